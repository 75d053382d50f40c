// Two models side by side: the panes, and tokens of two tokenizations that cover the same characters.
import { h } from "./dom.js";
import { titleOf } from "./variants.js";
import { isSpecial } from "./words.js";

// One titled place per model; a note says what its marks mean.
export function panes(infos, note = "") {
	const places = infos.map(() => h("div.side-place"));
	return { places, element: h("div.sides", infos.map((info, n) => h("section.side", { "aria-label": titleOf(info) }, h("h2.side-title", h("b", { "aria-hidden": "true" }, "AB"[n]), ` ${titleOf(info)}`), places[n])),
	note && h("p.side-note", note)) };
}

// A token's characters without spaces; a special token has none.
export const lettersOf = piece => (isSpecial(piece) ? "" : piece.replace(/^##|[\s␣⏎⇥▁]/g, "").toLowerCase());

/**
 * The finest segments at whose ends both lists of tokens end: [first, end, first, end] of each list; null if the tokens
 * are not of the same text.
 * @param {string[][]} lists
 */
export function aligned([a, b]) {
	const [left, right] = [a.map(lettersOf), b.map(lettersOf)], segments = [];
	if (left.join("") !== right.join("")) return null;
	for (let i = 0, j = 0; i < a.length || j < b.length;) {
		const [from, start] = [i, j];
		if (left[i] === "" || right[j] === "") { // special tokens and line breaks, of one or of both
			if (left[from] === "") i += 1;
			if (right[start] === "") j += 1;
		} else {
			let ahead = left[i++].length - right[j++].length;
			while (ahead) ahead += ahead < 0 ? left[i++].length : -right[j++].length;
		}
		segments.push([from, i, start, j]);
	}
	return segments;
}

// The tokens on the other side of those of one side: `counterpart(segments, 0)(3)` are those of the second list.
export function counterpart(segments, side) {
	const [from, to] = side ? [2, 0] : [0, 2];
	return n => {
		const found = segments?.find(each => each[from] <= n && n < each[from + 1]);
		return found ? Array.from({ length: found[to + 1] - found[to] }, (_, k) => found[to] + k) : [];
	};
}
