// Attention in four steps, one row a key: its score, whether the mask hides it, its probability, and what its value adds
// to the mix. Columns fill as the reader steps, so that one sees a score become a share of the mix.
import { h, s } from "./dom.js";
import { fitted, labelOf, largest, number, strip, textWidth } from "./matrix.js";

const ROW = 21, TOP = 24;
const PARTS = ["scores", "mask", "softmax", "mix"];
const NAMES = { scores: "score", mask: "masked", softmax: "probability", mix: "× value" };

// the four stages of the attention that a stage belongs to, or null where it is none of them
export function attentionOf(stages, stage) {
  const [, prefix, part] = stage.id.match(/^(.*)\.([^.]+)$/) ?? [];
  if (!PARTS.includes(part)) return null;
  const found = {};
  for (const name of PARTS) found[name] = stages.find((each) => each.id === `${prefix}.${name}`);
  return found.softmax && found.scores ? { ...found, part } : null;
}

const row = (tensor, head) => (tensor.axes.length > 1 ? tensor.values[Math.min(head, tensor.values.length - 1)] : tensor.values);

// values of a head's keys, (keys, d_head), where the mix has them; key–value heads are shared by groups of query heads
function valuesOf(stage, head, heads) {
  const tensor = stage?.tensors.find((each) => each.axes.length === 3);
  return tensor ? tensor.values[Math.floor((head * tensor.values.length) / heads)] : null;
}

export function keysPicture(four, { width, head }) {
  const parts = PARTS.filter((name) => four[name]), reached = PARTS.indexOf(four.part);
  const tensor = four.scores.tensors[0], axis = tensor.axes.at(-1), heads = tensor.axes.length > 1 ? tensor.values.length : 1;
  const scores = row(tensor, head), masked = four.mask ? row(four.mask.tensors[0], head) : scores;
  const shares = row(four.softmax.tensors[0], head), values = valuesOf(four.mix, head, heads);
  const names = scores.map((_, at) => labelOf(axis, at));
  const left = Math.min(width * 0.24, 16 + Math.max(...names.map((name) => textWidth(name))));
  const wide = (width - left - 8) / parts.length, height = TOP + ROW * (scores.length + (values ? 1.5 : 0)) + 6;
  const most = { scores: largest(scores), mask: largest(masked), softmax: Math.max(...shares.map((each) => each ?? 0), 1e-9),
    mix: values ? largest(values) * Math.max(...shares.map((each) => each ?? 0)) : 1 };
  const draw = {
    scores: (at, x, y) => bar(scores[at], most.scores, x, y, wide - 14, true),
    mask: (at, x, y) => bar(masked[at], most.mask, x, y, wide - 14, true),
    softmax: (at, x, y) => bar(shares[at] ?? 0, most.softmax, x, y, wide - 14, false),
    mix: (at, x, y) => (values ? strip(values[at].map((value) => value * (shares[at] ?? 0)),
      { x, y: y + 2, width: wide - 14, height: ROW - 4, most: most.mix }) : bar(shares[at] ?? 0, most.softmax, x, y, wide - 14, false)),
  };
  const columns = parts.map((name, n) => {
    const x = left + n * wide + 10, later = PARTS.indexOf(name) > reached, now = name === four.part;
    return s("g", { class: `step-part${later ? " step-later" : ""}${now ? " step-now" : ""}` },
      s("rect", { class: "step-part-ground", x: x - 6, y: 2, width: wide - 2, height: height - 4, rx: 4 }),
      s("text", { x, y: 16, class: "step-part-name" }, fitted(NAMES[name], wide - 12)),
      ...(later ? [] : scores.map((_, at) => draw[name](at, x, TOP + at * ROW))),
      name === "mix" && values && !later ? mixed(four.mix, head, { x, y: TOP + ROW * (scores.length + 0.3), width: wide - 14 }) : null);
  });
  return s("svg", { class: "step-keys", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `What the query at this place makes of ${scores.length} keys in head ${head}` },
  ...names.map((name, at) => s("text", { x: left - 4, y: TOP + at * ROW + 14.5, "text-anchor": "end" }, fitted(name, left - 8))),
  ...columns);
}

function mixed(stage, head, { x, y, width }) {
  const tensor = stage.tensors.find((each) => each.axes.length === 2 && each.axes[0].name === "head");
  if (!tensor) return null;
  return s("g", {}, s("path", { class: "step-sum", d: `M${x} ${y - 3}h${width}` }),
    strip(row(tensor, head), { x, y, width, height: ROW, scale: "signed" }));
}

// a bar from the left, or from the middle where it can be negative, with its number
function bar(value, most, x, y, width, signed) {
  if (value === null) return s("g", {}, s("rect", { class: "step-hidden", x, y: y + 3, width, height: ROW - 6 }),
    s("path", { class: "step-masked", d: hatch(x, y + 3, width, ROW - 6) }), s("text", { x: x + width / 2, y: y + 14.5, class: "step-over", "text-anchor": "middle" }, "−∞"));
  const told = signed ? number(value) : value < 0.0005 && value > 0 ? "<0.001" : value.toFixed(3).replace(/^1\.000$/, "1");
  const numbers = 44, room = Math.max(8, width - numbers), zero = signed ? x + room / 2 : x;
  const long = Math.min(1, Math.abs(value) / most) * (signed ? room / 2 : room);
  return s("g", {}, signed ? s("path", { class: "step-zero", d: `M${zero} ${y + 2}v${ROW - 4}` }) : null,
    s("rect", { class: value < 0 ? "step-down step-grow-left" : "step-up step-grow", x: value < 0 ? zero - long : zero, y: y + 4,
      width: Math.max(long, 0.4), height: ROW - 8 }),
    s("text", { x: x + width, y: y + 14.5, "text-anchor": "end", class: "step-number" }, fitted(told, numbers)));
}

function hatch(x, y, width, height) {
  const lines = [];
  for (let at = 0; at + height <= width; at += 7) lines.push(`M${x + at} ${y + height}l${height} ${-height}`);
  return lines.join("");
}
