// What a chart computes before it draws: ends of axes, round numbers, smoothing, and which points a screen can show.
import { counted, rounded } from "./words.js";

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const general = (value, digits = 6) => String(Number(value.toPrecision(digits))).replace("e+", "e");

export function scientific(value) {
  if (!value) return "0";
  const [head, power] = value.toExponential(2).split("e");
  const small = [...power.replace("+", "")].map(sign => sign === "-" ? "⁻" : SUPERSCRIPTS[sign]).join("");
  return Number(head) === 1 ? `10${small}` : `${Number(head)}·10${small}`;
}

export function duration(seconds) {
  if (seconds === 0) return "0";
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"]].find(each => Math.abs(seconds) >= each[0]) ?? [1, "s"];
  return `${general(seconds / unit, 3)} ${name}`;
}

const tickText = value => Math.abs(value) >= 1e6 ? `${general(value / 1e6)}M`
  : Math.abs(value) >= 1e4 ? `${general(value / 1e3)}k` : general(value);

// how an axis names its numbers; the names are those of the functions that do the same in Python
const FORMATS = { tick_text: tickText, short: rounded, scientific, duration, flops_text: scientific,
  multiple: value => `${general(value)}×`, signed: value => value > 0 ? `+${general(value)}` : general(value) };
export const named = axis => FORMATS[axis.named] ?? tickText;

// A value that is read off: more digits than beside an axis.
export function exact(value, axis = {}) {
  if (axis.named === "duration" || axis.named === "scientific") return named(axis)(value);
  return Math.abs(value) >= 1000 ? counted(Math.round(value)) : general(value, 4);
}

// ---- axes

// Whether two numbers differ by no more than what computing them leaves: nothing can be told apart between them.
export const alike = (low, high) => high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));

export function limits(axis, values) {
  let low = Infinity, high = -Infinity;
  for (const each of [values, axis.holds ?? []]) {
    for (const value of each) { if (value < low) low = value; if (value > high) high = value; }
  }
  if (alike(low, high)) {
    const around = Math.abs(low) / 10 || 1;
    return axis.log ? [low / 1.1, high * 1.1] : [low - around, high + around];
  }
  const pad = axis.pad ?? 0.04, margin = axis.log ? (high / low) ** pad : pad * (high - low), held = axis.holds ?? [];
  return [held.includes(low) ? low : axis.log ? low / margin : low - margin,
    held.includes(high) ? high : axis.log ? high * margin : high + margin];
}

// Below what a few spikes reach that are far above nine tenths of these values.
export function calmTop(values) {
  if (!values.length) return Infinity;
  const sorted = Float64Array.from(values).sort(), high = sorted[Math.floor(0.9 * (sorted.length - 1))];
  return high + 4 * Math.max(high - sorted[0], Math.abs(high) * 0.05);
}

const SECONDS = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400]; // round on a clock

function evenTicks(low, high, most, ofTime = false) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const clock = ofTime && raw > 30 && SECONDS.find(size => size >= raw * 0.999);
  const step = clock || power * [1, 2, 2.5, 5, 10].find(times => power * times >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9), found = [];
  for (let n = 0; n <= Math.min(last - first, 100); n++) found.push(Number(((first + n) * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.ceil(Math.log10(high / low) / most));
  let found = [];
  for (const steps of stride === 1 ? [[1], [1, 3], [1, 2, 5]] : [[1]]) {
    const ticks = [];
    for (let power = Math.floor(first / stride) * stride; power <= last; power += stride) {
      for (const step of steps) ticks.push(Number((step * 10 ** power).toPrecision(12)));
    }
    const inside = ticks.filter(tick => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
    if (inside.length <= most || !found.length) found = inside;
  }
  return found.length >= 3 || high > 8 * low ? found : evenTicks(low, high, Math.min(most, 5));
}

export function ticksOf(axis, [low, high], most) {
  const found = axis.log ? logTicks(low, high, most) : evenTicks(low, high, most, axis.named === "duration");
  return found.map(tick => [tick, named(axis)(tick)]);
}

export const share = (value, [low, high], log) =>
  log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
export const unshare = (part, [low, high], log) => log ? low * (high / low) ** part : low + part * (high - low);

// ---- points

export const drawable = (value, log) => value !== null && Number.isFinite(value) && (!log || value > 0);

// Exponential smoothing without its bias towards the first value; what is no number stays so.
export function smoothed(ys, weight) {
  let sum = 0, mass = 0;
  return ys.map(y => {
    if (y === null || !Number.isFinite(y)) return y;
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + 1 - weight;
    return sum / mass;
  });
}

// The first index whose x is not below a value; xs ascend.
export function firstFrom(xs, value) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// A series' value at x: that of a point, or between two of them; null outside of it.
export function valueAt(xs, ys, x) {
  const at = firstFrom(xs, x);
  if (xs[at] === x) return { value: ys[at], between: false };
  if (at === 0 || at === xs.length || ys[at] === null || ys[at - 1] === null) return null;
  const part = (x - xs[at - 1]) / (xs[at] - xs[at - 1]);
  return { value: ys[at - 1] + part * (ys[at] - ys[at - 1]), between: true };
}

// Places as lines: many points in one column of pixels become its lowest and its highest; gaps end a line.
export function linesOf({ x: xs }, ys, [from, to], { x, y }, { xOf, yOf }, thin) {
  const lines = [];
  let line = null, column = null, low = 0, high = 0, last = 0; // of a column, the indices of three points
  const add = n => line.push([xOf(xs[n]), yOf(ys[n])]);
  const flush = () => {
    if (column !== null) [...new Set([low, high, last])].sort((one, other) => one - other).forEach(add);
    column = null;
  };
  for (let n = from; n < to; n++) {
    if (!drawable(xs[n], x.log) || !drawable(ys[n], y.log)) {
      flush();
      line = null;
      continue;
    }
    if (!line) lines.push(line = []);
    if (!thin) { add(n); continue; }
    const here = Math.round(xOf(xs[n]));
    if (here !== column) {
      flush();
      [column, low, high] = [here, n, n];
    }
    if (ys[n] < ys[low]) low = n;
    if (ys[n] > ys[high]) high = n;
    last = n;
  }
  flush();
  return lines;
}
