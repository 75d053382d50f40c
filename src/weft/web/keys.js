// Attention in four steps, one row per key: its score, whether it is masked, its probability, and what its value
// contributes to the output. Columns fill in as the reader steps through them.
import { picture, s } from "./dom.js";
import { extent, labelOf, largest, number, strip } from "./matrix.js";
import { fitText, share, sum as total, textWidth } from "./words.js";

const ROW = 21, TOP = 24, NUMBERS = 47; // pixels: height of a row, of the heading; width of a number
const NARROW = 480; // pixels; a narrower picture has one column less
const MAX_KEYS = 36; // rows; of more keys, those with the largest probabilities
const PARTS = ["scores", "mask", "softmax", "mix"];
const BAHDANAU = { energies: "scores", alignment: "softmax" }; // names in Bahdanau et al.
const NAMES = { scores: "score", mask: "masked", softmax: "probability", mix: "× value" };

// the four stages of the attention that a stage belongs to; null for other stages
export function attentionOf(stages, stage) {
  const [, prefix, last] = stage.id.match(/^(.*)\.([^.]+)$/) ?? [], part = BAHDANAU[last] ?? last;
  if (!PARTS.includes(part)) return null;
  const stagesByName = {};
  const find = name => stages.find(each => each.id === `${prefix}.${name}`);
  for (const [other, name] of Object.entries(BAHDANAU)) stagesByName[name] = find(other);
  if (stagesByName.softmax) return { ...stagesByName, part };
  for (const name of [...PARTS, "values"]) stagesByName[name] = find(name);
  return stagesByName.softmax && stagesByName.scores ? { ...stagesByName, part } : null;
}

const row = ({ axes, values }, head) => (axes.length > 1 ? values[Math.min(head, values.length - 1)] : values);

// values of a head's keys, (keys, d_head); several query heads may share a value head
function valuesOf(stage, head, heads) {
  const tensor = stage?.tensors.find(each => each.axes.length === 3);
  return tensor ? tensor.values[Math.floor((head * tensor.values.length) / heads)] : null;
}

// positions to show, in order: all, or the most probable
function shownKeys(shares) {
  const all = shares.map((_, at) => at);
  if (all.length <= MAX_KEYS) return all;
  return all.sort((a, b) => (shares[b] ?? 0) - (shares[a] ?? 0)).slice(0, MAX_KEYS).sort((a, b) => a - b);
}

export function keysPicture(attention, { width, head: selectedHead }) {
  const tensor = attention.scores.tensors[0], axis = tensor.axes.at(-1);
  const heads = tensor.axes.length > 1 ? tensor.values.length : 1;
  const head = Math.min(selectedHead, heads - 1), shares = row(attention.softmax.tensors[0], head);
  const places = shownKeys(shares);
  const pick = values => places.map(at => values[at]);
  const scores = pick(row(tensor, head)), masked = attention.mask ? pick(row(attention.mask.tensors[0], head)) : scores;
  const all = valuesOf(attention.values, head, heads), values = all && pick(all), probable = pick(shares);
  const reached = PARTS.indexOf(attention.part);
  // on a narrow page, the mask is drawn in the column of the scores
  const hidden = width < NARROW && attention.mask ? (reached < 1 ? "mask" : "scores") : "";
  const parts = PARTS.filter(name => attention[name] && name !== hidden);
  const names = places.map(at => labelOf(axis, at));
  const left = Math.min(width * 0.24, 16 + Math.max(...names.map(name => textWidth(name))));
  const columnWidth = (width - left - 8) / parts.length, height = TOP + ROW * (places.length + 1.5) + 6;
  const draw = {
    scores: x => bars(scores, { x, width: columnWidth - 14, max: largest(scores), signed: true }),
    mask: x => bars(masked, { x, width: columnWidth - 14, max: largest(scores), signed: true }),
    softmax: x => bars(probable, { x, width: columnWidth - 14, max: extent(attention.softmax.tensors[0], shares) }),
    mix: x => (values ? contributions(values, probable, { x, width: columnWidth - 14 }) : []),
  };
  const columns = parts.map((name, n) => {
    const x = left + n * columnWidth + 10, later = PARTS.indexOf(name) > reached, now = name === attention.part;
    return s("g", { class: `step-part${later ? " step-later" : ""}${now ? " step-now" : ""}` },
      s("rect", { class: "step-part-ground", x: x - 6, y: 2, width: columnWidth - 2, height: height - 4, rx: 4 }),
      s("text", { x, y: 16, class: "step-part-name" }, fitText(NAMES[name], columnWidth - 12)),
      later ? null : draw[name](x),
      name === "mix" && !later && mixSum(attention.mix, head,
        { x, y: TOP + ROW * (places.length + 0.3), width: columnWidth - 14 }));
  });
  const others = shares.length - places.length, rest = total(shares) - total(probable);
  return picture(width, height, { class: "step-keys", role: "img",
    "aria-label": `Attention of this query to ${shares.length} keys${heads > 1 ? ` in head ${head}` : ""}` },
  ...labels(names, left, TOP), ...columns,
  others ? s("text", { x: 8, y: height - 12, class: "step-part-name" },
    fitText(`${others} more keys: ${number(Math.max(0, rest), 2)}`,
      left + (parts.length - 1) * columnWidth - 8)) : null);
}

const labels = (names, left, top) => names.map((name, at) =>
  s("text", { x: left - 4, y: top + at * ROW + 14.5, "text-anchor": "end" }, fitText(name, left - 8)));

// a vector with named entries: one bar per row
export function rows(tensor, { width }) {
  const names = tensor.values.map((_, at) => labelOf(tensor.axes[0], at)), signed = tensor.scale === "signed";
  const left = Math.min(width * 0.34, 16 + Math.max(...names.map(name => textWidth(name))));
  const height = ROW * names.length + 8;
  const first = names.slice(0, 5).map((name, at) => `${name} ${number(tensor.values[at])}`);
  return picture(width, height, { class: "step-keys", role: "img",
    "aria-label": `${tensor.name}: ${first.join(", ")}` },
  ...labels(names, left, 4),
  ...bars(tensor.values, { x: left + 8, y: 4, width: width - left - 20, max: extent(tensor), signed }));
}

// contribution of each key's value to the output: its probability times the value
function contributions(values, shares, { x, width }) {
  const max = largest(values) * Math.max(...shares.map(share => share ?? 0));
  return values.map((value, at) => strip(value.map(each => each * (shares[at] ?? 0)),
    { x, y: TOP + at * ROW + 2, width, height: ROW - 4, max }));
}

function mixSum(stage, head, { x, y, width }) {
  const tensor = stage.tensors.find(each => each.axes.length === 2 && each.axes[0].name === "head");
  if (!tensor) return null;
  return s("g", {}, s("path", { class: "step-sum", d: `M${x} ${y - 3}h${width}` }),
    strip(row(tensor, head), { x, y, width, height: ROW, scale: "signed" }));
}

// Bars in rows, from the left or, if values can be negative, from the middle, with their values. All bars of one sign
// are one element.
function bars(values, { x, y = TOP, width, max, signed = false }) {
  const space = Math.max(8, width - NUMBERS), zero = signed ? x + space / 2 : x;
  const up = [], down = [], hidden = [], numbers = [];
  values.forEach((value, at) => {
    const top = y + at * ROW;
    if (value === null) {
      hidden.push(hatch(x, top + 3, width, ROW - 6));
      numbers.push(s("text", { x: x + width / 2, y: top + 14.5, class: "step-over", "text-anchor": "middle" }, "−∞"));
      return;
    }
    const length = Math.max(0.4, Math.min(1, Math.abs(value) / max) * (signed ? space / 2 : space)).toFixed(1);
    const signedLength = value < 0 ? -length : length;
    (value < 0 ? down : up).push(`M${zero} ${top + 4}h${signedLength}v${ROW - 8}h${-signedLength}z`);
    const text = signed || value > 1 ? number(value, signed ? 3 : 4) : share(value);
    numbers.push(s("text", { x: x + width, y: top + 14.5, "text-anchor": "end", class: "step-number" }, text));
  });
  const origin = { "transform-origin": `${zero}px 0` }; // the line from which bars grow
  const path = (name, d) => d.length && s("path", { class: name, d: d.join(""), style: origin });
  return [signed && s("path", { class: "step-zero", d: `M${zero} ${y + 1}v${ROW * values.length - 2}` }),
    path("step-up step-grow", up), path("step-down step-grow", down),
    hidden.length && s("path", { class: "step-masked", d: hidden.join("") }), ...numbers].filter(Boolean);
}

function hatch(x, y, width, height) {
  const lines = [`M${x} ${y}h${width}v${height}h${-width}z`];
  for (let at = 0; at + height <= width; at += 7) lines.push(`M${x + at} ${y + height}l${height} ${-height}`);
  return lines.join("");
}
