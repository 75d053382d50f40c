// Parts of the view of runs: the list, samples, recipes and events.
import { h } from "./dom.js";
import { duration } from "./numbers.js";
import { eventsOf } from "./runs_curves.js";
import { htmlTable, scrollRegion } from "./table.js";
import { abbreviate, withCommas as count } from "./words.js";

const MAX_EVENTS = 200; // the latest ones
export const STATES = { running: "running", finished: "finished", interrupted: "interrupted", imported: "imported",
	damaged: "damaged" };

const COLUMNS = ["run", "objective", "model", "steps", "best", "state", "age"];

// The list of runs. `now` is the server's time, `chosen` the selected names; `choose(name, on)` selects or deselects.
export function listOf(runs, now, chosen, choose) {
	const row = run => {
		const box = h("input", { type: "checkbox", value: run.name, checked: chosen.includes(run.name),
			onchange: () => choose(run.name, box.checked) });
		const of = run.steps ? ` / ${count(run.steps)}` : "";
		const done = run.steps_done === null ? "" : `${count(run.steps_done)}${of}`;
		const bar = run.state === "running" && run.steps && h("progress", { max: run.steps, value: run.steps_done ?? 0,
			"aria-label": `progress of ${run.name}` });
		const name = [h("label.runs-name", box, h("span", run.name)), run.problem && h("span.runs-problem", run.problem)];
		const model = [run.model, run.parameters && abbreviate(run.parameters)].filter(Boolean).join(" ");
		return [name, run.objective ?? "", model, [done, bar], run.best_text ?? "",
			h("span", { class: `runs-${run.state}` }, STATES[run.state] ?? run.state),
			duration(Math.max(0, Math.floor(now - run.changed)))];
	};
	return htmlTable({ header: COLUMNS, rows: runs.map(row), text: [0, 1, 2, 4, 5], cards: true, kind: "runs-table",
		marked: n => chosen.includes(runs[n].name) });
}

export function noRuns() {
	return h("span", h("strong", "No runs yet."), " Train one and it appears here: ",
		h("code", "weft train gpt-tiny --data book.txt"), ", or ", h("code", "weft quickstart"),
		", which needs no data.");
}

// Samples of a run at a step, or at the last evaluation before it; "end" is the final evaluation.
export function sampleOf(run, step, named) {
	const isFinal = step === "end" && run.final.length > 0;
	const sample = isFinal ? null : run.samples.filter(each => step === "end" || each.step <= step).at(-1);
	const texts = isFinal ? run.final : sample?.texts ?? [];
	const when = sample && sample.step !== step ? ` (step ${count(sample.step)})` : "";
	const shown = texts.map(text => h("pre", { tabindex: 0 }, text.replace(/\n{3,}/g, "\n\n")));
	return h("div.runs-text", named && h("h3", `${run.name}${when}`),
		texts.length ? shown : h("p.soft", "No sample yet."));
}

// A table of text; a row is a card on a narrow page.
const cards = (label, header, rows, kind = "") =>
	scrollRegion(label, htmlTable({ header, rows, text: [...header.keys()], kind: `prose ${kind}`, cards: true }));

function setting(run, key) {
	const value = run.recipe[key];
	return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}

// All settings of one run, folded, or those in which several runs differ.
export function recipes(runs, open) {
	const keys = [...new Set(runs.flatMap(run => Object.keys(run.recipe)))];
	const header = ["setting", ...runs.map(run => run.name)];
	const rows = keys.map(key => [key, ...runs.map(run => setting(run, key))]);
	if (runs.length === 1) {
		const summary = h("summary", `All ${rows.length} settings of ${runs[0].name}`);
		return [h("h2", "Recipe"), h("details.fold", { open }, summary, cards("Settings", header, rows))];
	}
	const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
	return [h("h2", "Differences between recipes"), differing.length ? cards("Differing settings", header, differing)
		: h("p", "The settings are identical.")];
}

export function events(runs) {
	const lines = runs.flatMap(run => eventsOf(run).map(event => ({ ...event, run: run.name })));
	lines.sort((a, b) => a.time.localeCompare(b.time));
	const rows = lines.slice(-MAX_EVENTS).map(each => [each.time.slice(0, 16).replace("T", " "),
		...runs.length > 1 ? [each.run] : [], each.step === null ? "" : count(each.step), each.text]);
	const header = ["time", ...runs.length > 1 ? ["run"] : [], "step", "event"];
	return rows.length ? [h("h2", "Events"), cards("Events", header, rows, "runs-events")] : [];
}
