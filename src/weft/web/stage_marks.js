// Marks of the stage: a vector is always bars on a zero line, a share is always an area or a width. Positions are in
// pixels; `data-m` names a mark, so that it moves to where the next picture draws it.
import { s } from "./dom.js";
import { fitText, minus as typeset, round, textWidth, visibleToken, withCommas } from "./words.js";

export const minus = (value, digits = 2) => typeset(value.toFixed(digits));
export const length = values => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
export const largest = values => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1;
// Places of the values farthest from zero, the farthest first.
export const strongestOf = (values, count) => values.map((_, n) => n)
	.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, count);
export const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
const weightOf = a => (a < 0.005 ? "0" : a > 0.994 ? "1" : a.toFixed(2).slice(1));

// A number with three significant digits, without trailing zeros or an exponent where it can be avoided.
export function brief(value) {
	const size = Math.abs(value);
	if (!size) return "0";
	if (size >= 1000) return withCommas(Math.round(value)).replace("-", "−");
	return size < 0.005 ? value.toExponential(0).replaceAll("-", "−") : minus(value, size >= 100 ? 0 : size >= 10 ? 1
		: 2);
}

export const quoted = piece => `“${piece.replace(/^␣/, "").trim() || "␣"}”`;
export const tokenName = (piece, letters = 9) => {
	const shown = Array.from(visibleToken(piece));
	return shown.length > letters ? `${shown.slice(0, letters - 1).join("")}…` : shown.join("");
};

export function text(x, y, content, kind = "", props = {}) {
	return s("text", { x: round(x), y: round(y), class: kind, ...props }, content);
}

export function rect(x, y, width, height, kind, radius = 4, props = {}) {
	return s("rect", { class: kind, x: round(x), y: round(y), width: round(Math.max(0, width)),
		height: round(Math.max(0, height)), rx: radius, ...props });
}

// A bar from a zero line: to the right if the value is positive, else to the left.
export const signedBar = (value, zero, y, size, height, radius = 1, kind = "") =>
	rect(value < 0 ? zero - size : zero, y, size, height, (value < 0 ? "neg" : "pos") + kind, radius);

const rounded = path => path.replace(/\d+\.\d{2,}(e-\d+)?/g, number => String(round(Number(number))));
export const line = (d, kind, props = {}) => s("path", { d: rounded(d), class: kind, ...props });
export const circle = (x, y, radius, kind, props = {}) =>
	s("circle", { class: kind, cx: round(x), cy: round(y), r: round(radius), ...props });

// A group that is dimmed until its step and grows in it.
export const at = (step, ...children) => s("g", { "data-s": step }, ...children);

// A part that a click or Enter opens; `go` is a path of the closer views, an action such as "head=2", or nothing where
// it cannot be opened. Its label contains the text that is seen.
export const part = (go, label, ...children) =>
	s("g", go ? { "data-go": go, "data-key": go, tabindex: "0", role: "button", "aria-label": label } : {}, ...children);

// At most `count` values: of neighbours the one farthest from zero.
export function binned(values, count) {
	if (values.length <= count) return values;
	return Array.from({ length: count }, (_, n) => values
		.slice(Math.floor((n * values.length) / count), Math.floor(((n + 1) * values.length) / count))
		.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best)));
}

// A vector: above the line (or right of it) positive, below it negative. A long one is binned.
/**
 * @param {number[]} vector
 * @param {{ x: number, y: number, w: number, h: number, max?: number, down?: boolean, m?: string }} box
 */
export function bars(vector, { x, y, w, h, max, down = false, m }) {
	const along = down ? h : w, across = down ? w : h, values = binned(vector, Math.max(8, Math.floor(along / 2.4)));
	const each = along / values.length, gap = Math.max(0.4, Math.min(each * 0.14, 10)), top = max || largest(values);
	const signs = { pos: "", neg: "" }, size = round(each - gap), middle = (down ? x : y) + across / 2;
	values.forEach((value, n) => {
		const start = round((down ? y : x) + n * each);
		const high = round(Math.min(1, Math.abs(value) / top) * (across / 2) * (value < 0 ? -1 : 1));
		if (high) signs[value < 0 ? "neg" : "pos"] += down ? `M${middle} ${start}h${high}v${size}h${-high}z`
			: `M${start} ${middle}v${-high}h${size}v${high}z`;
	});
	const origin = down ? `${middle}px ${y}px` : `${x}px ${middle}px`;
	return s("g", { class: down ? "grow across" : "grow", style: { "transform-origin": origin }, "data-m": m },
		line(down ? `M${middle} ${y}v${h}` : `M${x} ${middle}h${w}`, "axis"),
		signs.pos && line(signs.pos, "pos"), signs.neg && line(signs.neg, "neg"));
}

// Vectors on their threads; all but the followed one are fainter.
/**
 * @param {number[][]} vectors
 * @param {{ x: number, w: number, ys: number[], h: number, max?: number, here: number, m?: string }} box
 */
export const strips = (vectors, { x, w, ys, h, max, here, m }) => vectors.map((vector, n) =>
	s("g", { opacity: n === here ? 1 : 0.72 }, bars(vector, { x, y: ys[n] - h / 2, w, h, max, m: m && `${m}${n}` })));

export function plus(x, y, radius, sign = "+") {
	const arm = radius * 0.5;
	return s("g", circle(x, y, radius, "plus"), sign === "+"
		? line(`M${x - arm} ${y}h${2 * arm}M${x} ${y - arm}v${2 * arm}`, "stroke")
		: text(x, y + radius * 0.45, sign, "middle bold"));
}

export function chip(label, { x, y, w, h, here, fs }) {
	return s("g", rect(x, y - h / 2, w, h, here ? "chip here" : "chip", 5),
		text(x + w / 2, y + fs * 0.35, fitText(label, w - 8, `${fs}px monospace`), here ? "mono middle inverse"
			: "mono middle"));
}

// A norm, or another function of a whole column, as a tall pill.
export function pill(label, { x, y, w, h, fs }) {
	return s("g", rect(x, y, w, h, "panel", w / 2), s("text.middle.soft", { transform: `translate(${x + w / 2 + fs * 0.35} ${y + h / 2}) rotate(-90)` }, label));
}

// Names above columns, turned; only every second where they are close.
export function columnNames(names, { x, y, each, here, fs, letters = 8 }) {
	const every = Math.max(1, Math.ceil((fs * 1.05) / each));
	return names.map((name, n) => ((here - n) % every ? null : s("text", {
		class: n === here ? "mono bold" : "mono soft",
		transform: `translate(${x + (n + 0.5) * each + fs * 0.35} ${y}) rotate(-90)` },
			tokenName(name, letters))));
}

// Scores and weights as one matrix: area is size, a hollow cell is negative, a hatched one masked. A row is a query.
export function weave({ scores, weights }, { x, ys, each, rh, fs, here, numbers = false, go }) {
	const high = Math.min(rh - 6, each * 1.9), most = Math.max(4, largest(scores.flat().filter(Number.isFinite)));
	return s("g.weave", scores.map((row, i) => {
		const cells = row.flatMap((score, j) => {
			const middle = x + (j + 0.5) * each, weight = weights[i][j];
			if (score === null) return rect(middle - each / 2 + 2, ys[i] - high * 0.35, each - 4, high * 0.7, "hatch", 2);
			const [a, b] = [Math.sqrt(Math.abs(score) / most), Math.sqrt(weight)];
			const cell = (inset, kind) => rect(middle - each / 2 + 1 + inset, ys[i] - high / 2 + inset, each - 2 - 2 * inset,
				high - 2 * inset, `cell ${kind}`, 3, { style: { "--a": a.toFixed(3), "--b": b.toFixed(3) } });
			const shown = score < 0 ? [cell(1, "hollow"), cell(0, "pos late")] : [cell(0, "pos")];
			if (numbers && weight >= 0.3 && each > fs * 1.6)
				shown.push(text(middle, ys[i] + fs * 0.35, Math.round(100 * weight), "middle inverse bold"));
			else if (numbers && weight >= 0.01 && each > fs * 4)
				shown.push(text(middle + (b * each) / 2 + 5, ys[i] + fs * 0.35, Math.round(100 * weight), "soft"));
			return shown;
		});
		return part(`${go}/${i}`, `Row ${i}`, s("g", { opacity: i === here || numbers ? 1 : 0.6 },
			rect(x - 3, ys[i] - rh / 2 + 1, each * row.length + 6, rh - 2, "hit"), ...cells,
			i === here && rect(x - 4, ys[i] - high / 2 - 4, each * row.length + 8, high + 8, "frame", 6)));
	}));
}

// Weights on the threads, values, and one link per token to a sum; the width of a link is its weight. A ring is the
// weight of the model beside this one.
/** @param {{ weights: number[], others?: number[], values: number[][], max: number }} shown */
export function links({ weights, others, values, max }, { x, w, ys, rh, fs, to, from, m = "v" }) {
	const left = fs * 4.1, wide = Math.min(w * 0.3, 130), start = x + left + wide + 6, end = to.x;
	const high = Math.min(rh * 0.76, fs * 3.4), lines = [], dots = [];
	weights.forEach((a, j) => {
		const radius = Math.max(1.2, Math.sqrt(a) * Math.min(rh / 2, fs)), middle = x + fs * 0.9;
		dots.push(circle(middle, ys[j], radius, "pos fly", { style: { "transition-delay": `${j * 45}ms`,
			...from && { "--dx": `${from[j] - middle}px`, "--dy": `${to.y - ys[j]}px` } } }),
		others && circle(middle, ys[j], Math.max(1.2, Math.sqrt(others[j] ?? 0) * Math.min(rh / 2, fs)), "beside"),
		text(x + left - 5, ys[j] + fs * 0.35, weightOf(a), `end halo ${a > 0.2 ? "bold" : "soft"}`),
		s("g", { opacity: (0.35 + 0.65 * Math.sqrt(a)).toFixed(2) },
			bars(values[j], { x: x + left, y: ys[j] - high / 2, w: wide, h: high, max, m: `${m}${j}` })));
		const d = `M${start} ${ys[j]}C${start + (end - start) * 0.6} ${ys[j]} `
			+ `${end - (end - start) * 0.45} ${to.y} ${end} ${to.y}`;
		const width = round(Math.max(0.8, a * Math.min(rh, fs * 4.4) * 0.62));
		lines.push(line(d, "link", { pathLength: 1, "stroke-width": width, opacity: (0.22 + 0.7 * a).toFixed(2) }));
		if (a > 0.08) lines.push(line(d, "flow", { "stroke-width": Math.min(2, width / 2) }));
	});
	return [lines, dots, plus(end, to.y, fs * 0.85, "Σ")];
}

// One line of text that fits, as `fitText` with the stage's type size.
export const fit = (content, room, fs) => fitText(content, room, `${fs}px system-ui, sans-serif`);
export const wide = (content, fs) => textWidth(content, `${fs}px system-ui, sans-serif`);

// "q_{1} = W_{Q} n / √`8`": subscripts, superscripts (^{}) and upright parts of a formula.
export function formula(source, h) {
	return source.split(/([_^]\{[^}]*\}|`[^`]*`)/).map(each => {
		const inner = each.replace(/^[_^]?[{`]|[}`]$/g, "");
		return each.startsWith("_{") ? h("sub", inner) : each.startsWith("^{") ? h("sup", inner)
			: each.startsWith("`") ? h("span.upright", inner) : each;
	});
}
