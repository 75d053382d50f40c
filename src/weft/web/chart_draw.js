// A chart as SVG: where everything stands, and the shapes. chart.js has what moves.
import { calmTop, drawable, exact, firstFrom, limits, linesOf, named, share, ticksOf } from "./chart_axes.js";
import { s } from "./dom.js";
import { clamp, fitted } from "./words.js";

const EDGE = 14, GAP = 17, LETTER = 7, BOLD = 9; // around everything; between lines of text; width of a letter, about
const ARROW = 44; // width of one with the number beside it
const NAMES = "12px system-ui, sans-serif"; // of what is named above its row
const MANY = 40; // points of a line, which are then no longer marked one by one
const MAX_SAMPLED = 5000; // values by which spikes are told from the rest
const MAX_MARKERS = 4000; // of points without a line
const CIRCLES = { o: 2.6, ".": 1.8, ring: 5.5 };
const MARKERS = { s: "m-3-3h6v6h-6z", "^": "m0-4 4 7h-8z", D: "m0-4 4 4-4 4-4-4z", v: "m0 4 4-7h-8z",
  ">": "m4 0-7 4v-8z", "<": "m-4 0 7 4v-8z",
  "*": "m0-6 1.4 4.2h4.4l-3.6 2.6 1.4 4.2-3.6-2.6-3.6 2.6 1.4-4.2-3.6-2.6h4.4z",
  x: "m-3-3 6 6m0-6-6 6", "|": "m0-5v10", _: "m-5 0h10" };

export const round = value => Math.round(value * 10) / 10;
export const points = places => places.map(([x, y]) => `${round(x)},${round(y)}`).join(" ");
const longest = texts => Math.max(0, ...texts.map(text => text.length));

function coloured(look, ...kinds) {
  const shade = look.colour?.endsWith("%");
  return { class: [...kinds, shade ? "" : look.colour].filter(Boolean).join(" "),
    style: shade && { color: `color-mix(in srgb, var(--deep) ${look.colour}, var(--card))` } };
}

function line(places, look, kind) {
  const pen = kind === "line" && { "stroke-width": look.width || 1, "stroke-dasharray": look.dash || undefined };
  return s("polyline", { points: points(places), ...coloured(look, kind), ...pen });
}

function marker(look, [x, y], title) {
  const told = title && s("title", {}, title), ring = look.marker === "ring" && "ring";
  return look.marker in CIRCLES
    ? s("circle", { cx: round(x), cy: round(y), r: CIRCLES[look.marker], ...coloured(look, "dot", ring) }, told)
    : s("path", { d: `M${round(x)} ${round(y)}${MARKERS[look.marker]}`, ...coloured(look, "dot") }, told);
}

// How a series is drawn, for its name in a legend.
export function sample(look) {
  return s("svg", { class: "plot-sample", viewBox: "0 0 22 10", width: 22, height: 10, "aria-hidden": "true" },
    look.width > 0 && line([[1, 5], [21, 5]], look, "line"), look.marker && marker(look, [11, 5]));
}

// What stands at a value of the horizontal axis, in words.
export function atText(axis, x) {
  const name = axis.ticks?.find(each => each[0] === x)?.[1];
  const plain = Math.abs(x) < 1e6 || axis.named === "duration" ? exact(x, axis) : named(axis)(x);
  return `${axis.label ?? ""} ${name ?? plain}`.trim();
}

// ---- where things stand

// The indices of a series that are in sight, and one more on either side.
function span(each, range) {
  if (!range || !each.ascends) return [0, each.x.length];
  return [Math.max(0, firstFrom(each.x, range[0]) - 1), Math.min(each.x.length, firstFrom(each.x, range[1]) + 1)];
}

// The ends of both axes: of what is in sight, unless it lies in the background.
function ranges({ data: { x, y }, range, valuesOf }, front) {
  const xEnds = [Infinity, -Infinity], yEnds = [Infinity, -Infinity], held = [...y.holds ?? []];
  const widen = (ends, value) => { if (value < ends[0]) ends[0] = value; if (value > ends[1]) ends[1] = value; };
  const top = y.clips ? calmTop(front.flatMap(each => some(each, valuesOf(each), range, y.log))) : Infinity;
  for (const each of front) {
    const [from, to] = span(each, range), values = valuesOf(each);
    for (let n = from; n < to; n++) {
      const at = each.x[n], value = values[n];
      if (!drawable(at, x.log) || !drawable(value, y.log)) continue;
      widen(xEnds, at);
      if (value <= top && (!range || (at >= range[0] && at <= range[1]))) widen(yEnds, value);
      for (const end of each.band?.[n] ?? []) if (drawable(end, y.log)) held.push(end);
    }
    if (drawable(each.level ?? null, y.log)) held.push(each.level);
  }
  if (xEnds[0] > xEnds[1]) return null;
  const shown = yEnds[0] <= yEnds[1] ? yEnds : held.length ? held : [1];
  const zoomed = range && (!x.log || range[0] > 0) ? range : limits(x, xEnds);
  return { xRange: zoomed, yRange: limits({ ...y, holds: held }, shown) };
}

// Enough of the values in sight to know what most of them are.
function some(each, values, range, log) {
  const [from, to] = span(each, range), stride = Math.ceil((to - from) / MAX_SAMPLED), found = [];
  for (let n = from; n < to; n += stride) if (drawable(values[n], log)) found.push(values[n]);
  return found;
}

// `chart` has data, series, range, hidden and valuesOf; null where there is nothing to draw.
export function frameOf(chart, width, height) {
  const { x, y, title } = chart.data, shown = chart.series.filter(each => !chart.hidden.has(each.name));
  const front = shown.filter(each => !each.background), found = ranges(chart, front);
  if (!found) return null;
  const titles = wrapped(title ?? "", (width - 2 * EDGE) / BOLD);
  const frame = { ...found, width, height, shown, front, titles };
  frame.top = frame.titles.length ? 22 + GAP * (frame.titles.length - 1) : 10;
  frame.top += y.clips ? 20 : 14;
  frame.rows = y.ticks ?? ticksOf(y, frame.yRange, Math.max(2, Math.floor((height - frame.top - 40) / 34)));
  const beside = y.ticks ? 0 : LETTER * longest(frame.rows.map(each => each[1])) + 6;
  frame.left = EDGE + beside + (y.label ? GAP + LETTER : 0);
  frame.right = width - EDGE - 6;
  const wide = frame.right - frame.left, names = ticks => longest(ticks.map(each => each[1]));
  const needs = ticks => ticks.length * ((LETTER + 1) * names(ticks) + 6);
  const several = [7, 6, 5, 4, 3, 2, 1].map(most => ticksOf(x, frame.xRange, most));
  frame.columns = x.ticks ?? several.find(ticks => needs(ticks) <= wide) ?? [];
  frame.tilted = needs(frame.columns) > wide;
  const under = frame.tilted ? 0.65 * (LETTER + 1) * names(frame.columns) + 15 : GAP;
  frame.foot = height - 9 - under - (x.label ? GAP : 0);
  frame.xOf = value => frame.left + wide * share(value, frame.xRange, x.log);
  frame.yOf = value => frame.foot + (frame.top - frame.foot) * share(value, frame.yRange, y.log);
  return frame;
}

function wrapped(title, most) {
  const lines = [];
  for (const word of title.split(" ").filter(Boolean)) {
    if (lines.length && `${lines.at(-1)} ${word}`.length <= most) lines[lines.length - 1] += ` ${word}`;
    else lines.push(word);
  }
  const some = lines.length <= 2 ? lines : [lines[0], `${lines[1]} …`];
  return some.map(line => line.length <= most ? line : `${line.slice(0, most - 1)}…`); // a word may be wider than all
}

// ---- shapes

// Everything that a frame shows, as an <svg>.
export function drawn(chart, frame, width, height) {
  const title = chart.data.title ?? "";
  const svg = s("svg", { class: "chart live", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  if (!frame) {
    svg.append(s("text", { x: EDGE, y: 22, class: "title" }, title),
      s("text", { x: EDGE, y: 48, class: "tick" }, "nothing to draw here"));
    return svg;
  }
  const { left, right, top, foot } = frame, box = { x: left, y: top, width: right - left, height: foot - top };
  const cut = s("svg", { ...box, viewBox: `${left} ${top} ${box.width} ${box.height}` }), over = s("g");
  const behindFirst = [...frame.shown].sort((a, b) => Number(!a.background) - Number(!b.background));
  for (const each of behindFirst) drawSeries(chart, frame, each, cut, over);
  const made = [...around(chart.data, frame), cut, ...over.childNodes, ...outliers(chart, frame),
    ...marks(chart, frame)];
  const words = made.filter(each => each.tagName === "text");
  svg.append(...made.filter(each => each.tagName !== "text"), ...words); // what is read stands on top
  return svg;
}

function around({ x, y }, frame) {
  const { left, right, top, foot } = frame, made = [];
  const rule = (kind, ...places) => made.push(s("polyline", { class: kind, points: points(places) }));
  const text = (kind, at, down, words, turn) => made.push(s("text", { class: kind, x: round(at), y: round(down),
    transform: turn && `rotate(${turn} ${round(at)} ${round(down)})` }, words));
  frame.titles.forEach((words, row) => text("title", EDGE, 22 + GAP * row, words));
  for (const [tick, name] of frame.rows) {
    const at = frame.yOf(tick);
    if (y.ticks) { text("name", left, at - 9, fitted(name, right - left, NAMES)); continue; } // above what they name
    rule("grid", [left, at], [right, at]);
    text("tick end", left - 6, at + 4, name);
  }
  for (const [tick, name] of frame.columns) {
    const at = frame.xOf(tick);
    if (y.ticks) rule("grid", [at, top], [at, foot]); else rule("axis", [at, foot], [at, foot + 4]);
    if (frame.tilted) text("tick end", at + 4, foot + 14, name, -40); else text("tick middle", at, foot + 18, name);
  }
  rule("axis", [left, foot], [right, foot]);
  if (x.label) text("tick end", right, frame.height - 9, x.label);
  if (y.label) text("tick middle", EDGE + 8, (top + foot) / 2, y.label, -90);
  return made;
}

function drawSeries(chart, frame, each, cut, over) {
  const { x, y } = chart.data, { look } = each, seen = span(each, chart.range), [from, to] = seen;
  const place = (a, b) => drawable(a, x.log) && drawable(b, y.log) ? [frame.xOf(a), frame.yOf(b)] : null;
  const told = n => `${atText(x, each.x[n])}: ${exact(each.y[n], y)}`;
  if (drawable(each.level ?? null, y.log)) {
    cut.append(line([frame.left, frame.right].map(at => [at, frame.yOf(each.level)]), look, "line"));
  }
  if (each.band?.length) {
    const both = each.band.map(([low, high], n) => [place(each.x[n], low), place(each.x[n], high)]);
    const ends = both.filter(([low, high]) => low && high);
    const outline = [...ends.map(([low]) => low), ...ends.map(([, high]) => high).reverse()];
    cut.append(s("polygon", { points: points(outline), ...coloured(look, "band") }));
  }
  if (each.bars) {
    drawBars(frame, each, place, told, cut);
    return;
  }
  if (look.width && each.x.length > 1) {
    const thin = each.ascends && to - from > 2 * (frame.right - frame.left), ys = chart.valuesOf(each);
    const draw = (values, kind) => {
      cut.append(...linesOf(each, values, seen, chart.data, frame, thin).map(some => line(some, look, kind)));
    };
    if (ys !== each.y) draw(each.y, "faint");
    draw(ys, each.background ? "faint" : "line");
  }
  const inside = ([a, b]) => a >= frame.left - 1 && a <= frame.right + 1 && b >= frame.top - 1 && b <= frame.foot + 1;
  for (let n = from; look.marker && to - from <= (look.width ? MANY : MAX_MARKERS) && n < to; n++) {
    const at = place(each.x[n], each.y[n]);
    if (at && inside(at)) over.append(marker(look, at, told(n)));
  }
  (each.labels ?? []).forEach((label, n) => {
    const at = label && place(each.x[n], each.y[n]), half = LETTER * label.length / 2;
    if (!at || !inside(at)) return;
    const late = at[0] + half > frame.right, early = at[0] - half < frame.left;
    const x = late ? frame.right : early ? frame.left : at[0], left = late ? x - 2 * half : early ? x : x - half;
    const labels = frame.labels ??= [], taken = labels.some(other =>
      Math.abs(other.left - left) < Math.max(other.wide, 2 * half) && Math.abs(other.y - at[1]) < GAP - 3);
    if (taken) return; // on a narrow chart not all have space
    labels.push({ left, y: at[1], wide: 2 * half });
    over.append(s("text", { x: round(x), y: round(at[1] - 8),
      ...coloured(look, "tick", late ? "end" : early ? "" : "middle") }, label));
  });
}

function drawBars(frame, each, place, told, cut) {
  const half = 0.35 * (frame.right - frame.left) / Math.max(1, each.x.length);
  each.x.forEach((value, n) => {
    const at = place(value, each.y[n]);
    if (!at) return;
    const low = at[0] - half, high = at[0] + half;
    const corners = [[low, frame.foot], [low, at[1]], [high, at[1]], [high, frame.foot]];
    cut.append(s("polygon", { points: points(corners), ...coloured(each.look, "bar") }, s("title", {}, told(n))));
  });
}

// What lies above the chart: arrows at its edge with the value; of neighbours the highest.
function outliers(chart, frame) {
  const { x, y } = chart.data, taken = [], above = [];
  for (const each of y.clips ? frame.front : []) {
    const [from, to] = span(each, chart.range), ys = chart.valuesOf(each);
    for (let n = from; n < to; n++) {
      if (ys[n] > frame.yRange[1] && drawable(each.x[n], x.log)) above.push([each.x[n], ys[n]]);
    }
  }
  above.sort((one, other) => other[1] - one[1]);
  return above.slice(0, 400).flatMap(([value, high]) => {
    const at = frame.xOf(value), late = at > frame.right - ARROW;
    const near = other => Math.abs(at - other) < (Math.max(at, other) > frame.right - ARROW ? 2 : 1) * ARROW;
    if (at < frame.left || at > frame.right || taken.some(near)) return [];
    taken.push(at);
    const beside = { class: `tick c1 ${late ? "end" : ""}`, x: round(late ? at - 7 : at + 7), y: frame.top - 1 };
    return [marker({ colour: "c1", marker: "^" }, [at, frame.top - 5], `${atText(x, value)}: ${exact(high, y)}`),
      s("text", beside, exact(high, y))];
  });
}

// What happened: a line from top to bottom, with its name where there is space for it; a small one for what is usual.
function marks(chart, frame) {
  const { x, marks: all = [] } = chart.data, { left, right, top, foot } = frame;
  let free = left;
  return all.flatMap(([value, text, name = ""]) => {
    if (!drawable(value, x.log) || (chart.range && (value < chart.range[0] || value > chart.range[1]))) return [];
    const at = clamp(frame.xOf(value), left, right), small = name === "small", told = s("title", {}, text);
    const places = [[at, small ? foot - 6 : top], [at, foot]];
    const shape = s("polyline", { class: small ? "mark small" : "mark", points: points(places) }, told);
    const wide = name.length * LETTER + 8, fits = !small && name && at >= free && at + wide < right;
    if (!fits) return [shape];
    free = at + wide;
    return [shape, s("text", { class: "tick c1", x: round(at + 4), y: top + 11 }, name)];
  });
}
