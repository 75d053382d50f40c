// A token's way as the lectures draw it: boxes from the bottom to the top, one block unfolded, the residual stream a line
// past each sublayer that comes back at a ⊕. Every box carries a miniature of its own numbers.
import { s } from "./dom.js";
import { fitted, flat, heat, labelOf, strip, vector } from "./matrix.js";

const BOLD = "600 12.5px system-ui, sans-serif", PLAIN = "12px system-ui, sans-serif";
const GAP = 16, ADD = 30, LANE = 13, WIDE = 210, TWO_COLUMNS = 600;

export const isBlock = (group) => /\.\d+$/.test(group);
export const isSummary = (stage) => stage.id === stage.group;
const ofSource = (stage) => /^(encoder|source)\b/.test(stage.group);

// x + f(x): where a stream comes back to what was made of it
export const adds = (stage) => /(^|\.)(add|residual|\w*_skip|\w*skip)$/.test(stage.id) && stage.inputs.length > 1;

// Stages of a group in rows: a stage stands above all that it reads, and what reads the same stands side by side.
function rowsOf(stages, sideBySide) {
  const row = new Map(), rows = [];
  let last = -1;
  for (const stage of stages) {
    const below = stage.inputs.filter((id) => row.has(id)).map((id) => row.get(id));
    const own = below.length ? Math.max(...below) + 1 : last < 0 ? 0 : sideBySide ? 0 : last + 1;
    const at = sideBySide ? own : last + 1;
    row.set(stage.id, at);
    last = Math.max(last, at);
    (rows[at] ??= []).push(stage);
  }
  return rows;
}

function columnsOf(step, width) {
  const sources = step.stages.filter(ofSource), others = step.stages.filter((stage) => !ofSource(stage));
  return width >= TWO_COLUMNS && sources.length && others.length ? [sources, others] : [step.stages];
}

function groupsOf(stages) {
  const groups = [];
  for (const stage of stages) {
    if (groups.at(-1)?.name !== stage.group) groups.push({ name: stage.group, stages: [] });
    groups.at(-1).stages.push(stage);
  }
  return groups;
}

// Where every box stands: {boxes: Map of id → box, frames, height}; y counts from the bottom until all is placed.
function placed(step, width) {
  const columns = columnsOf(step, width), boxes = new Map(), frames = [];
  const each = width / columns.length;
  let height = 0;
  columns.forEach((stages, column) => {
    const left = column * each + 30, right = (column + 1) * each - 26;
    let y = 6;
    for (const group of groupsOf(stages)) {
      const open = group.stages.length > 1 && isBlock(group.name);
      const start = y;
      if (open) y += 14;
      for (const row of rowsOf(group.stages, right - left > 60 * 3)) {
        const wide = (right - left - 8 * (row.length - 1)) / row.length;
        if (row.some(adds)) y += ADD - GAP;
        const high = wide >= WIDE ? 32 : 46;
        row.forEach((stage, at) => boxes.set(stage.id, { stage, column, left, right, width: wide, height: high,
          x: left + at * (wide + 8), bottom: y }));
        y += high + GAP;
      }
      if (open) {
        y += 8;
        frames.push({ name: group.name, x: left - 24, width: right - left + 44, bottom: start, height: y - start - 8, stages: group.stages });
      }
    }
    height = Math.max(height, y + 4);
  });
  for (const box of boxes.values()) box.y = height - box.bottom - box.height;
  for (const frame of frames) frame.y = height - frame.bottom - frame.height;
  return { boxes, frames, height };
}

// The lines between boxes. Neighbours are joined straight; what skips boxes goes past them in a lane: a stream that is
// added on the left, all else on the right.
function joined({ boxes }) {
  const edges = [], lanes = { left: [], right: [] };
  const order = [...boxes.values()];
  for (const to of order) {
    for (const id of to.stage.inputs) {
      const from = boxes.get(id);
      if (!from) continue;
      const between = order.some((box) => box.column === to.column && box.y < from.y && box.y > to.y + 1);
      const near = from.column === to.column && !between;
      const plus = adds(to.stage), foot = to.y + to.height, middle = to.x + to.width / 2, start = from.x + from.width / 2;
      if (near) edges.push({ from: id, to: to.stage.id, d: elbow(start, from.y, middle, plus ? foot + 20 : foot) });
      else if (from.column !== to.column) edges.push({ from: id, to: to.stage.id, cross: true,
        d: `M${from.x + from.width} ${from.y + from.height / 2}H${to.left - 17}V${to.y + to.height / 2}H${to.x}` });
      else {
        const side = plus ? "left" : "right";
        const x = side === "left" ? to.left - 6 - lane(lanes.left, to, from) * LANE : to.right + 6 + lane(lanes.right, to, from) * (LANE - 4);
        const end = plus ? `V${foot + 14}H${middle - 7}` : `V${to.y + to.height / 2}H${to.x + to.width}`;
        edges.push({ from: id, to: to.stage.id, skip: plus, d: `M${start} ${from.y}v-5H${x}${end}` });
      }
    }
  }
  return edges;
}

function elbow(x1, y1, x2, y2) {
  if (Math.abs(x1 - x2) < 1) return `M${x1} ${y1}V${y2}`;
  const turn = (y1 + y2) / 2;
  return `M${x1} ${y1}V${turn}H${x2}V${y2}`;
}

// the first lane of a side that is free between two boxes
function lane(taken, to, from) {
  const [top, bottom] = [to.y, from.y];
  let at = 0;
  while (taken.some((each) => each.at === at && each.column === to.column && each.top < bottom && each.bottom > top)) at++;
  taken.push({ at, top, bottom, column: to.column });
  return Math.min(at, 1);
}

function miniature(stage, room, options) {
  const tensor = stage.tensors[0];
  if (!tensor || room.width < 12) return null;
  if (isSummary(stage) && tensor.axes.length === 2) return heat(tensor, room);
  const values = vector(tensor, options);
  if (values.every((value) => typeof value !== "number" && value !== null)) return null;
  return strip(values, { ...room, scale: tensor.scale });
}

function drawBox(box, options) {
  const { stage, x, y, width, height } = box, flatBox = width >= WIDE;
  const titled = flatBox ? Math.min(width * 0.46, 190) : width - 12;
  const room = flatBox ? { x: x + titled + 14, y: y + 5, width: width - titled - 22, height: height - 10 }
    : { x: x + 7, y: y + 20, width: width - 14, height: height - 25 };
  return s("g", { class: `step-box${isSummary(stage) ? " step-folded" : ""}`, "data-id": stage.id, role: "button",
    tabindex: "-1", "aria-label": stage.title },
  s("title", {}, stage.about ? `${stage.title}: ${stage.about}` : stage.title),
  s("rect", { x, y, width, height, rx: 5 }),
  s("text", { x: x + 8, y: flatBox ? y + height / 2 + 4.5 : y + 14 }, fitted(stage.title, titled - 4, BOLD)),
  s("g", { class: "step-mini" }, miniature(stage, room, options)));
}

// The whole drawing. `choose(id)` is called when a box is chosen; what comes back moves the light:
// at(id, seconds) lights a stage and lets its inputs travel to it.
export function flow(step, { width, head = 0, choose }) {
  const place = placed(step, width), edges = joined(place), order = step.stages.map((stage) => stage.id);
  const lines = edges.map((edge) => s("path", { d: edge.d,
    class: `step-edge${edge.skip ? " step-skip" : ""}${edge.cross ? " step-cross" : ""}` }));
  const boxes = new Map();
  for (const box of place.boxes.values()) boxes.set(box.stage.id, drawBox(box, { head, place: step.place, step }));
  const plus = [...place.boxes.values()].filter((box) => adds(box.stage)).map((box) => {
    const x = box.x + box.width / 2, y = box.y + box.height + 14;
    return s("path", { class: "step-plus", d: `M${x - 7} ${y}a7 7 0 1 0 14 0a7 7 0 1 0-14 0M${x - 4} ${y}h8M${x} ${y - 4}v8M${x} ${y - 7}V${box.y + box.height}` });
  });
  const dots = s("g", { class: "step-dots" });
  const svg = s("svg", { class: "step-flow", width, height: place.height, viewBox: `0 0 ${width} ${place.height}`, role: "group",
    "aria-label": "The way through the model, from the bottom to the top" },
  ...place.frames.map((frame) => s("g", { class: "step-frame" },
    s("rect", { x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 9 }),
    s("text", { x: frame.x + 10, y: frame.y + 15 }, fitted(blockName(frame.name), frame.width - 20, PLAIN)))),
  ...lines, ...plus, ...boxes.values(), dots);
  svg.addEventListener("click", (event) => {
    const box = event.target.closest(".step-box");
    if (box) choose(box.dataset.id);
  });
  svg.addEventListener("keydown", (event) => {
    const here = order.indexOf(event.target.closest(".step-box")?.dataset.id);
    const to = { ArrowUp: here + 1, ArrowDown: here - 1, Home: 0, End: order.length - 1 }[event.key];
    if (here < 0 || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const id = order[Math.min(Math.max(to, 0), order.length - 1)];
    choose(id);
    boxes.get(id)?.focus();
  });
  let running = 0;
  return {
    svg, middle: (id) => { const box = place.boxes.get(id); return box ? box.y + box.height / 2 : 0; },
    at(id, milliseconds = 0) {
      const now = order.indexOf(id);
      for (const [each, box] of boxes) {
        box.classList.toggle("step-now", each === id);
        box.classList.toggle("step-later", order.indexOf(each) > now);
        box.setAttribute("aria-current", each === id ? "step" : "false");
        box.setAttribute("tabindex", each === id ? "0" : "-1");
      }
      const live = [];
      edges.forEach((edge, n) => {
        const on = edge.to === id;
        lines[n].classList.toggle("step-live", on);
        lines[n].classList.toggle("step-later", order.indexOf(edge.to) > now);
        if (on) live.push(lines[n]);
      });
      cancelAnimationFrame(running);
      dots.replaceChildren();
      if (milliseconds && live.length) running = travel(live, dots, milliseconds, (frame) => { running = frame; });
    },
  };
}

// a dot for each input, from where it was computed to where it is read
function travel(paths, layer, milliseconds, keep) {
  const ways = paths.map((path) => ({ path, length: path.getTotalLength(), dot: s("circle", { r: 4.5 }) }));
  layer.replaceChildren(...ways.map((way) => way.dot));
  const start = performance.now();
  const move = (now) => {
    const part = Math.min(1, Math.max(0, (now - start) / milliseconds)), eased = part * part * (3 - 2 * part);
    for (const { path, length, dot } of ways) {
      const point = path.getPointAtLength(length * eased);
      dot.setAttribute("cx", point.x);
      dot.setAttribute("cy", point.y);
    }
    if (part < 1) keep(requestAnimationFrame(move));
    else layer.replaceChildren();
  };
  return requestAnimationFrame(move);
}

// "decoder.3" as a reader counts: "Decoder, block 4"
export function blockName(group) {
  const [, stack, number] = group.match(/^(.*)\.(\d+)$/) ?? [];
  if (stack === undefined) return group.charAt(0).toUpperCase() + group.slice(1);
  return `${stack.charAt(0).toUpperCase() + stack.slice(1)}, block ${Number(number) + 1}`;
}
