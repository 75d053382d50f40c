// Orders of an n-gram model as a ladder: one row per candidate, one column per order. Each order uses its counts and
// takes the rest of the probability from the shorter context; columns fill in as the reader steps through them.
import { picture, s } from "./dom.js";
import { number } from "./matrix.js";
import { fitText, share, textWidth, visibleToken, withCommas } from "./words.js";

const ROW = 26, TOP = 66, MIN_WIDTH = 88; // pixels: height of a row and of the heading, width of a column
const MAX_ROWS = 14;

const orderOf = stage => Number(stage.id.match(/^order\.(\d+)$/)?.[1] ?? 0);
const valuesOf = (stage, name) => stage.tensors.find(tensor => tensor.name === name)?.values;

export const isOrder = stage => orderOf(stage) > 0;

// the orders around one that fit side by side, the lowest first
function shownOrders(stages, stage, width) {
  const orders = stages.filter(isOrder), now = orders.indexOf(stage);
  const max = Math.max(2, Math.floor(width / MIN_WIDTH));
  const first = Math.max(0, Math.min(now - max + 2, orders.length - max));
  return orders.slice(first, first + max);
}

function contextOf(stages, order) {
  const context = stages.find(each => each.id === "context.last")?.tensors[0].axes[0].labels ?? [];
  return order > 1 ? context.slice(1 - order).map(visibleToken).join(" ") : "any context";
}

function cell(stage, at, { x, y, width, top }) {
  const p = valuesOf(stage, "probability")[at], counted = valuesOf(stage, "from its own counts")?.[at] ?? p;
  const count = valuesOf(stage, "counts")?.[at];
  const space = width - 46, solid = (Math.min(counted, p) / top) * space, full = (p / top) * space;
  return s("g", {},
    s("rect", { class: "step-up", x, y: y + 12, width: solid, height: 8 }),
    full - solid > 0.4
      && s("rect", { class: "step-borrowed", x: x + solid, y: y + 12, width: full - solid, height: 8 }),
    s("text", { x, y: y + 9, class: "step-count" }, count === undefined ? "" : `${withCommas(count)}×`),
    s("text", { x: x + width - 8, y: y + 20, "text-anchor": "end", class: "step-number" }, share(p)));
}

export function ladder(stages, stage, { width }) {
  const orders = shownOrders(stages, stage, width - 80), axis = stage.tensors[0].axes[0];
  // the most probable candidates of this order
  const probabilities = valuesOf(stage, "probability");
  const candidates = axis.labels.map((_, at) => at).sort((a, b) => probabilities[b] - probabilities[a])
    .slice(0, MAX_ROWS);
  const names = candidates.map(at => visibleToken(axis.labels[at]));
  const left = Math.min(width * 0.24, 18 + Math.max(...names.map(name => textWidth(name))));
  const columnWidth = (width - left - 6) / orders.length, height = TOP + candidates.length * ROW + 8;
  const columns = orders.map((each, n) => {
    const x = left + n * columnWidth + 8, later = orderOf(each) > orderOf(stage), { numbers } = each;
    const top = Math.max(...candidates.map(at => valuesOf(each, "probability")[at]), 1e-9);
    const gamma = Object.entries(numbers).find(([name]) => name.startsWith("γ"));
    return s("g", { class: each === stage ? "step-now step-part" : "step-part" },
      s("rect", { class: "step-part-ground", x: x - 6, y: 2, width: columnWidth - 4, height: height - 4, rx: 4 }),
      s("text", { x, y: 17, class: "step-part-name" }, each.title),
      s("text", { x, y: 34 }, fitText(contextOf(stages, orderOf(each)), columnWidth - 12)),
      s("text", { x, y: 51, class: "step-part-name" }, fitText(`${number(numbers["count of the context"] ?? 0)}×`
        + (gamma ? `, γ ${number(gamma[1], 3)}` : ""), columnWidth - 12)),
      ...(later ? [] : candidates.map((at, y) =>
        cell(each, at, { x, y: TOP + y * ROW, width: columnWidth - 10, top }))));
  });
  const first = names.slice(0, 4).map((name, y) => `${name} ${number(probabilities[candidates[y]], 3)}`);
  return picture(width, height, { class: "step-keys step-ladder", role: "img",
    "aria-label": `${stage.title}: the most probable are ${first.join(", ")}` },
  ...names.map((name, y) => s("text", { x: left - 4, y: TOP + y * ROW + 20, "text-anchor": "end" },
    fitText(name, left - 8))), ...columns);
}
