// An n-gram model on the stage: the last tokens are the context, and every order is a column that looks it up. What the
// counts leave over comes from the shorter context; the stream's thickness is that share.
import { s } from "./dom.js";
import { at, brief, fit, largest, line, part, quoted, rect, signedBar, text, tokenName } from "./stage_marks.js";
import { tokensPart } from "./stage_threads.js";
import { wordSteps } from "./stage_transformer.js";
import { wordRows, wordsPart } from "./stage_words.js";
import { withCommas } from "./words.js";

const MAX_UNITS = 48; // of a layer that are drawn
const ordersOf = step => step.stages.filter(stage => /^order\.\d+$/.test(stage.id));
const numberOf = order => Number(order.id.slice(6));
export const valuesOf = (order, name) => order.tensors.find(tensor => tensor.name === name)?.values;
const gammaOf = order => Object.entries(order.numbers).find(([name]) => name.startsWith("γ"))?.[1] ?? 1;

const contextOf = (step, n) => (n > 1 ? step.pieces.slice(Math.max(0, step.place - n + 2), step.place + 1).join("")
	: "any context");

// Stages of a neural n-gram: the embeddings of its context, and the hidden layer.
const neural = step => step.stages.filter(each => ["context.embeddings", "hidden.tanh"].includes(each.id));

// A stage as a column of bars, one for each of the first units; rows of several tokens are side by side.
function unitsColumn(stage, { id, title, tensors: [tensor] }) {
	const rows = Array.isArray(tensor.values[0]) ? tensor.values : [tensor.values];
	const shown = rows.map(row => row.slice(0, MAX_UNITS)), most = largest(shown.flat().map(Math.abs));
	return { id, at: id, title, flex: 1, heightNarrow: 180, band: [], draw(box) {
		const top = box.narrow ? box.y : stage.fs * 4, height = box.narrow ? box.h - 10 : stage.streamY - stage.fs * 6;
		const step = height / shown[0].length, width = (box.w - stage.fs) / shown.length;
		return [at(stage.indexOf(id), shown.map((row, n) => {
			const middle = box.x + (n + 0.5) * width;
			return s("g", line(`M${middle} ${top}v${height}`, "axis"), row.map((value, k) => {
				const length = (Math.abs(value) / most) * width * 0.46;
				return signedBar(value, middle, top + k * step, length, step * 0.8, 0);
			}));
		}))];
	} };
}

export function ngram(stage) {
	const { step, fs } = stage, orders = ordersOf(step), { order: rows, others } = wordRows(stage);
	const count = rows.length + (others > 0 ? 1 : 0);
	const columns = orders.map(order => {
		const n = numberOf(order), p = valuesOf(order, "probability"), own = valuesOf(order, "from its own counts") ?? p,
			counts = valuesOf(order, "counts");
		const most = largest(rows.map(rank => p[rank])), gamma = gammaOf(order), now = stage.indexOf(order.id);
		return { id: order.id, at: order.id, title: order.title, flex: 1, heightNarrow: rows.length * 30 + 30, band: n < 2
			? [] : [{ at: 0, norm: gamma }], draw(box) {
			const { narrow } = box, words = narrow ? { y: box.y + 20, h: rows.length * 30 } : stage.boxes.words;
			const rh = narrow ? 30 : Math.min(words.h / Math.max(count, 4), fs * 4.4), indent = narrow ? 76 : 0;
			const left = box.x + indent, room = box.w - indent - fs * 4.6, bar = Math.min(fs * 1.05, rh * 0.32);
			const seen = order.numbers["count of the context"] ?? 0;
			return [part(`order/${n}`, `${order.title}: zoom in`, rect(box.x - 6, narrow ? box.y - 20 : fs * 2, box.w,
				narrow ? box.h + 14 : stage.streamY - fs * 4, "hit", 8)),
				text(box.x, narrow ? box.y + 6 : fs * 3.2, fit(`after ${n > 1 ? `“${contextOf(step, n)}”` : "any context"}`,
					box.w - 8, fs), "mono"),
				text(box.x + (narrow ? box.w : 0), narrow ? box.y + 6 : fs * 4.8,
					fit(`seen ${withCommas(seen)}×${n > 1 ? `, γ ${brief(gamma)}` : ""}`, box.w, fs), narrow ? "soft end" : "soft"),
				at(now, rows.map((rank, k) => {
					const y = words.y + k * rh + rh * 0.5, { piece } = step.choice.candidates[rank];
					const solid = (Math.min(own[rank], p[rank]) / most) * room, full = (p[rank] / most) * room;
					return s("g", narrow ? text(box.x, y + bar, tokenName(piece, 8), "mono soft")
						: [text(left, y - 5, tokenName(piece, 9), "mono"),
							counts && text(left + fs * 6, y - 5, `${withCommas(counts[rank])}×`, "soft")],
					line(`M${left} ${y}v${bar}`, "axis"),
						rect(left, y, solid, bar, "pos", 0, { "data-m": `n${n}-${rank}` }), rect(left + solid, y, full - solid, bar,
							"pale", 0),
						text(left + full + 6, y + bar * 0.95, p[rank] < 0.0005 ? "0" : p[rank].toFixed(3).slice(p[rank] < 1 ? 1
							: 0), ""));
				}))];
		} };
	});
	const layers = neural(step).map(each => unitsColumn(stage, each));
	const label = layers.length ? "bars: values of single units, to the right above zero, to the left below"
		: "thickness = γ, the share that the shorter context decides · solid: from the counts, pale: from the shorter context";
	return { parts: [tokensPart(stage), ...columns, ...layers, wordsPart(stage, { logits: layers.length ? "logits" : "log p" })],
		bare: true, band: { start: 1, label } };
}

export function ngramSteps(stage) {
	const { step, threads, choice } = stage;
	return [
		["tokens", "Context", `The model sees the last ${threads.order - 1} tokens and nothing before them.`,
			`c = ${quoted(contextOf(step, threads.order))}`],
		...ordersOf(step).map(order => [order.id, order.title, order.about, order.formula.split(" if the count")[0],
			`order/${numberOf(order)}`]),
		...neural(step).map(each => [each.id, each.title, each.about, each.formula]),
		...choice ? wordSteps(stage) : [],
	];
}
