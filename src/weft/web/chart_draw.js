// Draws a chart as SVG: its frame (the geometry), and the shapes. chart.js makes it interactive.
import {
	clippedTop, drawable, exactText, fractionOf, limits, lowerBound, polylines, roundTicks,
} from "./chart_axes.js";
import { s } from "./dom.js";
import { formatOf, general } from "./numbers.js";
import { clamp, fitText, round } from "./words.js";
/** @import { AxisData, ChartState, Frame, Look, PlotData, Range, SeriesData, Tick } from "../../../types" */
/** @typedef {[number, number]} Point */

// Lengths are in pixels, as in figures/shapes.py.
const EDGE = 14, LINE_HEIGHT = 17; // margin around everything; height of a line of text
const LETTER_WIDTH = 7, TITLE_LETTER_WIDTH = 9; // approximate
const MAX_LABEL_SHARE = 0.4; // of the width, for names of rows on the left
const OUTLIER_WIDTH = 44; // arrow and number of an outlier
const ROW_FONT = "12px system-ui, sans-serif"; // of a row's name
const MAX_MARKED_POINTS = 40; // a line of more points has no markers
const MAX_SAMPLED = 5000; // values per series from which spikes are found
const MAX_MARKERS = 4000; // of a series without a line
const MAX_OUTLIERS = 400; // considered for an arrow
const CIRCLES = { o: 2.6, ".": 1.8, ring: 5.5 }; // radii
const MARKERS = { s: "m-3-3h6v6h-6z", "^": "m0-4 4 7h-8z", D: "m0-4 4 4-4 4-4-4z", v: "m0 4 4-7h-8z",
	">": "m4 0-7 4v-8z", "<": "m-4 0 7 4v-8z",
	"*": "m0-6 1.4 4.2h4.4l-3.6 2.6 1.4 4.2-3.6-2.6-3.6 2.6 1.4-4.2-3.6-2.6h4.4z",
	x: "m-3-3 6 6m0-6-6 6", "|": "m0-5v10", _: "m-5 0h10" };
const BAND_WIDTH = 8; // of a single point
const MIN_ROOM = 0.05; // share of its value over which a flat curve may be spread
const OUTLIER = { colour: "c1", marker: "^", dash: "", width: 0 };

export const coordinates = points => points.map(([x, y]) => `${round(x)},${round(y)}`).join(" ");
/** @param {Tick[]} ticks */
const longestLabel = ticks => Math.max(0, ...ticks.map(tick => tick.label.length));

function coloured(look, ...kinds) {
	const shade = look.colour.endsWith("%");
	return { class: [...kinds, shade ? "" : look.colour].filter(Boolean).join(" "),
		style: shade && { color: `color-mix(in srgb, var(--deep) ${look.colour}, var(--card))` } };
}

function line(points, look, kind) {
	const pen = kind === "line" && { "stroke-width": look.width || 1, "stroke-dasharray": look.dash || undefined };
	return s("polyline", { points: coordinates(points), ...coloured(look, kind), ...pen });
}

function marker(look, [x, y], tooltip = "") {
	const title = tooltip && s("title", tooltip), ring = look.marker === "ring" && "ring";
	return look.marker in CIRCLES
		? s("circle", { cx: round(x), cy: round(y), r: CIRCLES[look.marker], ...coloured(look, "dot", ring) }, title)
		: s("path", { d: `M${round(x)} ${round(y)}${MARKERS[look.marker]}`, ...coloured(look, "dot") }, title);
}

/** @param {Look} look */
export function legendSample(look) {
	return s("svg.plot-sample", { viewBox: "0 0 22 10", width: 22, height: 10, "aria-hidden": "true" },
		look.width > 0 && line([[1, 5], [21, 5]], look, "line"), look.marker && marker(look, [11, 5]));
}

/** @param {AxisData} axis */
export function positionText(axis, x) {
	const label = axis.ticks?.find(tick => tick.value === x)?.label;
	const text = Math.abs(x) < 1e6 || axis.format === "duration" ? exactText(x, axis) : formatOf(axis)(x);
	return `${axis.label ?? ""} ${label ?? text}`.trim();
}

/**
 * Return the half-open range of a series' points that are visible, and one more on either side.
 * @param {SeriesData} series
 * @param {Range | null} range
 * @returns {Range}
 */
function visibleSpan(series, range) {
	const { x } = series;
	if (!range || !series.ascends) return [0, x.length];
	return [Math.max(0, lowerBound(x, range[0]) - 1), Math.min(x.length, lowerBound(x, range[1]) + 1)];
}

/**
 * Return the limits of both axes from the visible points; null if there are none.
 * @param {ChartState} chart
 * @param {SeriesData[]} front  series that are not in the background
 */
function axisRanges({ data: { x, y }, range, valuesOf }, front) {
	const xEnds = [Infinity, -Infinity], yEnds = [Infinity, -Infinity], includes = [...y.includes ?? []];
	const widen = (ends, value) => { if (value < ends[0]) ends[0] = value; if (value > ends[1]) ends[1] = value; };
	const levels = [];
	const top = y.clips ? clippedTop(front.flatMap(series => sample(series, valuesOf(series), range, y.log))) : Infinity;
	for (const series of front) {
		const [from, to] = visibleSpan(series, range), values = valuesOf(series), { band, level } = series;
		for (let n = from; n < to; n++) {
			const at = series.x[n], value = values[n];
			if (!drawable(at, x.log) || !drawable(value, y.log)) continue;
			widen(xEnds, at);
			if (value <= top && (!range || (at >= range[0] && at <= range[1]))) widen(yEnds, value);
			for (const end of band ? [band.low[n], band.high[n]] : []) {
				if (end !== null && drawable(end, y.log)) includes.push(end);
			}
		}
		if (typeof level === "number" && drawable(level, y.log)) levels.push(level);
	}
	if (xEnds[0] > xEnds[1]) return null;
	// a level that would take more than half of a chart that clips is marked at its edge
	const room = y.clips ? Math.max(yEnds[1] - yEnds[0], MIN_ROOM * Math.abs(yEnds[1])) : Infinity;
	includes.push(...levels.filter(level => !(level < yEnds[0] - room || level > yEnds[1] + room)));
	const shown = yEnds[0] <= yEnds[1] ? yEnds : includes.length ? includes : [1];
	const zoomed = range && (!x.log || range[0] > 0) ? range : limits(x, xEnds);
	return { xRange: zoomed, yRange: limits({ ...y, includes }, shown) };
}

// Evenly spaced visible values, enough to tell spikes from the rest.
function sample(series, values, range, log) {
	const [from, to] = visibleSpan(series, range), stride = Math.ceil((to - from) / MAX_SAMPLED), sampled = [];
	for (let n = from; n < to; n += stride) if (drawable(values[n], log)) sampled.push(values[n]);
	return sampled;
}

// Return the geometry of a chart; null if there is nothing to draw.
export function frameOf(chart, width, height) {
	const { x, y, title } = chart.data, shown = chart.series.filter(series => !chart.hidden.has(series.name));
	const front = shown.filter(series => !series.background), ranges = axisRanges(chart, front);
	if (!ranges) return null;
	const { xRange, yRange } = ranges, titles = wrapTitle(title ?? "", (width - 2 * EDGE) / TITLE_LETTER_WIDTH);
	const top = (titles.length ? 22 + LINE_HEIGHT * (titles.length - 1) : 10) + (y.clips ? 20 : 14);
	const rows = y.ticks ?? roundTicks(y, yRange, Math.max(2, Math.floor((height - top - 40) / 34)));
	const labelWidth = LETTER_WIDTH * longestLabel(rows) + 6;
	const above = Boolean(y.ticks) && labelWidth > MAX_LABEL_SHARE * width; // names of rows are above them
	const left = EDGE + (above ? 0 : labelWidth) + (y.label ? LINE_HEIGHT + LETTER_WIDTH : 0), right = width - EDGE - 6;
	const boxWidth = right - left;
	const fits = ticks => ticks.length * ((LETTER_WIDTH + 1) * longestLabel(ticks) + 6) <= boxWidth;
	const columns = x.ticks ?? [7, 6, 5, 4, 3, 2, 1].map(most => roundTicks(x, xRange, most)).find(fits) ?? [];
	const tilted = !fits(columns);
	const labelHeight = tilted ? 0.65 * (LETTER_WIDTH + 1) * longestLabel(columns) + 15 : LINE_HEIGHT;
	const bottom = height - 9 - labelHeight - (x.label ? LINE_HEIGHT : 0);
	return { xRange, yRange, width, height, shown, front, titles, top, left, right, bottom, rows, columns, tilted, above,
		labels: [], xOf: value => left + boxWidth * fractionOf(value, xRange, x.log),
		yOf: value => bottom + (top - bottom) * fractionOf(value, yRange, y.log) };
}

function wrapTitle(title, maxLetters) {
	const lines = [];
	for (const word of title.split(" ").filter(Boolean)) {
		if (lines.length && `${lines.at(-1)} ${word}`.length <= maxLetters) lines[lines.length - 1] += ` ${word}`;
		else lines.push(word);
	}
	const firstTwo = lines.length <= 2 ? lines : [lines[0], `${lines[1]} …`];
	// a single word may be wider than the chart
	return firstTwo.map(text => text.length <= maxLetters ? text : `${text.slice(0, maxLetters - 1)}…`);
}

export function drawChart(chart, frame, width, height) {
	const title = chart.data.title ?? "";
	const svg = s("svg.chart.live", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
	if (!frame) {
		svg.append(s("text.title", { x: EDGE, y: 22 }, title), s("text.tick", { x: EDGE, y: 48 }, "no data to plot"));
		return svg;
	}
	const { left, right, top, bottom } = frame, box = { x: left, y: top, width: right - left, height: bottom - top };
	const clipped = s("svg", { ...box, viewBox: `${left} ${top} ${box.width} ${box.height}` }), above = s("g");
	const backgroundFirst = [...frame.shown].sort((a, b) => Number(!a.background) - Number(!b.background));
	for (const series of backgroundFirst) drawSeries(chart, frame, series, clipped, above);
	const shapes = [...decorations(chart.data, frame), clipped, ...above.children, ...outliers(chart, frame),
		...marks(chart, frame)];
	const texts = shapes.filter(shape => shape.tagName === "text");
	svg.append(...shapes.filter(shape => shape.tagName !== "text"), ...texts); // texts are on top
	return svg;
}

/**
 * @param {PlotData} data
 * @param {Frame} frame
 */
function decorations({ x, y }, frame) {
	const { left, right, top, bottom } = frame;
	const shapes = [];
	const addLine = (kind, ...points) => shapes.push(s("polyline", { class: kind, points: coordinates(points) }));
	const addText = (kind, at, down, text, angle = 0) => shapes.push(s("text", { class: kind, x: round(at),
		y: round(down), transform: angle !== 0 && `rotate(${angle} ${round(at)} ${round(down)})` }, text));
	frame.titles.forEach((text, row) => addText("title", EDGE, 22 + LINE_HEIGHT * row, text));
	for (const { value, label } of frame.rows) {
		const at = frame.yOf(value);
		if (y.ticks) {
			if (frame.above) addText("name", left, at - 9, fitText(label, right - left, ROW_FONT));
			else addText("name", EDGE, at + 4, label);
			continue;
		}
		addLine("grid", [left, at], [right, at]);
		addText("tick end", left - 6, at + 4, label);
	}
	for (const { value, label } of frame.columns) {
		const at = frame.xOf(value);
		if (y.ticks) addLine("grid", [at, top], [at, bottom]); else addLine("axis", [at, bottom], [at, bottom + 4]);
		if (frame.tilted) addText("tick end", at + 4, bottom + 14, label, -40);
		else addText("tick middle", at, bottom + 18, label);
	}
	addLine("axis", [left, bottom], [right, bottom]);
	if (x.label) addText("tick end", right, frame.height - 9, x.label);
	if (y.label) addText("tick middle", EDGE + 8, (top + bottom) / 2, y.label, -90);
	return shapes;
}

function drawSeries(chart, frame, series, clipped, above) {
	const { x, y } = chart.data, { look, band, level } = series;
	const span = visibleSpan(series, chart.range), [from, to] = span;
	/** @returns {Point | null} */
	const pointAt = (a, b) => drawable(a, x.log) && drawable(b, y.log) ? [frame.xOf(a), frame.yOf(b)] : null;
	const tooltip = n => `${positionText(x, series.x[n])}: ${exactText(series.y[n], y)}`;
	if (typeof level === "number" && drawable(level, y.log)) {
		clipped.append(line([frame.left, frame.right].map(at => [at, frame.yOf(level)]), look, "line"));
	}
	if (band) {
		const ends = series.x.map((value, n) => ({ low: pointAt(value, band.low[n]), high: pointAt(value, band.high[n]) }))
			.filter(({ low, high }) => low && high);
		const wide = ends.length > 1 ? [0] : [-BAND_WIDTH / 2, BAND_WIDTH / 2]; // the band of a single point is a bar
		const side = points => points.flatMap(([at, y]) => wide.map(by => [at + by, y]));
		const outline = [...side(ends.map(({ low }) => low)), ...side(ends.map(({ high }) => high)).reverse()];
		clipped.append(s("polygon", { points: coordinates(outline), ...coloured(look, "band") }));
	}
	if (series.bars) {
		drawBars(frame, series, pointAt, tooltip, clipped);
		return;
	}
	if (look.width && series.x.length > 1) {
		const thin = series.ascends && to - from > 2 * (frame.right - frame.left), ys = chart.valuesOf(series);
		const draw = (values, kind) => {
			clipped.append(...polylines(series, values, span, chart.data, frame, thin).map(each => line(each, look, kind)));
		};
		if (ys !== series.y) draw(series.y, "faint");
		draw(ys, series.background ? "faint" : "line");
	}
	const { left, right, top, bottom } = frame;
	const isInside = ([a, b]) => a >= left - 1 && a <= right + 1 && b >= top - 1 && b <= bottom + 1;
	const maxMarkers = look.width ? MAX_MARKED_POINTS : MAX_MARKERS;
	for (let n = from; look.marker && to - from <= maxMarkers && n < to; n++) {
		const point = pointAt(series.x[n], series.y[n]);
		if (point && isInside(point)) above.append(marker(look, point, tooltip(n)));
	}
	(series.labels ?? []).forEach((label, n) => {
		const point = label ? pointAt(series.x[n], series.y[n]) : null, width = LETTER_WIDTH * label.length;
		if (!point || !isInside(point)) return;
		const late = point[0] + width / 2 > right, early = point[0] - width / 2 < left;
		const at = late ? right : early ? left : point[0], start = late ? at - width : early ? at : at - width / 2;
		const overlaps = frame.labels.some(other => Math.abs(other.left - start) < Math.max(other.width, width)
			&& Math.abs(other.y - point[1]) < LINE_HEIGHT - 3);
		if (overlaps) return; // on a narrow chart not every label has space
		frame.labels.push({ left: start, y: point[1], width });
		above.append(s("text", { x: round(at), y: round(point[1] - 8),
			...coloured(look, "tick", late ? "end" : early ? "" : "middle") }, label));
	});
}

function drawBars(frame, series, pointAt, tooltip, clipped) {
	const half = 0.35 * (frame.right - frame.left) / Math.max(1, series.x.length);
	series.x.forEach((value, n) => {
		const point = pointAt(value, series.y[n]);
		if (!point) return;
		const [x, y] = point, left = x - half, right = x + half;
		const corners = coordinates([[left, frame.bottom], [left, y], [right, y], [right, frame.bottom]]);
		clipped.append(s("polygon", { points: corners, ...coloured(series.look, "bar") }, s("title", tooltip(n))));
	});
}

// Draw points above the chart as arrows at its edge, with their values; of neighbours only the highest.
function outliers(chart, frame) {
	const { x, y } = chart.data, { left, right, top } = frame;
	const arrows = [];
	const points = [];
	for (const series of y.clips ? frame.front : []) {
		const [from, to] = visibleSpan(series, chart.range), ys = chart.valuesOf(series);
		for (let n = from; n < to; n++) {
			if (ys[n] > frame.yRange[1] && drawable(series.x[n], x.log)) points.push({ x: series.x[n], y: ys[n] });
		}
	}
	points.sort((a, b) => b.y - a.y);
	const levels = (y.clips ? frame.front : []).flatMap(({ level, look, name = "" }) => {
		if (typeof level !== "number" || (level >= frame.yRange[0] && level <= frame.yRange[1])) return [];
		const above = level > frame.yRange[1], at = above ? top - 5 : frame.bottom - 6;
		if (above) arrows.push(right);
		return [marker({ ...look, marker: above ? "^" : "v" }, [right - 4, at], name),
			s("text", { x: round(right - 12), y: round(at + 4), ...coloured(look, "tick", "end") }, general(level, 4))];
	});
	const spikes = points.slice(0, MAX_OUTLIERS).flatMap(point => {
		const at = frame.xOf(point.x), edge = right - OUTLIER_WIDTH, late = at > edge;
		const isNear = arrow => Math.abs(at - arrow) < (Math.max(at, arrow) > edge ? 2 : 1) * OUTLIER_WIDTH;
		if (at < left || at > right || arrows.some(isNear)) return [];
		arrows.push(at);
		const text = exactText(point.y, y), beside = round(late ? at - 7 : at + 7);
		return [marker(OUTLIER, [at, top - 5], `${positionText(x, point.x)}: ${text}`),
			s("text", { class: `tick c1 ${late ? "end" : ""}`, x: beside, y: top - 1 }, text)];
	});
	return [...levels, ...spikes];
}

// Draw marks as vertical lines, with their names where they fit; a small mark is a short line.
function marks(chart, frame) {
	const { left, right, top, bottom } = frame, { range, data } = chart;
	let free = left;
	return (data.marks ?? []).flatMap(({ x, text, name = "", small = false }) => {
		if (!drawable(x, data.x.log) || (range && (x < range[0] || x > range[1]))) return [];
		const at = clamp(frame.xOf(x), left, right), ends = [[at, small ? bottom - 6 : top], [at, bottom]];
		const title = s("title", text), width = name.length * LETTER_WIDTH + 8;
		const shape = s("polyline", { class: small ? "mark small" : "mark", points: coordinates(ends) }, title);
		if (!name || at < free || at + width >= right) return [shape];
		free = at + width;
		return [shape, s("text.tick.c1", { x: round(at + 4), y: top + 11 }, name)];
	});
}
