// Compare: results of `weft compare` and `weft scale` in the server's folders: curves, ranking, scaling laws.
import * as chart from "./chart.js";
import { button, field, group, h, select, set, soft } from "./dom.js";
import { latest } from "./reading.js";
import { saveTools } from "./save.js";
import { facts, fold, table } from "./table.js";

export const title = "Compare";
export const about = "Models trained with equal compute, and scaling laws.";
export const path = "compare";

const COMMANDS = ["weft compare lstm transformer++ --data book.txt --flops 1e13",
	"weft scale llama-tiny --data book.txt --budget 1e13"];
const LOSS_PANELS = /^(scaling-)?loss|isoflops/;
const FOLDED = ["sweep"]; // panels with one small chart per contender
const LOSS_SIZE = { width: 760, height: 420 }; // pixels

const labelOf = panel => /isoflops/.test(panel.name) ? "parameters"
	: panel.plots[0].x.label.replace(" in training", "");

export async function mount(main, context) {
	const { api, signal, state } = context, studies = (await api.get("v1/comparisons", signal)).data;
	if (!studies.length) {
		main.append(h("p", "No comparisons in this server's folders. These commands make one; "
			+ "then serve its folder along with the runs: weft serve runs comparisons"),
		...COMMANDS.map(line => h("pre", line)));
		return {};
	}
	const place = h("div");
	let charts = [];
	let shown = null;
	const known = () => studies.find(each => each.name === state.study) ?? studies.find(each => each.finished)
		?? studies[0];
	const choice = select(studies.map(each => [each.name, each.name]), known().name, name => {
		context.set({ study: name, x: undefined, hidden: undefined }, { push: true });
		show();
	});
	main.append(h("div.fields", field("Comparison", choice)), place,
		saveTools({ name: "compare", command: () => shown?.command || COMMANDS[0],
			svg: () => charts.length ? charts.map(each => each.element) : place }));

	const draw = (into, plot, on = {}) => {
		const drawn = chart.mount(into.appendChild(h("div")), plot, on);
		charts.push(drawn);
		return drawn;
	};

	// Curves: one large chart with a choice of horizontal axes.
	function losses(panels) {
		if (!panels.length) return null;
		const current = () => panels.find(each => labelOf(each) === state.x) ?? panels[0];
		const section = h("section", { "aria-label": "Loss" }), into = h("div.compare-losses");
		const caption = h("p.soft.about"), hidden = () => state.hidden?.split("\n") ?? [];
		const axes = panels.map(each => button(labelOf(each), () => {
			context.set({ x: each === panels[0] ? undefined : labelOf(each) });
			fill();
		}));
		let drawn = null;
		const fill = () => {
			const panel = current();
			axes.forEach((button, n) => button.setAttribute("aria-pressed", panels[n] === panel));
			caption.textContent = panel.about;
			if (drawn) { drawn.close(); charts = charts.filter(each => each !== drawn); into.replaceChildren(); }
			drawn = draw(into, { ...panel.plots[0], size: LOSS_SIZE, hidden: hidden() },
				{ hidden: names => context.set({ hidden: names.join("\n") || undefined }) });
		};
		section.append(h("div.compare-axes", group("Bits per byte against"),
			soft("Bits per byte against "), axes), into, caption);
		return { section, fill };
	}

	function contenders({ contenders: all, settings = {} }) {
		const named = all.filter(each => each.differs);
		const names = [...new Set(Object.values(settings).flatMap(Object.keys))];
		const rows = Object.entries(settings).map(([key, values]) => [key, ...names.map(name => values[name] ?? "")]);
		const columns = [...names.keys(), names.length];
		return [
			named.length > 0 && h("ul.compare-differs", named.map(each =>
				h("li", h("b", each.name), " ", h("code", each.differs)))),
			rows.length > 0 && fold(`Settings that differ: ${rows.length}`,
				table({ header: ["setting", ...names], rows: rows.slice(0, 400), text: columns, folds: false })),
			all.filter(each => each.sample).map(each =>
				fold(`Samples of ${each.name}`, h("pre", { tabindex: 0 }, each.sample)))];
	}

	const show = latest(context, place, async ending => {
		const study = known();
		choice.value = study.name;
		if (study.problem) return place.replaceChildren(h("p", study.problem));
		const data = await api.get(`v1/comparisons/${encodeURIComponent(study.name)}`, ending);
		for (const each of charts) each.close();
		charts = [];
		shown = data;
		place.replaceChildren(...data.finished ? [] : unfinished(data));
		if (data.finished) fillPlace(data);
		return context.set({}); // the command changes
	});

	const unfinished = data => [
		h("p", `Unfinished: ${data.runs} ${data.runs === 1 ? "run" : "runs"} done. `
			+ "Run the command again to continue:"), h("pre", data.command)];

	function fillPlace(data) {
		const curves = losses(data.panels.filter(each => LOSS_PANELS.test(each.name)));
		place.append(h("h2", data.title), h("p.lead", data.result), curves?.section ?? "");
		curves?.fill();
		const others = data.panels.filter(each => !LOSS_PANELS.test(each.name));
		const open = others.filter(each => !FOLDED.includes(each.name)), pair = h("div.charts");
		place.append(pair);
		for (const panel of open) {
			const figure = h("figure.compare-figure");
			pair.append(figure);
			for (const plot of panel.plots) draw(figure, plot);
			figure.append(h("figcaption.soft", panel.about));
		}
		place.append(...data.tables.map(table), ...contenders(data).flat().filter(Boolean));
		for (const panel of others.filter(each => FOLDED.includes(each.name))) place.append(small(panel));
		place.append(fold("Method", facts(Object.entries(data.facts ?? {})),
			h("ul.about.notes", data.notes.map(line => h("li", line)))));
	}

	// Many small charts, drawn when they become visible.
	function small(panel) {
		const into = h("div.charts.small");
		return set(fold(`Learning rates: ${panel.plots.length} charts`, h("p.soft.about", panel.about), into), { ontoggle() {
			if (into.childNodes.length) return;
			for (const plot of panel.plots) draw(into, { ...plot, controls: false });
		} });
	}

	await show();
	return { close: () => charts.forEach(each => each.close()) };
}
