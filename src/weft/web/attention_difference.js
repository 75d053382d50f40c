// Attention of two models on one text: how one head of the second differs from that head of the first. Where tokens
// differ, those that cover the same characters are one cell: keys are summed, queries averaged.
import { h, picture, s, soft } from "./dom.js";
import { aligned, lettersOf } from "./sides.js";
import { table } from "./table.js";
import { percent, short, sum } from "./words.js";

const MAX_CELLS = 64, SIZE = { room: 380, most: 26, least: 7, label: 13 }; // segments along a side, and pixels
const LISTED = 6;
const VISIBLE = 0.01; // change of a probability

// Changes by [query segment, key segment], or why there are none.
function changes([a, b], selections) {
	if (a.kind !== b.kind) return `${a.name} and ${b.name.toLowerCase()} are not compared.`;
	const rows = aligned([a.queries, b.queries]), columns = aligned([a.keys, b.keys]);
	if (!rows || !columns) return "The two models read different characters.";
	if (Math.max(rows.length, columns.length) > MAX_CELLS || a.block > 1 || b.block > 1) return "Shorten the text to see it.";
	const places = (from, to) => Array.from({ length: to - from }, (_, n) => from + n);
	const of = (maps, { layer, head }, queries, keys) => sum(queries.map(query =>
		sum(keys.map(key => maps.weight(layer, head, query, key))))) / (queries.length || 1);
	const cells = rows.flatMap(([i, to, j, end], row) => columns.flatMap(([k, last, m, stop], column) => {
		if (i === to || j === end) return [];
		const before = of(a, selections[0], places(i, to), places(k, last));
		const after = of(b, selections[1], places(j, end), places(m, stop));
		return Math.abs(after - before) < VISIBLE ? [] : [{ row, column, before, after, query: i }];
	}));
	const nameOf = (list, other) => (/** @type {any} */ [i, to, j, end]) => (i < to ? list.slice(i, to) : other.slice(j, end)).join("");
	return { cells, rows: rows.map(nameOf(a.queries, b.queries)), columns: columns.map(nameOf(a.keys, b.keys)) };
}

// `views` have maps, a layer and a head each; `choose(query)` selects a token of the first.
export function difference(element, views, choose) {
	const found = changes(views.map(view => view.maps), views), [here, there] = views.map(({ maps, layer, head }) =>
		maps.where(layer, head));
	const title = h("h2", here !== there ? `Difference: ${here || "attention"} of A, ${there || "attention"} of B`
		: here ? `Difference in ${here}` : "Difference");
	if (typeof found === "string") return element.replaceChildren(title, soft(found));
	const { cells, rows, columns } = found, widest = names => 7.4 * Math.max(4, ...names.map(name => Math.min(10, name.length)));
	const left = widest(rows), top = widest(columns), each = Math.max(SIZE.least, Math.min(SIZE.most, SIZE.room / Math.max(rows.length,
		columns.length))), every = Math.ceil(SIZE.label / each), label = (names, n) => (n % every ? "" : short(names[n], 10));
	const marks = cells.map(cell => {
		const size = Math.max(2, Math.sqrt(Math.abs(cell.after - cell.before)) * (each - 1)), inset = (each - size) / 2;
		return s("rect", { x: left + cell.column * each + inset, y: top + cell.row * each + inset, width: size, height: size,
			class: cell.after > cell.before ? "more" : "less", onclick: () => choose(cell.query) },
		s("title", `${rows[cell.row]} → ${columns[cell.column]}: ${percent(cell.before)} → ${percent(cell.after)}`));
	});
	const wide = left + each * columns.length + 2, high = top + each * rows.length + 2;
	const plot = picture(wide, high, { class: "att-difference", role: "img",
		"aria-label": "Change of each attention probability, queries down, keys across" },
	s("rect.att-frame", { x: left, y: top, width: each * columns.length, height: each * rows.length }),
	rows.map((_, n) => s("text.end", { x: left - 5, y: top + (n + 0.5) * each + 4 }, label(rows, n))),
	columns.map((_, n) => s("text", { transform: `translate(${left + (n + 0.5) * each + 4} ${top - 5}) rotate(-90)` },
		label(columns, n))), marks);
	const largest = cells.filter(({ row, column }) => lettersOf(rows[row]) && columns[column])
		.sort((x, y) => Math.abs(y.after - y.before) - Math.abs(x.after - x.before)).slice(0, LISTED);
	element.replaceChildren(title, h("div.att-changes", plot, h("div",
		h("p.att-legend.soft", h("span", h("i.more"), "more in B"),
			h("span", h("i.less"), "less in B"), "area: change of the probability"),
		table({ title: "Largest changes", header: ["from", "to", "A", "B"], text: [0, 1], rows: largest.map(each =>
			[short(rows[each.row], 14), short(columns[each.column], 14), percent(each.before), percent(each.after)]) }))));
}
