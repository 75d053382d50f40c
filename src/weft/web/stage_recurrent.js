// Recurrent models on the stage: cells unrolled along the threads, each with its gates, and the state as a band that
// runs from token to token. Bahdanau's context is a sum of links from the source's threads.
import { s } from "./dom.js";
import { CELL_FORMULAS } from "./stage_closer.js";
import { at, bars, largest, length, line, links, part, quoted, rect, strips, text } from "./stage_marks.js";
import { embeddingPart, layerName, sourceParts, tokensPart } from "./stage_threads.js";
import { firstSteps, wordSteps } from "./stage_transformer.js";
import { wordsPart } from "./stage_words.js";
import { clamp, percent, withCommas } from "./words.js";

const isSigned = gate => /candidate|hidden/.test(gate);

// A gate as a box that is filled as far as it is open; a signed value goes up or down from the middle.
function gateBox(x, y, size, mean, signed) {
	const part = clamp(Math.abs(mean), 0, 1) * size, half = size / 2;
	return [rect(x, y - half, size, size, "gate", 3), signed
		? rect(x, mean < 0 ? y : y - part / 2, size, part / 2, mean < 0 ? "neg" : "pos", 0)
		: rect(x, y + half - part, size, part, "pos", 0)];
}

function layerPart(stage, layer, number) {
	const { fs, here, threads: { rows, layers, mix, source } } = stage, gated = layer.cell !== "elman", gates = gated ? layer.gates : [];
	const title = mix ? layerName(stage, number) : layers.length > 1 ? `${layerName(stage, number)}, ${layer.cell.toUpperCase()}`
		: gated ? `${layer.cell.toUpperCase()} cell` : "Elman cell";
	const back = layer.direction === "backward", begin = back ? rows.length - 1 : 0;
	const ids = [`gates${number}`, `state${number}`], [computed, stated] = ids.map(stage.indexOf);
	const most = largest(layer.states.flat()), thickest = largest(layer.norms);
	return { id: `layer${number}`, at: ids[gated ? 0 : 1], title, flex: 1, rowsNarrow: true,
		extraNarrow: gated ? 62 : 0, headRoom: 6.2,
		band: mix ? [] : [{ at: 1, norm: layer.norms[here] }], draw(box) {
			const size = Math.min(fs * 1.5, box.rh(0) * 0.7),
				each = Math.max(size + 4, Math.min(fs * 2.6, (box.w * 0.4) / Math.max(1, gates.length)));
			const wide = gates.length * each, middle = box.x + wide + fs * 1.1, left = middle + fs * 1.4, room = box.x
				+ box.w - left - fs * 1.2;
			const thick = norm => fs * 0.3 + fs * 1.3 * (norm / thickest), first = box.ys[0] - box.rh(0) * 0.5;
			// the state on its way from token to token
			const points = box.ys.map((y, n) => [y, thick(layer.norms[n])]);
			if (back) points.reverse();
			// a text begins with a state of zeros, unless an encoder gives another
			const isWhole = rows[begin] === (back ? stage.step.pieces.length - 1 : 0) && !source;
			const start = here === begin ? length(layer.previous[0]) : isWhole ? 0 : layer.norms[begin];
			const edge = back ? box.ys.at(-1) + box.rh(0) * 0.5 : first;
			const sides = [-1, 1].map(sign => [[edge, thick(start)], ...points]
				.map(([y, w]) => `${middle + (sign * w) / 2} ${y}`));
			const band = line(`M${sides[0].join("L")}L${sides[1].reverse().join("L")}z`, "state");
			const names = gates.map((gate, n) => s("text.soft", { transform: `translate(${box.x + n * each + size / 2 + fs * 0.35} ${first - fs * 0.4}) rotate(-90)` }, gate));
			return [part(`layer/${number}`, `${title}: zoom in`, rect(box.x - 4, box.ys[here] - box.rh(0) / 2,
				box.w - fs * 0.4, box.rh(0), "hit"),
				rect(box.x - 4, box.ys[here] - box.rh(0) / 2 + 1, box.w - fs * 0.4, box.rh(0) - 2, "frame", 6)),
			gated && at(computed, names, box.ys.map((y, n) => s("g", { opacity: n === here ? 1 : 0.65 },
				layer.means[n].map((mean, k) => gateBox(box.x + k * each, y, size, mean, isSigned(gates[k])))))),
			at(stated, band, strips(layer.states, { x: left, w: room, ys: box.ys, h: box.sh, max: most, here,
				m: `h${number}-` }),
				!gated && text(left, first - fs * 0.5, "state", "soft"),
				box.narrow || mix ? null
					: line(`M${box.x + box.w - fs * 0.6} ${box.ys[here]}H${box.x + box.w}V${stage.streamY}`, "stem"))];
		} };
}

// The layers of ELMo at the followed token, each with its weight, and their sum: the token's vector.
function mixPart(stage) {
	const { fs, threads: { mix: { names, layers, mean } } } = stage, most = largest(layers.flat());
	return { id: "mix", at: "mix", title: "Mix", width: stage.narrow ? 0 : fs * 9, heightNarrow: 300,
		band: [{ at: 1, norm: length(mean) }], draw(box) {
			const each = Math.min(box.h / (layers.length + 1), fs * 6), row = (name, values, n) => [
				text(box.x, box.y + n * each + fs, name, n === layers.length ? "bold" : "soft"),
				bars(values, { x: box.x, y: box.y + n * each + fs * 1.5, w: box.w, h: each - fs * 2, max: most, m: `mix${n}` })];
			return [at(stage.indexOf("mix"), layers.map((values, n) => row(`${names[n]} × 1/${layers.length}`, values, n)),
				row("= vector", mean, layers.length), box.narrow ? null
					: line(`M${box.x + box.w / 2} ${box.y + each * (layers.length + 1)}V${stage.streamY}`, "stem"))];
		} };
}

export function recurrent(stage) {
	const { threads: t, fs, here, names } = stage, { source } = t, n = stage.indexOf;
	const context = source && { id: "context", at: "align", title: "weight × annotation", flex: 1.1, rowsNarrow: true,
		sheaf: 1, draw(box) {
		const ys = box.rows(1), to = { x: box.x + box.w - fs, y: box.narrow ? ys.at(-1) : stage.y(here) };
		return [at(n("align"), links({ weights: source.weights[here], values: source.memory,
			max: largest(source.memory.flat()) },
			{ x: box.x, w: box.w, ys, rh: box.rh(1), fs, to, from: null, m: "v" })),
		part("align", "Alignment: zoom in", rect(box.x, box.y - fs * 2, fs * 4, fs * 1.8, "hit"))];
	} };
	return { parts: [tokensPart(stage), embeddingPart(stage), context,
		...t.layers.map((layer, number) => layerPart(stage, layer, number)), t.mix && mixPart(stage),
		wordsPart(stage, t.mix ? { next: "Token after" } : {})].filter(Boolean),
		source: source && { rows: source.rows, parts: sourceParts(stage) },
		band: { start: length(t.embedding.x[here]),
			label: `vector of ${quoted(names[here])} · thickness = length; a green band beside the threads is a state` } };
}

export function recurrentSteps(stage) {
	const { step, threads: t, names, here, choice } = stage, now = quoted(names[here]), { source } = t;
	const weights = source?.weights[here], most = weights?.indexOf(Math.max(...weights));
	const many = t.layers.length > 1, [tokens, embedding] = firstSteps(stage,
		`The text is ${step.pieces.length} tokens, read one after the other. To the model each is only a number.`,
		"The number selects a row of a table.");
	const cells = t.layers.flatMap((layer, number) => {
		const open = name => percent(layer.means[here][layer.gates.indexOf(name)]);
		const of = many ? ` of ${layerName(stage, number).toLowerCase()}` : "", back = layer.direction === "backward";
		const before = back ? "the state after the next token" : "the state before";
		const go = `layer/${number}`, [kept, names] = layer.cell === "lstm"
			? [`${open("forget")} of the cell is kept, ${open("input")} of the new is written`, "i, f, o"]
			: layer.cell === "gru" ? [`${open("update")} of the state is kept`, "r, z"] : [];
		return [kept && [`gates${number}`, "Gates", `The gates${of} read ${now} and ${before}. On average ${kept}.`,
			`${names} = σ(W x + U h_{−1} + b)`, go], [`state${number}`, "New state", layer.cell === "elman"
			? `${now} and the state before make the new state${of}, which runs on to the next token.`
			: `What is kept and what is new make the state${of}. It runs on to the ${back ? "token before" : "next token"}, and up to the next column.`,
			CELL_FORMULAS[layer.cell], go]];
	}).filter(Boolean);
	return [
		tokens,
		source && ["source", "Source",
			"The source is read in both directions; the two states at a token are its annotation.",
			"h_{j} = [→h_{j} ; ←h_{j}]"],
		embedding,
		source && ["align", "Alignment",
			`The state before asks the source. ${quoted(stage.sourceNames[most])} gets the most: ${percent(weights[most])}. The weighted sum is the context.`, "c = Σ a_{j} h_{j}", "align"],
		...cells,
		t.mix && ["mix", "Mix", `The vector of ${now} is the mean of its embedding and of all layers, both directions side by side.`,
			"Σ s_{j} [→h_{j} ; ←h_{j}]"],
		...!choice ? [] : t.mix ? [["logits", "Logits",
			`The forward state has read the text up to ${now}. It is compared with all ${withCommas(choice.vocab_size)} tokens.`, "z = E h + b", "logit/0"],
		["probabilities", "Probabilities", `It predicts the token after: ${quoted(choice.candidates[0].piece)}, ${percent(choice.candidates[0].final)}. `
			+ `The backward state predicts the one before: ${quoted(t.before.piece)}, ${percent(t.before.probability)}.`,
		"p = softmax(z)", "logit/0"]] : wordSteps(stage),
	].filter(Boolean);
}
