// Closer views of the stage: head → row → number, feed-forward → neuron, embedding, logit, recurrent layer → unit. They
// use the stage's marks, larger and with figures. `closer(stage, path)` returns a picture and its caption.
import { s } from "./dom.js";
import { bars, brief, circle, columnNames, dot, largest, line, minus, part, quoted, rect, signedBar,
	strongestOf, text, tokenName, weave } from "./stage_marks.js";
import { valuesOf } from "./stage_ngram.js";
import { hasRoot, headOf, lastOf, scaleText } from "./stage_transformer.js";
import { layerName } from "./stage_threads.js";
import { percent, share, sum, withCommas } from "./words.js";

const MAX_FIGURES = 16; // products that are all written out; of more, the largest
const MAX_CELLS = 128; // neurons that are drawn as a grid

const boxOf = stage => ({ fs: stage.fs, W: stage.width, H: stage.height, narrow: stage.narrow, m: stage.narrow ? 12 : 20 });
const figure = value => minus(value, Math.abs(value) < 0.1 && value ? 3 : 2);

// One number and its operands: a times b, term by term, and the sum.
function product(stage, { a, b, names, end }) {
	const { fs, W, H, narrow, m } = boxOf(stage), terms = a.map((value, n) => value * b[n]), count = a.length;
	const few = count <= (narrow ? 4 : MAX_FIGURES), side = narrow ? 0 : fs * 12,
		each = Math.min((W - 2 * m - side) / count, 150), left = m + side;
	const rh = (H - fs * 5) / 3, room = each * count;
	const strong = strongestOf(terms, count).reduce((all, n) => (all.length < (narrow ? 3 : 8) && all.every(i => Math.abs(i - n) * each > fs * 4) ? [...all, n]
			: all), []);
	const rows = [[names[0], a, "", "a"], [names[1], b, "× ", "b"],
		["product", terms, "= ", "terms"]].map(([name, values, sign, m2], r) => {
		const y = fs + r * rh, high = Math.max(fs * 2, rh - fs * 4.4);
		return [text(m, narrow ? y + fs : y + rh / 2 - fs * 0.8, sign + name, "bold"),
			bars(values, { x: left, y: y + fs * 1.6, w: room, h: high, m: m2 }),
			values.map((value, n) => (few || (r === 2 && strong.includes(n))) && text(left + (n + 0.5) * each, y + high
				+ fs * 3, figure(value),
				r === 2 ? "middle bold" : "middle")),
			few && r === 2 && !narrow && values.map((_, n) => n > 0 && text(left + n * each, y + high + fs * 3, "+",
				"middle soft"))];
	});
	const total = sum(terms);
	return [rows, line(`M${left} ${H - fs * 3.6}h${room}`, "wire"),
		text(left, H - fs * 1.4, `sum = ${figure(total)}${end(total)}`, "large",
			{ style: { "font-size": `${fs * (narrow ? 1.3 : 1.7)}px` } })];
}

function stackedVectors(stage, rows) {
	const { fs, W, H, m } = boxOf(stage), rh = (H - fs * 2) / rows.length, count = rows[0][1].length;
	const all = count <= (stage.narrow ? 6 : 32);
	return rows.map(([name, values, key], n) => {
		const y = fs * 1.4 + n * rh, each = (W - 2 * m) / count;
		return [text(m, y, name, "bold"), bars(values, { x: m, y: y + fs, w: W - 2 * m, h: rh - fs * (all ? 4.6 : 3.2),
			m: key }),
			all && values.map((value, k) => text(m + (k + 0.5) * each, y + rh - fs * 2, figure(value), "middle soft"))];
	});
}

function neuronGrid(stage, feed) {
	const { fs, W, H, narrow, m } = boxOf(stage),
		shown = strongestOf(feed.hidden, narrow ? 48 : MAX_CELLS).sort((a, b) => a - b);
	const columns = narrow ? 6 : Math.min(16, Math.ceil(Math.sqrt(shown.length * 2.4))), each = (W - 2 * m) / columns;
	const lines = Math.ceil(shown.length / columns), rh = Math.min((H - fs * 3.4) / lines, each),
		most = largest(feed.hidden);
	const rest = feed.hidden.length - shown.length;
	return [text(m, fs * 1.4, narrow ? "Area = activation"
		: `Area = activation; hollow = below 0.${rest ? ` The ${shown.length} strongest of ${withCommas(feed.hidden.length)} neurons.` : ""}`, "bold"),
		shown.map((unit, n) => {
			const value = feed.hidden[unit], x = m + ((n % columns) + 0.5) * each, y = fs * 2.8 + (Math.floor(n / columns) + 0.5) * rh;
			const radius = Math.sqrt(Math.abs(value) / most) * Math.min(each, rh - fs * 1.4) * 0.44;
			const shows = [rect(x - each / 2 + 1, y - rh / 2 + 1, each - 2, rh - 2, "hit", 6),
				radius >= 0.5 ? circle(x, y - fs * 0.5, radius, value < 0 ? "ring" : "pos", { "data-m": `unit${unit}` })
					: line(`M${x - 4} ${y - fs * 0.5}h8`, "axis"),
				rh > fs * 2.4 && text(x, y + rh / 2 - 4, brief(value), "middle soft")];
			const label = `Neuron ${unit}: ${brief(value)}`;
			return feed.units?.includes(unit) ? part(`ff/${unit}`, label, ...shows) : s("g", { "aria-label": label },
				...shows);
		})];
}

function headView(stage, attention, { names, keyNames, go, here }) {
	const { fs, W, H, narrow, m } = boxOf(stage), own = headOf(attention, stage.head),
		rows = names.length, columns = keyNames.length;
	const top = fs * 7, side = narrow || attention.q.length < 2 ? 0 : Math.min(W * 0.26, 400), left = m + fs * 6;
	const each = Math.min((W - 2 * m - fs * 6 - side - 30) / columns, narrow ? 40 : 120),
		rh = Math.min((H - top - fs) / rows, narrow ? 40 : 90);
	const ys = names.map((_, n) => top + (n + 0.5) * rh), heads = attention.q.length;
	const grid = Math.ceil(Math.sqrt(heads)), size = Math.min((side - (grid - 1) * 12) / grid,
		(H - fs * 4) / Math.ceil(heads / grid) - fs * 1.8);
	return [text(m, fs * 1.5, "Attention weights, % of each row", "bold"), text(m, top - fs * 0.7, "query ↓", "soft"),
		columnNames(keyNames, { x: left, y: top - fs * 0.5, each, here: go === "head" ? here : -1, fs }),
		names.map((name, n) => text(left - 10, ys[n] + fs * 0.35, tokenName(name, 8), n === here ? "mono end bold"
			: "mono end")),
		s("g.settled", weave(own, { x: left, ys, each, rh, fs, here, numbers: true, go })),
		side && text(W - m - side, fs * 1.5, `The ${heads} heads of this block`, "bold"),
		side && attention.weights.map((weights, k) => {
			const x = W - m - side + (k % grid) * (size + 12), y = fs * 4 + Math.floor(k / grid) * (size + fs * 1.8),
				unit = size / columns, high = size / rows;
			const marks = weights.flatMap((row, i) => row.map((weight, j) => {
				const share = Math.sqrt(weight) * 0.92;
				return weight > 0.02
					? `M${x + (j + 0.5 - share / 2) * unit} ${y + (i + 0.5 - share / 2) * high}h${share * unit}v${share * high}h${-share * unit}z` : "";
			})).join("");
			return part(`head=${k}`, `Head ${k}`, text(x, y - 4, heads > 9 ? k : `head ${k}`, k === own.head
				? "bold" : "soft"), rect(x, y, size, size, "panel", 4),
				line(marks, "pos"), k === own.head && rect(x - 2, y - 2, size + 4, size + 4, "frame", 5));
		})];
}

// One query: key, score, weight and value of every token that it may look at, and their sum. Bahdanau's attention has
// no vectors q and k of its own.
/**
 * @param {any} stage
 * @param {{ q?: any, k?: any, v: any, scores: any, weights: any, output: any }} row
 * @param {{ name: string, names: string[], go?: string, scoreName: string }} labels
 */
function rowView(stage, { q, k, v, scores, weights, output }, { name, names, go, scoreName }) {
	const { fs, W, H, narrow, m } = boxOf(stage), top = fs * (q ? 6 : 3),
		rh = Math.min((H - top - fs * 5) / names.length, 84);
	const x = share => m + share * (W - 2 * m), wide = narrow ? 0 : W * 0.17, sh = rh * 0.74, ys = names.map((_, n) => top
		+ (n + 0.5) * rh);
	const [cScore, cWeight, cValue] = narrow ? [0.24, 0.66, 1] : [0.31, 0.55, 0.79], most = largest(scores),
		vMost = largest(v.flat()), kMost = k && largest([...k, q ?? []].flat());
	const half = (x(cWeight) - x(cScore)) * (narrow ? 0.3 : 0.37), zero = x(cScore) + half, wideShare = narrow ? W * 0.16
		: x(cValue) - x(cWeight) - fs * 4.5;
	const sums = output ?? v[0].map((_, d) => sum(weights.map((a, j) => a * v[j][d]))), yo = top
		+ names.length * rh;
	return [q && [text(m, fs * 1.4, `${quoted(name)} asks`, "bold"),
		bars(q, { x: x(narrow ? 0.42 : 0.1), y: 0, w: narrow ? W * 0.5 : wide, h: fs * 3.6, max: kMost,
		m: `q${names.indexOf(name)}` }),
		!narrow && text(x(0.1) + wide + 14, fs * 2.1, "← its query q, compared with every key k below", "soft")],
	k && !narrow && text(x(0.1), top - fs * 0.6, "k", "bold"), text(x(cScore), top - fs * 0.6, scoreName, "bold"),
		text(x(cWeight), top - fs * 0.6, "weight", "bold"),
	!narrow && text(x(cValue), top - fs * 0.6, "v", "bold"),
	ys.map((y, j) => {
		const score = scores[j], hidden = score === null, size = hidden ? 0 : (Math.abs(score) / most) * half;
		const shown = [rect(m - 6, y - rh / 2 + 1, W - 2 * m + 12, rh - 2, "hit", 6),
			text(x(0), y + fs * 0.35, tokenName(names[j]), "mono"),
			k && !narrow && bars(k[j], { x: x(0.1), y: y - sh / 2, w: wide, h: sh, max: kMost, m: `k${j}` }),
			hidden ? [rect(x(cScore), y - sh / 2, half * 2, sh, "hatch", 0), text(x(cWeight), y + fs * 0.35, "masked",
				"soft")]
				: [line(`M${zero} ${y - sh / 2}v${sh}`, "axis"), signedBar(score, zero, y - sh * 0.28, size, sh * 0.56),
					text(x(cWeight) - fs * 0.8, y + fs * 0.35, figure(score), "end"), rect(x(cWeight), y - sh * 0.28,
						Math.max(1, weights[j] * wideShare), sh * 0.56, "pos", 1),
					narrow ? text(x(1), y + fs * 0.35, percent(weights[j]), "bold end")
						: text(x(cWeight) + weights[j] * wideShare + 8, y + fs * 0.35, percent(weights[j]), "bold"),
					!narrow && s("g", { opacity: (0.25 + 0.75 * Math.sqrt(weights[j])).toFixed(2) },
						bars(v[j], { x: x(cValue), y: y - sh / 2, w: wide, h: sh, max: vMost, m: `v${j}` }))]];
		return hidden || !go ? s("g", ...shown.flat())
			: part(`${go}/${j}`, `Score for ${quoted(names[j])}: ${figure(score)}, weight ${percent(weights[j])}`,
			...shown.flat());
	}),
	!narrow && [line(`M${x(cValue)} ${yo + 4}h${wide}`, "wire"),
		bars(sums, { x: x(cValue), y: yo + 8, w: wide, h: Math.min(fs * 4, H - yo - 10), m: "o" }),
		text(x(cValue) - 12, yo + fs * 2.6, "o = Σ weight × v", "end bold")]];
}

// A recurrent layer at the followed token: gates and states, unit by unit.
function layerView(stage, layer, number) {
	const { fs, W, H, narrow, m } = boxOf(stage), [h0, c0] = layer.previous, [h1, c1] = layer.state;
	const rows = [["h before", h0], c0 && ["c before", c0], ...layer.gates.map((gate, n) => [gate, layer.values[n]]),
		c1 && ["new c", c1], ["new h", h1]].filter(Boolean);
	const rh = (H - fs * 2) / rows.length, side = narrow ? 0 : fs * 11, units = h1.length, room = W - 2 * m - side,
		each = room / units;
	return [rows.map(([name, vector], n) => {
		const y = fs + n * rh, gate = layer.gates.includes(name) && !/candidate|hidden/.test(name);
		return [text(m, narrow ? y + fs : y + rh / 2 + fs * 0.35, gate ? `${name} gate` : name, n === 0
			|| n >= rows.length - (c1 ? 2 : 1) ? "bold" : ""),
			bars(vector, { x: m + side, y: y + (narrow ? fs * 1.3 : 2), w: room, h: rh - (narrow ? fs * 1.6 : 6),
				max: gate ? 1 : undefined, m: `${name}${number}` }),
			gate && !narrow && text(m + side - 10, y + rh / 2 + fs * 0.35, percent(sum(vector) / units), "end soft")];
	}), units <= room / 9 && h1.map((value, unit) => part(`layer/${number}/${unit}`, `Unit ${unit}: ${figure(value)}`,
		rect(m + side + unit * each, fs, each, H - fs * 2, "hit", 2)))];
}

// One unit of a recurrent layer: the arithmetic of its new state.
function unitTerms(layer, unit) {
	const at = values => values[unit], gate = name => layer.values[layer.gates.indexOf(name)][unit];
	const [h0, c0] = layer.previous, [h1, c1] = layer.state;
	if (layer.cell === "lstm") return { terms: [["forget f", gate("forget")], ["× c before", at(c0)],
		["+ input i", gate("input")], ["× candidate g", gate("candidate")],
		["= new c", at(c1)], ["output o", gate("output")], ["× tanh(c)", Math.tanh(at(c1))], ["= new h", at(h1)]],
	formula: `h = \`${figure(gate("output"))}\` · tanh(\`${figure(gate("forget"))}\` · \`${figure(at(c0))}\` + \`${figure(gate("input"))}\` · \`${figure(gate("candidate"))}\`) = \`${figure(at(h1))}\`` };
	if (layer.cell === "gru") return { terms: [["1 − update z", 1 - gate("update")], ["× candidate n", gate("candidate")],
		["+ update z", gate("update")], ["× h before", at(h0)], ["= new h", at(h1)]],
		formula: `h = \`${figure(1 - gate("update"))}\` · \`${figure(gate("candidate"))}\` + \`${figure(gate("update"))}\` · \`${figure(at(h0))}\` = \`${figure(at(h1))}\`` };
	return { terms: [["W x + U h₋₁ + b", layer.before[0][unit]], [`= ${layer.activation}`, at(h1)]],
		formula: `h = ${layer.activation}(\`${figure(layer.before[0][unit])}\`) = \`${figure(at(h1))}\`` };
}

function unitView(stage, layer, unit) {
	const { fs, W, H, narrow, m } = boxOf(stage), { terms } = unitTerms(layer, unit),
		rh = Math.min((H - fs * 2) / terms.length, fs * 5);
	const zero = m + (narrow ? W * 0.6 : W * 0.4),
		scale = (narrow ? W * 0.25 : W * 0.34) / largest(terms.map(([, value]) => value));
	return [line(`M${zero} ${fs}v${rh * terms.length}`, "axis"), terms.map(([name, value], n) => {
		const y = fs + (n + 0.5) * rh, size = Math.abs(value) * scale, result = name.startsWith("=");
		return [text(m, y + fs * 0.4, name, result ? "bold" : ""), signedBar(value, zero, y - rh * 0.25, size, rh * 0.5),
			text(value < 0 ? zero + 8 : zero + size + 8, y + fs * 0.4, figure(value), result ? "bold" : ""),
			result && line(`M${m} ${y - rh / 2}H${W - m}`, "axis")];
	})];
}

// One order of an n-gram model: how often each candidate followed the context, and what the shorter context adds.
function orderView(stage, order) {
	const { fs, W, H, narrow, m } = boxOf(stage), rows = stage.choice.candidates.slice(0, 12);
	const [p, counts, own = p] = ["probability", "counts", "from its own counts"].map(name => valuesOf(order, name));
	const rh = Math.min((H - fs * 4) / rows.length, fs * 4), most = largest(p.slice(0, rows.length)),
		left = m + fs * (narrow ? 7 : 10), count = left + fs * 5, room = W - m - count - fs * 6;
	return [text(left, fs * 1.4, "count", "bold"),
		text(count, fs * 1.4, narrow ? "probability" : "probability: solid from its counts, pale from the shorter context", "bold"),
		rows.map(({ piece }, n) => {
			const y = fs * 2.4 + (n + 0.5) * rh, solid = (Math.min(own[n], p[n]) / most) * room, full = (p[n] / most) * room;
			return [text(m, y + fs * 0.35, tokenName(piece), "mono"),
				text(left, y + fs * 0.35, counts ? `${withCommas(counts[n])}×` : ""),
				rect(count, y - rh * 0.28, solid, rh * 0.56, "pos", 1), rect(count + solid, y - rh * 0.28, full - solid,
					rh * 0.56, "pale", 1),
				text(count + full + 8, y + fs * 0.35, share(p[n]))];
		})];
}

// A closer view: its picture, caption [title, text, formula], the names of the path, and how many siblings it has.
export function closer(stage, path) {
	const { step, threads: t, names, here, head, choice } = stage, [kind, ...rest] = path, [i, j] = rest.map(Number);
	const view = (children, crumbs, caption, siblings = 0) => ({ children, crumbs, caption, siblings });
	if (kind === "embedding") {
		const { words, x, added } = t.embedding, place = t.rows[i], id = step.ids[place], name = quoted(names[i]);
		const places = added && x[i].map((value, k) => value - words[i][k]);
		const changed = words?.[i].length === x[i].length && words[i].some((value, k) => Math.abs(value - x[i][k]) > 1e-4);
		const token = [`E[${id}], the token`, words?.[i], `w${i}`], stream = label => [label, x[i], `x${i}`];
		const rows = added ? [token, [`+ P[${place}], the position`, places, `p${i}`], stream("= x, the stream begins")]
			: changed ? [token, stream("x, after norm or scaling")] : [stream(`x = E[${id}]`)];
		return view(stackedVectors(stage, rows), [`Embedding of ${name}`], [`Embedding of ${name}`, added
			? "One row for the token and one for its position, added number by number."
			: "One row of the table, selected by the token.",
		`x = E[\`${id}\`]${added ? ` + P[\`${place}\`]` : ""}`], names.length);
	}
	if (kind === "logit") {
		const { features, rows, bias } = choice.factors, { piece, logit } = choice.candidates[i], name = quoted(piece);
		return view(product(stage, { a: rows[i], b: features, names: [`row of ${name}`, lastOf(stage)],
			end: total =>
				`${bias ? `, + bias ${figure(bias[i])}` : ""} → logit ${figure(logit)}${Math.abs(total + (bias?.[i] ?? 0) - logit) > 0.02 ? " (capped)" : ""}` }),
		["Logits", name],
			[`Logit of ${name}`, `The row of this token times the ${lastOf(stage)}, number by number. The sum is its score.`,
			`z = w · x = \`${figure(logit)}\``], rows.length);
	}
	if (kind === "ff") {
		const feed = t.block.feedforward, known = feed.units?.indexOf(i) ?? -1, f = feed.activation;
		if (i === undefined || known < 0) return view(neuronGrid(stage, feed), ["Feed-forward"],
			["Feed-forward", "Each neuron responds to one pattern in the stream. Choose one to see its sum.",
			feed.factors ? `${f}(W_{g} n) ⊙ W_{u} n` : `${f}(W_{1} n)`]);
		const before = feed.before[i], bias = feed.bias?.[known];
		return view(product(stage, { a: feed.up[known], b: feed.read, names: [`weights of neuron ${i}`,
			"what the layer reads"], end: _ => `${bias ? `, + bias ${figure(bias)}` : ""} → ${f} → `
			+ (feed.factors ? `× ${figure(feed.factors[i])} = ${figure(feed.hidden[i])}` : figure(feed.hidden[i])) }),
			["Feed-forward", `neuron ${i}`],
		[`Neuron ${i}`,
			`Its weights times the stream, summed. ${f} then ${feed.hidden[i] > 0 ? "passes it on" : "holds it back"}.`,
			`${f}(\`${figure(before)}\`)${feed.factors ? ` · \`${figure(feed.factors[i])}\`` : ""} = \`${figure(feed.hidden[i])}\``],
		feed.units.length);
	}
	if (kind === "head" || kind === "cross") {
		const [attention, keyNames, kindName] = kind === "cross" ? [t.block.cross, stage.sourceNames, "Cross-attention, h"]
			: [t.block.attention, names, "H"];
		const own = headOf(attention, head), root = hasRoot(attention), scale = scaleText(attention);
		const crumbs = [`Block ${t.open}`, `${kindName}ead ${own.head}`];
		if (i === undefined) return view(headView(stage, attention, { names, keyNames, go: kind, here }), crumbs,
			[`Head ${own.head}`, "Each row is one token asking, and sums to 100%. Every head has its own pattern.",
			`A = softmax(Q K^{T} ${scale})`], attention.q.length);
		const name = quoted(names[i]), row = { q: own.q[i], k: own.k, v: own.v, scores: own.scores[i],
			weights: own.weights[i], output: i === here ? own.output : null };
		if (j === undefined) {
			const terms = strongestOf(row.weights, 2).map(n =>
				`\`${row.weights[n].toFixed(2)}\` v_{${keyNames[n].replace("␣", "")}}`);
			return view(rowView(stage, row, { name: names[i], names: keyNames, go: `${kind}/${i}`, scoreName: root
				? `q·k/√${own.q[0].length}` : "score" }), [...crumbs, `row ${name}`],
				[`Row ${name}`, "Key, score, share and value of each token that it may look at. Choose one to see its sum.",
					`o = ${terms.join(" + ")} + …`], names.length);
		}
		const sum = dot(row.q, row.k[j]), score = row.scores[j], bias = score === null ? 0 : score - sum * attention.scale;
		return view(product(stage, { a: row.q, b: row.k[j], names: [`q of ${name}`, `k of ${quoted(keyNames[j])}`],
			end: total =>
			` ${root ? `÷ √${own.q[0].length}` : `× ${brief(attention.scale)}`} = ${figure(total * attention.scale)}`
			+ (Math.abs(bias) > 2e-3 ? `, ${bias < 0 ? "−" : "+"} ${figure(Math.abs(bias))} for the position` : "")
				+ ` → score ${score === null ? "masked" : figure(score)}` }),
				[...crumbs, `row ${name}`, `key ${quoted(keyNames[j])}`],
		["One score",
			`${row.q.length} products, one sum: how well the query of ${name} fits the key of ${quoted(keyNames[j])}.`,
			`s = \`${figure(sum)}\` ${scale} = \`${score === null ? "−∞" : figure(score)}\``], keyNames.length);
	}
	if (kind === "align") {
		const { scores, weights, memory } = t.source, name = quoted(names[here]);
		return view(rowView(stage, { scores: scores[here], weights: weights[here], v: memory, output: null },
			{ name: names[here], names: stage.sourceNames, scoreName: "energy" }), ["Alignment"],
			[`Alignment after ${name}`,
				"Energy, share and annotation of each source token. Their weighted sum is the context.", "c = Σ a_{j} h_{j}"]);
	}
	if (kind === "layer") {
		const layer = t.layers[i], crumbs = [layerName(stage, i)];
		if (j === undefined) return view(layerView(stage, layer, i), crumbs, [layer.cell === "elman" ? "Hidden state"
			: `${layer.cell.toUpperCase()} cell at ${quoted(names[here])}`,
			"Every column is one unit: its gates decide what is kept and what is written.", CELL_FORMULAS[layer.cell]],
			t.layers.length);
		return view(unitView(stage, layer, j), [...crumbs, `unit ${j}`],
			[`Unit ${j}`, "One number of the new state and its operands.", unitTerms(layer, j).formula],
			layer.state[0].length);
	}
	const order = step.stages.find(each => each.id === `order.${i}`);
	return view(orderView(stage, order), [order.title], [order.title, order.about, order.formula]);
}

export const CELL_FORMULAS = { lstm: "c = f ⊙ c_{−1} + i ⊙ g,   h = o ⊙ tanh(c)", gru: "h = (`1` − z) ⊙ n + z ⊙ h_{−1}",
	elman: "h = f(W x + U h_{−1} + b)" };
