// Computations of a chart before it is drawn: limits and ticks of axes, smoothing, and points that a screen can show.
import { count, formatOf, general } from "./numbers.js";
/** @import { AxisData, Frame, Range, SeriesData, Tick } from "../../../types" */

/**
 * Format a value that is read off the chart, with more digits than a tick.
 * @param {AxisData} axis
 */
export function exactText(value, axis = {}) {
	if (axis.format === "duration" || axis.format === "scientific") return formatOf(axis)(value);
	return Math.abs(value) >= 1000 ? count(value) : general(value, 4);
}

// Whether two values differ by no more than rounding errors.
export const indistinguishable = (low, high) => high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));

/**
 * Return where an axis begins and ends, as `Axis.limits` of figures/plot.py does.
 * @param {AxisData} axis
 * @param {number[]} values
 * @returns {Range}
 */
export function limits(axis, values) {
	const { log, pad = 0.04, includes = [] } = axis;
	let low = Infinity, high = -Infinity;
	for (const part of [values, includes]) {
		for (const value of part) { if (value < low) low = value; if (value > high) high = value; }
	}
	if (indistinguishable(low, high)) {
		const margin = Math.abs(low) / 10 || 1;
		return log ? [low / 1.1, high * 1.1] : [low - margin, high + margin];
	}
	const margin = log ? (high / low) ** pad : pad * (high - low);
	return [includes.includes(low) ? low : log ? low / margin : low - margin,
		includes.includes(high) ? high : log ? high * margin : high + margin];
}

// The upper limit of an axis that clips: a few spikes, far above 90 % of the values, lie above it.
export function clippedTop(values) {
	if (!values.length) return Infinity;
	const sorted = Float64Array.from(values).sort(), high = sorted[Math.floor(0.9 * (sorted.length - 1))];
	return high + 4 * Math.max(high - sorted[0], Math.abs(high) * 0.05);
}

const CLOCK_STEPS = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400]; // seconds
const powerOfTen = exponent => Number(`1e${exponent}`); // ** may be off by one bit
const decimal = value => Number(value.toPrecision(12)); // 0.30000000000000004 → 0.3

function evenTicks(low, high, maxTicks, ofTime = false) {
	const raw = (high - low) / maxTicks, power = powerOfTen(Math.floor(Math.log10(raw)));
	const clock = ofTime && raw > 30 && CLOCK_STEPS.find(size => size >= raw * 0.999);
	const step = clock || power * ([1, 2, 2.5, 5].find(factor => power * factor >= raw * 0.999) ?? 10);
	const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9), ticks = [];
	for (let n = 0; n <= Math.min(last - first, 100); n++) ticks.push(decimal((first + n) * step));
	return ticks;
}

function logTicks(low, high, maxTicks) {
	const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
	const stride = Math.max(1, Math.ceil(Math.log10(high / low) / maxTicks - 1e-9)); // decades between ticks
	let ticks = [];
	for (const digits of stride === 1 ? [[1], [1, 3], [1, 2, 5]] : [[1]]) {
		const inside = [];
		for (let power = Math.floor(first / stride) * stride; power <= last; power += stride) {
			for (const digit of digits) {
				const tick = decimal(digit * powerOfTen(power));
				if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) inside.push(tick);
			}
		}
		if (inside.length <= maxTicks || !ticks.length) ticks = inside;
	}
	// over a narrow range, a logarithmic axis is nearly linear
	return ticks.length >= 3 || high > 8 * low ? ticks : evenTicks(low, high, Math.min(maxTicks, 5));
}

/**
 * Return at most `maxTicks` round numbers between the limits, with their labels.
 * @param {AxisData} axis
 * @param {Range} limits
 * @returns {Tick[]}
 */
export function roundTicks(axis, [low, high], maxTicks) {
	const text = formatOf(axis);
	const ticks = axis.log ? logTicks(low, high, maxTicks) : evenTicks(low, high, maxTicks, axis.format === "duration");
	return ticks.filter(value => !axis.whole || Number.isInteger(value)).map(value => ({ value, label: text(value) }));
}

// The position of a value along its axis, 0 at the beginning and 1 at the end; and the value at such a position.
export const fractionOf = (value, [low, high], log) =>
	log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
export const valueAtFraction = (part, [low, high], log) => log ? low * (high / low) ** part : low + part * (high - low);

export const drawable = (value, log) => Number.isFinite(value) && (!log || value > 0);

// Exponential moving average without bias towards the first value; missing values stay missing.
export function smooth(ys, weight) {
	let sum = 0, mass = 0;
	return ys.map(y => {
		if (!Number.isFinite(y)) return y;
		sum = weight * sum + (1 - weight) * y;
		mass = weight * mass + 1 - weight;
		return sum / mass;
	});
}

// The index of the first x that is not below a value; xs ascend.
export function lowerBound(xs, value) {
	let low = 0, high = xs.length;
	while (low < high) {
		const middle = (low + high) >> 1;
		if (xs[middle] < value) low = middle + 1; else high = middle;
	}
	return low;
}

// The value of a series at x: that of a point, or interpolated between two; null outside the series.
export function valueAt(xs, ys, x) {
	const n = lowerBound(xs, x);
	if (xs[n] === x) return { value: ys[n], interpolated: false };
	if (n === 0 || n === xs.length || ys[n] === null || ys[n - 1] === null) return null;
	const part = (x - xs[n - 1]) / (xs[n] - xs[n - 1]);
	return { value: ys[n - 1] + part * (ys[n] - ys[n - 1]), interpolated: true };
}

/**
 * Return polylines through the points of a series; gaps end a line. With `thin`, the points within one column of pixels
 * become the lowest, the highest and the last.
 * @param {SeriesData} series
 * @param {any[]} ys
 * @param {Range} span  half-open range of indices
 * @param {{ x: AxisData, y: AxisData }} axes
 * @param {Frame} frame
 * @param {boolean} thin
 */
export function polylines({ x: xs }, ys, [from, to], { x, y }, { xOf, yOf }, thin) {
	/** @type {[number, number][][]} */
	const lines = [];
	/** @type {[number, number][] | null} */
	let line = null;
	/** @type {number | null} */
	let column = null;
	let low = 0, high = 0, last = 0; // indices of a column's points
	const add = n => line?.push([xOf(xs[n]), yOf(ys[n])]);
	const flush = () => {
		if (column !== null) [...new Set([low, high, last])].sort((a, b) => a - b).forEach(add);
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
