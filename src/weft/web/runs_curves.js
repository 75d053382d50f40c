// Metrics of runs, which arrive in parts, and the charts of several runs.
import { exactText, lowerBound } from "./chart_axes.js";
import { formatOf } from "./numbers.js";
import { capitalised } from "./words.js";

const COLOURS = ["c0", "c1", "c2", "c3"], DASHES = ["", "6 3", "1.5 2.5"];
const NO_CURVE = new Set(["tokens", "epoch", "seconds"]);
const TITLES = { loss: "Loss", lr: "Learning rate", gradient_norm: "Gradient norm before clipping",
	tokens_per_second: "Tokens per second" };
const ORDER = ["loss", "validation_bits_per_byte", "validation_accuracy", "lr", "gradient_norm", "tokens_per_second"];
const FROM_ZERO = new Set(["lr", "gradient_norm", "tokens_per_second"]);
// horizontal axes: `name` in the <select>, `label` and `format` on the axis
export const AXES = { step: { name: "step", label: "step", whole: true },
	tokens: { name: "tokens", label: "tokens", format: "number" },
	time: { name: "time", label: "training time", format: "duration" },
	flops: { name: "FLOPs", label: "FLOPs", format: "scientific" } };

// A run without data; `since` is the position from which its journals are read.
export const empty = name => ({ name, series: {}, since: "", flops: null, damaged: 0, events: [], samples: [],
	final: [], recipe: null });

// Append a response's series, or replace the existing ones after a rollback. Returns whether anything changed.
export function add(run, response) {
	if (response.reset) Object.assign(run, { series: {}, damaged: 0 });
	const before = run.series.seconds?.values.at(-1) ?? 0; // the seconds of a response count from its first line
	for (const [key, { steps, values }] of Object.entries(response.series)) {
		const known = run.series[key] ?? { steps: [], values: [] };
		const added = key === "seconds" ? values.map(value => value + before) : values;
		// new arrays, since smoothed values are cached by array
		run.series[key] = { steps: known.steps.concat(steps), values: known.values.concat(added) };
	}
	Object.assign(run, { since: response.next, flops: response.flops_per_token,
		damaged: run.damaged + response.damaged });
	return response.reset || Object.keys(response.series).length > 0;
}

// A step on another axis: interpolated between logged steps, and extrapolated beyond them.
function interpolate({ steps, values }, step) {
	const at = lowerBound(steps, step), last = steps.length - 1;
	if (steps[at] === step) return values[at];
	if (at > last) return values[last] * step / steps[last];
	const [x, y] = at ? [steps[at - 1], values[at - 1]] : [0, 0];
	return y + (values[at] - y) * (step - x) / (steps[at] - x);
}

// The function from steps to an axis; null if the run did not log the necessary metrics.
export function axisOf(run, axis) {
	const { tokens, seconds } = run.series;
	if (axis === "step") return step => step;
	if (axis === "time") return seconds?.steps.length ? step => interpolate(seconds, step) : null;
	if (!tokens?.steps.length || (axis === "flops" && !run.flops)) return null;
	return step => interpolate(tokens, step) * (axis === "flops" ? run.flops : 1);
}

const isHeldOut = key => key.startsWith("validation_");

const sentence = key => {
	const held = isHeldOut(key), words = (held ? key.slice(11) : key).replaceAll("_", " ");
	return `${capitalised(words)}${held ? ", held out" : ""}`;
};

const look = (index, held, alone, single) => ({ colour: held && alone ? "c1" : COLOURS[index % 4],
	marker: held || single ? "o" : "", dash: DASHES[Math.floor(index / 4) % 3], width: held && !alone ? 1.2 : 1.8 });

// The charts of runs on one horizontal axis, in a fixed order.
export function charts(runs, { x, logX, logY }) {
	const keys = new Set(runs.flatMap(run => Object.keys(run.series)).filter(key => !NO_CURVE.has(key)));
	if (keys.has("validation_loss")) { keys.delete("validation_loss"); keys.add("loss"); }
	const rank = key => (ORDER.indexOf(key) + 1) || ORDER.length + 1;
	const ends = [Infinity, -Infinity]; // shared, so that a step is at the same position in all charts
	const alone = runs.length === 1, marks = runs.flatMap(run => marksOf(run, axisOf(run, x), alone));
	const list = [...keys].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).map(key => {
		const series = runs.flatMap((run, index) => seriesOf(run, index, key, axisOf(run, x), alone));
		return { key, title: TITLES[key] ?? sentence(key), size: { width: 480, height: 260 }, controls: false, series,
			marks: isHeldOut(key) ? [] : marks, x: { ...AXES[x], log: logX, pad: 0, includes: ends },
			y: { log: logY, clips: !isHeldOut(key) && key !== "lr", includes: FROM_ZERO.has(key) && !logY ? [0] : [],
				pad: series.some(({ labels }) => labels.length) ? 0.2 : undefined } };
	}).filter(chart => chart.series.length);
	for (const line of list.flatMap(chart => chart.series)) {
		ends[0] = Math.min(ends[0], line.x[0]);
		ends[1] = Math.max(ends[1], line.x.at(-1));
	}
	const [start, end] = ends; // where the runs have one point, it has the only tick
	return start < end ? list : list.map(chart => ({ ...chart,
		x: { ...chart.x, ticks: [{ value: start, label: formatOf(AXES[x])(start) }] } }));
}

function seriesOf(run, index, key, toAxis, alone) {
	const metrics = key === "loss" ? ["loss", "validation_loss"] : [key];
	return metrics.filter(metric => toAxis && run.series[metric]).map(metric => {
		const held = isHeldOut(metric), { steps, values } = run.series[metric], single = steps.length === 1;
		const name = !alone ? (held && key === "loss" ? `${run.name}, held out` : run.name)
			: key === "loss" ? (held ? "held out" : "training") : (TITLES[metric] ?? sentence(metric)).toLowerCase();
		return { name, x: steps.map(toAxis), y: values, look: look(index, held, alone && key === "loss", single),
			labels: single ? [exactText(values[0])] : [], exact: key === "lr" };
	});
}

const MARKS = {
	rollback: event => ({ step: event.to, text: `rolled back to here from step ${event.step}`, name: "rollback" }),
	resume: event => ({ step: event.step, text: "resumed", name: "resume" }),
	recipe: event => ({ step: event.step, text: "recipe changed", name: "new recipe" }),
};

function marksOf(run, toAxis, alone) {
	if (!toAxis) return [];
	const marks = run.events.filter(event => MARKS[event.event]).map(event => MARKS[event.event](event));
	const evaluations = alone ? run.events.filter(event => event.event === "evaluation")
		.map(({ step }) => ({ step, text: `evaluation at step ${step}`, small: true })) : [];
	return [...marks, ...evaluations].filter(({ step }) => Number.isFinite(step))
		.map(({ step, text, ...style }) => ({ x: toAxis(step), text: alone ? text : `${run.name}: ${text}`, ...style }));
}

const firstSteps = steps => `${steps.slice(0, 8).join(", ")}${steps.length > 8 ? " …" : ""}`;
const EVENTS = {
	start: () => "started", resume: () => "resumed", interrupted: () => "interrupted", finish: () => "finished",
	import: e => `imported: ${e.origin ?? ""}`, recipe: () => "recipe changed",
	rollback: e => `diverged after step ${e.since}; rolled back to step ${e.to}, learning rate × ${e.rate}`,
	discarded: e => `updates discarded: loss or gradient out of bounds (step ${firstSteps(e.steps ?? [])})`,
	enough: e => `stopped early: no improvement since step ${e.best_step}`,
	"checkpoint failed": e => `checkpoint could not be written: ${e.reason}`,
	skipped: e => `${e.rows} rows skipped: ${e.first ?? ""}`,
	"left out": e => e.line, damage: e => e.line, changed: e => e.line,
};

export function eventsOf(run) {
	return run.events.filter(event => EVENTS[event.event]).map(event => ({ time: event.time ?? "",
		step: event.step ?? event.steps?.[0] ?? null, text: EVENTS[event.event](event) ?? "" }));
}
