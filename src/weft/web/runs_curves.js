// What a run has logged, as it comes in parts, and the charts that several runs make.
import { firstFrom } from "./chart_axes.js";

const COLOURS = ["c0", "c1", "c2", "c3"], DASHES = ["", "6 3", "1.5 2.5"];
const NO_CURVE = new Set(["tokens", "epoch", "seconds"]);
const TITLES = { loss: "Loss", lr: "Learning rate", gradient_norm: "Gradient norm before clipping",
  tokens_per_second: "Tokens per second" };
const ORDER = ["loss", "validation_bits_per_byte", "validation_accuracy", "lr", "gradient_norm", "tokens_per_second"];
const FROM_ZERO = new Set(["lr", "gradient_norm", "tokens_per_second"]);
// what runs are compared by: `name` in a choice, `label` and `named` on an axis
export const AXES = { step: { name: "step", label: "step" },
  tokens: { name: "tokens", label: "tokens", named: "short" },
  time: { name: "time", label: "training time", named: "duration" },
  flops: { name: "FLOPs", label: "FLOPs", named: "scientific" } };

// Everything of a run that its curves need; `since` is where its journal goes on.
export const empty = name => ({ name, series: {}, since: "", flops: null, damaged: 0, events: [], samples: [],
  final: [], recipe: null });

// An answer's lines after those that are there; where the run went back, in their place.
export function add(run, answer) {
  if (answer.reset) Object.assign(run, { series: {}, damaged: 0 });
  const before = run.series.seconds?.[1].at(-1) ?? 0; // an answer's seconds count from its own first line
  for (const [key, [steps, values]] of Object.entries(answer.series)) {
    const [xs, ys] = run.series[key] ?? [[], []];
    const rest = key === "seconds" ? values.map(value => value + before) : values;
    run.series[key] = [xs.concat(steps), ys.concat(rest)]; // new lists: what was smoothed of the old ones is stale
  }
  Object.assign(run, { since: answer.next, flops: answer.flops_per_token, damaged: run.damaged + answer.damaged });
  return answer.reset || Object.keys(answer.series).length > 0;
}

// A step on another axis: between what was logged at the steps around it, and at the same pace beyond them.
function along([steps, values], step) {
  const at = firstFrom(steps, step), last = steps.length - 1;
  if (steps[at] === step) return values[at];
  if (at > last) return values[last] * step / steps[last];
  const [x, y] = at ? [steps[at - 1], values[at - 1]] : [0, 0];
  return y + (values[at] - y) * (step - x) / (steps[at] - x);
}

// The function from steps to an axis; null where the run did not log what it takes.
export function axisOf(run, axis) {
  const { tokens, seconds } = run.series;
  if (axis === "step") return step => step;
  if (axis === "time") return seconds?.[0].length ? step => along(seconds, step) : null;
  if (!tokens?.[0].length || (axis === "flops" && !run.flops)) return null;
  return step => along(tokens, step) * (axis === "flops" ? run.flops : 1);
}

const isHeldOut = key => key.startsWith("validation_");

const sentence = key => {
  const held = isHeldOut(key), words = (held ? key.slice(11) : key).replaceAll("_", " ");
  return `${words[0].toUpperCase()}${words.slice(1)}${held ? ", held out" : ""}`;
};

const look = (index, held, alone) => ({ colour: held && alone ? "c1" : COLOURS[index % 4], marker: held ? "o" : "",
  dash: DASHES[Math.floor(index / 4) % 3], width: held && !alone ? 1.2 : 1.8 });

// The charts of some runs on one horizontal axis, in a fixed order.
export function charts(runs, { x, logX, logY }) {
  const keys = new Set(runs.flatMap(run => Object.keys(run.series)).filter(key => !NO_CURVE.has(key)));
  if (keys.has("validation_loss")) { keys.delete("validation_loss"); keys.add("loss"); }
  const place = key => (ORDER.indexOf(key) + 1) || ORDER.length + 1;
  const alone = runs.length === 1, marks = runs.flatMap(run => marksOf(run, axisOf(run, x), alone));
  const made = [...keys].sort((one, other) => place(one) - place(other) || one.localeCompare(other)).map(key => ({
    key, title: TITLES[key] ?? sentence(key), size: [480, 260], controls: false,
    marks: isHeldOut(key) ? [] : marks,
    x: { ...AXES[x], log: logX, pad: 0 },
    y: { log: logY, clips: !isHeldOut(key) && key !== "lr", holds: FROM_ZERO.has(key) && !logY ? [0] : [] },
    series: runs.flatMap((run, index) => seriesOf(run, index, key, axisOf(run, x), alone)),
  })).filter(chart => chart.series.length);
  const ends = [Infinity, -Infinity];
  for (const { series } of made) {
    for (const each of series) { ends[0] = Math.min(ends[0], each.x[0]); ends[1] = Math.max(ends[1], each.x.at(-1)); }
  }
  for (const chart of made) chart.x.holds = ends; // below one another, the same place is the same step
  return made;
}

function seriesOf(run, index, key, along, alone) {
  const some = key === "loss" ? ["loss", "validation_loss"] : [key];
  return some.filter(each => along && run.series[each]).map(each => {
    const held = isHeldOut(each), [steps, values] = run.series[each];
    const name = !alone ? (held && key === "loss" ? `${run.name}, held out` : run.name)
      : key === "loss" ? (held ? "held out" : "training") : TITLES[each]?.toLowerCase() ?? sentence(each).toLowerCase();
    const drawn = look(index, held, alone && key === "loss");
    return { name, x: steps.map(along), y: values, look: drawn, certain: key === "lr" };
  });
}

const MARKED = {
  rollback: event => [event.to, `rolled back to here from step ${event.step}`, "rollback"],
  resume: event => [event.step, "resumed", "resume"],
  recipe: event => [event.step, "recipe changed", "new recipe"],
};

function marksOf(run, along, alone) {
  if (!along) return [];
  const own = run.events.filter(event => MARKED[event.event]).map(event => MARKED[event.event](event));
  const usual = alone ? run.events.filter(event => event.event === "evaluation")
    .map(event => [event.step, `evaluation at step ${event.step}`, "small"]) : [];
  return [...own, ...usual].filter(([step]) => Number.isFinite(step))
    .map(([step, text, name]) => [along(step), alone ? text : `${run.name}: ${text}`, name]);
}

const some = steps => `${steps.slice(0, 8).join(", ")}${steps.length > 8 ? " …" : ""}`;
const TOLD = {
  start: () => "started", resume: () => "resumed", interrupted: () => "interrupted", finish: () => "finished",
  import: e => `imported: ${e.origin ?? ""}`, recipe: () => "recipe changed",
  rollback: e => `diverged after step ${e.since}; rolled back to step ${e.to}, learning rate × ${e.rate}`,
  discarded: e => `updates discarded: loss or gradient out of bounds (step ${some(e.steps ?? [])})`,
  enough: e => `stopped early: no improvement since step ${e.best_step}`,
  "checkpoint failed": e => `checkpoint could not be written: ${e.reason}`,
  skipped: e => `${e.rows} rows skipped: ${e.first ?? ""}`,
  "left out": e => e.line, damage: e => e.line, changed: e => e.line,
};

// What a person may want to know of a run's life, in a sentence each.
export function happened(run) {
  return run.events.filter(event => TOLD[event.event]).map(event => ({ time: event.time ?? "",
    step: event.step ?? event.steps?.[0] ?? null, text: TOLD[event.event](event) ?? "" }));
}
