// Patching: how much of the logit difference the clean text's activations recover, by layer and position.
import { h } from "./dom.js";
import { indexIn, inlineSelect, legend, panel } from "./shaded.js";
import { table } from "./table.js";
import { tokenGrid } from "./token_grid.js";
import { clamp, minus } from "./words.js";

const MAX_LISTED = 10;
const share = value => `${minus((100 * value).toFixed(1))}%`;

// Nodes, neurons or paths by their effect.
function effects(name, list) {
	const interval = ({ low, high }) => (low === null ? [] : [`${share(low)} … ${share(high)}`]);
	return list.length > 0 && table({ title: `Strongest ${name}s`, text: [0],
		header: [name, "recovered", ...list[0].low === null ? [] : ["95% interval"]],
		rows: list.slice(0, MAX_LISTED).map(each => [each.name, share(each.recovered), ...interval(each)]) });
}

function circuitTable({ kept, nodes, pairs, accuracies }) {
	const rows = Object.entries(accuracies).map(([name, { preferred, likeliest }]) => [name, share(preferred), share(likeliest)]);
	return [h("h3", `Circuit: ${kept.length} of ${nodes} nodes`), h("p", kept.join(", ")),
		table({ header: [`on ${pairs} other pairs`, "answer preferred", "answer likeliest"], text: [0], rows })];
}

// `data` is the JSON of explain/interventions/picture.py's Patching; `changed({ site, row, column })` as in lens.js.
export function mount(element, data, /** @type {PatchOptions} */ { site, row, column, changed = () => {} } = {}) {
	let state = { site: indexIn(data.maps, site) ?? 0, row: 0, column: 0 };
	const { element: details, show: describe } = panel("Select a cell to see its value.");
	const drawn = h("div");
	const draw = (toRow, toColumn) => {
		const { kind, layers, tokens, recovered } = data.maps[state.site];
		const choose = (n, m) => {
			state = { ...state, row: n, column: m };
			describe(h("p", `${kind}, ${/^\d/.test(layers[n]) ? "layer " : ""}${layers[n]}, at `, h("b", tokens[m]),
				`: ${share(recovered[n][m])} of the logit difference is recovered.`));
		};
		const best = Math.max(...recovered.flat()), found = recovered.findIndex(values => values.includes(best));
		const at = [indexIn(recovered, toRow) ?? found, indexIn(tokens, toColumn) ?? recovered[found].indexOf(best)];
		drawn.replaceChildren(tokenGrid({ title: kind, names: layers, tokens, at,
			label: `${kind}: percent of the logit difference recovered, layers upwards`,
			foot: [data.answers ? "token" : "position", tokens],
			content: (n, m) => [minus(String(Math.round(100 * recovered[n][m]) || 0)), clamp(recovered[n][m], 0, 1)],
			choose(n, m) {
				choose(n, m);
				changed({ ...state });
			} }).element);
		choose(...at);
	};
	const kinds = Object.fromEntries(data.maps.map((each, n) => [n, each.kind]));
	const sites = inlineSelect("Site", kinds, state.site, "patch-site", name => {
		state = { ...state, site: Number(name) };
		draw();
		changed({ ...state });
	});
	const [corrupt, clean] = data.difference.map(value => minus(value.toFixed(2)));
	const names = data.answers ? ` of ${data.answers.join(" − ")}` : "";
	const over = data.pairs > 1 ? `, mean of ${data.pairs} pairs` : "";
	element.replaceChildren(...[h("div.lens", h("p", `Logit difference${names}: clean ${clean}, corrupt ${corrupt}${over}.`),
		sites, legend("share recovered", 1, { show: value => `${100 * value}%` }), details, drawn),
		h("div.patch-effects", effects("node", data.nodes), effects("neuron", data.neurons), effects("path", data.paths)),
		...data.circuit ? circuitTable(data.circuit) : []].filter(Boolean));
	draw(row, column);
}
