// Anatomy: the parts of a model, their costs, how costs grow, and the computation graph. No weights are needed.
import * as anatomy from "./anatomy.js";
import * as chart from "./chart.js";
import * as costs from "./costs.js";
import { button, field, group, h, select } from "./dom.js";
import * as graph from "./graph.js";
import { latest } from "./reading.js";
import { saveTools, shellQuote } from "./save.js";
import { table } from "./table.js";

export const title = "Anatomy";
export const about = "The model's parts, what they cost, and how they compute.";
export const path = "anatomy";

const SECTIONS = { anatomy: "Parts", costs: "Costs", growth: "Growth", graph: "Graph" };
const NGRAM_NOTE = "An n-gram model looks up counts. It has no weights to count, and its graph depends on the counts: "
	+ "weft explain RUN --only graph draws it.";
const GRAPH_STATE = ["open", "at", "shapes", "backward"];
const growth = {
	mount(place, { plots }) {
		const charts = h("div.charts");
		place.append(charts);
		const drawn = plots.map(plot => chart.mount(charts.appendChild(h("div")), plot));
		return { svg: () => drawn.map(each => each.element), close: () => drawn.forEach(each => each.close()) };
	},
};
const MODULES = { anatomy, costs, growth, graph };

export async function mount(main, context) {
	const { api, info, signal, state } = context, presets = (await api.get("v1/presets", signal)).data;
	let drawn = null;
	const current = () => state.show in SECTIONS ? state.show : "anatomy";
	const preset = () => presets.some(each => each.name === state.preset) ? state.preset : info ? undefined : "gpt2";
	const kind = () => preset() ? presets.find(each => each.name === preset()).kind : info.kind;
	const thisModel = info ? [["", `${info.id}, this model`]] : [];
	const place = h("div.anatomy-place"), caption = h("p.soft.about");
	const tabs = Object.entries(SECTIONS).map(([name, label]) =>
		button(label, () => change({ show: name }), { "data-show": name }));
	main.append(
		h("div.fields",
			field("Architecture", select([...thisModel, ...presets.map(({ name }) => [name, name])], preset() ?? "",
				name => change({ preset: name || undefined }))),
			h("div.anatomy-tabs", group("Section"), tabs)),
		place, caption,
		saveTools({ name: `anatomy-${preset() ?? info?.id}`, svg: () => drawn?.svg() ?? place, command }));

	function command() {
		const source = shellQuote(preset() ?? `runs/${info.id}`), show = current();
		const flags = show !== "graph" ? [] : ["shapes", "backward"].filter(name => state[name] === "1");
		return ["weft explain", source, "--only", show, ...flags.map(name => `--${name}`)].join(" ");
	}

	// Folds that are open in one model's graph do not apply to another's.
	function change(changes) {
		const of = { ...Object.fromEntries([...GRAPH_STATE, "part"].map(name => [name, undefined])), ...changes };
		context.set("preset" in changes ? of : changes, { push: true });
		show();
	}

	function explain(reason) {
		drawn = null;
		caption.textContent = "";
		place.replaceChildren(h("p", reason));
		return true;
	}

	// a model without this view shows the reason
	const show = latest(context, place, async ending => {
		const name = current(), of = preset();
		for (const tab of tabs) tab.setAttribute("aria-pressed", tab.dataset.show === name);
		if (kind() === "ngram" && name !== "anatomy") return explain(NGRAM_NOTE); // the request would be refused
		const query = new URLSearchParams(of ? { preset: of } : { model: info.id });
		const data = await api.get(`v1/architecture/${name}?${query}`, ending);
		drawn?.close?.();
		caption.textContent = data.about;
		place.replaceChildren();
		drawn = MODULES[name].mount(place, data, { shown: state, changed: changes => context.set(changes) });
		return place.append(...data.tables.map(table));
	}, error => error.status === 400 && explain(error.message));

	await show();
	return { close: () => drawn?.close?.() };
}
