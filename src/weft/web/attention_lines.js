// Attention: lines of one token, as in the lecture. Tokens in two columns, lines from a query to its keys, one colour
// per head (Vaswani et al. 2017, figure 3). Squares beside a key show how much each head attends to it.
import { picture, s } from "./dom.js";
import { clamp, share, short, textWidth } from "./words.js";

const MAX_ROWS = 44, ROW = 19; // rows, and pixels of a row
const MIN_WEIGHT = 0.02; // of a line

const BOLD = "bold 13px system-ui, sans-serif";

// Tokens to show: all, or in a long text those around the query and the strongest keys.
function shownTokens(maps, query, strongest) {
	let left = [...maps.queries.keys()], right = [...maps.keys.keys()];
	if (left.length > MAX_ROWS) left = left.filter(place => Math.abs(place - query) <= 12);
	if (right.length > MAX_ROWS) {
		const max = new Map();
		for (const each of strongest) for (const [key, weight] of each) max.set(key, Math.max(max.get(key) ?? 0, weight));
		const shownKeys = [...max].sort((a, b) => b[1] - a[1]).slice(0, MAX_ROWS - 8);
		right = shownKeys.map(([key]) => key).sort((a, b) => a - b);
	}
	return [left, right];
}

// Keys of [key, weight] grouped by the weight, rounded to this many steps.
function groupByWeight(strongest, steps) {
	const groups = new Map();
	for (const [key, weight] of strongest) {
		const rounded = Math.round(weight * steps) / steps;
		groups.set(rounded, [...groups.get(rounded) ?? [], key]);
	}
	return groups;
}

// Draw the lines of a query in some heads of a layer; `room` is the available width.
export function lines(maps, { layer, heads, query }, room) {
	const narrow = room < 480, strongest = heads.map(head => maps.strongest(layer, head, query));
	const [left, right] = shownTokens(maps, query, strongest);
	const labelOf = (labels, place) =>
		(labels.length > MAX_ROWS ? `${place}: ` : "") + short(labels[place], narrow ? 9 : 14);
	const labelWidth = (labels, places) =>
		14 + Math.ceil(Math.max(...places.map(place => textWidth(labelOf(labels, place), BOLD))));
	const from = labelWidth(maps.queries, left), keyWidth = labelWidth(maps.keys, right);
	const square = clamp(Math.floor((room - from - keyWidth - 60) / heads.length), 9, 14);
	const squares = square * heads.length + 4, { single } = maps;
	const to = from + clamp(room - from - keyWidth - squares, 56, 280), cells = to + keyWidth;
	const height = ROW * (Math.max(left.length, right.length) + 1.5), width = cells + squares;
	const y = row => ROW * (row + 1.5), rows = new Map(right.map((key, row) => [key, row])), start = left.indexOf(query);
	// hues around the colour wheel, every other one darker, as in print
	const hue = head => `hsl(${Math.round(209 + (360 * head) / maps.heads) % 360} 62% ` +
		`calc(var(--att-lightness) + ${head % 2 ? 0 : 12}%))`;
	const parts = [], summary = [];
	const text = (x, at, kind, words) => parts.push(s("text", { x, y: at, class: kind }, words));
	left.forEach((place, row) =>
		text(from - 6, y(row), place === query ? "end att-chosen" : "end att-quiet", labelOf(maps.queries, place)));
	right.forEach((place, row) => text(to + 6, y(row), "", labelOf(maps.keys, place)));
	if (!single) text(cells - 6, 10, "end att-tiny", "head");
	heads.forEach((head, n) => {
		// the lines of several heads end side by side, so that none hides another
		const offset = 0.6 * ROW * ((n + 0.5) / heads.length - 0.5), x = cells + n * square;
		const weights = new Map(strongest[n]), [best] = strongest[n];
		if (!single && (square > 13 || n % 2 === 0)) text(x + square / 2 - 1, 10, "middle att-tiny", head);
		// lines of about the same weight are one element; a thousand elements are slow
		const isDrawn = ([key, weight]) => rows.has(key) && (weight >= MIN_WEIGHT || weight === best[1]);
		const lineTo = key => `M${from} ${y(start) + offset}L${to} ${y(rows.get(key)) + offset}`;
		for (const [weight, keys] of groupByWeight(strongest[n].filter(isDrawn), 40))
			parts.push(s("path", { d: keys.map(lineTo).join(""), style: { stroke: hue(head) }, fill: "none",
				"stroke-width": 0.7 + 5 * weight, "stroke-opacity": 0.3 + 0.7 * weight }));
		const squareAt = row => `M${x} ${y(row) - 8}h${square - 2}v16h${2 - square}z`;
		parts.push(s("path.att-cell", { d: right.map((_, row) => squareAt(row)).join("") }));
		const roots = right.filter(key => weights.has(key)).map(key => [key, Math.sqrt(weights.get(key))]);
		for (const [root, keys] of groupByWeight(roots, 20))
			if (root > 0)
				parts.push(s("path", { d: keys.map(key => squareAt(rows.get(key))).join(""), style: { fill: hue(head) },
					opacity: root }));
		if (best) summary.push(`${single ? "" : `head ${head}: `}${maps.keys[best[0]]} ${share(best[1])}`);
	});
	const label = `Lines from ${maps.queries[query]}${single ? "; strongest" : ` in layer ${layer}; strongest by head`}: ${
		summary.join(", ")}`;
	return picture(width, height, { class: "att-svg", role: "img", "aria-label": label }, parts);
}
