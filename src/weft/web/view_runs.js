// Runs: training curves, live and overlaid, samples, differences between recipes, and events.
import { mount as mountChart } from "./chart.js";
import { button, debounced, field, h, select } from "./dom.js";
import { add, AXES, axisOf, charts, empty } from "./runs_curves.js";
import { events, listOf, noRuns, recipes, sampleOf, STATES } from "./runs_parts.js";
import { saveTools, shellQuote } from "./save.js";
import { scrollRegion } from "./table.js";
import { numberWithin, withCommas } from "./words.js";

export const title = "Runs";
export const about = "Training curves, samples, recipes and events, updated live.";
export const path = "runs";

const POLL_MS = 2000, IDLE_MS = 8000; // between requests while a run is training, and while none is
const MAX_CHOSEN = 12; // runs shown together
const descending = key => (a, b) => (b[key] ?? -Infinity) - (a[key] ?? -Infinity);
const byBest = (a, b) => (a.metric ?? "~").localeCompare(b.metric ?? "~")
	|| (a.best ?? Infinity) - (b.best ?? Infinity);
const SORTS = {
	changed: { label: "last changed", order: descending("changed") },
	name: { label: "name", order: (a, b) => a.name.localeCompare(b.name) },
	best: { label: "best", order: byBest },
	size: { label: "parameters", order: descending("parameters") },
	steps: { label: "steps", order: descending("steps_done") },
};

// names in the address, separated by commas
const splitNames = text => (text ?? "").split(",").filter(Boolean).map(decodeURIComponent);
const joinNames = names => names.map(encodeURIComponent).join(",") || undefined;

export async function mount(main, context) {
	const view = new Runs(main, context);
	await view.begin();
	return { close: () => view.close() };
}

class Runs {
	rows = []; // of the list
	data = new Map(); // metrics, samples and events by run
	charts = new Map(); // by metric
	now = 0;
	timer = 0;
	status = h("p.soft", { role: "status" });
	notes = h("div.runs-notes");
	grid = h("div.charts");
	samples = h("section");
	recipes = h("section");
	events = h("section");

	constructor(main, context) {
		const { state } = context, range = state.zoom?.split(",").map(Number).filter(Number.isFinite);
		this.context = context;
		this.chosen = splitNames(state.runs);
		this.hidden = splitNames(state.hide);
		this.zoom = range?.length === 2 && range[0] < range[1] ? range : null;
		this.list = scrollRegion("Runs");
		this.list.classList.add("runs-scroll");
		this.curves = h("section", h("h2.unseen", "Curves"), this.controls(), this.notes, this.grid);
		const pictures = () => [...this.charts.values()].map(chart => chart.element);
		this.foot = h("div", { hidden: true }, saveTools({ svg: pictures, name: "runs", command: () => this.command() }));
		this.parts = [this.finder(), this.list, this.curves, this.samples, this.recipes, this.events, this.foot];
		main.append(...this.parts.slice(0, 2), this.status, ...this.parts.slice(2));
	}

	close() {
		clearTimeout(this.timer);
		this.closeCharts();
	}

	closeCharts() { for (const chart of this.charts.values()) chart.close(); }

	async begin() {
		await this.loadList();
		if (!this.chosen.length) {
			const { info, state } = this.context, menu = this.rows.find(run => run.name === info?.id);
			const running = this.rows.find(run => run.state === "running");
			const first = (state.model ? menu : running ?? menu) ?? running ?? this.rows.find(run => run.steps_done > 1) ?? this.rows[0];
			this.chosen = first ? [first.name] : [];
		}
		this.showList();
		const first = this.list.querySelector(".marked");
		if (first) this.list.scrollTop = first.offsetTop - first.parentElement.offsetTop;
		await this.loadChosen();
		document.addEventListener("visibilitychange", () => this.wait(), { signal: this.context.signal });
		this.wait();
	}

	async loadList() {
		const { now, runs } = await this.context.api.get("v1/runs", this.context.signal);
		this.now = now;
		this.rows = runs;
	}

	state(name) { return this.rows.find(run => run.name === name)?.state; }

	// Load new data of a run; returns whether there was any.
	async load(name) {
		const run = this.data.get(name) ?? empty(name), before = run.problem;
		this.data.set(name, run);
		if (!this.state(name)) { // earlier data are kept
			run.problem = `${name}: no such run on this server, or no longer.`;
			return run.problem !== before;
		}
		try {
			// concurrent requests would add lines twice
			run.reading ??= this.read(run).finally(() => { run.reading = null; });
			const grew = await run.reading;
			run.problem = null;
			return grew || Boolean(before);
		} catch (error) {
			if (error.name === "AbortError" || error.status === 0) throw error;
			run.problem = error.message;
			return before !== error.message;
		}
	}

	async read(run) {
		const { api, signal } = this.context, state = this.state(run.name);
		const get = path => api.get(`v1/runs/${encodeURIComponent(run.name)}/${path}`, signal);
		let grew = false, evaluated = !run.since || run.state !== state;
		for (let more = true; more;) {
			const response = await get(`metrics?since=${encodeURIComponent(run.since)}`);
			more = response.more;
			evaluated ||= response.reset || Object.keys(response.series).some(key => key.startsWith("validation_"));
			grew = add(run, response) || grew;
		}
		if (evaluated) {
			const [{ events, damage }, { samples, final }] = await Promise.all([get("events"), get("samples")]);
			Object.assign(run, { state, events, damage, samples, final });
		}
		run.recipe ??= (await get("recipe")).flat;
		return grew || evaluated;
	}

	async loadChosen() {
		this.curves.setAttribute("aria-busy", "true");
		try {
			await Promise.all(this.chosen.map(name => this.load(name)));
		} finally {
			this.curves.removeAttribute("aria-busy");
		}
		this.show();
	}

	// Poll while the page is visible.
	wait() {
		clearTimeout(this.timer);
		if (document.hidden || this.context.signal.aborted) return;
		const running = this.rows.some(run => run.state === "running");
		this.timer = setTimeout(() => this.poll(), running ? POLL_MS : IDLE_MS);
	}

	async poll() {
		try {
			const before = this.rows, changed = new Map(before.map(run => [run.name, run.changed]));
			await this.loadList();
			if (JSON.stringify(this.rows) !== JSON.stringify(before)) this.showList();
			const moved = this.chosen.filter(name => {
				const run = this.rows.find(each => each.name === name);
				return run?.state === "running" || run?.changed !== changed.get(name);
			});
			const grew = await Promise.all(moved.map(name => this.load(name)));
			if (grew.some(Boolean)) this.show();
			this.wait();
		} catch (error) {
			this.context.fail(error);
			if (error.status) this.wait(); // without a response, the page restarts when the server is back
		}
	}

	finder() {
		const { state, set } = this.context;
		const show = changes => { set(changes); this.showList(); };
		const find = h("input", { type: "search", value: state.find ?? "", autocomplete: "off",
			oninput: debounced(() => show({ find: find.value || undefined }), 100) });
		const sort = select(Object.entries(SORTS).map(([id, { label }]) => [id, label]), state.sort ?? "changed",
			value => show({ sort: value === "changed" ? undefined : value }));
		return h("div.fields", field("Find", find), field("Sort by", sort));
	}

	showList() {
		const { find = "", sort } = this.context.state;
		const text = run => [run.name, run.objective, run.model, STATES[run.state]].join(" ").toLowerCase();
		const { order } = SORTS[sort] ?? SORTS.changed;
		const found = this.rows.filter(run => text(run).includes(find.toLowerCase())).sort(order);
		const active = /** @type {HTMLInputElement} */ (document.activeElement);
		const focused = this.list.contains(active) ? active.value : null;
		this.list.replaceChildren(listOf(found, this.now, this.chosen, (name, chosen) => this.choose(name, chosen)));
		if (focused !== null) [...this.list.querySelectorAll("input")].find(box => box.value === focused)?.focus();
		for (const part of this.parts) part.hidden = !this.rows.length;
		this.foot.hidden = !this.charts.size;
		const count = found.length < this.rows.length ? `${found.length} of ${this.rows.length} runs` : "";
		this.status.replaceChildren(this.rows.length ? count : noRuns());
	}

	choose(name, chosen) {
		if (chosen && this.chosen.length >= MAX_CHOSEN) {
			this.showList();
			this.status.textContent = `${MAX_CHOSEN} runs at most; deselect one first.`;
			return;
		}
		this.chosen = chosen ? [...this.chosen, name] : this.chosen.filter(each => each !== name);
		this.context.set({ runs: joinNames(this.chosen), at: undefined });
		this.showList();
		this.loadChosen().catch(error => this.context.fail(error));
	}

	controls() {
		const { state, set } = this.context, redraw = debounced(() => this.showCurves(), 15);
		const box = (label, key) => field(label, h("input", { type: "checkbox", checked: state[key] === "1",
			onchange: ({ target }) => { set({ [key]: target.checked ? "1" : undefined }); this.showCurves(); } }));
		const smooth = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth ?? 0,
			oninput({ target: { value } }) { set({ smooth: Number(value) ? value : undefined }); redraw(); } });
		const axis = select(Object.entries(AXES).map(([id, { name }]) => [id, name]), state.x ?? "step", value => {
			this.zoom = null;
			set({ x: value === "step" ? undefined : value, zoom: undefined });
			this.showCurves();
		});
		this.resetZoom = button("Reset zoom", () => this.zoomTo(null));
		return h("div.fields", field("Horizontal axis", axis), field("Smoothing", smooth),
			box("log x", "logx"), box("log y", "logy"), this.resetZoom);
	}

	zoomTo(range, from = null) {
		this.zoom = range;
		this.context.set({ zoom: range ? range.map(end => Number(end.toPrecision(6))).join(",") : undefined });
		for (const [key, chart] of this.charts) if (key !== from) chart.zoom(range);
		this.resetZoom.hidden = !range;
	}

	known() { return this.chosen.map(name => this.data.get(name)).filter(Boolean); }

	showCurves() {
		const { state } = this.context, x = AXES[state.x] ? state.x : "step", runs = this.known();
		const list = charts(runs, { x, logX: state.logx === "1", logY: state.logy === "1" });
		const smooth = numberWithin(state.smooth, 0, 0.99, 0);
		if (list.map(chart => chart.key).join() !== [...this.charts.keys()].join()) {
			this.closeCharts();
			this.charts.clear();
			this.grid.replaceChildren();
		}
		for (const data of list) {
			const current = { ...data, smooth, zoom: this.zoom, hidden: this.hidden }, chart = this.charts.get(data.key);
			if (chart) chart.update(current); else this.addChart(current);
		}
		this.resetZoom.hidden = !this.zoom;
		this.foot.hidden = !list.length; // nothing to save
		const notes = runs.length ? runs.flatMap(run => this.notesOf(run, x)) : ["Select a run."];
		this.notes.replaceChildren(...notes.filter(Boolean).map(note => h("p.soft", note)));
	}

	addChart(data) {
		const { key } = data, others = work => { for (const [name, chart] of this.charts) if (name !== key) work(chart); };
		this.charts.set(key, mountChart(this.grid.appendChild(h("div")), data, {
			zoom: range => this.zoomTo(range, key),
			read: at => others(chart => chart.read(at)),
			hidden: names => {
				this.hidden = names;
				this.context.set({ hide: joinNames(names) });
				others(chart => chart.update({ hidden: names }));
			},
		}));
	}

	notesOf(run, x) {
		const logged = Object.keys(run.series).length, lines = run.damaged === 1 ? "line" : "lines";
		return [run.problem, run.damage, run.damaged && `${run.name}: ${run.damaged} damaged ${lines} skipped`,
			!logged && `${run.name} has no metrics${this.state(run.name) === "running" ? " yet" : ""}.`,
			logged && !axisOf(run, x) && `${run.name} has no metrics for an axis of ${AXES[x].name}.`];
	}

	show() {
		this.showCurves();
		this.showSamples();
		const known = this.known().filter(run => run.recipe), open = this.recipes.querySelector("details")?.open;
		this.recipes.replaceChildren(...known.length ? recipes(known, open) : []);
		this.events.replaceChildren(...events(this.known()));
		this.context.set({}); // the command may change
	}

	showSamples() {
		const runs = this.known().filter(run => run.samples.length || run.final.length), { state, set } = this.context;
		const steps = [...new Set(runs.flatMap(run => run.samples.map(each => each.step)))].sort((a, b) => a - b);
		const places = runs.some(run => run.final.length) ? [...steps, "end"] : steps, last = places.length - 1;
		const selected = places.findIndex(place => String(place) === state.at);
		const texts = h("div.runs-texts"), output = h("output");
		const draw = place => {
			output.textContent = place === "end" ? "at the end" : `at step ${withCommas(place)}`;
			texts.replaceChildren(...runs.map(run => sampleOf(run, place, runs.length > 1)));
		};
		const slider = h("input.runs-slider", { type: "range", min: 0, max: last,
			value: selected < 0 ? last : selected, oninput: () => {
				const place = places[Number(slider.value)];
				set({ at: place === places[last] ? undefined : String(place) });
				draw(place);
			} });
		const focused = this.samples.contains(document.activeElement);
		this.samples.replaceChildren(...runs.length ? [h("h2", "Samples"),
			h("div.fields", { hidden: last < 1 }, field("Step", slider, output)), texts] : []);
		if (focused) slider.focus();
		if (runs.length) draw(places[Number(slider.value)]);
	}

	command() {
		const names = this.chosen.map(name => shellQuote(`runs/${name}`));
		if (names.length === 2) return `weft runs diff ${names.join(" ")}`;
		const interrupted = names.length === 1 && this.state(this.chosen[0]) === "interrupted";
		return interrupted ? `weft train --resume ${names[0]}` : "weft runs";
	}
}
