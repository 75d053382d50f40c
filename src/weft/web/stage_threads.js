// The tokens at the left end of their threads. Of a long text some are left out; a count between two chips leads there.
import { s } from "./dom.js";
import { at, bars, chip, largest, part, quoted, rect, strips, text, tokenName } from "./stage_marks.js";
import { capitalised, withCommas } from "./words.js";

// Ranges of tokens that are not shown: before the first row, between rows, and after the last.
export function gaps(rows, size) {
	const edges = [-1, ...rows, size];
	return edges.slice(1).map((to, n) => ({ row: n, from: edges[n] + 1, to })).filter(({ from, to }) => to > from);
}

// `sheaf` 1: the source of a model that reads one text and writes another.
export function tokensPart(stage, sheaf = 0) {
	const { step, fs, threads: { order } } = stage, source = sheaf === 1, id = source ? "source" : "tokens";
	const names = source ? stage.sourceNames : stage.names;
	const rows = source ? stage.threads.source.rows : stage.threads.rows, here = source ? -1 : stage.here;
	const missing = gaps(rows, source ? step.source_pieces.length : step.pieces.length);
	return { id, at: id, title: source ? "Source" : stage.threads.source ? "Target" : "Tokens", width: fs * 6.4, sheaf,
		rowsNarrow: true, isTokens: true, draw(box) {
			const ys = box.rows(sheaf), rh = box.rh(sheaf), h = Math.min(rh - 4, fs * 2.3);
			const w = box.narrow ? 96 : box.w;
			const chips = names.map((name, n) => {
				const unseen = order && (rows[n] > step.place || rows[n] <= step.place - order + 1); // by an n-gram model
				const label = tokenName(name), cut = label.endsWith("…") ? `, shown as ${label}` : "";
				const shown = s("g", { opacity: unseen ? 0.45 : 1, "data-thread": source ? undefined : rows[n] },
					chip(label, { x: box.x, y: ys[n], w, h: Math.max(h, fs * 1.25), here: n === here, fs }));
				return part(stage.canFollow && !source && n !== here && `follow=${rows[n]}`,
					`Follow ${quoted(name)}${cut}`, shown);
			});
			const more = missing.map(({ row, from, to }) => {
				const apart = Math.max(rh * 0.75, fs * 1.45); // from the middle of a chip
				const y = row === 0 ? ys[0] - apart : row < ys.length ? (ys[row - 1] + ys[row]) / 2 : ys[row - 1] + apart,
					label = `⋮ ${withCommas(to - from)} more`;
				const shown = [rect(box.x + w * 0.12, y - fs * 0.62, w * 0.76, fs * 1.24, "paper-fill", 3),
					text(box.x + w / 2, y + fs * 0.35, label, "soft middle")];
				return part(stage.canReach && !source && `more=${from}-${to}`,
					`${label}: positions ${from} to ${to - 1}`, ...shown);
			});
			return [at(stage.indexOf(id), chips, more)];
		} };
}

export function embeddingPart(stage, sub = "") {
	const { threads: { embedding: { x } }, names, fs } = stage, max = largest(x.flat());
	return { id: "embedding", at: "embedding", title: "Embedding", sub, width: fs * 6.7, rowsNarrow: true,
		draw: box => [at(stage.indexOf("embedding"), x.map((vector, i) => {
			const place = { x: box.x, y: box.ys[i] - box.sh / 2, w: box.w, h: box.sh };
			return part(`embedding/${i}`, `Embedding of ${quoted(names[i])}`, rect(place.x, place.y, place.w, place.h, "hit"),
				bars(vector, { ...place, max, m: `x${i}` }));
		}))] };
}

// What a recurrent layer is called: ELMo has as many for each direction.
export function layerName({ threads: { layers } }, n) {
	const { direction } = layers[n];
	return direction ? `${capitalised(direction)} layer ${n % (layers.length / 2)}` : layers.length > 1 ? `Layer ${n}` : "Cell";
}

// The encoder's side of a model that reads one text and writes another: its threads, and the vectors that it makes.
export function sourceParts(stage) {
	const { threads: { source }, fs } = stage;
	return [tokensPart(stage, 1), { id: "memory", at: "source", title: "Encoder", sheaf: 1, width: fs * 6.7, rowsNarrow: true,
		draw(box) {
			const shown = at(stage.indexOf("source"), strips(source.memory, { x: box.x, w: box.w, ys: box.rows(1),
				h: Math.min(box.rh(1) * 0.78, fs * 3.4), here: -1, m: "memory" }));
			return [source.encoder ? part("encoder", "Look inside the encoder",
				rect(box.x - 8, box.y - 4, box.w + 16, box.h + 8, "panel", 6), shown) : shown];
		} }];
}

// The encoder's pass as a step of its own, which ends with the vectors that the decoder reads.
export function encoderOf(step) {
	const { source_pieces: pieces, source_ids: ids, source_place: place, threads } = step;
	return { ...step, kind: "encoder", pieces, ids, place, threads: threads.source.encoder, memory: threads.source.encoder.final,
		source_pieces: null, source_ids: null, masked: null, choice: null,
		stages: step.stages.filter(({ id }) => /^(encoder\.|source_)/.test(id)) };
}
