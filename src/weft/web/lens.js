// Logit lens: prediction of each layer if the model ended there, layers by tokens.
import { h, roving } from "./dom.js";
import { indexIn, inlineSelect, legend, panel } from "./shaded.js";
import { scrollRegion } from "./table.js";
import { percent, withCommas } from "./words.js";

const CONTENTS = { guess: "the layer's prediction", rank: "rank of the final prediction" };

function layerNames(layers) {
  const last = layers - 2;
  return ["embedding", ...Array.from({ length: last }, (_, n) => `layer ${n}`), `layer ${last}, output`];
}

const rankOf = (data, row, column) => withCommas(data.final_rank[row][column]);

// Text and shade of a cell: the prediction and its probability, or the rank of the model's final prediction.
function content(data, show, row, column) {
  const { piece, probability } = data.guesses[row][column];
  return show === "rank" ? [rankOf(data, row, column), data.final_probability[row][column]] : [piece, probability];
}

function cellDetails(data, names, row, column) {
  const { piece, probability } = data.guesses[row][column];
  const final = data.guesses.at(-1)[column].piece;
  const at = data.masked ? "at" : "after";
  const ranks = data.final_rank.map((_, layer) => rankOf(data, layer, column)).join(" → ");
  const here = row === data.guesses.length - 1 ? [] : [" The output's ", h("b", {}, final),
    ` has ${percent(data.final_probability[row][column])} here, rank ${rankOf(data, row, column)}.`];
  return [
    h("p", {}, `${names[row]}, ${at} `, h("b", {}, data.read[column]), ": ", h("b", {}, piece),
      ` ${percent(probability)}.`, here),
    h("p", { class: "soft" }, "Rank of ", h("b", {}, final), ` from the embedding to the output: ${ranks}`),
  ];
}

// `data` is the JSON of explain/lens.py's Lens. `options`: the initial view and selection, and
// `changed({ show, row, column })`, which is called with other ones.
/**
 * @param {any} element
 * @param {any} data
 * @param {{ show?: string, row?: any, column?: any, changed?: (state: any) => void }} options
 */
export function mount(element, data, { show = "guess", row, column, changed = () => {} } = {}) {
  const layers = data.guesses.length;
  const names = layerNames(layers);
  let state = { show: Object.hasOwn(CONTENTS, show) ? show : "guess", row: layers - 1, column: 0 };
  const cells = data.guesses.map((guesses, layer) => guesses.map((_, n) => {
    const same = data.final_rank[layer][n] === 1;
    const at = { row: layer, column: n };
    return h("td", { tabindex: "-1", class: same ? "lens-same" : "", dataset: at }, h("span"));
  }));
  const fill = () => cells.forEach((line, layer) => line.forEach((cell, n) => {
    const [text, share] = content(data, state.show, layer, n);
    cell.firstChild.textContent = text;
    cell.style.setProperty("--s", share.toFixed(3));
  }));
  const { element: details, show: describe } = panel("Select a cell to see details.");
  details.classList.add("lens-details");
  const mark = (toRow, toColumn) => {
    const old = cells[state.row][state.column];
    old.tabIndex = -1;
    old.classList.remove("lens-chosen");
    state = { ...state, row: toRow, column: toColumn };
    const cell = cells[toRow][toColumn];
    cell.tabIndex = 0;
    cell.classList.add("lens-chosen");
    describe(...cellDetails(data, names, toRow, toColumn));
  };
  const choose = (toRow, toColumn) => {
    mark(toRow, toColumn);
    changed({ ...state });
  };
  const find = event => {
    const cell = event.target.closest("td");
    return cell ? { row: Number(cell.dataset.row), column: Number(cell.dataset.column) } : null;
  };

  const heads = pieces => pieces.map(piece => h("th", { scope: "col" }, h("span", {}, piece || "?")));
  const rows = cells.map((line, layer) => h("tr", {}, h("th", { scope: "row" }, names[layer]), line)).reverse();
  const body = h("tbody", {}, rows);
  const label = "The most probable token at every layer; arrow keys move between cells";
  const heading = data.masked ? "in the text" : "next in the text";
  const table = h("table", { role: "grid", "aria-label": label },
    h("thead", {}, h("tr", {}, h("th", { scope: "row" }, heading), heads(data.following))),
    body,
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "token read"), heads(data.read))));
  roving(body, () => [...cells].reverse().flat(),
    { row: cell => cells[cell.dataset.row],
      onfocus: cell => choose(Number(cell.dataset.row), Number(cell.dataset.column)) });
  body.addEventListener("click", event => {
    const at = find(event);
    if (at) cells[at.row][at.column].focus({ preventScroll: true });
  });
  body.addEventListener("pointerover", event => {
    const at = find(event);
    if (at && event.pointerType === "mouse") describe(...cellDetails(data, names, at.row, at.column));
  });
  body.addEventListener("pointerleave", () => describe(...cellDetails(data, names, state.row, state.column)));
  const key = h("div");
  const explain = () => key.replaceChildren(legend(
    `probability of the ${state.show === "rank" ? "final " : ""}prediction`, 1, { show: percent }));
  const chosen = inlineSelect("Each cell shows", CONTENTS, state.show, "lens-show", name => {
    state = { ...state, show: name };
    fill();
    explain();
    changed({ ...state });
  });
  const scroll = scrollRegion("Logit lens, scrolls sideways", table);
  fill();
  explain();
  element.replaceChildren(h("div", { class: "lens" }, chosen, key, details, scroll));
  mark(indexIn(cells, row) ?? state.row, indexIn(data.read, column) ?? state.column);
  if (state.column) scroll.scrollLeft = cells[state.row][state.column].offsetLeft - scroll.clientWidth / 2;
}
