// A table of layers by tokens, the first layer at the bottom. The pointer and the arrow keys select a cell.
import { h, roving } from "./dom.js";
import { scrollRegion } from "./table.js";

const line = (name, cells) => h("tr", h("th", { scope: "row" }, name), cells);
const heading = (name, tokens) => line(name, tokens.map(token => h("th", { scope: "col" }, h("span", token || "?"))));

// `names` of the layers, `tokens`; `head` and `foot`: [name, tokens] of the lines above and below; `content(row, column)`:
// text, shade and class of a cell; `at`: the cell that is selected first; `choose(row, column)` is called with others.
// Returns the `element`, `fill()`, which shows other contents, and `placeOf(event)`, the cell below the pointer.
export function tokenGrid(/** @type {any} */ { title, label, names, tokens, head, foot, content, at, choose }) {
	const cells = names.map((_, row) => tokens.map((_, column) =>
		h("td", { tabindex: -1, class: content(row, column)[2], dataset: { row, column } }, h("span"))));
	const fill = () => cells.forEach((cellsOfRow, row) => cellsOfRow.forEach((cell, column) => {
		const [text, shade] = content(row, column);
		cell.firstChild.textContent = text;
		cell.style.setProperty("--s", shade.toFixed(3));
	}));
	const placeOf = ({ target }) => {
		const cell = target.closest("td");
		return cell && [Number(cell.dataset.row), Number(cell.dataset.column)];
	};
	const body = h("tbody", { onclick: ({ target }) => target.closest("td")?.focus({ preventScroll: true }) },
		cells.map((cellsOfRow, row) => line(names[row], cellsOfRow)).reverse());
	let chosen = cells[at[0]][at[1]];
	chosen.tabIndex = 0;
	chosen.classList.add("lens-chosen");
	roving(body, () => [...cells].reverse().flat(), { row: cell => cells[cell.dataset.row], onfocus: cell => {
		chosen.classList.remove("lens-chosen");
		chosen = cell;
		cell.classList.add("lens-chosen");
		choose(...placeOf({ target: cell }));
	} });
	fill();
	return { fill, placeOf, body, element: scrollRegion(`${title}, scrolls sideways`, h("table", { role: "grid",
		"aria-label": `${label}; arrow keys move between cells` }, head && h("thead", heading(...head)), body,
	h("tfoot", heading(...foot)))), offset: () => chosen.offsetLeft };
}
