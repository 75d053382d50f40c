// Costs of a model as stacked bars; pointing at a segment shows its value.
import { h, roving, s } from "./dom.js";

const WIDE = 1000, HIGH = 34;

function strip(bar) {
  let left = 0;
  return s("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", class: "cost-bar", role: "group",
    "aria-label": bar.title }, bar.pieces.map(({ share, shade, tells }) => {
      const piece = s("rect", { x: left * WIDE, y: 0, width: share * WIDE, height: HIGH, class: "cost-piece",
        role: "img", tabindex: -1, "aria-label": tells, style: { "--p": shade / 100 } });
      left += share;
      return piece;
    }));
}

function drawn(bar) {
  const told = h("span", { class: "soft", role: "status" }, bar.total);
  const svg = strip(bar);
  const key = h("ul", { class: "cost-key" }, bar.pieces.map(({ name, label, shade }, n) => name && h("li",
    { "data-piece": n }, h("i", { style: { "--p": shade / 100 }, "aria-hidden": "true" }), `${name} ${label}`)));
  const pieces = [...svg.children];
  const tell = n => {
    told.textContent = bar.pieces[n]?.tells ?? bar.total;
    pieces.forEach((piece, at) => piece.classList.toggle("chosen", at === n));
    for (const each of key.children) each.classList.toggle("chosen", Number(each.dataset.piece) === n);
  };
  roving(svg, () => pieces, { onfocus: piece => tell(pieces.indexOf(piece)) });
  svg.addEventListener("pointermove", event => tell(pieces.indexOf(event.target)));
  svg.addEventListener("pointerleave", () => tell(-1));
  svg.addEventListener("focusout", () => tell(-1));
  key.addEventListener("pointerover", event => tell(Number(event.target.closest("li")?.dataset.piece ?? -1)));
  key.addEventListener("pointerleave", () => tell(-1));
  return h("div", { class: "cost-part" }, h("p", { class: "cost-head" }, h("b", {}, bar.title), " ", told), svg, key);
}

export function mount(element, { bars }) {
  const made = element.appendChild(h("div", { class: "costs" }, bars.map(drawn)));
  return { svg: () => made };
}

