// A text with shaded tokens. One is selected by a click or the arrow keys; others can be pointed at.
import { h, roving, select, set, soft } from "./dom.js";
import { percent } from "./words.js";

const LEGEND = [0, 0.25, 0.5, 0.75, 1];

// Shade of a value, 0 … 1; `top` and more are the darkest.
export function shadeOf(value, top) {
	return value === null || top <= 0 ? 0 : Math.min(1, Math.abs(value) / top);
}

// An index into a list from the address, which may hold anything; undefined if it is not one.
export function indexIn(list, text) {
	const place = Number(text ?? NaN);
	return Number.isInteger(place) && place >= 0 && place < list.length ? place : undefined;
}

const twoDigits = value => String(+value.toPrecision(2));

// The legend: shades and their values; `more`: there are larger values; `below`: there are negative ones; `shareOf` a shade
// returns its share of `top`.
export function legend(name, top, { more = false, below = false, show = twoDigits, shareOf = shade => shade } = {}) {
	const swatch = step => h("span.shaded-swatch", { style: { "--s": step } },
		show(shareOf(step) * top) + (more && step === 1 ? "+" : ""));
	return h("p.shaded-legend", h("span", name), LEGEND.map(swatch),
		below ? h("span.shaded-swatch.shaded-below", { style: { "--s": 0.6 } }, "below 0") : null);
}

// The space before a word stays white. A line break of two characters is shown by the second.
export function splitSpace(text) {
	const plain = text.includes("\n") || text === "\r" ? text.replaceAll("\r", "") : text;
	return /^ \S/u.test(plain) ? [" ", plain.slice(1)] : ["", plain];
}

// The symbol before a token: for a token without text, or for a line break.
function symbolOf(token) {
	const lines = token.text.split("\n").length - 1;
	return token.text.replace(/^\r+|\r+$/g, "") ? "⏎".repeat(lines) : token.piece;
}

function tokenOf(token) {
	const [space, text] = splitSpace(token.text), symbol = symbolOf(token);
	const label = text.trim() ? {} : { "aria-label": token.piece };
	const span = h("span.shaded-token", { role: "option", tabindex: "-1", "aria-selected": "false", ...label },
		symbol ? h("span.shaded-sign", { "aria-hidden": "true" }, symbol) : null, text);
	return [space, span];
}

// `tokens`: [{ text, piece }]. `choose(n)` is called with a selected token, `point(n)` with the one below the pointer.
// Returns the `element`, `shade(shades)`, in which negative shades are marked, `mark(n)`, which selects a token, and
// `light(places)`, which outlines some.
/**
 * @param {{ label: string, tokens: { text: string, piece: string }[], choose?: (n: number) => void,
 *   point?: (n: number) => void }} options
 */
export function shadedText({ label, tokens, choose = () => {}, point = () => {} }) {
	const nodes = tokens.map(tokenOf), spans = nodes.map(([, span]) => span);
	const indices = new Map(spans.map((span, n) => [span, n]));
	const element = h("div.shaded-text", { role: "listbox", "aria-orientation": "horizontal", dir: "auto",
		"aria-label": `${label}; arrow keys move between tokens` }, nodes.flat());
	let at = 0;

	const mark = n => {
		if (!spans[n]) return;
		for (const [place, on] of [[at, false], [n, true]]) {
			spans[place].tabIndex = on ? 0 : -1;
			spans[place].setAttribute("aria-selected", on);
		}
		at = n;
	};
	const tokenAt = event => indices.get(event.target.closest(".shaded-token"));
	roving(element, () => spans, { onfocus: span => {
		const n = indices.get(span) ?? 0;
		if (n === at && span.getAttribute("aria-selected") === "true") return;
		mark(n);
		choose(n);
	} });
	set(element, { onclick: event => spans[tokenAt(event) ?? -1]?.focus({ preventScroll: true }), onpointerover(event) {
		const n = tokenAt(event);
		if (n !== undefined) point(n);
	}, onpointerleave: () => point(-1) });
	const shade = shades => spans.forEach((span, n) => {
		span.style.setProperty("--s", Math.abs(shades[n] ?? 0).toFixed(3));
		span.classList.toggle("shaded-below", shades[n] < 0);
	});
	const light = places => spans.forEach((span, n) => span.classList.toggle("linked", places.includes(n)));
	return { element, shade, mark, light };
}

// A labelled <select> within a sentence; `names` is { name: label }.
export function inlineSelect(label, names, name, kind, onchange) {
	return h("label", { class: kind }, `${label} `, select(Object.entries(names), name, onchange));
}

// The details of the selected token or cell; a screen reader announces them.
export function panel(hint) {
	const element = h("div.shaded-details", { "aria-live": "polite" }, soft(hint));
	return { element, show: (...parts) => element.replaceChildren(...parts) };
}

// Tokens with their probabilities, the most probable first.
export function predictionList(predictions) {
	return h("ol", predictions.map(({ piece, probability }) =>
		h("li.shaded-swatch", { style: { "--s": probability.toFixed(3) } },
			h("b", piece), ` ${percent(probability)}`)));
}
