// A chart that one can point at: lines with bands, points, bars and marks on even or logarithmic axes. Dragging and the
// keys + − 0 zoom, the pointer and the arrow keys read every series' value, its name in the legend switches one off.
import { alike, drawable, exact, firstFrom, share, smoothed, unshare, valueAt } from "./chart_axes.js";
import { atText, drawn, frameOf, points, round, sample } from "./chart_draw.js";
import { button, h, isPlain, s, uniqueId } from "./dom.js";
import { clamp } from "./words.js";

const MIN_DRAG = 5; // pixels; less is a click
const MIN_WIDTH = 220; // pixels
const NEAR = 5; // pixels from a mark, which is told then
const MIN_SMOOTHED = 30; // points of a line that is worth smoothing
const LOOK = { colour: "c0", marker: "", dash: "", width: 1.8 };

// { title, size, x, y, series: [{ name, x, y, look, band, labels, level, background, bars, certain (never smoothed) }],
//   marks: [[x, text, name]] }, as figures/shapes.py's plot_data has it; and smooth, zoom, hidden (names), controls.
// `on`: { zoom, read, hidden } are told of changes that a person makes.
export function mount(element, data, on = {}) {
  const chart = new Chart(element, data, on);
  return { update: changes => chart.update(changes), zoom: range => chart.zoom(range, false),
    read: x => chart.read(x, false), element: chart.plot, close: () => chart.close() };
}

class Chart {
  constructor(element, data, on) {
    Object.assign(this, { data: { ...data }, on, range: data.zoom ?? null, hidden: new Set(data.hidden) });
    this.at = null; // the value of the horizontal axis that is read
    this.memory = new Map(); // smoothed values
    this.valuesOf = this.valuesOf.bind(this);
    this.place = h("div", { class: "plot-place" });
    this.told = h("span", { class: "plot-at" });
    this.legend = h("div", { class: "plot-legend" });
    this.controls = data.controls === false ? null : h("div", { class: "plot-controls" });
    this.live = h("p", { class: "unseen", "aria-live": "polite" });
    const foot = h("div", { class: "plot-foot" }, this.told, this.legend, this.controls);
    this.plot = element.appendChild(h("div", { class: "plot" }, this.place, foot, this.live));
    this.update({});
    this.watch = new ResizeObserver(() => { if (this.place.clientWidth !== this.width) this.redraw(); });
    this.watch.observe(this.place);
  }

  close() {
    this.watch.disconnect();
    cancelAnimationFrame(this.waiting);
  }

  update(changes) {
    Object.assign(this.data, changes);
    if ("zoom" in changes) this.range = changes.zoom;
    if ("hidden" in changes) this.hidden = new Set(changes.hidden);
    this.series = this.data.series.map(each => {
      const x = each.x ?? [], ascends = x.every((value, n) => !n || value >= x[n - 1]);
      return { ...each, x, y: each.y ?? [], ascends, look: { ...LOOK, ...each.look } };
    });
    this.reads = !this.data.y.ticks && this.series.some(each => each.x.length > 1 && !each.background);
    this.zooms = this.reads && !this.data.x.ticks && !this.series.some(each => each.bars);
    this.showNames();
    this.redraw();
  }

  // A series' values as they are drawn; the raw ones stay faint behind them.
  valuesOf(each) {
    const weight = this.data.smooth ?? 0, { look } = each;
    const plain = look.width && !look.marker && !each.background && !each.bars && !each.certain;
    if (!weight || !plain || each.x.length < 3) return each.y;
    const known = this.memory.get(each.y);
    if (known?.weight === weight) return known.ys;
    if (this.memory.size > 64) this.memory.clear();
    const ys = smoothed(each.y, weight);
    this.memory.set(each.y, { weight, ys });
    return ys;
  }

  // ---- legend and controls

  showNames() {
    const shown = this.series.filter(each => each.name), told = shown.length > 1 || this.reads;
    const sign = JSON.stringify([told, shown.map(({ name, look }) => [name, look])]);
    if (sign !== this.sign) {
      this.sign = sign;
      this.cells = new Map(); // where the values of a name are told
      this.legend.replaceChildren(...told ? shown.map(each => this.entry(each, shown.length)) : []);
    }
    if (this.controls && !this.controls.childNodes.length && this.zooms) this.addControls();
  }

  entry({ name, look }, count) {
    const value = h("span", { class: "plot-value" });
    this.cells.set(name, [...this.cells.get(name) ?? [], value]);
    const inside = [sample(look), h("span", {}, name), value];
    if (count < 2) return h("span", { class: "plot-name" }, inside);
    return button(inside, () => this.toggle(name), { class: "plot-name", dataset: { name },
      "aria-pressed": String(!this.hidden.has(name)) });
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    for (const each of this.legend.children) {
      if (each.dataset.name === name) each.setAttribute("aria-pressed", !this.hidden.has(name));
    }
    this.on.hidden?.([...this.hidden]);
    this.redraw();
  }

  addControls() {
    const positive = key => this.series.every(each => each[key].every(value => value === null || value > 0));
    this.controls.append(...["x", "y"].filter(positive).map(key => this.logButton(key)));
    const smooths = each => each.x.length >= MIN_SMOOTHED && each.look.width && !each.look.marker && !each.background;
    if (!this.series.some(smooths)) return;
    const input = h("input", { type: "range", id: uniqueId("smooth"), min: 0, max: 0.99, step: 0.01, oninput: () => {
      cancelAnimationFrame(this.waiting);
      this.waiting = requestAnimationFrame(() => this.update({ smooth: Number(input.value) }));
    } });
    input.value = this.data.smooth ?? 0;
    this.controls.append(h("span", { class: "plot-smooth" }, h("label", { for: input.id }, "smooth"), input));
  }

  logButton(key) {
    return button(`log ${key}`, event => {
      const log = !this.data[key].log;
      this.data[key] = { ...this.data[key], log };
      event.target.setAttribute("aria-pressed", log);
      this.redraw();
    }, { "aria-pressed": String(Boolean(this.data[key].log)) });
  }

  // ---- drawing

  draw() {
    const [wanted, height] = this.data.size ?? [480, 290], width = Math.max(MIN_WIDTH, this.width || wanted);
    const frame = frameOf(this, width, height), svg = drawn(this, frame, width, height);
    this.frame = frame;
    this.pointer = svg.appendChild(s("g", { class: "pointer" }));
    if (this.reads && frame) {
      svg.setAttribute("tabindex", 0);
      this.listen(svg);
    }
    return svg;
  }

  redraw() {
    if (this.from) { // somebody is choosing a range on what is drawn now
      this.late = true;
      return;
    }
    this.width = this.place.clientWidth;
    const focused = this.place.contains(document.activeElement), svg = this.draw();
    this.moving = focused; // what is taken away is blurred, and is not to be forgotten
    this.place.replaceChildren(svg);
    if (focused) svg.focus({ preventScroll: true });
    this.moving = false;
    if (this.controls) {
      this.whole ??= button("whole chart", () => this.zoom(null));
      if (this.range) this.controls.append(this.whole); else this.whole.remove();
    }
    this.show();
  }

  // ---- reading

  readable() {
    return this.series.filter(each => each.x.length && !each.background && !this.hidden.has(each.name));
  }

  // The point that is nearest on the screen, of whichever series.
  nearest(x) {
    let best = null, far = Infinity;
    for (const { x: xs, ascends } of this.readable()) {
      const at = ascends ? firstFrom(xs, x) : 0;
      for (const value of ascends ? xs.slice(Math.max(0, at - 1), at + 1) : xs) {
        const distance = Math.abs(this.frame.xOf(value) - this.frame.xOf(x));
        if (distance < far) [far, best] = [distance, value];
      }
    }
    return best;
  }

  read(x, tell = true) {
    this.at = x;
    this.show();
    if (tell) this.on.read?.(x);
  }

  found(each) {
    if (each.ascends) return valueAt(each.x, this.valuesOf(each), this.at);
    const n = each.x.indexOf(this.at);
    return n < 0 ? null : { value: each.y[n], between: false };
  }

  show() {
    const { frame, at, data } = this;
    if (!frame) return;
    const inside = at !== null && drawable(at, data.x.log) && at >= frame.xRange[0] && at <= frame.xRange[1];
    const values = new Map(), told = [], shapes = [];
    for (const each of inside ? this.readable() : []) {
      const found = this.found(each);
      if (!found || !drawable(found.value, data.y.log) || (found.between && !each.look.width)) continue;
      const text = `${found.between ? "≈ " : ""}${exact(found.value, data.y)}`, y = frame.yOf(found.value);
      values.set(each.name, [...values.get(each.name) ?? [], text]);
      told.push(`${each.name ?? ""} ${text}`.trim());
      if (y >= frame.top) shapes.push(s("circle", { cx: round(frame.xOf(at)), cy: round(y), r: 4 }));
    }
    if (inside) shapes.push(s("polyline", { points: points([frame.top, frame.foot].map(y => [frame.xOf(at), y])) }));
    this.pointer.replaceChildren(...shapes);
    const near = ([x]) => Math.abs(frame.xOf(x) - frame.xOf(at)) < NEAR;
    const marked = inside ? (data.marks ?? []).filter(near).map(each => each[1]).slice(0, 2) : [];
    const words = inside ? [atText(data.x, at) + (data.smooth ? ", smoothed" : ""), ...marked].join(" · ") : "";
    this.told.textContent = this.legend.childNodes.length || !words ? words : `${words}: ${told.join(", ")}`;
    for (const [name, cells] of this.cells) {
      cells.forEach((cell, n) => { cell.textContent = values.get(name)?.[n] ?? ""; });
    }
    if (this.place.contains(document.activeElement)) this.live.textContent = words && `${words}: ${told.join(", ")}`;
  }

  // ---- zooming

  zoom(range, tell = true) {
    if (range && alike(...range)) return;
    this.range = range;
    this.redraw();
    if (tell) this.on.zoom?.(range);
  }

  // To a part of what is in sight, from 0 to 1; what lies outside of these is more than that.
  zoomTo(from, to) {
    this.zoom([from, to].map(part => unshare(part, this.frame.xRange, this.data.x.log)));
  }

  wider(middle) {
    const { xRange } = this.frame, log = this.data.x.log;
    const whole = frameOf({ ...this, range: null, valuesOf: this.valuesOf }, 480, 290).xRange;
    const low = Math.max(whole[0], unshare(-middle, xRange, log));
    const high = Math.min(whole[1], unshare(2 - middle, xRange, log));
    this.zoom(low <= whole[0] && high >= whole[1] ? null : [low, high]);
  }

  // The end of a drag; what came in the meantime is drawn.
  release() {
    this.from = null;
    if (this.late) this.redraw();
    this.late = false;
  }

  listen(svg) {
    let moved = false;
    const where = event => {
      const box = svg.getBoundingClientRect(), { left, right, width, xRange } = this.frame;
      const pixel = (event.clientX - box.left) * width / box.width;
      return { pixel, x: unshare(clamp((pixel - left) / (right - left), 0, 1), xRange, this.data.x.log) };
    };
    const chosen = event => [this.from.x, where(event).x].sort((one, other) => one - other);
    const on = (name, work) => svg.addEventListener(name, work);
    on("pointerdown", event => { if (event.button === 0) { this.from = where(event); moved = false; } });
    on("pointermove", event => {
      if (!this.from || !this.zooms || (!moved && Math.abs(where(event).pixel - this.from.pixel) < MIN_DRAG)) {
        this.read(this.nearest(where(event).x));
        return;
      }
      if (!moved) svg.setPointerCapture(event.pointerId);
      moved = true;
      const [x, end] = chosen(event).map(this.frame.xOf), { top, foot } = this.frame;
      this.pointer.replaceChildren(s("rect", { class: "chosen", x, y: top, width: end - x, height: foot - top }));
    });
    on("pointerup", event => {
      const range = moved && this.from && chosen(event);
      this.release();
      if (range && range[1] > range[0]) this.zoom(range);
    });
    on("pointerleave", () => {
      if (this.from && moved) return;
      this.release();
      this.read(null);
    });
    on("pointercancel", () => { this.release(); this.read(null); });
    on("dblclick", () => { if (this.zooms) this.zoom(null); });
    on("blur", () => { if (!this.moving) this.read(null); });
    on("keydown", event => this.key(event));
  }

  key(event) {
    if (!isPlain(event) || !this.frame) return;
    const { xRange } = this.frame, log = this.data.x.log, way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const middle = this.at === null ? 0.5 : share(this.at, xRange, log);
    if (way && !event.shiftKey) this.step(way);
    else if (!this.zooms) return;
    else if (way && this.range) this.zoomTo(way / 4, 1 + way / 4);
    else if (event.key === "+" || event.key === "=") this.zoomTo(middle / 2, (1 + middle) / 2);
    else if (event.key === "-" && this.range) this.wider(middle);
    else if (event.key === "0") this.zoom(null);
    else return;
    event.preventDefault();
  }

  // To the next point; what is in sight moves along.
  step(way) {
    const { xRange } = this.frame, log = this.data.x.log, first = xRange[way > 0 ? 0 : 1];
    const from = this.at ?? first, beyond = value => (value - from) * way > 0 || (this.at === null && value === from);
    let next = null;
    for (const { x: xs, ascends } of this.readable()) {
      const at = ascends ? firstFrom(xs, from) : 0;
      for (let n = at - 1; n < xs.length; n++) { // points may share a place
        if (n >= 0 && beyond(xs[n]) && (next === null || (next - xs[n]) * way > 0)) next = xs[n];
        if (ascends && n > at && xs[n] > from) break;
      }
    }
    if (next === null) return;
    if (this.range && (next < xRange[0] || next > xRange[1])) {
      const by = share(next, xRange, log) - (way > 0 ? 0.8 : 0.2);
      this.zoomTo(by, 1 + by);
    }
    this.read(next);
  }
}
