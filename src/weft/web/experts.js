// Experts of each token of a text: the text of one layer, coloured by the strongest expert, and how much each expert reads.
import { h, soft } from "./dom.js";
import { indexIn, inlineSelect, panel, shadedText } from "./shaded.js";
import { percent } from "./words.js";

const GOLDEN = 137.508; // degrees between the hues of neighbouring experts

const hueOf = expert => `oklch(0.62 0.17 ${(25 + expert * GOLDEN) % 360})`;

// `data` is the JSON of explain/experts.py's ExpertMap; `changed({ layer, place })` is called with another selection.
export function mount(element, data, /** @type {ExpertsOptions} */ { layer, place, changed = () => {} } = {}) {
	let state = { layer: indexIn(data.layers, layer) ?? 0, place: indexIn(data.tokens, place) ?? 0 };
	const { element: details, show: describe } = panel("Select a token to see its experts.");
	const strip = shadedText({ label: "The text, coloured by expert", tokens: data.tokens, choose: n => choose(n) });
	const spans = [...strip.element.querySelectorAll(".shaded-token")], load = h("div.experts-load");
	const even = percent(data.chosen[0][0].length / data.experts);
	const swatch = (expert, text) => h("li.shaded-swatch", { style: { "--s": 0.8, "--hue": hueOf(expert) } }, text);

	const fill = () => {
		const chosen = data.chosen[state.layer], weights = data.weights[state.layer];
		spans.forEach((span, n) => span.style.setProperty("--hue", hueOf(chosen[n][0])));
		strip.shade(weights.map(([strongest]) => 0.25 + 0.75 * Math.min(1, strongest)));
		const counts = Array(data.experts).fill(0);
		chosen.flat().forEach(expert => { counts[expert] += 1; });
		const most = Math.max(...counts);
		load.replaceChildren(...counts.map((count, expert) => h("div",
			h("span", expert),
			h("span.experts-bar", { style: { "--hue": hueOf(expert), width: `${100 * count / most}%` } }),
			soft(percent(count / data.tokens.length)))));
	};
	const choose = (n, quiet = false) => {
		strip.mark(n);
		state = { ...state, place: n };
		const pairs = data.chosen[state.layer][n].map((expert, i) => [expert, data.weights[state.layer][n][i]]);
		describe(h("p", h("b", data.tokens[n].piece), `, ${data.layers[state.layer]}, is read by`),
			h("ol", pairs.map(([expert, weight]) => swatch(expert, `expert ${expert}, weight ${weight.toFixed(2)}`))));
		if (!quiet) changed({ ...state });
	};
	const layers = inlineSelect("Experts of", Object.fromEntries(data.layers.map((name, n) => [n, name])), state.layer,
		"experts-layer", n => {
			state = { ...state, layer: Number(n) };
			fill();
			choose(state.place);
		});
	element.replaceChildren(h("div.experts", layers, details, h("div.saliency-read", strip.element,
		h("div", h("h3", "Share of the tokens that each expert reads"), soft(`Spread evenly, each would read ${even}.`), load))));
	fill();
	choose(state.place, true);
}
