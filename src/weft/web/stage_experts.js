// A mixture of experts on the stage: the router's probabilities, and what the chosen experts add to the token.
import { at, largest, links, rect, strongestOf, text } from "./stage_marks.js";
import { mean, percent, sum, withCommas } from "./words.js";

const MAX_EXPERTS = 12; // rows; of more experts, the chosen ones and the most probable others
const ROW = 24; // pixels, in the narrow layout

const listed = names => names.join(", ").replace(/, ([^,]*)$/, " and $1");

// The columns of the feed-forward part; `join(box, step, from)` leads a result back to the stream.
export function expertParts(stage, { probabilities, chosen, weights, outputs, shared }, norm, join) {
	const { fs, indexOf: n } = stage, all = probabilities.length, most = largest(probabilities);
	const shown = [...new Set([...chosen, ...strongestOf(probabilities, MAX_EXPERTS)])].slice(0, MAX_EXPERTS).sort((a, b) => a - b);
	const own = shared ? [...outputs, shared.output] : outputs, panel = "block";
	const step = box => (box.h - fs * 1.8) / shown.length, yOf = (box, expert) => box.y + (shown.indexOf(expert) + 0.5) * step(box);
	return [{ id: "router", at: "feedforward", panel, flex: 0.14, least: fs * 9.5, title: "Experts",
		heightNarrow: shown.length * ROW + fs * 1.8, draw(box) {
			const left = box.x + fs * 2.4, bar = Math.min(step(box) * 0.6, fs * 1.4);
			return [at(n("feedforward"), shown.map(expert => {
				const y = yOf(box, expert), size = (probabilities[expert] / most) * (box.w - fs * 6.4), reads = chosen.includes(expert),
					kind = reads ? "bold" : "soft";
				return [text(box.x, y + fs * 0.35, expert, kind), rect(left, y - bar / 2, size, bar, reads ? "pos" : "pos light", 1),
					text(left + size + 6, y + fs * 0.35, percent(probabilities[expert]), kind)];
			}), text(box.x, box.y + box.h, `${chosen.length} of ${withCommas(all)} chosen`, "soft"))];
		} },
	{ id: "mixture", at: "mixture", panel, flex: 0.2, least: fs * 11, label: "weight × output", heightNarrow: own.length * ROW * 2,
		band: [{ at: 1, norm }], draw(box) {
			const rh = box.narrow ? ROW * 2 : step(box); // in the narrow layout below the router, else beside its rows
			const ys = own.map((_, k) => (box.narrow ? box.y + (k + 0.5) * rh
				: k < chosen.length ? yOf(box, chosen[k]) : box.y + box.h - fs * 0.35));
			const to = { x: box.x + box.w - fs * 1.4, y: mean(ys) };
			return [at(n("mixture"), links({ weights: shared ? [...weights, shared.weight] : weights, values: own, max: largest(own.flat()) },
				{ x: box.x, w: box.w - fs * 0.4, ys, rh: Math.min(rh, fs * 3), fs, to, from: null, m: "e" })),
			join(box, n("add"), { x: to.x + fs * 0.85, y: to.y })];
		} }];
}

// The steps in which a router chooses, and experts compute.
export function expertSteps({ chosen, weights, probabilities, shared }, now, formulaOf) {
	const [names, read] = chosen.length > 1 ? ["Experts", "read"] : ["Expert", "reads"], p = sum(chosen.map(expert => probabilities[expert]));
	return [["feedforward", "Router", `The router scores ${withCommas(probabilities.length)} experts for ${now}. ${names} ${
		listed(chosen)} ${read} it, with ${percent(p)} of the probability.`, formulaOf("router")],
	["mixture", "Experts", `Each expert is a feed-forward layer of its own. Outputs are weighted by ${
		listed(weights.map(weight => weight.toFixed(2)))}${shared ? ", and a shared layer's is added" : ""}. The others compute nothing.`,
	formulaOf("experts")]];
}
