// Path of a token as the lectures draw it: boxes from bottom to top, one block unfolded, the residual stream as a line
// past each sublayer that returns at a ⊕. Every box shows a miniature of its values.
import { picture, roving, s, tip } from "./dom.js";
import { extent, heat, isIds, strip, vector } from "./matrix.js";
import { fitText, visibleToken } from "./words.js";

const BOLD = "600 12.5px system-ui, sans-serif", PLAIN = "12px system-ui, sans-serif";
const GAP = 16, ADD = 30, LANE = 13; // pixels between rows, below a ⊕, between lanes
const WIDE_BOX = 210; // pixels; a wider box has its miniature beside the title
const TWO_COLUMNS = 600; // pixels; a wider drawing has encoder and decoder side by side

// the group of a stage: "decoder.3" for all stages of that block, "embedding" or "output" for others
export const groupOf = stage => stage.id.match(/^\w+\.\d+(?=\.|$)/)?.[0] ?? stage.group;
export const isSummary = stage => /^(encoder|decoder)\.\d+$/.test(stage.id);
const isSource = stage => /^(encoder|source)/.test(stage.id);

// the source token whose path is shown: the one that is attended to most
export function sourcePosition(step) {
  const alignment = step.stages.find(stage => stage.id === "attention.alignment")?.tensors[0].values;
  return step.source_place ?? (alignment ? alignment.indexOf(Math.max(...alignment)) : null);
}

// x + f(x): a residual stream meets the output of a sublayer
export const adds = stage => /\.residual$/.test(stage.id) && stage.inputs.length > 1;

// Stages with their inputs as drawn: an unfolded block's output is its last inner stage, and every block with
// cross-attention reads the last stage of the source.
export function withDrawnInputs(step) {
  const source = step.source_pieces ? step.stages.filter(isSource).at(-1)?.id : null;
  const stages = step.stages.map((stage, at) => {
    const before = step.stages[at - 1];
    if (!isSummary(stage)) return stage;
    if (before && groupOf(before) === stage.id) return { ...stage, inputs: [before.id] };
    return source && !isSource(stage) ? { ...stage, inputs: [...stage.inputs, source] } : stage;
  });
  return { ...step, stages };
}

// Stages of a group in rows: a stage is above all of its inputs, and stages with equal inputs are side by side.
function rowsOf(stages) {
  const row = new Map(), rows = [];
  let last = 0;
  for (const stage of stages) {
    const below = stage.inputs.filter(id => row.has(id)).map(id => row.get(id));
    last = below.length ? Math.max(...below) + 1 : last;
    row.set(stage.id, last);
    (rows[last] ??= []).push(stage);
  }
  return rows;
}

function columnsOf(step, width) {
  const sources = step.source_pieces ? step.stages.filter(isSource) : [];
  const others = step.stages.filter(stage => !sources.includes(stage));
  return width >= TWO_COLUMNS && sources.length && others.length ? [sources, others] : [step.stages];
}

function groupsOf(stages) {
  /** @type {{ name: string, stages: any[] }[]} */
  const groups = [];
  for (const stage of stages) {
    const name = groupOf(stage), last = groups.at(-1);
    if (last && last.name === name) last.stages.push(stage); else groups.push({ name, stages: [stage] });
  }
  return groups;
}

// Layout of all boxes: { boxes: Map of id → box, frames, height }; y counts from the bottom until all are placed.
function layOut(step, width) {
  const columns = columnsOf(step, width), boxes = new Map(), frames = [];
  const each = width / columns.length;
  let height = 0;
  columns.forEach((stages, column) => {
    const left = column * each + 30, right = (column + 1) * each - 26;
    let y = 6;
    for (const group of groupsOf(stages)) {
      const open = group.stages.length > 1 && /\.\d+$/.test(group.name);
      const start = y;
      if (open) y += 14;
      for (const row of rowsOf(group.stages)) {
        const boxWidth = (right - left - 8 * (row.length - 1)) / row.length;
        if (row.some(adds)) y += ADD - GAP;
        const folded = !open && row.every(isSummary), boxHeight = folded ? 23 : boxWidth >= WIDE_BOX ? 32 : 46;
        row.forEach((stage, at) => boxes.set(stage.id, { stage, column, folded, left, right,
          width: boxWidth, height: boxHeight, x: left + at * (boxWidth + 8), bottom: y }));
        y += boxHeight + (folded ? 9 : GAP);
      }
      if (open) {
        y += 14;
        frames.push({ name: group.name, x: left - 24, width: right - left + 44, bottom: start, height: y - start - 8 });
      }
    }
    height = Math.max(height, y + 4);
  });
  for (const box of boxes.values()) box.y = height - box.bottom - box.height;
  for (const frame of frames) frame.y = height - frame.bottom - frame.height;
  return { boxes, frames, height };
}

// Lines between boxes, as points. Neighbours are joined directly; other lines pass the boxes in a lane: residual
// streams on the left, others on the right, and lines from the other stack between the two.
function edgesOf({ boxes }) {
  const edges = [], lanes = { left: [], right: [] }, order = [...boxes.values()];
  for (const to of order) {
    const plus = adds(to.stage), foot = to.y + to.height, middle = to.x + to.width / 2, beside = to.y + to.height / 2;
    for (const id of to.stage.inputs) {
      const from = boxes.get(id);
      if (!from) continue;
      const start = from.x + from.width / 2;
      const between = order.some(box => box.column === to.column && box.y < from.y && box.y > to.y + 1);
      const edge = { from: id, to: to.stage.id, skip: false, cross: from.column !== to.column };
      if (edge.cross) {
        const x = to.left - 28, y = from.y + from.height / 2, low = foot + 5;
        edge.points = [[from.x + from.width, y], [x, y], ...(isSummary(to.stage) ? [[x, beside], [to.x, beside]]
          : [[x, low], [middle, low], [middle, foot]])];
      } else if (!between) {
        const end = plus ? foot + 21 : foot, turn = (from.y + end) / 2;
        edge.points = Math.abs(start - middle) < 1 ? [[start, from.y], [middle, end]]
          : [[start, from.y], [start, turn], [middle, turn], [middle, end]];
      } else if (plus) {
        const x = to.left - 8 - lane(lanes.left, to, from) * LANE;
        edge.skip = true;
        edge.points = [[start, from.y], [start, from.y - 6], [x, from.y - 6], [x, foot + 14], [middle - 7, foot + 14]];
      } else {
        const x = to.right + 7 + lane(lanes.right, to, from) * (LANE - 4);
        const end = to.x + to.width > to.right - 1 ? [[x, beside], [to.x + to.width, beside]]
          : [[x, foot + 5], [middle, foot + 5], [middle, foot]]; // no line crosses a neighbour
        edge.points = [[start, from.y], [start, from.y - 6], [x, from.y - 6], ...end];
      }
      edges.push(edge);
    }
  }
  return edges;
}

const pathOf = points => `M${points.map(point => point.join(" ")).join("L")}`;
const arrowHead = points => {
  const [end, before] = [points.at(-1), points.at(-2)].map(([x, y]) => ({ x, y }));
  return tip(end, before);
};

// the first lane of a side that is free between two boxes
function lane(used, to, from) {
  const [top, bottom] = [to.y, from.y];
  let at = 0;
  const beside = used.filter(each => each.column === to.column && each.top < bottom && each.bottom > top);
  while (beside.some(each => each.at === at)) at++;
  used.push({ at, top, bottom, column: to.column });
  return Math.min(at, 1);
}

function miniature(stage, room, options) {
  const tensor = stage.tensors[0];
  if (!tensor || room.width < 12) return null;
  if (isIds(tensor)) { // ids are no quantities, so they have no bars
    const names = tensor.axes[0].labels.map(visibleToken), here = Math.min(options.place, names.length - 1);
    const text = tensor.name === "context" ? names.join(" ") : `${names[here]} → ${tensor.values[here]}`;
    return s("text", { x: room.x, y: room.y + room.height / 2 + 4.5 }, fitText(text, room.width, PLAIN));
  }
  if (isSummary(stage) && tensor.axes.length === 2) return heat(tensor, room);
  const values = vector(tensor, options);
  if (values.every(value => typeof value !== "number" && value !== null)) return null;
  return strip(values, { ...room, max: extent(tensor, values), scale: tensor.scale });
}

// position of the title and the miniature in a box
function miniatureBox({ x, y, width, height, folded }) {
  const beside = width >= WIDE_BOX || folded, edge = folded ? 3 : 5;
  const titleWidth = beside ? Math.min(width * (width < 300 ? 0.54 : 0.46), 190) : width - 12;
  return { titleWidth, middle: beside ? y + height / 2 + 4.5 : y + 14,
    room: beside ? { x: x + titleWidth + 14, y: y + edge, width: width - titleWidth - 22, height: height - 2 * edge }
      : { x: x + 7, y: y + 20, width: width - 14, height: height - 25 } };
}

function drawBox(box, picture) {
  const { stage, x, y, width, height, folded } = box, { titleWidth, middle } = miniatureBox(box);
  return s("g", { class: `step-box${folded ? " step-folded" : ""}`, "data-id": stage.id, role: "button",
    tabindex: "-1" },
  s("title", {}, stage.about ? `${stage.title}: ${stage.about}` : stage.title),
  s("rect", { x, y, width, height, rx: 5 }),
  s("text", { x: x + 8, y: middle }, fitText(stage.title, titleWidth - 4, BOLD)),
  s("g", { class: "step-mini" }, picture));
}

// The drawing. Boxes show values of the head in `chosen`; `choose(id)` is called when one is selected. Returns
// at(id, milliseconds), which highlights a stage and animates its inputs.
export function flow(step, { width, chosen, choose }) {
  const place = layOut(step, width), edges = edgesOf(place), order = step.stages.map(stage => stage.id);
  const lines = edges.map(edge => s("path", { d: pathOf(edge.points) + arrowHead(edge.points),
    class: `step-edge${edge.skip ? " step-skip" : ""}${edge.cross ? " step-cross" : ""}` }));
  const boxes = new Map();
  const mini = box => miniature(box.stage, miniatureBox(box).room, { ...chosen,
    place: step.source_pieces && isSource(box.stage) ? sourcePosition(step) ?? 0 : step.place }) ?? "";
  for (const box of place.boxes.values()) boxes.set(box.stage.id, drawBox(box, mini(box)));
  const plus = [...place.boxes.values()].filter(box => adds(box.stage)).map(box => {
    const x = box.x + box.width / 2, foot = box.y + box.height, y = foot + 14;
    const circle = `M${x - 7} ${y}a7 7 0 1 0 14 0a7 7 0 1 0-14 0`;
    return s("path", { class: "step-plus", d: `${circle}M${x - 4} ${y}h8M${x} ${y - 4}v8M${x} ${y - 7}V${foot}` });
  });
  const dots = s("g", { class: "step-dots" });
  const svg = picture(width, place.height, { class: "step-flow", role: "group",
    "aria-label": "Path through the model, from bottom to top" },
  ...place.frames.map(frame => s("g", { class: "step-frame" },
    s("rect", { x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 9 }),
    s("text", { x: frame.x + 10, y: frame.y + 15 }, fitText(blockName(frame.name), frame.width - 20, PLAIN)))),
  ...lines, ...plus, ...boxes.values(), dots);
  svg.addEventListener("click", event => {
    const box = event.target.closest(".step-box");
    if (box) choose(box.dataset.id);
  });
  roving(svg, () => [...boxes.values()].reverse(), { onfocus: box => {
    if (box.getAttribute("aria-current") !== "step") choose(box.dataset.id);
  } });
  let running = 0;
  return {
    svg,
    // redraw the boxes that show values of one head
    head() {
      for (const box of place.boxes.values()) {
        const [tensor] = box.stage.tensors;
        if (box.folded || !tensor?.axes.slice(0, -1).some(axis => axis.name === "head")) continue;
        boxes.get(box.stage.id).lastChild.replaceChildren(mini(box));
      }
    },
    middle: id => { const box = place.boxes.get(id); return box ? box.y + box.height / 2 : 0; },
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
        if (on) live.push(pathOf(edge.points));
      });
      cancelAnimationFrame(running);
      dots.replaceChildren();
      if (milliseconds && live.length) running = travel(live, dots, milliseconds, frame => { running = frame; });
    },
  };
}

// one dot per input, from where it was computed to where it is read
function travel(lines, layer, milliseconds, keep) {
  const moving = lines.map(d => {
    const path = s("path", { d });
    return { path, length: path.getTotalLength(), dot: s("circle", { r: 4.5 }) };
  });
  layer.replaceChildren(...moving.map(one => one.dot));
  const start = performance.now();
  const move = now => {
    const part = Math.min(1, Math.max(0, (now - start) / milliseconds)), eased = part * part * (3 - 2 * part);
    for (const { path, length, dot } of moving) {
      const point = path.getPointAtLength(length * eased);
      dot.setAttribute("cx", point.x);
      dot.setAttribute("cy", point.y);
    }
    if (part < 1) keep(requestAnimationFrame(move));
    else layer.replaceChildren();
  };
  return requestAnimationFrame(move);
}

// a readable name of "decoder.3"
export function blockName(group) {
  const [, stack, number] = group.match(/^(.*)\.(\d+)$/) ?? [], words = (stack ?? group).replaceAll("_", " ");
  const name = words.charAt(0).toUpperCase() + words.slice(1);
  if (stack === "recurrence") return `Layer ${number}`;
  if (stack === "order") return "From counts";
  return stack === undefined ? name : `${name}, block ${number}`;
}
