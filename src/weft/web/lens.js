// Logit lens: prediction of each layer if the model ended there, layers by tokens.
import { h, set } from "./dom.js";
import { indexIn, inlineSelect, legend, panel } from "./shaded.js";
import { tokenGrid } from "./token_grid.js";
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
	const { piece, probability } = data.guesses[row][column], final = data.guesses.at(-1)[column].piece;
	const at = data.masked ? "at" : "after";
	const ranks = data.final_rank.map((_, layer) => rankOf(data, layer, column)).join(" → ");
	const here = row === data.guesses.length - 1 ? [] : [" The output's ", h("b", final),
		` has ${percent(data.final_probability[row][column])} here, rank ${rankOf(data, row, column)}.`];
	return [
		h("p", `${names[row]}, ${at} `, h("b", data.read[column]), ": ", h("b", piece),
			` ${percent(probability)}.`, here),
		h("p.soft", "Rank of ", h("b", final), ` from the embedding to the output: ${ranks}`),
	];
}

// `data` is the JSON of explain/lens.py's Lens; `changed({ show, row, column })` is called with another selection.
export function mount(element, data, /** @type {LensOptions} */ { show = "guess", row, column, changed = () => {} } = {}) {
	const layers = data.guesses.length, names = layerNames(layers);
	let state = { show: Object.hasOwn(CONTENTS, show) ? show : "guess", row: indexIn(data.guesses, row) ?? layers - 1,
		column: indexIn(data.read, column) ?? 0 };
	const { element: details, show: describe } = panel("Select a cell to see details.");
	details.classList.add("lens-details");
	const describeCell = (layer, n) => describe(...cellDetails(data, names, layer, n));
	const grid = tokenGrid({ title: "Logit lens", label: "The most probable token at every layer", names, tokens: data.read,
		head: [data.masked ? "in the text" : "next in the text", data.following], foot: ["token read", data.read],
		at: [state.row, state.column],
		content: (layer, n) => [...content(data, state.show, layer, n), data.final_rank[layer][n] === 1 && "lens-same"],
		choose(layer, n) {
			state = { ...state, row: layer, column: n };
			describeCell(layer, n);
			changed({ ...state });
		} });
	set(grid.body, { onpointerover(event) {
		const at = grid.placeOf(event);
		if (at && event.pointerType === "mouse") describeCell(...at);
	}, onpointerleave: () => describeCell(state.row, state.column) });
	const key = h("div");
	const explain = () => key.replaceChildren(legend(
		`probability of the ${state.show === "rank" ? "final " : ""}prediction`, 1, { show: percent }));
	const chosen = inlineSelect("Each cell shows", CONTENTS, state.show, "lens-show", name => {
		state = { ...state, show: name };
		grid.fill();
		explain();
		changed({ ...state });
	});
	explain();
	describeCell(state.row, state.column);
	element.replaceChildren(h("div.lens", chosen, key, details, grid.element));
	if (state.column) grid.element.scrollLeft = grid.offset() - grid.element.clientWidth / 2;
}
