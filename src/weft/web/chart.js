// An interactive chart: lines with bands, points, bars and marks on linear or logarithmic axes. Dragging and the keys
// + − 0 zoom, the pointer and the arrow keys read the value of every series, its name in the legend hides it.
import {
	drawable, exactText, fractionOf, indistinguishable, lowerBound, smooth, valueAt, valueAtFraction,
} from "./chart_axes.js";
import { coordinates, drawChart, frameOf, legendSample, positionText } from "./chart_draw.js";
import { button, h, isPlain, s, uniqueId } from "./dom.js";
import { clamp, round } from "./words.js";
/** @import { Frame, PlotData, Range, SeriesData } from "../../../types" */

const MIN_DRAG = 5; // pixels; a shorter drag is a click
const MIN_WIDTH = 220; // pixels
const MARK_DISTANCE = 5; // pixels from a mark within which its text is shown
const MIN_SMOOTHED = 30; // points of a line that can be smoothed
const LOOK = { colour: "c0", marker: "", dash: "", width: 1.8 };

/**
 * Draw a chart into an element.
 * @param {Element} element
 * @param {PlotData} data
 * @param {{ zoom?: (range: Range | null) => void, read?: (x: number | null) => void,
 *   hidden?: (names: any[]) => void }} on  called when a person zooms, reads values or hides a series
 */
export function mount(element, data, on = {}) {
	return new Chart(element, data, on);
}

class Chart {
	series = [];
	/** @type {Frame | null} */
	frame = null;
	at = null; // position on the horizontal axis at which values are read
	smoothed = new Map(); // smoothed values, by the raw ones
	dragStart;
	redrawLate = false; // a redraw waits for the end of a drag
	replacing = false; // the chart is being replaced, and loses focus for a moment
	legendKey = "";
	pendingUpdate = 0; // animation frame
	resetButton = button("reset zoom", () => this.choose(null));
	valueCells = new Map(); // elements that show the values of a name
	place = h("div");
	position = h("span.plot-at");
	legend = h("div.plot-legend");
	live = h("p.unseen", { "aria-live": "polite" });

	constructor(element, data, on) {
		this.data = { ...data };
		this.on = on;
		this.range = data.zoom ?? null;
		this.hidden = new Set(data.hidden);
		this.controls = data.controls === false ? null : h("div.plot-controls");
		const foot = h("div.plot-foot", this.position, this.legend, this.controls);
		this.element = element.appendChild(h("div.plot", this.place, foot, this.live));
		this.update({});
		this.watch = new ResizeObserver(() => { if (this.place.clientWidth !== this.width) this.redraw(); });
		this.watch.observe(this.place);
	}

	close() {
		this.watch.disconnect();
		cancelAnimationFrame(this.pendingUpdate);
	}

	update(changes) {
		Object.assign(this.data, changes);
		if ("zoom" in changes) this.range = changes.zoom;
		if ("hidden" in changes) this.hidden = new Set(changes.hidden);
		this.series = this.data.series.map(series => {
			const x = series.x ?? [], ascends = x.every((value, n) => !n || value >= x[n - 1]);
			return { ...series, x, y: series.y ?? [], ascends, look: { ...LOOK, ...series.look } };
		});
		this.readable = !this.data.y.ticks && this.series.some(series => series.x.length > 1 && !series.background);
		this.zoomable = this.readable && !this.data.x.ticks && !this.series.some(series => series.bars);
		this.showLegend();
		this.redraw();
	}

	// The values of a series as they are drawn. If they are smoothed, the raw ones stay faint behind them.
	valuesOf = series => {
		const weight = this.data.smooth ?? 0, { look } = series;
		const smoothable = look.width && !look.marker && !series.background && !series.bars && !series.exact;
		if (!weight || !smoothable || series.x.length < 3) return series.y;
		const known = this.smoothed.get(series.y);
		if (known?.weight === weight) return known.ys;
		if (this.smoothed.size > 64) this.smoothed.clear();
		const ys = smooth(series.y, weight);
		this.smoothed.set(series.y, { weight, ys });
		return ys;
	};

	showLegend() {
		const named = this.series.filter(series => series.name), shown = named.length > 1 || this.readable;
		const key = JSON.stringify([shown, named.map(({ name, look }) => [name, look])]);
		if (key !== this.legendKey) {
			this.legendKey = key;
			this.valueCells = new Map();
			this.legend.replaceChildren(...shown ? named.map(series => this.legendEntry(series, named.length)) : []);
		}
		if (this.controls && !this.controls.childNodes.length && this.zoomable) this.addControls(this.controls);
	}

	/** @param {SeriesData} series */
	legendEntry({ name, look }, count) {
		const value = h("span.plot-value");
		this.valueCells.set(name, [...this.valueCells.get(name) ?? [], value]);
		const content = [legendSample(look), h("span", name), value];
		if (count < 2) return h("span.plot-name", content);
		return button(content, () => this.toggle(name), { class: "plot-name", dataset: { name },
			"aria-pressed": String(!this.hidden.has(name)) });
	}

	toggle(name) {
		if (!this.hidden.delete(name)) this.hidden.add(name);
		for (const entry of this.legend.querySelectorAll("button")) {
			if (entry.dataset.name === name) entry.setAttribute("aria-pressed", String(!this.hidden.has(name)));
		}
		this.on.hidden?.([...this.hidden]);
		this.redraw();
	}

	addControls(controls) {
		const isPositive = key => this.series.every(series => series[key].every(value => value === null || value > 0));
		controls.append(...["x", "y"].filter(isPositive).map(key => this.logButton(key)));
		const isSmoothable = this.series.some(({ x, look, background }) =>
			x.length >= MIN_SMOOTHED && look.width && !look.marker && !background);
		if (!isSmoothable) return;
		const input = h("input", { type: "range", id: uniqueId("smooth"), min: 0, max: 0.99, step: 0.01, oninput: () => {
			cancelAnimationFrame(this.pendingUpdate);
			this.pendingUpdate = requestAnimationFrame(() => this.update({ smooth: Number(input.value) }));
		} });
		input.value = this.data.smooth ?? 0;
		controls.append(h("span.plot-smooth", h("label", { for: input.id }, "smooth"), input));
	}

	logButton(key) {
		return button(`log ${key}`, event => {
			const log = !this.data[key].log;
			this.data[key] = { ...this.data[key], log };
			event.target.setAttribute("aria-pressed", log);
			this.redraw();
		}, { "aria-pressed": String(Boolean(this.data[key].log)) });
	}

	draw() {
		const size = this.data.size ?? { width: 480, height: 290 };
		const width = Math.max(MIN_WIDTH, this.width || size.width);
		const frame = frameOf(this, width, size.height), svg = drawChart(this, frame, width, size.height);
		this.frame = frame;
		this.pointer = svg.appendChild(s("g.pointer"));
		if (this.readable && frame) {
			svg.setAttribute("tabindex", "0");
			this.listen(svg, frame);
		}
		return svg;
	}

	redraw() {
		this.redrawLate = Boolean(this.dragStart);
		if (this.redrawLate) return;
		this.width = this.place.clientWidth;
		const focused = this.place.contains(document.activeElement), svg = this.draw();
		this.replacing = focused;
		this.place.replaceChildren(svg);
		if (focused) svg.focus({ preventScroll: true });
		this.replacing = false;
		if (this.controls) {
			if (this.range) this.controls.append(this.resetButton); else this.resetButton.remove();
		}
		this.show();
	}

	readableSeries() {
		return this.series.filter(series => series.x.length && !series.background && !this.hidden.has(series.name));
	}

	// The point of any series that is nearest on the screen.
	nearest(x, { xOf }) {
		let best = null, least = Infinity;
		for (const { x: xs, ascends } of this.readableSeries()) {
			const n = ascends ? lowerBound(xs, x) : 0;
			for (const value of ascends ? xs.slice(Math.max(0, n - 1), n + 1) : xs) {
				const distance = Math.abs(xOf(value) - xOf(x));
				if (distance < least) [least, best] = [distance, value];
			}
		}
		return best;
	}

	read(x) {
		this.at = x;
		this.show();
	}

	point(x) {
		this.read(x);
		this.on.read?.(x);
	}

	reading(series) {
		if (series.ascends) return valueAt(series.x, this.valuesOf(series), this.at);
		const n = series.x.indexOf(this.at);
		return n < 0 ? null : { value: series.y[n], interpolated: false };
	}

	show() {
		const { frame, at, data } = this;
		if (!frame) return;
		const inside = at !== null && drawable(at, data.x.log) && at >= frame.xRange[0] && at <= frame.xRange[1];
		const values = new Map(), texts = [], shapes = [];
		for (const series of inside ? this.readableSeries() : []) {
			const reading = this.reading(series);
			if (!reading || !drawable(reading.value, data.y.log) || (reading.interpolated && !series.look.width)) continue;
			const text = `${reading.interpolated ? "≈ " : ""}${exactText(reading.value, data.y)}`;
			const x = frame.xOf(at ?? 0), y = frame.yOf(reading.value);
			values.set(series.name, [...values.get(series.name) ?? [], text]);
			texts.push(`${series.name ?? ""} ${text}`.trim());
			if (y >= frame.top) shapes.push(s("circle", { cx: round(x), cy: round(y), r: 4 }));
		}
		let position = "";
		if (inside) {
			const x = frame.xOf(at), isNear = mark => Math.abs(frame.xOf(mark.x) - x) < MARK_DISTANCE;
			shapes.push(s("polyline", { points: coordinates([[x, frame.top], [x, frame.bottom]]) }));
			const smoothed = data.smooth ? ", smoothed" : "", marks = (data.marks ?? []).filter(isNear).slice(0, 2);
			position = [positionText(data.x, at) + smoothed, ...marks.map(mark => mark.text)].join(" · ");
		}
		this.pointer.replaceChildren(...shapes);
		const reading = position && `${position}: ${texts.join(", ")}`;
		this.position.textContent = this.legend.childNodes.length ? position : reading;
		for (const [name, cells] of this.valueCells) {
			cells.forEach((cell, n) => { cell.textContent = values.get(name)?.[n] ?? ""; });
		}
		if (this.place.contains(document.activeElement)) this.live.textContent = reading;
	}

	zoom(range) {
		this.range = range;
		this.redraw();
	}

	choose(range) {
		if (range && indistinguishable(...range)) return;
		this.zoom(range);
		this.on.zoom?.(range);
	}

	// Zoom to a part of the visible range, from 0 to 1; values outside of these extend it.
	zoomTo(from, to, { xRange }) {
		this.choose([from, to].map(part => valueAtFraction(part, xRange, this.data.x.log)));
	}

	zoomOut(middle, { xRange }) {
		const { log } = this.data.x, full = frameOf({ ...this, range: null }, 480, 290)?.xRange;
		if (!full) return;
		const low = Math.max(full[0], valueAtFraction(-middle, xRange, log));
		const high = Math.min(full[1], valueAtFraction(2 - middle, xRange, log));
		this.choose(low <= full[0] && high >= full[1] ? null : [low, high]);
	}

	endDrag() {
		this.dragStart = null;
		if (this.redrawLate) this.redraw();
	}

	listen(svg, frame) {
		let moved = false;
		const positionOf = event => {
			const box = svg.getBoundingClientRect(), { left, right, width, xRange } = frame;
			const pixel = (event.clientX - box.left) * width / box.width;
			return { pixel, x: valueAtFraction(clamp((pixel - left) / (right - left), 0, 1), xRange, this.data.x.log) };
		};
		const selected = (start, event) => [start.x, positionOf(event).x].sort((a, b) => a - b);
		const on = (name, work) => svg.addEventListener(name, work);
		on("pointerdown", event => { if (event.button === 0) { this.dragStart = positionOf(event); moved = false; } });
		on("pointermove", event => {
			const start = this.dragStart, here = positionOf(event);
			if (!start || !this.zoomable || (!moved && Math.abs(here.pixel - start.pixel) < MIN_DRAG)) {
				return this.point(this.nearest(here.x, frame));
			}
			if (!moved) svg.setPointerCapture(event.pointerId);
			moved = true;
			const [x, end] = selected(start, event).map(frame.xOf), height = frame.bottom - frame.top;
			this.pointer.replaceChildren(s("rect.chosen", { x, y: frame.top, width: end - x, height }));
		});
		on("pointerup", event => {
			const range = moved && this.dragStart && selected(this.dragStart, event);
			this.endDrag();
			if (range && range[1] > range[0]) this.choose(range);
		});
		const leave = () => { this.endDrag(); this.point(null); };
		on("pointerleave", () => { if (!this.dragStart || !moved) leave(); });
		on("pointercancel", leave);
		on("dblclick", () => { if (this.zoomable) this.choose(null); });
		on("blur", () => { if (!this.replacing) this.point(null); });
		on("keydown", event => this.handleKey(event, frame));
	}

	handleKey(event, frame) {
		if (!isPlain(event)) return;
		const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
		const middle = this.at === null ? 0.5 : fractionOf(this.at, frame.xRange, this.data.x.log);
		if (direction && !event.shiftKey) this.step(direction, frame);
		else if (!this.zoomable) return;
		else if (direction && this.range) this.zoomTo(direction / 4, 1 + direction / 4, frame);
		else if (event.key === "+" || event.key === "=") this.zoomTo(middle / 2, (1 + middle) / 2, frame);
		else if (event.key === "-" && this.range) this.zoomOut(middle, frame);
		else if (event.key === "0") this.choose(null);
		else return;
		event.preventDefault();
	}

	// Read the next point to the left (−1) or right (1); the visible range follows.
	step(direction, frame) {
		const { xRange } = frame, from = this.at ?? xRange[direction > 0 ? 0 : 1];
		const isBeyond = value => (value - from) * direction > 0 || (this.at === null && value === from);
		let next = null;
		for (const { x: xs, ascends } of this.readableSeries()) {
			const start = ascends ? lowerBound(xs, from) : 0;
			for (let n = start - 1; n < xs.length; n++) { // several points may have the same x
				if (n >= 0 && isBeyond(xs[n]) && (next === null || (next - xs[n]) * direction > 0)) next = xs[n];
				if (ascends && n > start && xs[n] > from) break;
			}
		}
		if (next === null) return;
		if (this.range && (next < xRange[0] || next > xRange[1])) {
			const by = fractionOf(next, xRange, this.data.x.log) - (direction > 0 ? 0.8 : 0.2);
			this.zoomTo(by, 1 + by, frame);
		}
		this.point(next);
	}
}
