// A running text whose tokens are shaded. One is chosen with a click or the arrow keys; others can be pointed at.
import { h } from "./dom.js";

const LEGEND = [0, 0.25, 0.5, 0.75, 1];

// With as many digits as `weft explain` prints.
export function percent(probability) {
  if (probability === 0) return "0";
  if (probability < 1e-6) return "<0.0001%";
  const digits = probability >= 0.1 ? 0 : probability >= 0.01 ? 1 : probability >= 0.001 ? 2 : 4;
  return `${(100 * probability).toFixed(digits)}%`;
}

export const minus = (text) => text.replace("-", "−");

// How dark a number is, 0 … 1, where `top` and more are the darkest.
export function shadeOf(value, top) {
  return value === null || top <= 0 ? 0 : Math.min(1, Math.abs(value) / top);
}

// A place of a list that an address names, or undefined: an address may hold anything.
export function placeIn(list, named) {
  const place = Number(named ?? NaN);
  return Number.isInteger(place) && place >= 0 && place < list.length ? place : undefined;
}

const short = (value) => String(+value.toPrecision(2));

// The shades with the numbers that they stand for; `more`: some numbers are larger; `below`: some are less than 0.
export function legend(name, top, { more = false, below = false, show = short } = {}) {
  const swatch = (step) => h("span", { class: "shaded-swatch", style: { "--s": step } },
    show(step * top) + (more && step === 1 ? "+" : ""));
  return h("p", { class: "shaded-legend" }, h("span", {}, name), LEGEND.map(swatch),
    below ? h("span", { class: "shaded-swatch shaded-below", style: { "--s": 0.6 } }, "below 0") : null);
}

// The space before a word stays white. Of a line's end in two signs, the second is the text.
export function parted(text) {
  const plain = text.includes("\n") || text === "\r" ? text.replaceAll("\r", "") : text;
  return /^ \S/u.test(plain) ? [" ", plain.slice(1)] : ["", plain];
}

// What is drawn before a token's text without being text: a token that adds none, or the end of a line.
function signOf(token) {
  const lines = token.text.split("\n").length - 1;
  return token.text.replace(/^\r+|\r+$/g, "") ? "⏎".repeat(lines) : token.piece;
}

function tokenOf(token) {
  const [space, text] = parted(token.text);
  const sign = signOf(token);
  const label = text.trim() ? {} : { "aria-label": token.piece };
  const span = h("span", { class: "shaded-token", role: "option", tabindex: "-1", "aria-selected": "false", ...label },
    sign ? h("span", { class: "shaded-sign", "aria-hidden": "true" }, sign) : null, text);
  return [space, span];
}

// The token nearest to this one in the line above (way −1) or below (1).
function beside(spans, from, way) {
  const here = spans[from].getClientRects()[0];
  let best = from;
  let least = Infinity;
  let line = null;
  for (let n = from + way; n >= 0 && n < spans.length; n += way) {
    const there = spans[n].getClientRects()[0];
    if (!there || Math.abs(there.top - here.top) < here.height / 2) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) > here.height / 2) break;
    const far = Math.abs(there.left - here.left);
    if (far < least) [best, least] = [n, far];
  }
  return best;
}

// Where a key leads from a place of a strip, or undefined.
function led(event, spans, at) {
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const last = spans.length - 1;
  switch (event.key) {
    case "ArrowRight": return Math.min(last, at + 1);
    case "ArrowLeft": return Math.max(0, at - 1);
    case "ArrowDown": return beside(spans, at, 1);
    case "ArrowUp": return beside(spans, at, -1);
    case "Home": return 0;
    case "End": return last;
    default: return undefined;
  }
}

// `tokens`: [{ text, piece }]. `choose(n)` hears of the one that is chosen, `point(n)` of the one below the pointer.
// Returns the strip's `element`, `shade(shades)`, with shades below 0 where the numbers are, and `mark(n)`.
export function shaded({ label, tokens, choose = () => {}, point = () => {} }) {
  const made = tokens.map(tokenOf);
  const spans = made.map(([, span]) => span);
  const numbers = new Map(spans.map((span, n) => [span, n]));
  const element = h("div", { class: "shaded-text", role: "listbox", "aria-orientation": "horizontal", dir: "auto",
    "aria-label": `${label}; arrow keys go from token to token` }, made.flat());
  let at = 0;
  if (spans.length) spans[0].tabIndex = 0;

  const mark = (n) => {
    if (!spans[n]) return;
    spans[at].tabIndex = -1;
    spans[at].setAttribute("aria-selected", "false");
    at = n;
    spans[at].tabIndex = 0;
    spans[at].setAttribute("aria-selected", "true");
  };
  const below = (event) => numbers.get(event.target.closest(".shaded-token"));
  const chosen = (n) => {
    mark(n);
    choose(n);
  };
  element.addEventListener("focusin", (event) => {
    const n = below(event);
    if (n !== undefined && (n !== at || spans[n].getAttribute("aria-selected") === "false")) chosen(n);
  });
  element.addEventListener("click", (event) => spans[below(event)]?.focus({ preventScroll: true }));
  element.addEventListener("pointerover", (event) => {
    const n = below(event);
    if (n !== undefined) point(n);
  });
  element.addEventListener("keydown", (event) => {
    const to = led(event, spans, at);
    if (to === undefined) return;
    event.preventDefault();
    spans[to].focus();
  });
  const shade = (shades) => spans.forEach((span, n) => {
    span.style.setProperty("--s", Math.abs(shades[n] ?? 0).toFixed(3));
    span.classList.toggle("shaded-below", shades[n] < 0);
  });
  return { element, shade, mark };
}

// What is told of a token or a cell that is chosen; a screen reader says it.
export function panel(hint) {
  const element = h("div", { class: "shaded-told", "aria-live": "polite" }, h("span", { class: "soft" }, hint));
  return { element, tell: (...parts) => element.replaceChildren(...parts) };
}

// Tokens with their probabilities, the likeliest first.
export function likeliest(guesses) {
  return h("ol", { class: "shaded-likely" }, guesses.map(({ piece, probability }) =>
    h("li", { class: "shaded-swatch", style: { "--s": probability.toFixed(3) } },
      h("b", {}, piece), ` ${percent(probability)}`)));
}

// The same numbers as a table, for those who don't see shades.
export function folded(title, header, rows, text = [0, 1]) {
  const kind = (column) => (text.includes(column) ? {} : { class: "n" });
  const head = h("tr", {}, header.map((name, n) => h("th", { scope: "col", ...kind(n) }, name)));
  const body = rows.map((row) => h("tr", {}, row.map((cell, n) => h("td", kind(n), cell))));
  const table = h("table", { class: "table" }, h("thead", {}, head), h("tbody", {}, body));
  const size = rows.length === 1 ? "1 row" : `${rows.length} rows`;
  return h("details", { class: "fold" }, h("summary", {}, `${title}: ${size}`),
    h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": title }, table));
}
