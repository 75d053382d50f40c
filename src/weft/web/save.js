// Keeping what a view shows: as SVG, as PNG, as a link to it, or as the command that gives the same.
import { h, s } from "./dom.js";

const PROPERTIES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray",
  "stroke-linecap", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "font-style",
  "text-anchor", "dominant-baseline", "paint-order", "visibility", "display", "writing-mode", "image-rendering",
  "shape-rendering", "text-decoration", "letter-spacing", "white-space"];

const pageColour = () => getComputedStyle(document.documentElement).getPropertyValue("--page").trim() || "#fff";

// A mix of colours as other programs read it: color(srgb 0.5 0.6 0.7) is rgb(128 153 179) to them.
const plainColour = value => value.replace(/color\(srgb ([\d.]+) ([\d.]+) ([\d.]+)\)/g, (_, ...parts) =>
  `rgb(${parts.slice(0, 3).map(each => Math.round(255 * each)).join(", ")})`);

// A copy of an SVG that needs no style of the page: what its elements look like stands in their attributes.
export function standing(svg) {
  const box = svg.viewBox.baseVal, copy = svg.cloneNode(true);
  const width = box?.width || svg.clientWidth || 800, height = box?.height || svg.clientHeight || 400;
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  const outside = !svg.isConnected;
  if (outside) { document.body.append(svg); svg.style.setProperty("position", "absolute"); }
  from.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of PROPERTIES) {
      const value = style.getPropertyValue(name);
      if (value) to[index].setAttribute(name, plainColour(value));
    }
    for (const name of ["class", "style", "tabindex"]) to[index].removeAttribute(name);
  });
  if (outside) svg.remove();
  const x = box?.x ?? 0, y = box?.y ?? 0;
  copy.prepend(s("rect", { x, y, width, height, fill: pageColour() }));
  for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width, height,
    viewBox: `${x} ${y} ${width} ${height}` })) copy.setAttribute(name, value);
  return copy;
}

// Several pictures below one another, as one.
export function stacked(pictures, gap = 24) {
  const copies = [pictures].flat().filter(Boolean).map(standing);
  if (copies.length === 1) return copies[0];
  let y = 0, wide = 0;
  for (const copy of copies) {
    copy.setAttribute("y", y);
    y += Number(copy.getAttribute("height")) + gap;
    wide = Math.max(wide, Number(copy.getAttribute("width")));
  }
  return s("svg", { xmlns: "http://www.w3.org/2000/svg", width: wide, height: y - gap, viewBox: `0 0 ${wide} ${y - gap}` },
    s("rect", { width: wide, height: y - gap, fill: pageColour() }), copies);
}

// Lines of text as a picture: each a string, or a list of strings and of { text, shade (0 … 1), bold }.
export function svgOfText(lines, { width = 900, size = 14 } = {}) {
  const letter = size * 0.62, rows = [[]];
  let x = 0;
  const next = () => { rows.push([]); x = 0; };
  for (const line of lines) {
    for (const part of typeof line === "string" ? [{ text: line }] : line.map(e => typeof e === "string" ? { text: e } : e)) {
      for (const word of part.text.match(/\s*\S+|\s+/gu) ?? []) {
        const long = [...word].length * letter;
        if (x > 0 && x + long > width - 20) next();
        rows.at(-1).push({ ...part, text: word, x });
        x += long;
      }
    }
    next();
  }
  const high = size * 1.7;
  return s("svg", { viewBox: `0 0 ${width} ${rows.length * high + 10}`, class: "text-picture" }, rows.flatMap((row, y) =>
    row.flatMap(({ text, x, shade, bold }) => [
      shade > 0 && s("rect", { x: x + 10, y: y * high + 4, width: [...text].length * letter, height: high - 2,
        class: "text-shade", "fill-opacity": Math.min(1, shade) * 0.55 }),
      s("text", { x: x + 10, y: (y + 0.75) * high + 4, "font-size": size, "font-weight": bold ? 700 : 400,
        "xml:space": "preserve", textLength: [...text].length * letter, lengthAdjust: "spacingAndGlyphs" }, text)])));
}

function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const asBlob = svg => new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });

async function png(svg, scale = 2) {
  const image = new Image(), url = URL.createObjectURL(asBlob(svg));
  try {
    image.src = url;
    await image.decode();
    const canvas = h("canvas", { width: Math.ceil(svg.getAttribute("width") * scale),
      height: Math.ceil(svg.getAttribute("height") * scale) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise(done => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

async function copied(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

// A word as a shell takes it.
export const quoted = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;

// The row at the end of a view. `svg` gives one picture or several, `command` a line for a shell.
export function tools({ svg, name, command }) {
  const line = h("code"), show = () => { line.textContent = command(); };
  const button = (label, work) => h("button", { type: "button", onclick: event => work(event.target) }, label);
  const row = h("div", { class: "tools" },
    svg && button("Save SVG", () => download(asBlob(stacked(svg())), `${name}.svg`)),
    svg && button("Save PNG", async () => download(await png(stacked(svg())), `${name}.png`)),
    button("Copy link", target => copied(location.href, target)),
    command && h("span", { class: "tools-command" }, h("span", { class: "soft" }, "The same by command: "), line, " ",
      button("Copy", target => copied(command(), target))));
  if (command) {
    show();
    document.addEventListener("weft-state", () => row.isConnected && show());
  }
  return row;
}
