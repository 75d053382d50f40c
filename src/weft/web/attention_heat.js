// Attention: heat map of one head, queries down and keys across. The pointer and the arrow keys read its cells; it can
// be zoomed.
import { h, isPlain, s } from "./dom.js";
import { clamp, share, short, textWidth } from "./words.js";

const FONT = "11px system-ui, sans-serif", HIGHEST = 600, LARGEST_CELL = 44, SMALLEST_LABEL = 13;
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class Heat {
  // `onquery` is called with a selected token, `onzoom` when another part is shown
  constructor(shades, { onquery, onzoom }) {
    Object.assign(this, { shades, onquery, onzoom });
    this.canvas = h("canvas", { class: "att-heat", tabindex: 0, role: "application",
      "aria-roledescription": "heat map" });
    this.hint = h("span", { class: "soft" },
      "Point at a cell or use the arrow keys; drag, or press + and −, to zoom.");
    this.readout = h("p", { class: "att-readout", "aria-live": "polite" }, this.hint);
    this.small = h("canvas");
    this.listen();
  }

  // show other maps, unzoomed
  use(maps) {
    this.maps = maps;
    this.resize();
    this.whole();
    this.readout.replaceChildren(this.hint);
  }

  // show a head, and mark the row of a token
  show(layer, head, query) {
    Object.assign(this, { layer, head, query });
    if (this.cell) this.tell();
    this.draw();
  }

  whole() {
    this.seen = { top: 0, bottom: this.maps.rows, left: 0, right: this.maps.columns };
    this.cell = null;
    this.onzoom("all");
  }

  part(start) {
    const { rows, columns, kind } = this.maps, stop = Math.min(start + 32, rows);
    const across = kind === "cross" ? { left: 0, right: columns } : { left: start, right: stop };
    this.seen = { top: start, bottom: stop, ...across };
    this.cell = null;
    this.draw();
  }

  zoom(factor) {
    const { rows, columns, block } = this.maps, { top, bottom, left, right } = this.seen;
    const [row, column] = this.cell ?? [Math.floor(this.query / block), Math.floor((left + right) / 2)];
    const span = (low, high, at, most) => {
      const size = clamp(Math.round((high - low) * factor), Math.min(4, most), most);
      const start = clamp(at - Math.floor(size / 2), 0, most - size);
      return [start, start + size];
    };
    const [newTop, newBottom] = span(top, bottom, row, rows);
    const [newLeft, newRight] = span(left, right, column, columns);
    this.seen = { top: newTop, bottom: newBottom, left: newLeft, right: newRight };
    this.onzoom(newBottom - newTop === rows && newRight - newLeft === columns ? "all" : "part");
    this.draw();
  }

  // ---- drawing

  label(labels, at) {
    const { block } = this.maps, far = labels.length > 60 ? `${at * block}: ` : "";
    return far + short(labels[at * block], 13);
  }

  // available space; read once, because reading it makes the browser lay out the page
  resize() {
    this.room = this.canvas.parentElement?.clientWidth || 320;
    this.measured = null;
  }

  // geometry; measuring all labels is slow, so it is done once per zoom
  measure() {
    const { maps, seen, room } = this;
    if (this.measured?.seen === seen) return this.measured;
    const rows = seen.bottom - seen.top, columns = seen.right - seen.left;
    const widest = (labels, from, to) => {
      let most = 20;
      for (let at = from; at < to; at++) most = Math.max(most, textWidth(this.label(labels, at), FONT));
      return Math.ceil(most) + 8;
    };
    const gutter = Math.min(widest(maps.queries, seen.top, seen.bottom), room * 0.3);
    const header = Math.min(widest(maps.keys, seen.left, seen.right), 110);
    const size = Math.min((room - gutter - 4) / columns, LARGEST_CELL, Math.max(HIGHEST / rows, 3));
    return this.measured = { seen, rows, columns, gutter, header, size, width: room,
      height: Math.ceil(header + size * rows + 4), step: Math.ceil(SMALLEST_LABEL / size) };
  }

  // labels of rows and, rotated, of columns, as many as fit
  labels({ rows, columns, gutter, header, size, step }) {
    const { maps, seen } = this, found = [];
    for (let n = 0; n < rows; n += step)
      found.push({ text: this.label(maps.queries, n + seen.top), x: gutter - 5, y: header + (n + 0.5) * size });
    for (let n = 0; n < columns; n += step)
      found.push({ text: this.label(maps.keys, n + seen.left), x: gutter + (n + 0.5) * size, y: header - 5, across: true });
    return found;
  }

  draw() {
    const { maps, canvas, seen, shades } = this;
    const context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const frame = this.measure(), { rows, columns, gutter, header, size, width, height } = frame;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) {
      [canvas.width, canvas.height] = [wide, high];
      canvas.style.setProperty("height", `${height}px`);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    shades.paint(this.small, [maps.part(this.layer, this.head, seen)], columns);
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
    canvas.setAttribute("aria-label", `${maps.name}, layer ${this.layer}, head ${this.head}, queries down, ` +
      "keys across. Arrow keys read cells, Enter selects a query, plus and minus zoom, Escape resets the zoom.");
  }

  drawMarks(context) {
    const { seen, shades, measured: { rows, columns, gutter, header, size } } = this;
    context.setLineDash([]);
    Object.assign(context, { strokeStyle: shades.soft, lineWidth: 1 });
    context.strokeRect(gutter - 0.5, header - 0.5, size * columns + 1, size * rows + 1);
    context.strokeStyle = shades.mark;
    context.lineWidth = 1.5;
    const row = Math.floor(this.query / this.maps.block) - seen.top;
    if (row >= 0 && row < rows) context.strokeRect(gutter, header + row * size, size * columns, size);
    if (this.cell) {
      const [r, c] = [this.cell[0] - seen.top, this.cell[1] - seen.left];
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
    const labels = this.labels(frame).map(({ text, x, y, across }) => s("text", { x, y: y + top,
      class: across ? "att-small" : "att-end att-small", transform: across && `rotate(-90 ${x} ${y + top})` }, text));
    return s("svg", { class: "att-svg", viewBox: `0 0 ${width} ${height + top}` },
      s("text", { x: 0, y: 12, class: "att-chosen" }, title),
      s("image", { x: gutter, y: top + header, width: size * columns, height: size * rows, href: large.toDataURL() }),
      s("rect", { x: gutter, y: top + header, width: size * columns, height: size * rows, class: "att-frame" }),
      labels);
  }

  // ---- reading

  read(row, column) {
    const { maps, seen } = this;
    this.cell = [clamp(row, 0, maps.rows - 1), clamp(column, 0, maps.columns - 1)];
    [row, column] = this.cell;
    if (row < seen.top || row >= seen.bottom || column < seen.left || column >= seen.right) this.zoom(1);
    this.tell();
    this.draw();
  }

  tell() {
    const { maps } = this, [row, column] = this.cell;
    const named = (labels, at) => {
      const first = at * maps.block, last = Math.min(first + maps.block, labels.length) - 1;
      return first === last ? `${first} ${labels[first]}`
        : `${first}–${last} ${labels.slice(first, last + 1).join("")}`;
    };
    const weight = maps.past && column > row ? "masked: a later token"
      : (maps.block > 1 ? "at most " : "") + share(maps.weight(this.layer, this.head, row, column));
    this.readout.textContent = `${named(maps.queries, row)} → ${named(maps.keys, column)}: ${weight}`;
  }

  at(event) {
    const { gutter, header, size } = this.measured;
    return [Math.floor((event.offsetY - header) / size) + this.seen.top,
      Math.floor((event.offsetX - gutter) / size) + this.seen.left];
  }

  inside([row, column]) {
    return row >= this.seen.top && row < this.seen.bottom && column >= this.seen.left && column < this.seen.right;
  }

  listen() {
    const { canvas } = this;
    let begun = null;
    canvas.addEventListener("pointerdown", event => {
      if (event.pointerType !== "touch" && this.inside(this.at(event)))
        begun = [event.offsetX, event.offsetY, this.at(event)];
    });
    canvas.addEventListener("pointermove", event => {
      if (begun && Math.hypot(event.offsetX - begun[0], event.offsetY - begun[1]) > 6)
        this.dragged = [begun[0], begun[1], event.offsetX - begun[0], event.offsetY - begun[1]];
      const [row, column] = this.at(event), moved = !this.cell || row !== this.cell[0] || column !== this.cell[1];
      if (this.inside([row, column]) && (this.dragged || moved)) this.read(row, column);
    });
    canvas.addEventListener("pointerup", event => {
      const place = this.at(event), dragged = this.dragged && begun;
      this.dragged = null;
      if (dragged) this.zoomTo(begun[2], place);
      else if (this.inside(place)) {
        this.read(...place);
        this.onquery(place[0] * this.maps.block);
      }
      begun = null;
    });
    canvas.addEventListener("pointerleave", () => { begun = this.dragged = null; this.draw(); });
    canvas.addEventListener("keydown", event => this.pressed(event));
  }

  zoomTo(a, b) {
    const { rows, columns } = this.maps;
    const span = (x, y, most) => [clamp(Math.min(x, y), 0, most - 1), clamp(Math.max(x, y) + 1, 1, most)];
    const [top, bottom] = span(a[0], b[0], rows), [left, right] = span(a[1], b[1], columns);
    this.seen = { top, bottom, left, right };
    this.onzoom("part");
    this.draw();
  }

  pressed(event) {
    const [row, column] = this.cell ?? [Math.floor(this.query / this.maps.block), this.seen.left];
    const step = ARROWS[event.key];
    if (!isPlain(event)) return;
    if (step) this.read(row + step[0], column + step[1]);
    else if (event.key === "Enter" || event.key === " ") this.onquery(row * this.maps.block);
    else if (event.key === "+" || event.key === "=") this.zoom(0.6);
    else if (event.key === "-") this.zoom(1 / 0.6);
    else if (event.key === "Escape" || event.key === "0") { this.whole(); this.draw(); }
    else return;
    event.preventDefault();
  }
}
