// A tensor as a heat map, whose values the pointer and the arrow keys read, and as small strips.
// Positive values are blue, negative ones orange with a dash, masked ones hatched: colour is never the only sign.
import { h, isPlain, s } from "./dom.js";
import { clamp, fitText, minus, textWidth, visibleToken, withCommas } from "./words.js";

const LEVELS = 20; // shades
const BARS = 96, MEAN = 26; // pixels; height of a single row, and of the mean

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "−∞ (masked)";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1e6 || size < 1e-3 ? value.toExponential(2)
    : size >= 1000 ? withCommas(Math.round(value)) : value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1");
  return minus(text.replace(/\.$/, ""));
}

// the largest absolute value of nested arrays
export function largest(values) {
  let max = 0;
  const visit = value => {
    if (Array.isArray(value)) value.forEach(visit);
    else if (value !== null && Math.abs(value) > max) max = Math.abs(value);
  };
  visit(values);
  return max || 1;
}

export const isIds = ({ axes, scale }) => axes.length === 1 && axes[0].name === "token" && scale === "positive";

// the value with the darkest shade or the longest bar: for attention not a small probability, or a head that looks
// everywhere would seem certain; for a gate 1
export function extent(tensor, values) {
  const isAttention = tensor.scale === "probability" && ["key", "source"].includes(tensor.axes.at(-1).name);
  const least = isAttention ? Math.min(0.3, 3 / tensor.shape.at(-1)) : tensor.gate || tensor.name === "gates" ? 1 : 0;
  if (values) return Math.max(largest(values), least);
  if (!extents.has(tensor)) extents.set(tensor, Math.max(largest(tensor.values), least));
  return extents.get(tensor);
}

const extents = new WeakMap();

// the axis that is chosen in a <select> rather than drawn: before the last two, with a name and a size
export const chosenAxes = tensor => tensor.axes.slice(0, Math.max(0, tensor.axes.length - 2));

// The largest number of heads of these stages.
export const headsOf = stages => Math.max(1, ...stages.flatMap(stage => stage.tensors.flatMap(({ axes, shape }) =>
  axes.map((axis, n) => (axis.name === "head" ? shape[n] : 1)))));

// The one of `count` heads that belongs to the chosen one of `heads`: several heads may share keys and values.
export const headAt = (count, { head = 0, heads = count }) =>
  Math.min(Math.floor((head * count) / Math.max(heads, count)), count - 1);

// Index the leading axes of a tensor: heads as in `chosen`, others by `place(axis)`.
function indexAxes(tensor, axes, chosen, place) {
  let { values } = tensor;
  for (const axis of axes) {
    const at = axis.name === "head" ? headAt(values.length, chosen) : place(axis);
    values = values[Math.min(at, values.length - 1)];
  }
  return values;
}

// the last two axes of a tensor as rows, with the leading axes indexed
export function plane(tensor, chosen = {}) {
  const values = indexAxes(tensor, chosenAxes(tensor), chosen, axis => Number(chosen[axis.name] ?? 0));
  return Array.isArray(values[0]) ? values : [values];
}

export function labelOf(axis, at) {
  const label = axis?.labels?.[at];
  return label === undefined || label === null ? String(at) : visibleToken(label);
}

// one path per shade, so that a thousand cells are twenty elements
function shadedCells(rows, max, cell) {
  const paths = new Map(), dashes = [], masked = [];
  rows.forEach((row, y) => row.forEach((value, x) => {
    const left = x * cell.width, top = y * cell.height;
    const width = cell.width - cell.gap, height = cell.height - cell.gap, side = Math.min(width, height);
    if (value === null) {
      masked.push(`M${left} ${top + height}l${side} ${-side}`);
      return;
    }
    const level = Math.ceil((Math.abs(value) / max) * LEVELS - 1e-9);
    if (!level) return;
    const key = `${value < 0 ? "n" : "p"}${Math.min(level, LEVELS)}`;
    if (!paths.has(key)) paths.set(key, []);
    paths.get(key).push(`M${left} ${top}h${width}v${height}h${-width}z`);
    if (value < 0 && cell.width >= 7 && cell.height >= 7 && level > 2)
      dashes.push(`M${left + width / 2 - 2} ${top + height / 2}h4`);
  }));
  return [
    ...[...paths].map(([key, d]) => s("path", {
      class: key[0] === "n" ? "step-negative" : "step-positive", d: d.join(""),
      "fill-opacity": Number(key.slice(1)) / LEVELS,
    })),
    masked.length ? s("path", { class: "step-masked", d: masked.join("") }) : null,
    dashes.length ? s("path", { class: "step-dash", d: dashes.join("") }) : null,
  ].filter(Boolean);
}

// A small strip of bars around zero: positive up, negative down, masked positions hatched.
/**
 * @param {any[]} values
 * @param {{ x?: number, y?: number, width: number, height: number, max?: number, scale?: string,
 *   all?: boolean }} options
 */
export function strip(values, { x = 0, y = 0, width, height, max, scale = "signed", all = false }) {
  const path = (name, d) => d.length > 0 && s("path", { class: name, d: d.join("") });
  const shown = all ? values : thin(values, Math.max(1, Math.floor(width / 3)));
  const top = max || largest(shown), each = width / shown.length;
  const barWidth = Math.max(0.6, Math.min(each * 0.8, all ? 24 : 14));
  const signed = scale === "signed", zero = y + (signed ? height / 2 : height), space = signed ? height / 2 : height;
  const up = [], down = [], masked = [];
  shown.forEach((value, at) => {
    const left = (x + at * each + (each - barWidth) / 2).toFixed(1);
    if (value === null) masked.push(`M${left} ${y + height}l${barWidth} ${-Math.min(height, barWidth)}`);
    else {
      const barHeight = Math.min(1, Math.abs(value) / top) * space;
      if (barHeight >= 0.15) (value < 0 ? down : up).push(value < 0
        ? `M${left} ${zero}h${barWidth.toFixed(1)}v${barHeight.toFixed(1)}h${(-barWidth).toFixed(1)}z`
        : `M${left} ${zero}v${(-barHeight).toFixed(1)}h${barWidth.toFixed(1)}v${barHeight.toFixed(1)}z`);
    }
  });
  return s("g", { class: "step-strip" },
    s("path", { class: "step-zero", d: `M${x} ${zero}h${width}` }),
    path("step-up", up), path("step-down", down), path("step-masked", masked));
}

// at most this many values: of neighbours the one farthest from zero
function thin(values, max) {
  if (values.length <= max) return values;
  const thinned = [];
  for (let at = 0; at < max; at++) {
    const run = values.slice(Math.floor((at * values.length) / max), Math.floor(((at + 1) * values.length) / max));
    thinned.push(run.reduce((best, value) => (Math.abs(value ?? 0) > Math.abs(best ?? 0) ? value : best)));
  }
  return thinned;
}

// the vector that a miniature draws: of the selected head, at the selected position
export function vector(tensor, { head = 0, heads, place = 0 }) {
  const values = indexAxes(tensor, tensor.axes.slice(0, -1), { head, heads }, axis => (axis.labels ? place : 0));
  return Array.isArray(values) ? values : [values];
}

// a matrix as a miniature
export function heat(tensor, { x, y, width, height }) {
  const rows = plane(tensor).map(row => thin(row, Math.max(1, Math.floor(width / 2))));
  const cell = { width: Math.min(14, width / rows[0].length), height: height / rows.length, gap: 0 };
  return s("g", { transform: `translate(${x} ${y})`, class: "step-heat" },
    s("rect", { class: "step-ground", width: cell.width * rows[0].length, height }),
    ...shadedCells(rows, extent(tensor), cell));
}

function grid(rows, space, labelled, thin) {
  const columns = rows[0].length;
  const width = Math.min(labelled ? 34 : 26, Math.max(rows.length === 1 ? 5 : 3.2, space / columns));
  const height = rows.length === 1 ? BARS : Math.min(24, Math.max(thin ? 2.5 : 7, (thin ? 170 : 300) / rows.length));
  return { width, height, gap: width > 6 && height > 6 ? 1 : 0 };
}

function axisLabels(rows, cell, axes, left) {
  const [down, across] = axes, parts = [];
  const every = Math.max(1, Math.ceil(13 / cell.height)), step = Math.max(1, Math.ceil(14 / cell.width));
  // labels are tilted; their height depends on the longest
  const widths = (across?.labels ?? []).map((_, at) => Math.min(64, textWidth(labelOf(across, at))));
  const long = Math.max(0, ...widths);
  const labelHeight = across?.labels ? long * 0.85 + 12 : 16;
  if (down) rows.forEach((_, y) => y % every || parts.push(s("text", { x: -6, y: y * cell.height + cell.height / 2 + 4,
    "text-anchor": "end" }, fitText(labelOf(down, y), left - 10))));
  const columnStep = across?.labels ? step : Math.max(step, Math.ceil(30 / cell.width));
  for (let x = 0; x < rows[0].length; x += columnStep) {
    const middle = x * cell.width + cell.width / 2;
    parts.push(across?.labels
      ? s("text", { transform: `translate(${middle + 3} -6) rotate(-58)` }, fitText(labelOf(across, x), 64))
      : s("text", { x: middle, y: -5, "text-anchor": "middle", class: "step-quiet" }, labelOf(across, x)));
  }
  if (down) parts.push(s("text", { x: -6, y: -5, "text-anchor": "end", class: "step-quiet" },
    fitText(down.name, left - 4)));
  return { parts, labelHeight };
}

// A heat map of a tensor's last two axes. `chosen` indexes the other axes; the row `mark` and the `column` are framed,
// `pick` is called with a selected cell, and the `mean` of each column is below it, with thin rows above.
/**
 * @param {any} tensor
 * @param {{ width: number, chosen?: any, mark?: number | null, column?: number | null,
 *   pick?: ((y: number, x: number) => void) | null, mean?: number[] | null }} options
 */
export function matrix(tensor, { width, chosen = {}, mark = null, column = null, pick = null, mean = null }) {
  const rows = plane(tensor, chosen), axes = tensor.axes.slice(-2);
  const [down, across] = axes.length === 2 ? axes : [null, axes[0]];
  const names = down ? rows.map((_, y) => labelOf(down, y)) : [];
  const left = down ? Math.min(96, 14 + Math.max(textWidth(down.name), ...names.map(name => textWidth(name)))) : 2;
  const cell = grid(rows, width - left - (across?.labels ? 34 : 4), Boolean(across?.labels), Boolean(mean));
  const { parts, labelHeight } = axisLabels(rows, cell, [down, across], left);
  const gridWidth = rows[0].length * cell.width, gridHeight = rows.length * cell.height;
  const right = across?.labels ? 34 : 8;
  const totalHeight = labelHeight + 8 + gridHeight + (mean ? MEAN + 8 : 2);
  const frame = s("rect", { class: "step-at", width: cell.width, height: cell.height, visibility: "hidden" });
  const picture = s("svg", { class: "step-matrix", width: left + gridWidth + right, height: totalHeight,
    tabindex: "0", role: "img", viewBox: `0 ${-labelHeight - 8} ${left + gridWidth + right} ${totalHeight}` },
  s("g", { transform: `translate(${left} 0)` }, ...parts,
    s("rect", { class: "step-ground", width: gridWidth, height: gridHeight }),
    ...(rows.length === 1
      ? [strip(rows[0], { width: gridWidth, height: gridHeight, scale: tensor.scale, max: extent(tensor), all: true })]
      : shadedCells(rows, extent(tensor), cell)),
    mark !== null && s("rect", { class: "step-mark", y: mark * cell.height, width: gridWidth, height: cell.height }),
    mean && strip(mean, { y: gridHeight + 6, width: gridWidth, height: MEAN, scale: tensor.scale, max: 1, all: true }),
    column !== null && s("rect", { class: "step-mark", x: column * cell.width, width: cell.width, height: gridHeight }),
    frame));
  const output = h("output", { class: "step-readout", "aria-live": "polite" });
  picture.setAttribute("aria-label", `${tensor.name}: ${tensor.axes.map(axis => axis.name).join(" × ")}, `
    + `${tensor.shape.join(" × ")}. Arrow keys read values.`);
  /** @type {[number, number] | null} */
  let at = null;
  const show = (y, x) => {
    at = [clamp(y, 0, rows.length - 1), clamp(x, 0, rows[0].length - 1)];
    frame.setAttribute("visibility", "visible");
    frame.setAttribute("x", at[1] * cell.width);
    frame.setAttribute("y", at[0] * cell.height);
    const row = down ? `${down.name} ${labelOf(down, at[0])}, ` : "";
    output.textContent = `${row}${across.name} ${labelOf(across, at[1])}: ${number(rows[at[0]][at[1]])}`;
  };
  /** @returns {[number, number] | null} */
  const cellAt = event => {
    const box = picture.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - left) / cell.width);
    const y = Math.floor((event.clientY - box.top - labelHeight - 8) / cell.height);
    return x < 0 || y < 0 || x >= rows[0].length || y >= rows.length ? null : [y, x];
  };
  picture.addEventListener("pointermove", event => { const found = cellAt(event); if (found) show(...found); });
  if (pick) picture.addEventListener("click", event => { const found = cellAt(event); if (found) pick(...found); });
  picture.addEventListener("keydown", event => {
    const [y, x] = at ?? [mark ?? 0, -1];
    const to = { ArrowRight: [y, x + 1], ArrowLeft: [y, x - 1], ArrowDown: [y + 1, x], ArrowUp: [y - 1, x],
      Home: [y, 0], End: [y, rows[0].length - 1] }[event.key];
    if (event.key === "Enter" && pick && at) pick(...at);
    if (!to || !isPlain(event)) return;
    event.preventDefault();
    event.stopPropagation();
    show(to[0], to[1]);
  });
  return h("figure", { class: "step-figure" }, h("div", { class: "scroll step-scroll" }, picture), output);
}
