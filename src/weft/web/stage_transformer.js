// A Transformer on the stage: embeddings, blocks of which one is open, attention as links between threads, and the
// feed-forward layer. `transformer(stage)` returns the columns from left to right and the steps that walk through them.
import { at, bars, binned, brief, columnNames, fit, largest, length, line, links, part, pill, plus, quoted,
	rect, signedBar, strips, strongestOf, text, weave, wide } from "./stage_marks.js";
import { expertParts, expertSteps } from "./stage_experts.js";
import { embeddingPart, sourceParts, tokensPart } from "./stage_threads.js";
import { wordsPart } from "./stage_words.js";
import { percent, sum, withCommas } from "./words.js";

const MAX_NEURONS = 12; // rows of the feed-forward part
const MAX_PRODUCTS = 3; // lines from a neuron to each side

// The head of keys or values that a head of queries uses: several may share one.
const keyHead = ({ q, k }, head) => Math.floor((head * k.length) / q.length);

// Values of one head between the shown tokens.
export function headOf(attention, head) {
	const chosen = Math.min(head, attention.q.length - 1), shared = keyHead(attention, chosen);
	return { head: chosen, q: attention.q[chosen], k: attention.k[shared], v: attention.v[shared],
		scores: attention.scores[chosen], weights: attention.weights[chosen], output: attention.outputs[chosen] };
}

// Whether scores are divided by the root of a head's size, and by what they are scaled, in a formula.
export const hasRoot = ({ scale, q }) => Math.abs(scale - q[0][0].length ** -0.5) < 1e-6;
export const scaleText = attention => (hasRoot(attention) ? `/ √\`${attention.q[0][0].length}\``
	: `· \`${brief(attention.scale)}\``);

// Whether a sublayer normalises its input, rather than its result.
const isPre = ({ stages }, id) => {
	const place = (...names) => stages.findIndex(stage => names.some(name => stage.id === `${id}.${name}`));
	return place("norm") >= 0 && place("norm") < place("queries", "up", "router");
};

// The open block: its name, and the chosen head of its attention to the text and to the source.
function openBlock({ step, head, threads: { open, block, blocks } }) {
	const id = `${step.kind === "encoder" ? "encoder" : "decoder"}.${open}`;
	return { open, block, blocks, id, heads: block.attention.q.length, layers: blocks.length,
		own: headOf(block.attention, head), cross: block.cross && headOf(block.cross, head),
		preAttention: isPre(step, `${id}.attention`), preFeed: isPre(step, `${id}.feedforward`) };
}

export function transformer(stage) {
	const { step, threads: t, fs, head, here, names, indexOf: n } = stage;
	const { open, block, blocks, own, cross, heads, layers, preAttention, preFeed } = openBlock(stage);
	const { norms } = blocks[open], many = layers > 6, slimWidth = many ? fs * 0.9 : fs * 2.3;

	const slim = layer => ({
		id: `block ${layer}`, at: layer < open ? "before" : "after", width: slimWidth, heightNarrow: 42,
		folded: true, close: many,
		band: blocks[layer].norms.slice(1).map((norm, k, all) => ({ at: 0.3 + (0.6 * (k + 1)) / (all.length + 1), norm })),
		under: box => [box.narrow ? rect(6, box.y - 4, stage.width - 18, 42, "panel", 8)
			: rect(box.x, stage.top, box.w, stage.bottom - stage.top, "panel", Math.min(8, box.w / 2))],
		draw(box) {
			const step = n(layer < open ? "before" : "after"), label = String(layer), vector = blocks[layer].added;
			const shown = box.narrow
				? [rect(box.x - 4, box.y - 4, box.w + 8, 42, "hit", 8), text(box.x, box.y + 21, `Block ${label}`, "head",
					{ "data-s": step }),
					at(step, bars(vector, { x: box.x + 70, y: box.y, w: box.w - 78, h: 34 }))]
				: [rect(box.x, stage.top, box.w, stage.streamY - stage.top - fs * 2, "hit", 8),
					(!many || layer % 2 === 0 || layer === layers - 1 && layers % 2) && text(box.x + box.w / 2, stage.top
						+ fs * 1.5, label, "head middle", { "data-s": step }),
					at(step, bars(vector, { x: box.x + 2, y: box.y, w: box.w - 4, h: box.h, down: true, m: `block${layer}` }))];
			return [part(stage.canOpen && `open=${layer}`, `Open block ${label}`, ...shown)];
		},
	});

	const wire = (box, y) => (box.narrow ? line(`M${box.streamX} ${y}H${box.x - 6}`, "wire")
		: line(`M${box.x + box.w / 2} ${stage.streamY - stage.thick(norms[0]) / 2}V${box.y + box.h}`, "wire"));
	const norm = (name, step) => ({ id: name, at: step, panel: "block", width: fs * 1.9, heightNarrow: 0,
		draw: box => (box.narrow ? [] : [at(n(step), wire(box, 0), pill("norm",
			{ x: box.x + fs * 0.2, y: box.y, w: fs * 1.35, h: box.h, fs }))]) });
	// a sublayer's result returns to the stream
	const join = (box, step, from) => at(step, box.narrow
		? [line(`M${box.x} ${box.y + box.h - 8}H${box.streamX}`, "wire"), plus(box.streamX, box.y + box.h - 8,
			11)]
		: [line(`M${from.x} ${from.y}H${box.x + box.w}V${stage.streamY - fs}`, "wire"),
			plus(box.x + box.w, stage.streamY, fs * 0.85)]);

	const vectors = (id, values) => ({ id, at: "qkv", panel: "block", flex: 0.075, least: fs * 3.4,
		label: id.toUpperCase(), rowsNarrow: true,
		draw: box => [at(n("qkv"), strips(values, { x: box.x, w: box.w, ys: box.ys, h: box.sh, here, m: id,
			max: largest([...own.q, ...own.k].flat()) }))] });

	const mix = (id, values, label, go) => {
		const source = id === "cross", sheaf = source ? 1 : 0;
		return { id, at: id, panel: "block", flex: 0.26, least: fs * 12, label, rowsNarrow: true, sheaf, draw(box) {
			const ys = box.rows(sheaf), rh = box.rh(sheaf), weights = values.weights[here], { weave } = stage.boxes;
			const to = { x: box.x + box.w - fs, y: box.narrow ? ys.at(-1) : stage.y(here) };
			const from = source || box.narrow || !weave ? null : weights.map((_, j) => weave.x + (j + 0.5) * weave.each);
			const attention = stage.beside?.block?.[source ? "cross" : "attention"];
			const others = attention && headOf(attention, head).weights[here];
			return [at(n(id), links({ weights, others, values: values.v, max: largest(values.v.flat()) },
				{ x: box.x, w: box.w, ys, rh, fs, to, from, m: source ? "cv" : "v" })),
			!box.narrow && part(go, `${label}: zoom in`, rect(box.x, box.y - fs * 2.2, box.w * 0.6, fs * 1.8, "hit"))];
		} };
	};

	const joined = (id, attention, norm) => ({ id, at: id, panel: "block", flex: 0.07, least: fs * (heads > 6 ? 5.6 : 4.2),
		label: "heads", heightNarrow: heads > 6 ? 92 : 66, band: [{ at: 1, norm: norms[norm] }], draw(box) {
			const count = attention.outputs.length, columns = box.narrow ? Math.min(count, 6) : 1,
				lines = Math.ceil(count / columns);
			const w = (box.w - fs * 1.2) / columns, h = box.narrow ? 58 / lines : Math.min(box.h, fs * 6.5 * count) / count;
			const top = box.narrow ? box.y : box.y + box.h - h * count, max = largest(attention.outputs.flat());
			const tight = h < fs * 2.6;
			const cells = attention.outputs.map((output, k) => {
				const x = box.x + (k % columns) * w, y = top + Math.floor(k / columns) * h, chosen = k === own.head;
				const label = tight ? 0 : fs * 1.2, side = tight && !box.narrow ? fs * 1.5 : 0;
				return part(`head=${k}`, `Head ${k}${chosen ? ", chosen" : ""}`, rect(x - 3, y, w - 2, h - 2, "hit"),
					(!tight || !box.narrow) && text(x, y + (tight ? h / 2 + fs * 0.35 : fs), tight
						|| wide(`head ${k}`, fs) > w - 2 ? k : `head ${k}`, chosen ? "bold" : "soft"),
					bars(output, { x: x + side, y: y + label, w: w - 8 - side, h: h - label - 4, max, m: `o${k}` }),
					chosen && rect(x - 4, y - 1, w, h, "frame", 5));
			});
			const chosenY = top + (own.head + 0.55) * h, from = stage.y(here);
			const into = !box.narrow && line(`M${box.x - fs * 1.6} ${from + (chosenY > from ? 1 : -1) * fs * 0.7}`
				+ `Q${box.x - fs} ${chosenY} ${box.x - 5} ${chosenY}`, "wire");
			const rails = !box.narrow && line(cells.map((_, k) =>
				`M${box.x + w - 2} ${top + (k + 0.5) * h}H${box.x + box.w}`).join(""), "wire");
			return [at(n(id), into, cells, rails), join(box, n(id), { x: box.x + box.w, y: top + 0.5 * h })];
		} });

	const feed = block.feedforward && { id: "feedforward", at: "feedforward", panel: "block", flex: 0.24, least: fs * 14,
		title: "Feed-forward", heightNarrow: 236,
		band: [{ at: 1, norm: norms.at(-1) }],
		draw: box => [part("ff", "Zoom into the feed-forward layer", rect(box.x, box.y - fs * 3, box.w - fs * 1.2, box.h
			+ fs * 3 - 2, "hit", 6)),
			at(n("feedforward"), neurons(block.feedforward, { ...box, w: box.w - fs * 1.6 }, fs)),
			join(box, n("add"), { x: box.x + box.w - fs * 1.4, y: box.y + box.h / 2 })] };

	const parts = [
		tokensPart(stage),
		embeddingPart(stage, t.embedding.added ? "+ position" : ""),
		...blocks.slice(0, open).map((_, layer) => slim(layer)),
		preAttention && norm("norm", "norm"),
		vectors("q", own.q), vectors("k", own.k),
		{ id: "weave", at: "scores", panel: "block", flex: 0.36, least: fs * 10, rowsNarrow: true, extraNarrow: 66,
			title: `Attention, head ${own.head}`, draw(box) {
				const each = Math.min(box.w / names.length, fs * 5), top = box.ys[0] - box.rh(0) / 2;
				box.each = each;
				const probes = box.narrow ? [] : own.scores[here].map((score, j) => score !== null && line(
					`M${box.x - fs * 0.9} ${box.ys[j]}Q${box.x + (j + 0.5) * each} ${box.ys[j]} ${box.x + (j + 0.5) * each} `
					+ `${box.ys[here] - Math.min(box.rh(0) - 6, each * 1.9) / 2}`, "probe",
						{ pathLength: 1, style: { "--i": j } }));
				return [at(n("scores"), columnNames(names, { x: box.x, y: top - fs * 0.5, each, here, fs, letters: t.source ? 6
					: 8 }),
					weave(own, { x: box.x, ys: box.ys, each, rh: box.rh(0), fs, here, numbers: stage.near, go: "head" }),
						probes)];
			} },
		mix("values", own, "weight × V", `head/${here}`), joined("heads", block.attention, 1),
		...cross ? [mix("cross", cross, "weight × V of the source", `cross/${here}`),
			joined("crossadd", block.cross, 2)] : [],
		preFeed && norm("norm2", "feedforward"),
		...block.experts ? expertParts(stage, block.experts, norms.at(-1), join) : [feed],
		...blocks.slice(open + 1).map((_, k) => slim(open + 1 + k)),
		wordsPart(stage, step.kind === "encoder" && !step.masked && !stage.fills ? { next: "Label" } : stage.fills
			? { next: "The masked token" } : {}),
	].filter(Boolean);
	const start = length(t.embedding.x[here]);
	return { parts,
		band: { start,
		label: `residual stream of ${quoted(names[here])} · ${withCommas(t.embedding.x[here].length)} numbers, thickness = length` },
		source: t.source && { rows: t.source.rows, parts: sourceParts(stage) }, panelTitle: `Block ${open}`,
			panelStep: preAttention ? "norm" : "qkv" };
}

// The neurons farthest from zero, with the products that matter most to each and what each adds.
function neurons(feed, { x, y, w, h }, fs) {
	const { hidden, read, added, units } = feed, side = Math.max(w * 0.13, fs * 1.6);
	const rows = Math.min(MAX_NEURONS, Math.max(3, Math.floor((h - fs * 2) / (fs * 2.1))), hidden.length);
	const strongest = strongestOf(hidden, rows).sort((a, b) => a - b);
	const rh = (h - fs * 1.6) / rows, top = largest(hidden), left = x + side + w * 0.12, right = x + w - side - w * 0.12;
	const named = right - left > fs * 7, begin = left + (named ? fs * 2.9 : 0), zero = begin
		+ (strongest.some(unit => hidden[unit] < 0) ? (right - begin) * 0.3 : 0);
	const scale = right - zero, yOf = n => y + (n + 0.5) * rh, marks = [], lines = [];
	const inBins = Math.min(read.length, 32), outBins = Math.min(added.length, 32);
	const place = (coordinate, size, bins) => y + (h - fs * 1.6) * ((Math.floor((coordinate * bins) / size)
		+ 0.5) / bins);
	strongest.forEach((unit, n) => {
		const value = hidden[unit], size = (Math.abs(value) / top) * (value < 0 ? zero - begin : scale);
		marks.push(part(`ff/${unit}`, `Neuron ${unit}: ${brief(value)}`, rect(left, yOf(n) - rh / 2 + 1, right - left,
			rh - 2, "hit"),
			signedBar(value, zero, yOf(n) - Math.min(rh * 0.3, fs * 0.7), size, Math.min(rh * 0.6, fs * 1.4), 1, " light"),
			text(right - 2, yOf(n) + fs * 0.35, brief(value), "end")), named && text(left, yOf(n) + fs * 0.35, unit, "soft"));
		const known = units?.indexOf(unit) ?? -1;
		if (known < 0) return;
		const draw = (products, path) => strongestOf(products, MAX_PRODUCTS).forEach((k, _, [first]) => lines.push(line(path(k),
			products[k] < 0 ? "fine negative" : "fine",
			{ opacity: (0.15 + 0.6 * Math.abs(products[k] / (products[first] || 1))).toFixed(2) })));
		draw(feed.up[known].map((weight, k) => weight * read[k]), k =>
			`M${x + side + 2} ${place(k, read.length, inBins)}L${left - 4} ${yOf(n)}`);
		draw(feed.down[known].map(weight => weight * value), k =>
			`M${right + 4} ${yOf(n)}L${x + w - side - 2} ${place(k, added.length, outBins)}`);
	});
	const tall = h - fs * 1.6;
	return [lines, line(`M${zero} ${y}v${tall}`, "axis"), marks,
		bars(binned(read, inBins), { x, y, w: side, h: tall, down: true, m: "read" }),
		bars(binned(added, outBins), { x: x + w - side, y, w: side, h: tall, down: true, m: "added" }),
		text(x + w / 2, y + h, fit(rows < hidden.length ? `${rows} of ${withCommas(hidden.length)} neurons`
			: `${above(hidden)} of ${hidden.length} above 0`, w, fs), "soft middle")];
}

const above = values => values.filter(value => value > 0).length;

// Steps of a Transformer: name, caption, formula, and the closer view that Enter opens.
export function transformerSteps(stage) {
	const { step, threads: t, here, names, choice } = stage, now = quoted(names[here]);
	const { open, block, layers, id, own, cross, heads, preAttention } = openBlock(stage);
	const most = row => row.indexOf(Math.max(...row)), weights = own.weights[here], rest = 1 - sum(weights);
	const scale = scaleText(block.attention), masks = own.scores.flat().includes(null);
	const partOf = name => step.stages.find(each => each.id === `${id}.${name}`), rotary = partOf("attention.rotary");
	const { factors, activation, hidden = [] } = block.feedforward ?? {}, size = hidden.length;
	const normName = partOf("attention.norm")?.title === "RMSNorm" ? "x / rms(x)" : "(x − μ) / σ";
	return [
		...firstSteps(stage, `The text is cut into ${step.pieces.length} tokens. To the model each one is only a number.`,
			`The number selects a row of a table${
				t.embedding.added ? "; the position in the text adds another" : ""}. The stream begins here.`),
		t.source && ["source", "Source",
			`The encoder has read the source: one vector for each of its ${step.source_pieces.length} tokens.`,
			"m_{j} = encoder(source)_{j}", "encoder"],
		open > 0 && ["before", "Blocks", "The stream runs through the blocks. Each reads it and adds a little.",
			"x ← x + block(x)", "block"],
		preAttention && ["norm", "Norm",
			`Block ${open} is open. It reads a normalised copy of the stream.`,
			`n = ${normName}`, "block"],
		["qkv", "Q, K, V",
			`Every token gets three short vectors: what it looks for, what it offers, and what it hands over.${rotary ? " Q and K are rotated by the position." : ""}`,
			"q = W_{Q} n   k = W_{K} n   v = W_{V} n", "head"],
		["scores", "Scores",
			`The query of ${now} is multiplied by every key.${masks ? " Hatched: masked, a token never sees what comes after it." : ""}`,
			`s_{j} = q · k_{j} ${scale}`, `head/${here}`],
		["softmax", "Softmax",
			`Softmax turns a row of scores into shares of one. Here ${quoted(names[most(weights)])} gets the most: ${
				percent(Math.max(...weights))}.${rest > 0.005 ? ` Tokens that are not shown get ${percent(rest)}.` : ""}`,
			"a_{j} = exp(s_{j}) / Σ exp(s)", `head/${here}`],
		["values", "Values",
			"Each token hands over its value in proportion to its share: the wider the link, the larger the share.",
			"o = Σ a_{j} v_{j}", `head/${here}`],
		["heads", "Heads", heads > 1
			? `${heads} heads have looked at different tokens. Their results are joined and added to the stream.`
			: "The head's result is projected and added to the stream.", heads > 1 ? `x ← x + W_{O} [o_{0} … o_{${heads - 1}}]`
				: "x ← x + W_{O} o", "head"],
		cross && ["cross", "Cross-attention",
			`Now ${now} asks the source. ${quoted(stage.sourceNames[most(cross.weights[here])])} gets the most: ${
				percent(Math.max(...cross.weights[here]))}.`,
			"o = Σ a_{j} v_{j}   (source)", `cross/${here}`],
		cross && ["crossadd", "Heads", "What the heads found in the source is added to the stream.",
			"x ← x + W_{O} [o_{0} … ]", `cross/${here}`],
		size > 0 && ["feedforward", "Feed-forward",
			`Each token is read on its own. Of ${withCommas(size)} neurons ${withCommas(above(hidden))} are above 0.`,
			factors ? `f = W_{d} (${activation}(W_{g} n) ⊙ W_{u} n)` : `f = W_{2} ${activation}(W_{1} n)`, "ff"],
		...block.experts ? expertSteps(block.experts, now, name => partOf(`feedforward.${name}`)?.formula ?? "") : [],
		(size > 0 || block.experts) && ["add", "Add",
			"The result is added as well. Nothing in the stream is erased, only added to.", "x ← x + f", size > 0 ? "ff" : ""],
		open < layers - 1 && ["after", "Blocks", "The other blocks do the same, each with weights of its own.",
			"x ← x + block(x)", "block"],
		...choice ? wordSteps(stage) : [step.memory ? ["logits", "For the decoder",
			`This is what the decoder reads of ${now}: every block's cross-attention makes a key and a value of it.`,
			"k_{j} = W_{K} m_{j}   v_{j} = W_{V} m_{j}"] : ["logits", "Output", "The model's output for this text.", "f(x)"]],
	].filter(Boolean);
}

// The steps before the first layer of a model that has an embedding.
export function firstSteps({ step, threads, here, names }, cut, select) {
	const id = step.ids[step.place], go = `embedding/${here}`;
	const position = threads.embedding.added ? ` + P[\`${step.place}\`]` : "";
	return [["tokens", "Tokens", cut, `${quoted(names[here])} → \`${id}\``, go],
		["embedding", "Embedding", select, `x = E[\`${id}\`]${position}`, go]];
}

// What the logits are computed from: recurrent models have no residual stream.
export const lastOf = ({ threads }) => (threads.blocks ? "end of the stream" : "last vector");

// The last steps of every model that predicts tokens or labels.
export function wordSteps(stage) {
	const { step, choice, settings, chosen, fills } = stage, size = choice.vocab_size, labels = !stage.predictsTokens;
	const best = choice.candidates[0];
	if (labels) return [
		["logits", "Logits", `The ${lastOf(stage)} is compared with ${size} labels. Each gets one score, the logit.`,
			"z = W x + b", "logit/0"],
		["probabilities", "Label",
			`Softmax turns the scores into probabilities. The model says ${quoted(best.piece)}: ${percent(best.final)}.`,
			"p = softmax(z)", "logit/0"]];
	const factors = step.kind === "ngram"
		? ["Log-probabilities", `Every one of ${withCommas(size)} tokens has a probability; here its logarithm.`,
		"z = log p"]
		: ["Logits",
			`The ${lastOf(stage)} is compared with all ${withCommas(size)} tokens. Each gets one score, the logit.`,
			"z = W_{U} x"];
	const first = ["logits", ...factors, choice.factors ? "logit/0" : ""];
	if (fills) return [first,
		["probabilities", "Probabilities", "Softmax turns the scores into probabilities.", "p = softmax(z)", "logit/0"],
		["fill", "The blank is filled",
			`${quoted(best.piece)} is the most probable${step.masked ? `; the text had ${quoted(step.masked)}` : ""}.`,
			`argmax p = \`${best.piece}\``, "logit/0"]];
	const top = [settings.top_k && `top-k ${settings.top_k}`, settings.top_p && settings.top_p < 1
		&& `top-p ${settings.top_p}`].filter(Boolean).join(", ");
	return [first,
		["probabilities", "Probabilities",
			`Softmax turns logits into probabilities. A low T sharpens them, a high T evens them out.${top ? ` Cut by ${top}.` : ""}`,
			`p = softmax(z / T),   T = \`${settings.temperature.toFixed(2)}\``, choice.factors ? "logit/0" : ""],
		["choice", "Choice", !chosen ? "One random number decides." : `One random number u falls on ${quoted(chosen.piece)}`
			+ `${chosen.rank >= 8 ? ", one of the others" : ""}. It joins the text, and everything runs again.`,
		chosen ? `u = \`${chosen.number.toFixed(2)}\` → ${quoted(chosen.piece)}` : "u ~ U(0, 1)", choice.factors ? "logit/0"
			: ""]];
}
