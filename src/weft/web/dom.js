// Elements from their parts. What is put into them is text, whatever it holds: nothing here reads markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(each => each !== null && each !== undefined && each !== false));
  return element;
}

// h("button", { type: "button", onclick: go, style: { "--p": 0.5 } }, "Go on")
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

// The same of SVG.
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// A picture of so many pixels, or units where `props` say how wide it is.
export const picture = (width, height, props, ...children) =>
  s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...props }, ...children);

// The head of an arrow that comes to a place from another.
export function tip([x, y], [fromX, fromY], size = 7) {
  const angle = Math.atan2(y - fromY, x - fromX);
  const side = turn => [x - size * Math.cos(angle + turn), y - size * Math.sin(angle + turn)].map(Math.round).join(" ");
  return `M${side(0.45)}L${x} ${y}L${side(-0.45)}`;
}

export const button = (label, onclick, props) => h("button", { type: "button", onclick, ...props }, label);

export const soft = (...children) => h("span", { class: "soft" }, ...children);

let made = 0;
export const uniqueId = (prefix = "w") => `${prefix}-${++made}`;

// A labelled control: field("Temperature", h("input", …)).
export function field(label, control, ...more) {
  control.id ||= uniqueId();
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, ...more);
}

export function select(options, value, onchange, props = {}) {
  return h("select", { ...props, onchange: event => onchange(event.target.value) },
    options.map(([id, name]) => h("option", { value: id, selected: String(id) === String(value) }, name)));
}

// A slider that tells its value: `told(value)` in words.
export function slider(label, { told, change, ...range }) {
  const shown = h("output"), input = h("input", { type: "range", ...range, oninput: () => {
    tell();
    change(Number(input.value));
  } });
  const tell = () => {
    shown.textContent = told(Number(input.value));
    input.setAttribute("aria-valuetext", shown.textContent);
  };
  tell();
  return field(label, input, shown);
}

// `work` once nobody has called for so many milliseconds; `now` calls it at once.
export function debounced(work, ms = 250) {
  let timer;
  const later = (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), ms); };
  later.now = (...given) => { clearTimeout(timer); return work(...given); };
  return later;
}

// A shortcut of the browser or the system is none of ours.
export const isPlain = event => !(event.altKey || event.ctrlKey || event.metaKey);

// The item that is nearest in the line of items above (way −1) or below (1).
function beside(items, from, way) {
  const here = items[from].getBoundingClientRect();
  let best, least = Infinity, line = null;
  for (let n = from + way; items[n]; n += way) {
    const there = items[n].getBoundingClientRect();
    if (Math.abs(there.top - here.top) < here.height / 2) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) > here.height / 2) break;
    const far = Math.abs(there.left - here.left);
    if (far < least) [best, least] = [items[n], far];
  }
  return best;
}

// Arrow keys, Home and End move the focus among `items()`, of which one is in the tab order at a time. `row(item)` are
// those within which left and right, Home and End move.
export function roving(container, items, { onfocus, row = items } = {}) {
  const enter = element => {
    for (const each of items()) each.tabIndex = each === element ? 0 : -1;
  };
  container.addEventListener("focusin", event => {
    if (!items().includes(event.target)) return;
    enter(event.target);
    onfocus?.(event.target);
  });
  container.addEventListener("keydown", event => {
    const all = items(), here = document.activeElement, at = all.indexOf(here);
    if (at < 0 || !isPlain(event)) return;
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key], line = row(here), place = line.indexOf(here);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: line.length - 1 }[event.key];
    if (way === undefined && to === undefined) return;
    event.preventDefault();
    (way ? beside(all, at, way) : line[to])?.focus();
  });
  const first = items()[0];
  if (first && !items().some(each => each.tabIndex === 0)) enter(first);
}

// Tells on a button whether a text was copied; where a page may not, `shown`, the element with it, is selected.
export async function copied(pressed, text, shown) {
  const label = pressed.textContent;
  if (shown) getSelection().selectAllChildren(shown);
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = shown ? "Selected" : "Could not copy";
  }
  setTimeout(() => { pressed.textContent = label; }, 1500);
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
