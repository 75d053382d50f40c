// A table as on standalone pages: { header, rows, title, remarks, text }. Columns in `text` are aligned left; cells are
// texts or elements. A long table is folded.
import { h } from "./dom.js";

const MAX_UNFOLDED = 16; // rows

export function scrollRegion(label, ...children) {
	return h("div.scroll", { role: "region", tabindex: 0, "aria-label": label }, children);
}

export const fold = (summary, ...children) => h("details.fold", h("summary", summary), children);

// `cards`: each row is a card on a narrow page. `named`: the first cell is the row's header. `marked(n)`: highlight it.
export function htmlTable({ header, rows, text, kind = "", cards = false, named = cards, marked = _ => false }) {
	const role = name => (cards ? { role: name } : {}), side = n => (text.includes(n) ? undefined : "n");
	const cellOf = (cell, n) => (named && !n ? h("th", { scope: "row", ...role("rowheader") }, cell)
		: h("td", { class: side(n) ?? (cell.startsWith?.("  ") && "in"), "data-label": cards && header[n],
			...role("cell") }, cell));
	return h("table", { class: `table ${cards ? "cards-narrow" : ""} ${kind}`, ...role("table") },
		h("thead", role("rowgroup"), h("tr", role("row"), header.map((cell, n) =>
			h("th", { scope: "col", class: side(n), ...role("columnheader") }, cell)))),
		h("tbody", role("rowgroup"), rows.map((row, n) =>
			h("tr", { class: marked(n) && "marked", ...role("row") }, row.map(cellOf)))));
}

export const facts = (pairs, kind = "facts") => h("dl", { class: kind }, pairs.map(([name, fact]) =>
	h("div", h("dt", name), h("dd", fact))));

// `folds`: fold always, or never.
/** @param {any} table */
export function table({ rows, title = "", remarks = [], text = [0], folds = rows.length > MAX_UNFOLDED, ...options }) {
	const size = rows.length === 1 ? "1 row" : `${rows.length} rows`;
	const region = scrollRegion(title || options.header[0], htmlTable({ rows, text, ...options }));
	const notes = remarks.map(remark => h("p.soft.about", remark));
	return folds ? fold(`${title}: ${size}`, region, notes)
		: h("div", title && h("p.caption", { "aria-hidden": "true" }, title), region, notes);
}
