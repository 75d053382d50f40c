// Surprisal of each token of a text, and the tokens that the model expected instead.
import { button, h, picture, s, soft } from "./dom.js";
import { indexIn, inlineSelect, legend, panel, predictionList, shadedText, shadeOf, splitSpace } from "./shaded.js";
import { aligned } from "./sides.js";
import { facts, table } from "./table.js";
import { clamp, formatLarge, mean as meanOf, percent, sum as total, withCommas } from "./words.js";

const UNITS = { nats: 1, bits: Math.LN2 }; // nats per unit
const TOPS = [1, 2, 4, 6, 8, 10, 12, 16]; // candidate values for the darkest shade
const MAX_LISTED = 5; // tokens listed as the most surprising
const CONTEXT = 3; // tokens of context on either side
const CHART = { height: 120, left: 34, top: 14, bottom: 6, widest: 1600 };

// −log p of each token in nats; ∞ if it has a rank but no value, null if nothing predicts it.
const surprisals = data => data.nats.map((nats, n) => (nats === null && data.ranks[n] !== null ? Infinity : nats));

const shown = (value, digits = 2) => (Number.isNaN(value) ? "–" : Number.isFinite(value) ? value.toFixed(digits) : "∞");

export function totals(data) {
	const all = surprisals(data), scored = all.filter(nats => nats !== null), sum = total(scored);
	const sizes = data.tokens.map(token => new TextEncoder().encode(token.text).length);
	const bytes = total(sizes.filter((_, n) => all[n] !== null)), mean = sum / scored.length;
	return { tokens: scored.length, mean, perplexity: Math.exp(mean), bitsPerByte: bytes ? sum / Math.LN2 / bytes : NaN };
}

function summary(data, unit) {
	const { tokens, mean, perplexity, bitsPerByte } = totals(data);
	return facts([
		[tokens === 1 ? "token" : "tokens", withCommas(tokens)],
		[`${unit} per token`, shown(mean / UNITS[unit], 3)],
		[data.masked ? "pseudo-perplexity" : "perplexity", formatLarge(perplexity)],
		["bits per byte", shown(bitsPerByte, 3)],
	], "facts surprise-facts");
}

// The darkest shade is at the 95th percentile, rounded, so that shades are comparable between similar texts.
function topOf(values) {
	const finite = values.filter(Number.isFinite).sort((a, b) => a - b);
	const high = finite.length ? finite[Math.floor(0.95 * (finite.length - 1))] : TOPS[0];
	return TOPS.find(top => top >= high) ?? TOPS[TOPS.length - 1];
}

// One stem per token, and a line at the mean. Redrawn only when the values or the width change.
function chart(values, unit, width, max) {
	const { height, left, top, bottom } = CHART;
	const finite = values.filter(Number.isFinite), mean = meanOf(finite.length ? finite : [0]);
	const step = (width - left) / values.length;
	const y = value => top + (height - top - bottom) * (1 - Math.min(1, value / max));
	const x = n => left + step * (n + 0.5);
	const stem = n => (values[n] === null ? "" : `M${x(n).toFixed(1)} ${height - bottom}V${y(values[n]).toFixed(1)}`);
	const thick = Math.max(1, Math.min(12, step - 1.5)).toFixed(1);
	const chosen = s("path.surprise-chosen", { "stroke-width": thick });
	const plot = picture(width, height, { class: "surprise-chart", role: "img",
		"aria-label": `Surprisal of each token, up to ${max.toFixed(1)} ${unit}; mean ${mean.toFixed(1)}` },
	s("path.surprise-stems", { d: values.map((_, n) => stem(n)).join(""), "stroke-width": thick }), chosen,
	s("path.surprise-axis", { d: `M${left} ${height - bottom}H${width}` }),
	s("path.surprise-mean", { d: `M${left} ${y(mean).toFixed(1)}H${width}` }),
	s("text", { x: left - 4, y: top + 4, "text-anchor": "end" }, max.toFixed(1)),
	s("text", { x: left - 4, y: height - bottom, "text-anchor": "end" }, "0"));
	const nearest = clientX => {
		const box = plot.getBoundingClientRect();
		return clamp(Math.floor(((clientX - box.left) * (width / box.width) - left) / step), 0, values.length - 1);
	};
	return { picture: plot, nearest, mark: n => chosen.setAttribute("d", stem(n)) };
}

function tokenDetails(data, values, unit, n) {
	const name = h("b", data.tokens[n].piece);
	if (values[n] === null) return [h("p", name, " Not predicted.")];
	const rank = `rank ${withCommas(data.ranks[n])} of ${withCommas(data.vocab_size)}`;
	const p = percent(Math.exp(-values[n] * UNITS[unit]));
	const facts = ` probability ${p}, ${shown(values[n])} ${unit}, ${rank}. Expected:`;
	return [h("p", name, facts), predictionList(data.guesses[n])];
}

function mostSurprising(data, values, unit, choose) {
	const order = values.map((_, n) => n).filter(n => values[n] !== null).sort((a, b) => values[b] - values[a]);
	const texts = data.tokens.map(token => token.text);
	const words = (from, to) => texts.slice(Math.max(0, from), to).join("").replace(/\s+/g, " ");
	return h("ol.surprise-most", order.slice(0, MAX_LISTED).map(n => {
		const expected = data.guesses[n][0], [space, word] = splitSpace(texts[n]);
		return h("li", button([h("span.surprise-number", `${shown(values[n])} ${unit}`),
			h("span", words(n - CONTEXT, n) + space,
				h("b", word.trim() ? word : data.tokens[n].piece), words(n + 1, n + 1 + CONTEXT)),
			soft("expected ", h("code", expected.piece), ` ${percent(expected.probability)}`)],
		() => choose(n)));
	}));
}

// `data` is the JSON of explain/surprise.py's Surprise. `options`: the initial unit and position,
// `changed({ unit, place })`, which is called with other ones, `point(place)`, called with the token below the pointer,
// and `all`, responses that share their shades. Returns `choose(place)` and `light(places)`.
export function mount(element, data, /** @type {SurpriseOptions} */ { unit = "nats", place, changed = () => {}, point, all = [data] } = {}) {
	const box = h("div.surprise"), nats = surprisals(data);
	const first = nats.indexOf(Math.max(...nats)); // by default the most surprising one
	let state = { unit: Object.hasOwn(UNITS, unit) ? unit : "nats", place: indexIn(data.tokens, place) ?? first };
	let draw = () => {}, linked = { choose: (_n, _quiet) => {}, light: _places => {} };

	const build = () => {
		const values = nats.map(each => (each === null ? null : each / UNITS[state.unit]));
		const shades = all.flatMap(surprisals).filter(each => each !== null).map(each => each / UNITS[state.unit]);
		const top = topOf(shades);
		const { element: details, show: describe } = panel("Select a token to see what the model expected instead.");
		details.classList.add("shaded-tall");
		const strip = shadedText({ label: "The text, shaded by surprisal", tokens: data.tokens, point,
			choose: n => choose(n) });
		strip.shade(values.map(value => shadeOf(value, top)));
		const holder = h("div.surprise-holder");
		let plot = null;
		const choose = (n, quiet = false) => {
			strip.mark(n);
			plot?.mark(n);
			describe(...tokenDetails(data, values, state.unit, n));
			state = { ...state, place: n };
			if (!quiet) changed({ ...state });
		};
		draw = () => {
			const width = clamp(Math.floor(element.clientWidth), 240, CHART.widest);
			plot = chart(values, state.unit, width, Math.max(...shades.filter(Number.isFinite), 1e-9));
			plot.picture.addEventListener("click", event => choose(plot.nearest(event.clientX)));
			plot.mark(state.place);
			holder.replaceChildren(plot.picture);
		};
		const units = inlineSelect("Surprisal in", { nats: "nats", bits: "bits" }, state.unit, "surprise-unit", unit => {
			state = { ...state, unit };
			build();
			box.querySelector(".surprise-unit select").focus();
			changed({ ...state });
		});
		const numbers = n => (values[n] === null ? ["–", "–", "–"]
			: [shown(values[n]), percent(Math.exp(-nats[n])), withCommas(data.ranks[n])]);
		const expected = n => data.guesses[n].map(guess => `${guess.piece} ${percent(guess.probability)}`).join(" · ");
		const rows = data.tokens.map((token, n) => [n, token.piece, ...numbers(n), expected(n)]);
		const header = ["position", "token", state.unit, "probability", "rank", "most probable"];
		box.replaceChildren(summary(data, state.unit), units,
			legend(`surprisal, ${state.unit}`, top, { more: values.some(value => value > top * 1.001) }),
			h("h3.unseen", "Surprisal by token"), holder,
			h("div.surprise-read", h("div", strip.element), h("div", details,
				h("h3", "Most surprising tokens"), mostSurprising(data, values, state.unit, choose))),
			table({ title: "All tokens as a table", header, rows, text: [0, 1, 5], folds: true }));
		draw();
		choose(state.place, true);
		linked = { choose, light: strip.light };
	};
	element.replaceChildren(box);
	build();
	// the chart follows the width of the page
	let before = element.clientWidth;
	new ResizeObserver(() => {
		if (element.clientWidth === before) return;
		before = element.clientWidth;
		draw();
	}).observe(box);
	return { place: state.place, choose: n => linked.choose(n, true), light: places => linked.light(places) };
}

// Two models on one text: where the second is more surprised than the first, or less.
export function difference(element, responses, names, choose) {
	const [a] = responses, segments = aligned(responses.map(({ tokens }) => tokens.map(token => token.text)));
	if (!segments) return element.replaceChildren(soft("The two models read different characters."));
	const [left, right] = responses.map(surprisals), shownAt = segments.filter(([i, to]) => i < to);
	const values = shownAt.map(([i, to, j, end]) => (j < end ? total(right.slice(j, end)) - total(left.slice(i, to)) : 0))
		.map(value => (Number.isFinite(value) ? value : 0));
	const top = topOf(values.map(Math.abs)), change = total(values), strip = shadedText({
		label: "The text, shaded by the difference", choose: n => choose(shownAt[n][0]),
		tokens: shownAt.map(([i, to]) => ({ text: a.tokens.slice(i, to).map(token => token.text).join(""), piece: a.tokens[i].piece })) });
	strip.shade(values.map(value => Math.sign(value) * shadeOf(value, top)));
	const swatch = (name, kind) => h("span", { class: `shaded-swatch ${kind}`, style: { "--s": 0.7 } }, name);
	element.replaceChildren(h("h2", "Difference"), h("p", `${names[1]}: ${Math.abs(change).toFixed(1)} nats ${
		change < 0 ? "less" : "more"} for this text than ${names[0]}.`), h("p.shaded-legend",
	swatch("B less surprised", "shaded-below"), swatch("B more surprised", "")), strip.element);
}
