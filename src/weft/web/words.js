// Formats numbers and tokens, and measures texts.
import { SUFFIXES } from "./numbers.js";

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// A number from the address, which may hold anything: clamped, or `otherwise` if it is not a number.
export function numberWithin(text, low, high, otherwise) {
	const number = Number(text ?? NaN);
	return text !== "" && Number.isFinite(number) ? clamp(number, low, high) : otherwise;
}

export const withCommas = number => number.toLocaleString("en");
export const minus = text => text.replace(/^-(?=0\.?0*$)/, "").replaceAll("-", "−"); // a rounded 0 has no sign
export const sum = values => values.reduce((total, value) => total + (value ?? 0), 0);
export const capitalised = text => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}`;
export const round = value => Math.round(value * 10) / 10; // pixels
export const firstWords = (text, count) => text.trim().split(/\s+/).slice(0, count).join(" ");
// The first words of a sample text, up to one that attention can copy, or else 48 letters.
export function beginning(text) {
	const words = [...text.slice(0, 96).matchAll(/\p{L}{4,}/gu)], read = words.map(String);
	const again = words.find(([word], at) => read.indexOf(word) < at);
	return again ? text.slice(0, again.index).trimEnd() : text.length > 48 ? text.slice(0, 48).replace(/\s+\S*$/, "") : text;
}
export const mean = values => sum(values) / values.length;

// A probability with as many digits as `weft explain` prints.
export function percent(probability) {
	if (probability === 0) return "0";
	if (probability < 1e-6) return "<0.0001%";
	const digits = probability >= 0.1 ? 0 : probability >= 0.01 ? 1 : probability >= 0.001 ? 2 : 4;
	return `${(100 * probability).toFixed(digits)}%`;
}

// A probability in a column of numbers.
export const share = p => (p > 0 && p < 0.0005 ? "<0.001" : p.toFixed(3));

// A perplexity, which may be very large.
export const formatLarge = value => (!Number.isFinite(value) ? "∞" : value >= 1e6 ? value.toExponential(2)
	: value.toLocaleString("en", { maximumSignificantDigits: 4 }));

// 12.3M, 12.3k, …
export function abbreviate(value) {
	const [unit, name] = SUFFIXES.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
	return `${Number((value / unit).toPrecision(3))}${name}`;
}

// Whether a token is a special one, as <eos> or [MASK].
export const isSpecial = piece => /^(<[^<>\s␣]+>|\[[A-Z]+\])$/.test(piece);

// A text with symbols for line breaks, tabs, and leading and trailing spaces.
const SYMBOLS = { "\n": "⏎", "\t": "⇥", "\r": "␍" };
export const showWhitespace = text => text.replace(/[\n\t\r]/g, character => SYMBOLS[character])
	.replace(/^ +| +$/g, spaces => "␣".repeat(spaces.length));

// A single token, with symbols for all spaces.
export const visibleToken = piece => showWhitespace(piece).replaceAll(" ", "␣") || "∅";

export function short(label, maxLetters = 16) {
	const letters = Array.from(label);
	return letters.length > maxLetters ? `${letters.slice(0, maxLetters - 1).join("")}…` : label;
}

export const ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
const widths = new Map(); // measuring is slow, and labels repeat

export function textWidth(text, font = "11.5px system-ui, sans-serif") {
	const key = `${font}|${text}`;
	if (widths.size > 5000) widths.clear();
	if (!widths.has(key)) {
		ruler.font = font;
		widths.set(key, ruler.measureText(text).width);
	}
	return widths.get(key);
}

export function fitText(text, room, font) {
	if (textWidth(text, font) <= room) return text;
	const letters = Array.from(text.slice(0, 160)).slice(0, 80);
	while (letters.length && textWidth(`${letters.join("")}…`, font) > room) letters.pop();
	return `${letters.join("")}…`;
}

export const decodeBase64 = text => Uint8Array.from(atob(text), character => character.charCodeAt(0));
