// Saliency: tokens that a prediction depends on, by the gradient of its log-probability.
import { h, soft } from "./dom.js";
import { inlineSelect, legend, panel, shadedText, shadeOf } from "./shaded.js";
import { table } from "./table.js";
import { capitalised, minus, percent } from "./words.js";

const MEASURES = { norm: "gradient norm", times_input: "gradient × input" };
const MAX_LISTED = 8; // tokens listed as the most important ones

const MIN_SIGNED = 0.2; // shade from which the sign is marked
// the square root, so that more than the largest value is seen
const rootShade = (value, top) => Math.sqrt(shadeOf(value, top));
const isLarge = value => value === 0 || Math.abs(value) >= 0.001;
const plain = value => (isLarge(value) ? String(+value.toPrecision(3)) : value.toExponential(1));
const signed = value => (value > 0 ? "+" : "") + minus(plain(value));
const NEXT = { text: "", piece: "next?" };

function tokenHeading(data, isNext) {
	const kind = isNext ? "The model's next token, " : "";
	const condition = data.masked ? ", masked and predicted from both sides" : "";
	const probability = `probability ${percent(Math.exp(data.log_prob))}, log p ${minus(data.log_prob.toFixed(2))} nats`;
	return h("p.saliency-target", kind, h("b", data.target),
		`${condition}: ${probability}. It depends on:`);
}

// The most important tokens of all sides, with bars; those that lower log p are hatched, one longer than the scale is broken.
function mostImportant(data, measure, top) {
	const all = data.sides.flatMap(side => side.tokens.map((token, n) => ({ side, token, value: side[measure][n] })));
	all.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
	const bar = value => h("span", { class: `saliency-bar${value < 0 ? " saliency-less" : Math.abs(value) > top ? " saliency-beyond" : ""}`,
		style: { "--s": rootShade(value, top).toFixed(3) } });
	return h("ol.saliency-most", all.slice(0, MAX_LISTED).map(({ side, token, value }) => h("li",
		h("b", token.piece), soft(data.sides.length > 1 ? side.name : ""), bar(value),
		h("span.saliency-number", measure === "norm" ? plain(value) : signed(value)))));
}

// `data` is the JSON of explain/saliency.py's Saliency. `options`: the initial measure, `changed({ measure })`, and
// `explain(position)` if another prediction can be requested, and the `heading` of a prediction that is not a token.
export function mount(element, data, /** @type {SaliencyOptions} */ { measure = "norm", explain = null, changed = () => {}, heading } = {}) {
	const focused = element.querySelector(".saliency-text")?.contains(document.activeElement);
	const text = data.sides.at(-1);
	let chosen = Object.hasOwn(MEASURES, measure) ? measure : "norm";
	const { element: details, show: describe } = panel(`${explain ? "Point at" : "Select"} a token to see its values.`);
	const describeToken = side => n => {
		if (side.norm[n] === undefined) return;
		const values = ` gradient norm ${plain(side.norm[n])}, gradient × input ${signed(side.times_input[n])}`;
		describe(h("p", h("b", side.tokens[n].piece), values));
	};

	// nothing follows a finished translation, and a masked model has all of its tokens
	const hasNext = explain !== null && !data.masked && data.sides.length === 1;
	const tokens = [...text.tokens, ...data.rest, ...(hasNext ? [NEXT] : [])];
	const target = data.masked ? data.place : data.place + 1;
	const strips = data.sides.slice(0, -1).map(side =>
		shadedText({ label: `The ${side.name}`, tokens: side.tokens, choose: describeToken(side),
			point: describeToken(side) }));
	const textStrip = shadedText(explain === null
		? { label: "The text", tokens: text.tokens, choose: describeToken(text) }
		: { label: "The text; select the token to explain", tokens, point: describeToken(text),
			choose: n => (data.masked || n > 0) && explain(data.masked ? n : n - 1) });
	textStrip.element.classList.add("saliency-text");
	strips.push(textStrip);

	const key = h("div"), list = h("div");
	const shade = () => {
		// a mask depends mostly on itself, and would leave all other tokens white
		const others = (value, n) => (data.masked && n === data.place ? 0 : Math.abs(value));
		const top = Math.max(...data.sides.flatMap(side => side[chosen].map(others)));
		const below = data.sides.some(side => side[chosen].some(value => value < 0));
		const show = value => plain(+value.toPrecision(2));
		key.replaceChildren(legend(`${MEASURES[chosen]}, square-root scale`, top, { below, more: data.masked, show, shareOf: shade => shade ** 2 }));
		const mark = value => rootShade(value, top) * (value < 0 && rootShade(value, top) >= MIN_SIGNED ? -1 : 1);
		strips.forEach((strip, n) => strip.shade(data.sides[n][chosen].map(mark)));
		list.replaceChildren(mostImportant(data, chosen, top));
	};
	const measures = inlineSelect("Shaded by", MEASURES, chosen, "saliency-measure", name => {
		chosen = name;
		shade();
		changed({ measure: chosen });
	});
	const tables = data.sides.map(side => table({ folds: true, text: [0, 1],
		title: data.sides.length > 1 ? `All tokens of the ${side.name} as a table` : "All tokens as a table",
		header: ["position", "token", ...Object.values(MEASURES)], rows: side.tokens.map((token, n) =>
			[n, token.piece, plain(side.norm[n]), signed(side.times_input[n])]) }));
	const withTitle = (strip, n) => (data.sides.length > 1
		? [h("h3", capitalised(data.sides[n].name)), strip.element] : strip.element);
	element.replaceChildren(h("div.saliency",
		measures, key, heading ?? tokenHeading(data, target >= text.tokens.length + data.rest.length), h("div.saliency-read",
			h("div", details, strips.map(withTitle)), h("div", h("h3", "Most important tokens"), list)), tables));
	shade();
	if (explain === null) return;
	textStrip.mark(target);
	if (focused) textStrip.element.querySelector("[aria-selected=true]")?.focus({ preventScroll: true });
}
