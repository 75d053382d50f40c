// What a page has laid out as HTML, such as a shaded text or a table, as an SVG: the same boxes, the same texts.
import { s } from "./dom.js";

const EDGE = 8; // pixels around it
const pen = document.createElement("canvas").getContext("2d");

// A text node in pieces, one a line, with where each begins; what its box cuts off is left out.
function lines(node) {
  const parent = node.parentElement;
  const cut = getComputedStyle(parent).overflowX === "hidden" && parent.scrollWidth > parent.clientWidth;
  const edge = parent.getBoundingClientRect().right;
  const range = document.createRange();
  const found = [];
  let at = 0;
  for (const sign of node.data) {
    range.setStart(node, at);
    range.setEnd(node, at += sign.length);
    const box = range.getClientRects()[0];
    if (!box || sign === "\n") continue;
    if (cut && box.right > edge) {
      if (found.length) found.at(-1).text += "…";
      break;
    }
    const line = found.at(-1);
    if (line && Math.abs(line.top - box.top) < 2) line.text += sign;
    else found.push({ text: sign, left: box.left, top: box.top });
  }
  return found.filter((line) => line.text.trim());
}

function boxes(element, style) {
  const edge = parseFloat(style.borderLeftWidth) && parseFloat(style.borderTopWidth) ? style.borderTopColor : "none";
  const fill = /, 0\)$|transparent|\/ 0\)$/.test(style.backgroundColor) ? "none" : style.backgroundColor;
  if (edge === "none" && fill === "none") return [];
  return [...element.getClientRects()].map((box) => ({ box, fill, edge }));
}

export function laidOut(root) {
  const whole = root.getBoundingClientRect();
  const [x, y] = [(value) => value - whole.left + EDGE, (value) => value - whole.top + EDGE];
  const parts = [];
  const walk = (element) => {
    const style = getComputedStyle(element);
    for (const { box, fill, edge } of boxes(element, style)) {
      const { width, height } = box;
      parts.push(s("rect", { x: x(box.left), y: y(box.top), width, height, fill, stroke: edge }));
    }
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const rise = pen.measureText("x").fontBoundingBoxAscent;
    for (const child of element.childNodes) {
      if (child.nodeType === Node.ELEMENT_NODE) walk(child);
      if (child.nodeType !== Node.TEXT_NODE) continue;
      for (const { text, left, top } of lines(child)) {
        parts.push(s("text", { x: x(left), y: y(top) + rise, fill: style.color, "font-family": style.fontFamily,
          "font-size": style.fontSize, "font-weight": style.fontWeight, "xml:space": "preserve",
          "text-decoration": style.textDecorationLine }, text));
      }
    }
  };
  walk(root);
  return s("svg", { viewBox: `0 0 ${Math.ceil(whole.width) + 2 * EDGE} ${Math.ceil(whole.height) + 2 * EDGE}` }, parts);
}
