// A recurrent cell as the lectures draw it: the state runs along the top, and the gates below it control how much
// passes. A gate is filled in proportion to its mean opening at this token.
import { h, picture, s } from "./dom.js";
import { matrix, number } from "./matrix.js";
import { clamp, fitText, mean as meanOf } from "./words.js";

const LINE = 40, MIX = 100, GATE = 152, INPUT = 226, MARGIN = 44; // pixels from the top, and at the sides
const GATE_HEIGHT = 42;

const path = (d, kind = "") => s("path", { class: `step-edge ${kind}`, d });
const label = (x, y, text, anchor = "middle") => s("text", { x, y, "text-anchor": anchor }, text);

// ⊗ or ⊕ where two lines meet
function operator(x, y, plus = false) {
  const arms = plus ? `M${x - 5} ${y}h10M${x} ${y - 5}v10` : `M${x - 4} ${y - 4}l8 8M${x + 4} ${y - 4}l-8 8`;
  return s("path", { class: "step-plus", d: `M${x - 9} ${y}a9 9 0 1 0 18 0a9 9 0 1 0-18 0${arms}` });
}

const up = (x, from, to) => path(`M${x} ${from}V${to}M${x - 3.5} ${to + 6}L${x} ${to}l3.5 6`);
const right = (from, to, y, kind) => path(`M${from} ${y}H${to}M${to - 6} ${y - 3.5}l6 3.5l-6 3.5`, kind);

// a box filled in proportion to its mean; for values that can be negative, only the number is shown
function gate(x, width, name, mean, open = true) {
  const height = open ? clamp(mean, 0, 1) * GATE_HEIGHT : 0;
  return s("g", { class: "step-gate" },
    s("rect", { class: "step-gate-frame", x: x - width / 2, y: GATE, width, height: GATE_HEIGHT, rx: 4 }),
    s("rect", { class: "step-gate-open", x: x - width / 2, y: GATE + GATE_HEIGHT - height, width, height, rx: 4 }),
    label(x, GATE + 17, fitText(name, width - 4)),
    s("text", { x, y: GATE + 34, "text-anchor": "middle", class: "step-gate-number" }, number(mean, 3)));
}

// inputs of every gate: the previous state and the token
function inputs(xs, left) {
  return [path(`M6 ${INPUT}H${xs.at(-1)}`), ...xs.map(x => up(x, INPUT, GATE + GATE_HEIGHT)),
    path(`M${left} ${INPUT + 24}V${INPUT}`), label(left + 6, INPUT + 24, "xₜ", "start"),
    label(6, INPUT - 7, "hₜ₋₁", "start")];
}

// the state, from the previous token to the next
const memory = (width, name) => [right(6, width - 8, LINE, "step-skip"), label(6, LINE - 8, `${name}ₜ₋₁`, "start"),
  label(width - 6, LINE - 8, `${name}ₜ`, "end")];

const PICTURES = {
  lstm(means, width) {
    const spacing = (width - 2 * MARGIN) / 4, [f, i, g, o] = [0, 1, 2, 3].map(n => MARGIN + (n + 0.5) * spacing);
    const boxWidth = Math.min(92, spacing - 8), mid = (i + g) / 2;
    return [...memory(width, "c"), ...inputs([f, i, g, o], MARGIN / 2 + 14), up(f, GATE, LINE + 9),
      path(`M${i} ${GATE}V${MIX}H${mid - 9}`), path(`M${g} ${GATE}V${MIX}H${mid + 9}`), up(mid, MIX - 9, LINE + 9),
      up(o, GATE, MIX + 9), path(`M${o} ${LINE}V${MIX - 9}`), right(o + 9, width - 8, MIX),
      label(width - 6, MIX - 8, "hₜ", "end"), label(o + 14, (LINE + MIX) / 2 + 4, "tanh", "start"),
      operator(f, LINE), operator(mid, LINE, true), operator(mid, MIX), operator(o, MIX),
      gate(f, boxWidth, "forget", means.forget), gate(i, boxWidth, "input", means.input),
      gate(g, boxWidth, "new", means.candidate, false), gate(o, boxWidth, "output", means.output)];
  },
  gru(means, width) {
    const spacing = (width - 2 * MARGIN) / 3, [z, r, n] = [0, 1, 2].map(at => MARGIN + (at + 0.5) * spacing);
    const boxWidth = Math.min(104, spacing - 22);
    return [...memory(width, "h"), ...inputs([z, r, n], MARGIN / 2 + 14), up(z, GATE, LINE + 9),
      path(`M${z} ${MIX}H${n - 9}`), label((z + n) / 2, MIX - 7, "1 − z"), up(n, GATE, MIX + 9),
      up(n, MIX - 9, LINE + 9),
      right(r + boxWidth / 2, n - boxWidth / 2, GATE + GATE_HEIGHT / 2), operator(z, LINE), operator(n, LINE, true),
      operator(n, MIX),
      gate(z, boxWidth, "update z", means.update), gate(r, boxWidth, "reset r", means.reset),
      gate(n, boxWidth, "new", means.candidate, false)];
  },
  elman(means, width) {
    const x = width / 2;
    return [...inputs([x], x - 60), up(x, GATE, LINE + 20), right(x, width - 8, LINE + 20),
      label(width - 6, LINE + 12, "hₜ", "end"),
      gate(x, Math.min(150, width - 60), "hidden state", means.hidden, false)];
  },
};

// `means` by gate: forget, input, candidate and output, or update, reset and candidate, or hidden.
export function cellPicture(kind, means, width) {
  const text = Object.entries(means).map(([name, mean]) => `${name} ${number(mean, 3)}`).join(", ");
  return picture(width, INPUT + 32, { class: "step-cell", role: "img",
    "aria-label": `${kind} cell; means over its units: ${text}` }, ...PICTURES[kind](means, width));
}

const MEANS = "gates over time, mean";
const tensorOf = (stage, name) => stage?.tensors.find(tensor => tensor.name === name);

// the cell that a stage belongs to, with the mean of each gate at a position; null for other stages
export function cellOf(stages, stage, place) {
  const prefix = stage.id.replace(/\.[^.]+$/, "");
  const means = tensorOf(stages.find(one => one.id === `${prefix}.gates`), MEANS);
  if (!means || !/\.(before|gates|state)$/.test(stage.id)) return null;
  const names = means.axes[1].labels, now = means.values[Math.min(place, means.values.length - 1)];
  const kind = names.includes("forget") ? "lstm" : names.includes("reset") ? "gru" : "elman";
  return { kind, means: Object.fromEntries(names.map((name, at) => [name, now[at]])) };
}

// transpose (token, …) to (…, token): time runs across
function transposed(tensor, rows) {
  const values = rows[0].map((_, unit) => rows.map(row => row[unit]));
  const axes = [tensor.axes.at(-1), tensor.axes[0]];
  return { ...tensor, shape: [values.length, rows.length], axes, values, cut: null };
}

const averages = rows => rows[0].map((_, at) => meanOf(rows.map(row => row[at])));

// Gates over time as small multiples: units from top to bottom, tokens across, the mean below.
export function overTime(stage, { width, place }) {
  const gates = tensorOf(stage, "gates over time"), means = tensorOf(stage, MEANS);
  const states = stage.tensors.filter(tensor => tensor.name.endsWith("over time") && tensor !== gates);
  if (!states.length && !gates) return null;
  const half = width > 460 ? (width - 20) / 2 : width;
  const figure = (name, tensor, mean) => h("div", { class: "step-multiple" },
    h("h4", {}, name, h("span", { class: "step-shape" }, mean ? ` mean ${number(mean[place], 3)} at this token` : "")),
    matrix(tensor, { width: half, column: place, mean: mean ?? averages(tensor.values) }));
  const signed = name => (/candidate|hidden/.test(name) ? "signed" : "positive");
  const at = (values, n) => values.map(row => row[n]);
  const over = gates?.axes[1].labels.map((name, n) => figure(name,
    { ...transposed(gates, at(gates.values, n)), name, gate: true, scale: signed(name) }, at(means.values, n)));
  return h("div", {}, h("h3", { class: "step-over-time" }, "Over time"), h("div", { class: "step-multiples" },
    over ?? [], states.map(tensor =>
      figure(tensor.name.replace(" over time", ""), transposed(tensor, tensor.values)))));
}
