// A mixture of experts on the stage: the router's probabilities, and what the chosen experts add to the token.
import { at, fit, largest, links, rect, strongestOf, text } from "./stage_marks.js";
import { clamp, mean, minus, percent, sum, withCommas } from "./words.js";

const MAX_EXPERTS = 12; // rows; of more experts, the chosen ones and the most probable others
const ROW = 24; // pixels, in the narrow layout

const listed = numbers => numbers.join(", ").replace(/, ([^,]*)$/, " and $1");

// Rows [expert, y] of a column, and their height.
function rowsOf({ probabilities, chosen }, { y, h }, fs) {
  const tall = h - fs * 1.8, count = clamp(Math.floor(tall / (fs * 1.5)), chosen.length, MAX_EXPERTS);
  const others = strongestOf(probabilities, probabilities.length).filter(expert => !chosen.includes(expert));
  const shown = [...chosen, ...others].slice(0, Math.max(count, chosen.length)).sort((a, b) => a - b), rh = tall / shown.length;
  return { rh, rows: shown.map((expert, n) => [expert, y + (n + 0.5) * rh]) };
}

// The columns of the feed-forward part; `join(box, step, from)` leads a result back to the stream.
export function expertParts(stage, layer, norm, join) {
  const { fs, indexOf: n } = stage, { probabilities, chosen, weights, outputs, shared } = layer;
  const all = probabilities.length, high = Math.min(all, MAX_EXPERTS) * ROW + fs * 1.8;
  const router = { id: "router", at: "feedforward", panel: "block", flex: 0.14, least: fs * 9.5, title: "Experts", heightNarrow: high,
    draw(box) {
      const { rh, rows } = rowsOf(layer, box, fs), most = largest(probabilities), left = box.x + fs * 2.4;
      const room = box.w - fs * 6.4, bar = Math.min(rh * 0.6, fs * 1.4);
      return [at(n("feedforward"), rows.map(([expert, y]) => {
        const size = (probabilities[expert] / most) * room, reads = chosen.includes(expert), base = y + fs * 0.35;
        return [text(box.x, base, expert, reads ? "bold" : "soft"),
          rect(left, y - bar / 2, size, bar, reads ? "pos" : "pos light", 1),
          text(left + size + 6, base, percent(probabilities[expert]), reads ? "bold" : "soft")];
      }), text(box.x, box.y + box.h, fit(rows.length < all ? `${rows.length} of ${withCommas(all)} shown`
        : `${chosen.length} of ${all} chosen`, box.w, fs), "soft"))];
    } };
  const mixture = { id: "mixture", at: "mixture", panel: "block", flex: 0.2, least: fs * 11, label: "weight × output",
    heightNarrow: (chosen.length + 1) * ROW * 1.6, band: [{ at: 1, norm }], draw(box) {
      const { rh, rows } = rowsOf(layer, box, fs), own = [...outputs, ...shared ? [shared.output] : []], each = box.h / own.length;
      const ys = box.narrow ? own.map((_, k) => box.y + (k + 0.5) * each) // below the router, not beside its rows
        : [...chosen.map(expert => rows.find(row => row[0] === expert)?.[1] ?? 0), ...shared ? [box.y + box.h - fs * 0.35] : []];
      const to = { x: box.x + box.w - fs * 1.4, y: mean(ys) };
      return [at(n("mixture"), links({ weights: [...weights, ...shared ? [shared.weight] : []], values: own, max: largest(own.flat()) },
        { x: box.x, w: box.w - fs * 0.4, ys, rh: Math.min(box.narrow ? each : rh, fs * 3), fs, to, from: null, m: "e" })),
      join(box, n("add"), { x: to.x + fs * 0.85, y: to.y })];
    } };
  return [router, mixture];
}

// The steps in which a router chooses, and experts compute.
export function expertSteps({ chosen, weights, probabilities, shared }, now, formulaOf) {
  const names = `${chosen.length > 1 ? "Experts" : "Expert"} ${listed(chosen)}`, read = chosen.length > 1 ? "read" : "reads";
  const together = sum(chosen.map(expert => probabilities[expert]));
  return [["feedforward", "Router", `The router scores ${withCommas(probabilities.length)} experts for ${now}. ${names} ${read} it; together they have ${percent(together)}.`,
    formulaOf("router")],
  ["mixture", "Experts", `Each expert is a feed-forward layer of its own. Outputs are weighted by ${listed(weights.map(weight => minus(weight.toFixed(2))))}${
    shared ? ", that of the shared layer is added" : ""}. The others compute nothing.`, formulaOf("experts")]];
}
