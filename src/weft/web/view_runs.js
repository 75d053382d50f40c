// The runs of the folder: their curves as they grow, several overlaid; what they wrote, and what they differ in.
import { mount as mountChart } from "./chart.js";
import { button, debounced, field, h, select } from "./dom.js";
import { AXES, add, axisOf, charts, empty } from "./runs_curves.js";
import { STATES, events, listOf, noRuns, recipes, sampleOf } from "./runs_parts.js";
import { quoted, tools } from "./save.js";
import { scrolling } from "./table.js";
import { between, counted } from "./words.js";

export const title = "Runs";
export const about = "Training curves, samples, recipes and events, updated live.";
export const path = "runs";
export const shows = () => true;

const POLL_MS = 2000, CALM_MS = 8000; // between looks at a folder where something trains, and where nothing does
const MAX_CHOSEN = 12; // runs at a time
const byNumber = key => (one, other) => (other[key] ?? -Infinity) - (one[key] ?? -Infinity);
const byBest = (one, other) => (one.metric ?? "~").localeCompare(other.metric ?? "~")
  || (one.best ?? Infinity) - (other.best ?? Infinity);
const SORTS = { changed: ["last changed", byNumber("changed")], name: ["name", (a, b) => a.name.localeCompare(b.name)],
  best: ["best", byBest], size: ["parameters", byNumber("parameters")], steps: ["steps", byNumber("steps_done")] };

// names in the address: a comma stands between them, and none inside
const listed = text => (text ?? "").split(",").filter(Boolean).map(decodeURIComponent);
const joined = names => names.map(encodeURIComponent).join(",") || undefined;

export async function mount(main, context) {
  const view = new Runs(main, context);
  await view.begin();
  return { close: () => view.close() };
}

class Runs {
  constructor(main, context) {
    const { state } = context, range = state.zoom?.split(",").map(Number).filter(Number.isFinite);
    Object.assign(this, { context, rows: [], data: new Map(), drawn: new Map() });
    this.chosen = listed(state.runs);
    this.hidden = listed(state.hide);
    this.zoom = range?.length === 2 && range[0] < range[1] ? range : null;
    this.list = scrolling("Runs");
    this.list.classList.add("runs-scroll");
    this.counted = h("p", { class: "soft runs-counted", role: "status" });
    this.notes = h("div", { class: "runs-notes" });
    this.grid = h("div", { class: "charts" });
    this.curves = h("section", {}, h("h2", { class: "unseen" }, "Curves"), this.controls(), this.notes, this.grid);
    [this.samples, this.recipes, this.events] = [h("section"), h("section"), h("section")];
    const pictures = () => [...this.drawn.values()].map(chart => chart.element);
    this.foot = h("div", {}, tools({ svg: pictures, name: "runs", command: () => this.command() }));
    this.parts = [this.finder(), this.list, this.curves, this.samples, this.recipes, this.events, this.foot];
    main.append(...this.parts.slice(0, 2), this.counted, ...this.parts.slice(2));
  }

  close() {
    clearTimeout(this.timer);
    for (const chart of this.drawn.values()) chart.close();
  }

  async begin() {
    await this.look();
    if (!this.chosen.length) {
      const moving = this.rows.find(run => run.state === "running"), curved = this.rows.find(run => run.steps_done > 1);
      this.chosen = [moving ?? curved ?? this.rows[0]].filter(Boolean).map(run => run.name);
    }
    this.showList();
    const first = this.list.querySelector(".marked");
    if (first) this.list.scrollTop = first.offsetTop - first.parentElement.offsetTop;
    await this.loadChosen();
    document.addEventListener("visibilitychange", () => this.wait(), { signal: this.context.signal });
    this.wait();
  }

  // ---- what is known

  async look() {
    const found = await this.context.api.get("v1/runs", this.context.signal);
    this.now = found.now;
    this.rows = found.runs;
  }

  state(name) { return this.rows.find(run => run.name === name)?.state; }

  // Whatever is new of a run; whether there was anything.
  async load(name) {
    const run = this.data.get(name) ?? empty(name), before = run.problem;
    this.data.set(name, run);
    if (!this.state(name)) { // what was known of it stays
      run.problem = `${name}: no such run on this server, or no longer.`;
      return run.problem !== before;
    }
    try {
      run.reading ??= this.read(run).finally(() => { run.reading = null; }); // two at once would add the same lines
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
    const ask = what => api.get(`v1/runs/${encodeURIComponent(run.name)}/${what}`, signal);
    let grew = false, evaluated = !run.since || run.state !== state;
    for (let more = true; more;) {
      const answer = await ask(`metrics?since=${encodeURIComponent(run.since)}`);
      more = answer.more;
      evaluated ||= answer.reset || Object.keys(answer.series).some(key => key.startsWith("validation_"));
      grew = add(run, answer) || grew;
    }
    if (evaluated) {
      const [told, written] = await Promise.all([ask("events"), ask("samples")]);
      Object.assign(run, { state, events: told.events, damage: told.damage });
      Object.assign(run, { samples: written.samples, final: written.final });
    }
    run.recipe ??= (await ask("recipe")).flat;
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

  // Look again as long as anybody looks here.
  wait() {
    clearTimeout(this.timer);
    if (document.hidden || this.context.signal.aborted) return;
    const moving = this.rows.some(run => run.state === "running");
    this.timer = setTimeout(() => this.again(), moving ? POLL_MS : CALM_MS);
  }

  async again() {
    try {
      const before = this.rows, changed = new Map(before.map(run => [run.name, run.changed]));
      await this.look();
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
      if (error.status) this.wait(); // where the server is away, the page begins anew when it is back
    }
  }

  // ---- the list

  finder() {
    const { state, set } = this.context;
    const find = h("input", { type: "search", value: state.find ?? "", autocomplete: "off", oninput: debounced(() => {
      set({ find: find.value || undefined });
      this.showList();
    }, 100) });
    const sort = select(Object.entries(SORTS).map(([id, [name]]) => [id, name]), state.sort ?? "changed", value => {
      set({ sort: value === "changed" ? undefined : value });
      this.showList();
    });
    return h("div", { class: "fields" }, field("Find", find), field("Sort by", sort));
  }

  showList() {
    const { find = "", sort } = this.context.state;
    const text = run => [run.name, run.objective, run.model, STATES[run.state]].join(" ").toLowerCase();
    const [, order] = SORTS[sort] ?? SORTS.changed;
    const found = this.rows.filter(run => text(run).includes(find.toLowerCase())).sort(order);
    const focused = this.list.contains(document.activeElement) ? document.activeElement.value : null;
    this.list.replaceChildren(listOf(found, this.now, this.chosen, (name, chosen) => this.choose(name, chosen)));
    if (focused !== null) [...this.list.querySelectorAll("input")].find(box => box.value === focused)?.focus();
    for (const part of this.parts) part.hidden = !this.rows.length;
    const some = found.length < this.rows.length ? `${found.length} of ${this.rows.length} runs` : "";
    this.counted.replaceChildren(this.rows.length ? some : noRuns());
  }

  choose(name, chosen) {
    if (chosen && this.chosen.length >= MAX_CHOSEN) {
      this.showList();
      this.counted.textContent = `${MAX_CHOSEN} runs at most; deselect one first.`;
      return;
    }
    this.chosen = chosen ? [...this.chosen, name] : this.chosen.filter(each => each !== name);
    this.context.set({ runs: joined(this.chosen), at: undefined });
    this.showList();
    this.loadChosen().catch(error => this.context.fail(error));
  }

  // ---- the curves

  controls() {
    const { state, set } = this.context, later = debounced(() => this.showCurves(), 15);
    const box = (label, key) => {
      const input = h("input", { type: "checkbox", checked: state[key] === "1", onchange: () => {
        set({ [key]: input.checked ? "1" : undefined });
        this.showCurves();
      } });
      return field(label, input);
    };
    const smooth = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth ?? 0, oninput: () => {
      set({ smooth: Number(smooth.value) ? smooth.value : undefined });
      later();
    } });
    const axis = select(Object.entries(AXES).map(([id, { name }]) => [id, name]), state.x ?? "step", value => {
      this.zoom = null;
      set({ x: value === "step" ? undefined : value, zoom: undefined });
      this.showCurves();
    });
    this.whole = button("Reset zoom", () => this.zoomTo(null));
    return h("div", { class: "fields" }, field("Horizontal axis", axis), field("Smoothing", smooth), box("log x", "logx"),
      box("log y", "logy"), this.whole);
  }

  zoomTo(range, from = null) {
    this.zoom = range;
    this.context.set({ zoom: range ? range.map(end => Number(end.toPrecision(6))).join(",") : undefined });
    for (const [key, chart] of this.drawn) if (key !== from) chart.zoom(range);
    this.whole.hidden = !range;
  }

  known() { return this.chosen.map(name => this.data.get(name)).filter(Boolean); }

  showCurves() {
    const { state } = this.context, x = AXES[state.x] ? state.x : "step", runs = this.known();
    const wanted = charts(runs, { x, logX: state.logx === "1", logY: state.logy === "1" });
    const smooth = between(state.smooth, 0, 0.99, 0);
    if (wanted.map(chart => chart.key).join() !== [...this.drawn.keys()].join()) {
      for (const chart of this.drawn.values()) chart.close();
      this.drawn.clear();
      this.grid.replaceChildren();
    }
    for (const data of wanted) {
      const now = { ...data, smooth, zoom: this.zoom, hidden: this.hidden };
      if (this.drawn.has(data.key)) this.drawn.get(data.key).update(now); else this.addChart(now);
    }
    this.whole.hidden = !this.zoom;
    const notes = runs.length ? runs.flatMap(run => this.notesOf(run, x)) : ["Select a run."];
    this.notes.replaceChildren(...notes.filter(Boolean).map(note => h("p", { class: "soft" }, note)));
  }

  addChart(data) {
    const { key } = data, others = work => { for (const [each, chart] of this.drawn) if (each !== key) work(chart); };
    this.drawn.set(key, mountChart(this.grid.appendChild(h("div")), data, {
      zoom: range => this.zoomTo(range, key),
      read: at => others(chart => chart.read(at)),
      hidden: names => {
        this.hidden = names;
        this.context.set({ hide: joined(names) });
        others(chart => chart.update({ hidden: names }));
      },
    }));
  }

  // What has to be said of a run beside its curves.
  notesOf(run, x) {
    const logged = Object.keys(run.series).length, lines = run.damaged === 1 ? "line" : "lines";
    return [run.problem, run.damage, run.damaged && `${run.name}: ${run.damaged} damaged ${lines} skipped`,
      !logged && `${run.name} has no metrics${this.state(run.name) === "running" ? " yet" : ""}.`,
      logged && !axisOf(run, x) && `${run.name} has no metrics for an axis of ${AXES[x].name}.`];
  }

  show() {
    this.showCurves();
    this.showSamples();
    const told = this.known().filter(run => run.recipe), open = this.recipes.querySelector("details")?.open;
    this.recipes.replaceChildren(...told.length ? recipes(told, open) : []);
    this.events.replaceChildren(...events(this.known()));
    document.dispatchEvent(new CustomEvent("weft-state")); // the command may be another
  }

  showSamples() {
    const runs = this.known().filter(run => run.samples.length || run.final.length), { state, set } = this.context;
    const steps = [...new Set(runs.flatMap(run => run.samples.map(each => each.step)))].sort((a, b) => a - b);
    const places = runs.some(run => run.final.length) ? [...steps, "end"] : steps, last = places.length - 1;
    const asked = places.findIndex(place => String(place) === state.at);
    const texts = h("div", { class: "runs-texts" }), told = h("output");
    const draw = place => {
      told.textContent = place === "end" ? "at the end" : `at step ${counted(place)}`;
      texts.replaceChildren(...runs.map(run => sampleOf(run, place, runs.length > 1)));
    };
    const slider = h("input", { type: "range", min: 0, max: last, value: asked < 0 ? last : asked, class: "runs-slider",
      oninput: () => {
        const place = places[Number(slider.value)];
        set({ at: place === places[last] ? undefined : String(place) });
        draw(place);
      } });
    const focused = this.samples.contains(document.activeElement);
    this.samples.replaceChildren(...runs.length ? [h("h2", {}, "Samples"),
      h("div", { class: "fields", hidden: last < 1 }, field("Step", slider, told)), texts] : []);
    if (focused) slider.focus();
    if (runs.length) draw(places[Number(slider.value)]);
  }

  command() {
    const names = this.chosen.map(name => quoted(`runs/${name}`));
    if (names.length === 2) return `weft runs diff ${names.join(" ")}`;
    const stopped = names.length === 1 && this.state(this.chosen[0]) === "interrupted";
    return stopped ? `weft train --resume ${names[0]}` : "weft runs";
  }
}
