// Distribution of the next token: as the model predicts it, and after temperature, top-k, top-p and min-p.
import { button, h } from "./dom.js";
import { decodeBase64, percent, sum, withCommas } from "./words.js";

const EXCLUDED = -9999; // log-probability that the server writes for an excluded token
export const MAX_LISTED = 40; // most probable tokens to list

// Float32 log-probabilities by token id, from base64.
export const unpackLogprobs = text => new Float32Array(decodeBase64(text).buffer);

function softmax(values) {
	const shares = values.map(value => Math.exp(value - values[0])), total = sum(shares);
	return shares.map(share => share / total);
}

const entropy = probabilities => -sum(probabilities.map(p => (p > 0 ? p * Math.log(p) : 0)));

// Every filter keeps the most probable tokens, so its result is a length of one list, sorted once.
export class Distribution {
	constructor(logprobs) {
		this.logprobs = logprobs;
		this.order = Uint32Array.from(logprobs.keys()).sort((a, b) => logprobs[b] - logprobs[a] || a - b);
		this.sorted = Float64Array.from(this.order, id => logprobs[id]);
		this.raw = this.sorted.map(Math.exp);
		this.entropy = entropy(this.raw);
	}

	// 1 for the most probable token; equal ones share a rank.
	rank(id) {
		let before = 0;
		while (before < this.sorted.length && this.sorted[before] > this.logprobs[id]) before += 1;
		return before + 1;
	}

	// Probabilities of the tokens of `order` that the settings keep. Temperature, top_k, top_p and min_p are applied in
	// this order, as in src/weft/decode/sampling.py; temperature 0 keeps the most probable token.
	filter({ temperature = 1, top_k: k, top_p: p, min_p: least }) {
		let kept = this.sorted.length;
		const scaled = this.sorted.map(value => value / (temperature || 1));
		if (!temperature) kept = 1;
		else {
			if (k && k < kept) kept = this.until(scaled, kept, value => value < scaled[k - 1]); // ties are kept
			if (p && p < 1) {
				let before = 0;
				const shares = softmax(scaled.subarray(0, kept));
				kept = this.until(shares, kept, share => before >= p || ((before += share), false));
			}
			if (least) kept = this.until(scaled, kept, value => value < scaled[0] + Math.log(least));
		}
		while (kept > 1 && this.sorted[kept - 1] === -Infinity) kept -= 1;
		const probabilities = softmax(scaled.subarray(0, kept));
		return { kept, mass: sum(this.raw.subarray(0, kept)), probabilities, entropy: entropy(probabilities) };
	}

	until(values, end, dropped) {
		for (let place = 0; place < end; place += 1) if (dropped(values[place]) && place) return place;
		return end;
	}
}

function bar(share, kind) {
	return h("span", { class: `write-bar ${kind}`, style: { "--p": share } });
}

// One row per token: name, probability, and probability after the settings. `choose(id)` is called for a row.
function row(token, raw, after, { chosen, widest, choose }) {
	const dropped = after === 0, now = after ?? raw;
	const bars = h("span.write-bars", bar(raw / widest, "write-raw"),
		after !== undefined && bar(now / widest, "write-after"));
	return button([h("bdi.write-piece", token.text), bars,
		h("span.write-number", " ", percent(raw)), after !== undefined && h("span.write-number",
			h("span.unseen", ", when sampling "), dropped ? "–" : percent(after))], () => choose(token),
	{ class: `write-row${dropped ? " write-dropped" : ""}`, tabindex: -1, "aria-current": chosen && "true" });
}

// `tokens` are the most probable, with names; `full` is a Distribution if all log-probabilities are known.
function drawDistribution(box, /** @type {any} */ { tokens, full, settings, chosen, choose }) {
	const rows = tokens.slice(0, MAX_LISTED).filter(token => token.logprob > EXCLUDED);
	const filtered = settings && full?.filter(settings); // beam search has no sampling settings
	const after = place => filtered && (place < filtered.kept ? filtered.probabilities[place] : 0);
	const raw = rows.map(token => Math.exp(token.logprob));
	const widest = Math.max(...raw, filtered ? filtered.probabilities[0] : 0, 1e-9);
	const places = filtered && new Map(rows.map((token, place) => [token.id, place]));
	if (filtered) full.order.subarray(0, MAX_LISTED).forEach((id, place) => places.set(id, place));
	const buttons = rows.map((token, place) => row(token, raw[place], filtered && after(places.get(token.id)),
		{ chosen: token.id === chosen, widest, choose }));
	if (buttons.length) buttons[0].tabIndex = 0;
	const shown = buttons.length, others = full && full.sorted.length - shown;
	box.replaceChildren(
		h("div.write-row.write-names.soft", { "aria-hidden": "true" }, h("span", "token"), h("span"),
			h("span.write-number", h("i.write-raw"), "model"),
			filtered && h("span.write-number", h("i.write-after"), "sampled")),
		...buttons,
		others > 0 && h("div.write-row.soft", h("span", `${withCommas(others)} others`),
			h("span"), h("span.write-number", percent(sum(full.raw.subarray(shown)))),
			filtered && h("span.write-number",
				filtered.kept > shown ? percent(sum(filtered.probabilities.subarray(shown))) : "–")) || "");
	return filtered;
}

// Describe a position: of `token`, or of the next token if there is none.
export function drawPosition({ heading, facts, rows, sum: line }, { token, tokens, full, ...options }) {
	const focused = rows.contains(document.activeElement), among = full && withCommas(full.sorted.length);
	const rank = token && (full ? full.rank(token.id) : tokens.findIndex(each => each.id === token.id) + 1);
	heading.textContent = token ? "Alternatives" : "The next token";
	facts.replaceChildren(...token ? [h("bdi.write-piece", token.text),
		` has probability ${percent(Math.exp(token.logprob))}, ${(-token.logprob).toFixed(2)} nats`,
		rank ? `, rank ${withCommas(rank)}${full ? ` of ${among}` : ""}.` : "."]
		: ["Predictions of the model. Select one to continue from it."]);
	const filtered = drawDistribution(rows, { tokens, full, chosen: token?.id, ...options });
	line.textContent = filtered ? summarize(full, filtered) : full ? `Entropy ${full.entropy.toFixed(2)} nats.` : "";
	if (focused) rows.querySelector("button")?.focus();
}

function summarize(full, filtered) {
	const size = withCommas(full.sorted.length), kept = withCommas(filtered.kept);
	return `Sampling draws from ${kept} of ${size} tokens, which have ${percent(filtered.mass)} of the model's probability; `
		+ `entropy ${full.entropy.toFixed(2)} → ${filtered.entropy.toFixed(2)} nats.`;
}
