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

// `work` once nobody has called for so many milliseconds; `now` calls it at once.
export function debounced(work, ms = 250) {
  let timer;
  const later = (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), ms); };
  later.now = (...given) => { clearTimeout(timer); return work(...given); };
  return later;
}

// Arrow keys, Home and End move the focus among `items()`, of which one is in the tab order at a time.
export function roving(container, items, { columns = () => Infinity, onfocus } = {}) {
  const enter = element => {
    for (const each of items()) each.tabIndex = each === element ? 0 : -1;
  };
  container.addEventListener("focusin", event => {
    const found = items().find(each => each === event.target);
    if (found) { enter(found); onfocus?.(found); }
  });
  container.addEventListener("keydown", event => {
    const all = items(), at = all.indexOf(document.activeElement), wide = columns();
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + (wide === Infinity ? 1 : wide),
      ArrowUp: at - (wide === Infinity ? 1 : wide), Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    all[to]?.focus();
  });
  const first = items()[0];
  if (first && !items().some(each => each.tabIndex === 0)) enter(first);
}

export const percent = p => p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.00095 ? `${(100 * p).toFixed(1)} %`
  : p > 0 ? `${(100 * p).toPrecision(1)} %` : "0 %";

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
