// A table as the pages that stand alone have it: { header, rows, title, remarks, text }, where `text` are the columns
// that stand to the left. A long one is folded.
import { h } from "./dom.js";

const MANY = 16;

export function table({ header, rows, title, remarks = [], text = [0], folds = true }) {
  const side = n => text.includes(n) ? undefined : "n";
  const drawn = h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": title || header[0] },
    h("table", { class: "table" },
      h("thead", {}, h("tr", {}, header.map((cell, n) => h("th", { scope: "col", class: side(n) }, cell)))),
      h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, n) =>
        h("td", { class: side(n) ?? (cell.startsWith("  ") && "in") }, cell)))))));
  const said = remarks.map(remark => h("p", { class: "soft about" }, remark));
  return folds && rows.length > MANY
    ? h("details", { class: "fold" }, h("summary", {}, `${title}: ${rows.length} rows`), drawn, said)
    : h("div", {}, title && h("p", { class: "caption", "aria-hidden": "true" }, title), drawn, said);
}
