// What a model costs, as bars: each is a whole, and its pieces tell what they are when they are pointed at.
import { h, roving, s } from "./dom.js";

const WIDE = 1000, HIGH = 34;

function strip(bar, props = {}) {
  let left = 0;
  return s("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", class: "cost-bar", ...props },
    bar.pieces.map(({ share, shade, tells }) => {
      const piece = s("rect", { x: left * WIDE, y: 0, width: share * WIDE, height: HIGH, class: "cost-piece", role: "img",
        tabindex: -1, "aria-label": tells, style: { "--p": shade / 100 } });
      left += share;
      return piece;
    }));
}

function drawn(bar) {
  const told = h("span", { class: "soft", role: "status" }, bar.total);
  const svg = strip(bar, { role: "group", "aria-label": bar.title });
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
  element.append(h("div", { class: "costs" }, bars.map(drawn)));
  return { svg: () => picture(bars) };
}

// All bars as one SVG, with their keys below them.
function picture(bars) {
  const parts = [];
  let y = 0;
  for (const bar of bars) {
    parts.push(s("text", { x: 0, y: y + 18, class: "cost-title" }, `${bar.title}: ${bar.total}`));
    const own = strip(bar, { x: 0, y: y + 26, width: WIDE, height: HIGH });
    y += 26 + HIGH + 18;
    let x = 0;
    for (const { name, label, shade } of bar.pieces.filter(piece => piece.name)) {
      const wide = 34 + 7.4 * `${name} ${label}`.length;
      if (x + wide > WIDE) { x = 0; y += 20; }
      parts.push(s("rect", { x, y: y - 11, width: 13, height: 13, class: "cost-piece", style: { "--p": shade / 100 } }),
        s("text", { x: x + 19, y }, `${name} ${label}`));
      x += wide;
    }
    parts.push(own);
    y += 26;
  }
  return s("svg", { viewBox: `0 0 ${WIDE} ${y}`, class: "costs-picture" }, parts);
}
