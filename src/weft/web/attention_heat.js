// Attention: heat map of one head, queries down and keys across. The pointer and the arrow keys read its cells; it can
// be zoomed.
import { h, isPlain, s, set } from "./dom.js";
import { clamp, share, short, textWidth } from "./words.js";

const FONT = "12px system-ui, sans-serif";
const MAX_HEIGHT = 600, MAX_CELL = 44, MIN_LABEL = 13; // pixels: of the map, a cell, and between labels
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class Heat {
	maps;
	shades;
	layer = 0;
	head = 0;
	query = 0;
	visible = { top: 0, bottom: 0, left: 0, right: 0 }; // visible rows and columns
	cell; // row and column that are read
	dragged; // x, y, width and height
	measured;
	small = h("canvas");

	canvas = h("canvas.att-heat", { tabindex: 0, role: "application", "aria-roledescription": "heat map" });
	hint = h("span.soft", "Point at a cell or use the arrow keys; drag, or press + and −, to zoom.");
	readout = h("p.att-readout", { "aria-live": "polite" }, this.hint);

	// `query` is called with a selected token, `zoom` when another part is shown, `read` with a cell that is read
	constructor(on) {
		this.on = on;
		this.listen();
	}

	use(maps) {
		this.maps = maps;
		this.resize();
		this.resetZoom();
		this.readout.replaceChildren(this.hint);
	}

	// show a head, and mark the row of a token
	show(layer, head, query) {
		this.layer = layer;
		this.head = head;
		this.query = query;
		if (this.cell) this.describe();
		this.draw();
	}

	resetZoom() {
		this.visible = { top: 0, bottom: this.maps.rows, left: 0, right: this.maps.columns };
		this.cell = null;
		this.on.zoom("all");
	}

	part(start) {
		const { rows, columns, kind } = this.maps, stop = Math.min(start + 32, rows);
		const [left, right] = kind === "cross" ? [0, columns] : [start, stop];
		this.visible = { top: start, bottom: stop, left, right };
		this.cell = null;
		this.draw();
	}

	zoom(factor) {
		const { rows, columns, block } = this.maps, { top, bottom, left, right } = this.visible;
		const [row, column] = this.cell ?? [Math.floor(this.query / block), Math.floor((left + right) / 2)];
		const span = (low, high, at, max) => {
			const size = clamp(Math.round((high - low) * factor), Math.min(4, max), max);
			const start = clamp(at - Math.floor(size / 2), 0, max - size);
			return [start, start + size];
		};
		this.showPart(span(top, bottom, row, rows), span(left, right, column, columns));
	}

	showPart(down, across) {
		const { rows, columns } = this.maps, [top, bottom] = down, [left, right] = across;
		this.visible = { top, bottom, left, right };
		this.on.zoom(bottom - top === rows && right - left === columns ? "all" : "part");
		this.draw();
	}

	label(labels, at) {
		const { block } = this.maps, prefix = labels.length > 60 ? `${at * block}: ` : "";
		return prefix + short(labels[at * block], 13);
	}

	// available space; read once, because reading it makes the browser lay out the page
	resize() {
		this.room = this.canvas.parentElement?.clientWidth || 320;
		const screen = this.canvas.closest(".presenting main"), bottom = box => box.getBoundingClientRect().bottom;
		this.high = screen ? (bottom(screen) - this.canvas.getBoundingClientRect().top) / (this.canvas.currentCSSZoom ?? 1) : 0;
		this.measured = null;
	}

	// geometry; measuring all labels is slow, so it is done once per zoom
	measure() {
		const { maps, visible, room } = this;
		if (this.measured?.visible === visible) return this.measured;
		const rows = visible.bottom - visible.top, columns = visible.right - visible.left;
		const widest = (labels, from, to) => {
			let max = 20;
			for (let at = from; at < to; at++) max = Math.max(max, textWidth(this.label(labels, at), FONT));
			return Math.ceil(max) + 8;
		};
		const gutter = Math.min(widest(maps.queries, visible.top, visible.bottom), room * 0.3);
		const header = Math.min(widest(maps.keys, visible.left, visible.right), 110);
		const size = Math.min((room - gutter - 4) / columns, MAX_CELL, Math.max((this.high ? this.high - header - 12 : MAX_HEIGHT) / rows, 3));
		return this.measured = { visible, rows, columns, gutter, header, size, width: room,
			height: Math.ceil(header + size * rows + 4), step: Math.ceil(MIN_LABEL / size) };
	}

	// labels of rows and, rotated, of columns, as many as fit
	labels({ rows, columns, gutter, header, size, step }) {
		const { maps, visible } = this, labels = [];
		for (let n = 0; n < rows; n += step)
			labels.push({ text: this.label(maps.queries, n + visible.top), x: gutter - 5, y: header + (n + 0.5) * size });
		for (let n = 0; n < columns; n += step)
			labels.push({ text: this.label(maps.keys, n + visible.left), x: gutter + (n + 0.5) * size, y: header - 5,
				across: true });
		return labels;
	}

	draw() {
		const { maps, canvas, visible, shades } = this;
		const context = canvas.getContext("2d"), ratio = (window.devicePixelRatio || 1) * (canvas.currentCSSZoom ?? 1);
		const frame = this.measure(), { rows, columns, gutter, header, size, width, height } = frame;
		const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
		if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
			[canvas.width, canvas.height] = [pixelWidth, pixelHeight];
			canvas.style.setProperty("height", `${height}px`);
		}
		context.setTransform(ratio, 0, 0, ratio, 0, 0);
		context.clearRect(0, 0, width, height);
		shades.paint(this.small, [maps.part(this.layer, this.head, visible)], columns);
		context.imageSmoothingEnabled = false;
		context.drawImage(this.small, gutter, header, size * columns, size * rows);
		Object.assign(context, { font: FONT, fillStyle: shades.ink, textBaseline: "middle" });
		for (const { text, x, y, across } of this.labels(frame)) {
			context.save();
			context.textAlign = across ? "left" : "right";
			context.translate(x, y);
			if (across) context.rotate(-Math.PI / 2);
			context.fillText(text, 0, 0, (across ? header : gutter) - 6);
			context.restore();
		}
		this.drawMarks(context);
		canvas.setAttribute("aria-label", `${maps.name}${maps.where(this.layer, this.head, ", ")}, queries down, ` +
			"keys across. Arrow keys read cells, Enter selects a query, plus and minus zoom, Escape resets the zoom.");
	}

	drawMarks(context) {
		const { visible, shades, measured: { rows, columns, gutter, header, size } } = this;
		context.setLineDash([]);
		Object.assign(context, { strokeStyle: shades.soft, lineWidth: 1 });
		context.strokeRect(gutter - 0.5, header - 0.5, size * columns + 1, size * rows + 1);
		context.strokeStyle = shades.mark;
		context.lineWidth = 1.5;
		const row = Math.floor(this.query / this.maps.block) - visible.top;
		if (row >= 0 && row < rows) context.strokeRect(gutter, header + row * size, size * columns, size);
		if (this.cell) {
			const [r, c] = [this.cell[0] - visible.top, this.cell[1] - visible.left];
			context.lineWidth = 2.5;
			if (r >= 0 && r < rows && c >= 0 && c < columns)
				context.strokeRect(gutter + c * size - 1, header + r * size - 1, size + 2, size + 2);
		}
		if (this.dragged) {
			context.setLineDash([4, 3]);
			context.strokeRect(...this.dragged);
		}
	}

	// The map as an SVG to save: the cells are an image, everything else is vectors.
	picture(title) {
		const frame = this.measure(), { rows, columns, gutter, header, size, width, height } = frame;
		const large = h("canvas", { width: columns * 8, height: rows * 8 }), context = large.getContext("2d"), top = 24;
		context.imageSmoothingEnabled = false;
		context.drawImage(this.small, 0, 0, large.width, large.height);
		const box = { x: gutter, y: top + header, width: size * columns, height: size * rows };
		const labels = this.labels(frame).map(({ text, x, y, across }) => s("text", { x, y: y + top,
			class: across ? "att-small" : "end att-small", transform: across && `rotate(-90 ${x} ${y + top})` }, text));
		return s("svg.att-svg", { viewBox: `0 0 ${width} ${height + top}` },
			s("text.att-chosen", { x: 0, y: 12 }, title),
			s("image", { ...box, href: large.toDataURL() }), s("rect.att-frame", box), labels);
	}

	read(row, column) {
		const { maps } = this;
		this.cell = [clamp(row, 0, maps.rows - 1), clamp(column, 0, maps.columns - 1)];
		if (!this.inside(this.cell)) this.zoom(1);
		this.describe();
		this.draw();
	}

	describe() {
		if (!this.cell) return;
		const { maps } = this, [row, column] = this.cell;
		const labelOf = (labels, at) => {
			const first = at * maps.block, last = Math.min(first + maps.block, labels.length) - 1;
			return first === last ? `${first} ${labels[first]}`
				: `${first}–${last} ${labels.slice(first, last + 1).join("")}`;
		};
		const weight = maps.past && column > row ? "masked: a later token"
			: (maps.block > 1 ? "at most " : "") + share(maps.weight(this.layer, this.head, row, column));
		this.readout.textContent = `${labelOf(maps.queries, row)} → ${labelOf(maps.keys, column)}: ${weight}`;
	}

	/** @returns {[number, number]} */
	at(event) {
		const { gutter, header, size } = this.measured;
		return [Math.floor((event.offsetY - header) / size) + this.visible.top,
			Math.floor((event.offsetX - gutter) / size) + this.visible.left];
	}

	inside([row, column]) {
		const { top, bottom, left, right } = this.visible;
		return row >= top && row < bottom && column >= left && column < right;
	}

	listen() {
		let start = null;
		set(this.canvas, { onpointerdown: event => {
			if (event.pointerType !== "touch" && this.inside(this.at(event)))
				start = { x: event.offsetX, y: event.offsetY, cell: this.at(event) };
		}, onpointermove: event => {
			const [x, y] = start ? [event.offsetX - start.x, event.offsetY - start.y] : [0, 0];
			if (Math.hypot(x, y) > 6) this.dragged = [start.x, start.y, x, y];
			const cell = this.at(event), moved = !this.cell || cell.some((at, axis) => at !== this.cell[axis]);
			if (this.inside(cell) && (this.dragged || moved)) { this.read(...cell); this.on.read(...cell); }
		}, onpointerup: event => {
			const cell = this.at(event), from = this.dragged && start;
			this.dragged = null;
			if (from) this.zoomTo(from.cell, cell);
			else if (this.inside(cell)) {
				this.read(...cell);
				this.on.query(cell[0] * this.maps.block);
			}
			start = null;
		}, onpointerleave: () => { start = this.dragged = null; this.draw(); },
		onkeydown: event => this.handleKey(event) });
	}

	zoomTo(a, b) {
		const { rows, columns } = this.maps;
		const span = (x, y, max) => [clamp(Math.min(x, y), 0, max - 1), clamp(Math.max(x, y) + 1, 1, max)];
		this.showPart(span(a[0], b[0], rows), span(a[1], b[1], columns));
	}

	handleKey(event) {
		const [row, column] = this.cell ?? [Math.floor(this.query / this.maps.block), this.visible.left];
		const step = ARROWS[event.key];
		if (!isPlain(event)) return;
		if (step) { this.read(row + step[0], column + step[1]); this.on.read(...this.cell); }
		else if (event.key === "Enter" || event.key === " ") this.on.query(row * this.maps.block);
		else if (event.key === "+" || event.key === "=") this.zoom(0.6);
		else if (event.key === "-") this.zoom(1 / 0.6);
		else if (event.key === "Escape" || event.key === "0") { this.resetZoom(); this.draw(); }
		else return;
		event.preventDefault();
	}
}
