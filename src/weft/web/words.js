// Numbers and tokens as they are written, and how much room they take.
export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// A number of an address, which may hold anything: within its ends, or another where it is none.
export function between(text, low, high, otherwise) {
  const number = Number(text ?? NaN);
  return text !== "" && Number.isFinite(number) ? clamp(number, low, high) : otherwise;
}

export const counted = number => number.toLocaleString("en");
export const minus = text => text.replaceAll("-", "−");
export const sum = values => values.reduce((total, each) => total + (each ?? 0), 0);
export const mean = values => sum(values) / values.length;

// With as many digits as `weft explain` prints.
export function percent(probability) {
  if (probability === 0) return "0";
  if (probability < 1e-6) return "<0.0001%";
  const digits = probability >= 0.1 ? 0 : probability >= 0.01 ? 1 : probability >= 0.001 ? 2 : 4;
  return `${(100 * probability).toFixed(digits)}%`;
}

// A probability beside others, in a column.
export const share = p => (p > 0 && p < 0.0005 ? "<0.001" : p.toFixed(3));

// A perplexity, which may be huge.
export const large = value => (!Number.isFinite(value) ? "∞" : value >= 1e6 ? value.toExponential(2)
  : value.toLocaleString("en", { maximumSignificantDigits: 4 }));

// 12.3M, 12.3k …
export function rounded(value) {
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  const [unit, name] = units.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${Number((value / unit).toPrecision(3))}${name}`;
}

// A text whose lines' ends and tabs are signs, and the spaces around it.
const WHITE = { "\n": "⏎", "\t": "⇥", "\r": "␍" };
export const signs = text => text.replace(/[\n\t\r]/g, sign => WHITE[sign])
  .replace(/^ +| +$/g, some => "␣".repeat(some.length));

// A token by itself, in which every space is a sign.
export const visible = piece => signs(piece).replaceAll(" ", "␣") || "∅";

export function short(label, most = 16) {
  const letters = Array.from(label);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : label;
}

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map(); // measuring is slow, and the same labels come again and again

export function textWidth(text, font = "11.5px system-ui, sans-serif") {
  const key = `${font}|${text}`;
  if (widths.size > 5000) widths.clear();
  if (!widths.has(key)) {
    ruler.font = font;
    widths.set(key, ruler.measureText(text).width);
  }
  return widths.get(key);
}

// As much of a text as there is room for.
export function fitted(text, room, font) {
  if (textWidth(text, font) <= room) return text;
  const letters = Array.from(text.slice(0, 160)).slice(0, 80);
  while (letters.length && textWidth(`${letters.join("")}…`, font) > room) letters.pop();
  return `${letters.join("")}…`;
}

// Bytes from base64.
export const bytesOf = text => Uint8Array.from(atob(text), sign => sign.charCodeAt(0));
