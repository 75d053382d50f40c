// The numbers of the stage as tables, for those who do not see the picture, and for exact values.
import { strongestOf } from "./stage_marks.js";
import { valuesOf } from "./stage_ngram.js";
import { layerName } from "./stage_threads.js";
import { headOf } from "./stage_transformer.js";
import { table } from "./table.js";
import { percent, visibleToken } from "./words.js";

const MAX_NEURONS = 24;
const number = value => (value === null || value === undefined ? "masked"
	: String(+value.toPrecision(5)).replace("-", "−"));
const norm = values => number(Math.hypot(...values));

export function valueTables(stage) {
	const { step, threads: t, names, here, head, choice, shares } = stage, tables = [];
	const add = (title, header, rows, text = [0]) => tables.push(table({ title, header, rows, text, folds: false,
		named: true }));
	if (t.embedding) {
		/** @type {[string, (row: number) => any][]} */
		const columns = [["token", n => visibleToken(names[n])], ["position", n => t.rows[n]],
			["id", n => step.ids[t.rows[n]]], ["length of the embedding", n => norm(t.embedding.x[n])]];
		if (t.block) {
			const own = headOf(t.block.attention, head);
			columns.push([`score, head ${own.head}`, n => number(own.scores[here][n])],
				["weight", n => number(own.weights[here][n])], ["length of the value", n => norm(own.v[n])]);
		}
		for (const [n, layer] of (t.layers ?? []).entries()) {
			layer.gates.forEach((gate, k) => columns.push([`${gate}, ${layerName(stage, n).toLowerCase()}, mean`,
				row => number(layer.means[row][k])]));
			columns.push([`length of the state, ${layerName(stage, n).toLowerCase()}`, row => number(layer.norms[row])]);
		}
		add("Tokens", columns.map(([name]) => name), names.map((_, n) => columns.map(([, value]) => value(n))));
	}
	if (t.source) {
		const attended = t.block?.cross ? headOf(t.block.cross, head) : t.source;
		add("Source", ["token", "score", "weight"],
			stage.sourceNames.map((name, n) => [visibleToken(name), number(attended.scores[here][n]),
			number(attended.weights[here][n])]));
	}
	if (t.blocks) add("Blocks", ["block", "length of the stream before", "after"],
		t.blocks.map(({ norms }, n) => [n, number(norms[0]), number(norms.at(-1))]));
	if (t.block?.feedforward) {
		const { hidden, before } = t.block.feedforward;
		const strongest = strongestOf(hidden, MAX_NEURONS);
		add(`The ${strongest.length} strongest neurons of block ${t.open}`, ["neuron", "sum", "activation"],
			strongest.map(unit => [unit, number(before[unit]), number(hidden[unit])]));
	}
	if (t.block?.experts) {
		const { probabilities, chosen, weights } = t.block.experts;
		add(`Experts of block ${t.open}`, ["expert", "probability", "weight"], strongestOf(probabilities, MAX_NEURONS).map(expert =>
			[expert, number(probabilities[expert]), chosen.includes(expert) ? number(weights[chosen.indexOf(expert)]) : ""]));
	}
	for (const order of step.stages.filter(each => each.id.startsWith("order."))) {
		add(`${order.title}. ${order.about}`, ["token", "count", "probability"],
			choice.candidates.slice(0, 12).map(({ piece }, n) => [visibleToken(piece), valuesOf(order, "counts")?.[n] ?? "",
			number(valuesOf(order, "probability")[n])]));
	}
	if (choice) add("Predictions", ["token", "logit", "probability"],
		choice.candidates.map(({ piece, logit }, n) => [visibleToken(piece), number(logit),
		`${number(shares[n])} (${percent(shares[n])})`]));
	return tables;
}
