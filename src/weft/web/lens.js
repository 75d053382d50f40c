// The logit lens: what each layer would predict if the model ended there, layers by tokens.
import { h } from "./dom.js";
import { legend, panel, percent, placeIn } from "./shaded.js";

const SHOWS = { guess: "the layer's guess", rank: "the final answer's rank" };

export function layerNames(layers) {
  const last = layers - 2;
  return ["embedding", ...Array.from({ length: last }, (_, n) => `layer ${n}`), `layer ${last}, output`];
}

const rankOf = (data, row, column) => data.final_rank[row][column].toLocaleString("en");

// What a cell says and how dark it is: the guess and its probability, or how the model's final answer fares there.
function content(data, show, row, column) {
  const { piece, probability } = data.guesses[row][column];
  return show === "rank" ? [rankOf(data, row, column), data.final_probability[row][column]] : [piece, probability];
}

function told(data, names, row, column) {
  const { piece, probability } = data.guesses[row][column];
  const final = data.guesses.at(-1)[column].piece;
  const at = data.masked ? "at" : "after";
  const way = data.final_rank.map((_, layer) => rankOf(data, layer, column)).join(" → ");
  const here = row === data.guesses.length - 1 ? [] : [" The output's ", h("b", {}, final),
    ` has ${percent(data.final_probability[row][column])} here, rank ${rankOf(data, row, column)}.`];
  return [
    h("p", {}, `${names[row]}, ${at} `, h("b", {}, data.read[column]), ": ", h("b", {}, piece),
      ` ${percent(probability)}.`, here),
    h("p", { class: "soft" }, "Rank of ", h("b", {}, final), ` from the embedding to the output: ${way}`),
  ];
}

// `data` is the JSON of explain/lens.py's Lens. `options`: what is shown and chosen at first, and
// `changed({ show, row, column })`, which hears of other choices.
export function mount(element, data, { show = "guess", row, column, changed = () => {} } = {}) {
  const layers = data.guesses.length;
  const names = layerNames(layers);
  const last = data.read.length - 1;
  let state = { show: Object.hasOwn(SHOWS, show) ? show : "guess", row: layers - 1, column: last };
  const cells = data.guesses.map((guesses, layer) => guesses.map((_, place) => {
    const same = data.final_rank[layer][place] === 1;
    const at = { row: layer, column: place };
    return h("td", { tabindex: "-1", class: same ? "lens-same" : "", dataset: at }, h("span"));
  }));
  const fill = () => cells.forEach((line, layer) => line.forEach((cell, place) => {
    const [text, share] = content(data, state.show, layer, place);
    cell.firstChild.textContent = text;
    cell.style.setProperty("--s", share.toFixed(3));
  }));
  const { element: tells, tell } = panel("Choose a cell to see more of it.");
  tells.classList.add("lens-told");
  const mark = (toRow, toColumn) => {
    const old = cells[state.row][state.column];
    old.tabIndex = -1;
    old.classList.remove("lens-chosen");
    state = { ...state, row: toRow, column: toColumn };
    const cell = cells[toRow][toColumn];
    cell.tabIndex = 0;
    cell.classList.add("lens-chosen");
    tell(...told(data, names, toRow, toColumn));
  };
  const choose = (toRow, toColumn) => {
    mark(toRow, toColumn);
    changed({ ...state });
  };
  const find = (event) => {
    const cell = event.target.closest("td");
    return cell ? [Number(cell.dataset.row), Number(cell.dataset.column)] : null;
  };

  const heads = (pieces) => pieces.map((piece) => h("th", { scope: "col" }, h("span", {}, piece || "?")));
  const lines = cells.map((line, layer) => h("tr", {}, h("th", { scope: "row" }, names[layer]), line)).reverse();
  const body = h("tbody", {}, lines);
  const label = "The likeliest token at every layer; arrow keys go from cell to cell";
  const followed = data.masked ? "in the text" : "next in the text";
  const table = h("table", { role: "grid", "aria-label": label },
    h("thead", {}, h("tr", {}, h("th", { scope: "row" }, followed), heads(data.following))),
    body,
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "token read"), heads(data.read))));
  body.addEventListener("focusin", (event) => {
    const at = find(event);
    if (at) choose(...at);
  });
  body.addEventListener("click", (event) => {
    const at = find(event);
    if (at) cells[at[0]][at[1]].focus({ preventScroll: true });
  });
  body.addEventListener("pointerover", (event) => {
    const at = find(event);
    if (at && event.pointerType === "mouse") tell(...told(data, names, ...at));
  });
  body.addEventListener("pointerleave", () => tell(...told(data, names, state.row, state.column)));
  body.addEventListener("keydown", (event) => {
    const { row: here, column: place } = state;
    const to = {
      ArrowRight: [here, Math.min(last, place + 1)], ArrowLeft: [here, Math.max(0, place - 1)],
      ArrowUp: [Math.min(layers - 1, here + 1), place], ArrowDown: [Math.max(0, here - 1), place],
      Home: [here, 0], End: [here, last],
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    cells[to[0]][to[1]].focus();
  });

  const key = h("div", {});
  const explain = () => key.replaceChildren(legend(
    state.show === "rank" ? "probability of the final answer" : "probability of the guess", 1, { show: percent }));
  const chosen = h("label", { class: "lens-show" }, "Each cell shows ", h("select", {
    onchange: (event) => {
      state = { ...state, show: event.target.value };
      fill();
      explain();
      changed({ ...state });
    },
  }, Object.entries(SHOWS).map(([name, text]) => h("option", { value: name, selected: name === state.show }, text))));
  const region = { class: "scroll", role: "region", tabindex: "0", "aria-label": "Logit lens, scrolls sideways" };
  const scroll = h("div", region, table);
  fill();
  explain();
  element.replaceChildren(h("div", { class: "lens" }, chosen, key, tells, scroll));
  mark(placeIn(cells, row) ?? state.row, placeIn(data.read, column) ?? state.column);
  scroll.scrollLeft = cells[state.row][state.column].offsetLeft - scroll.clientWidth / 2;
}
