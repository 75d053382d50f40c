// Builds elements. Children are inserted as text, never parsed as markup.
const SVG = "http://www.w3.org/2000/svg";

const isProps = value => value && Object.getPrototypeOf(value) === Object.prototype;

function build(create, selector, children) {
	const [tag, ...classes] = selector.split("."), element = create(tag), props = isProps(children[0]) ? children.shift() : {};
	if (classes.length) element.setAttribute("class", classes.join(" "));
	element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
	return set(element, props);
}

// Give an element properties as those of `h`; those that are undefined, null or false are left as they are.
export function set(element, props) {
	for (const [name, value] of Object.entries(props)) {
		if (value === undefined || value === null || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
		else if (name === "dataset") Object.assign(element.dataset, value);
		else element.setAttribute(name, value === true ? "" : value);
	}
	return element;
}

// An HTML element: h("button.primary", { type: "button", onclick: start }, "Start"), h("b", "bold"). Classes stand after
// the tag, or in `class` if they depend on something.
export const h = (selector, ...children) => build(tag => document.createElement(tag), selector, children);

export const s = (selector, ...children) => build(tag => document.createElementNS(SVG, tag), selector, children);

// An <svg> of this size in pixels, unless `props` has another width.
export const picture = (width, height, props, ...children) =>
	s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...props }, ...children);

// Path of an arrow head at a point, pointing away from another.
export function tip({ x, y }, from, size = 7) {
	const angle = Math.atan2(y - from.y, x - from.x);
	const side = by => [x - size * Math.cos(angle + by), y - size * Math.sin(angle + by)].map(Math.round).join(" ");
	return `M${side(0.45)}L${x} ${y}L${side(-0.45)}`;
}

export const button = (label, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, label);

// A row of a list of predictions: a name, a bar for its share of the longest, a number.
export const barRow = (name, share, number, onclick, props = {}) => button([name, h("span.write-bars",
	h("span.write-bar.write-after", { style: { "--p": share } })), h("span.write-number", number)],
onclick, { class: "write-row", ...props });

export const soft = (...children) => h("span.soft", ...children);

// Properties of an element that groups controls.
export const group = label => ({ role: "group", "aria-label": label });

let lastId = 0;
export const uniqueId = (prefix = "w") => `${prefix}-${++lastId}`;

// A labelled control: field("Temperature", h("input", …)).
export function field(label, control, ...others) {
	control.id ||= uniqueId();
	return h("div.field", h("label", { for: control.id }, label), control, ...others);
}

export function select(options, value, onchange, props = {}) {
	return h("select", { ...props, onchange: event => onchange(event.target.value) },
		options.map(([id, name]) => h("option", { value: id, selected: String(id) === String(value) }, name)));
}

// A slider that shows its value as text; `format(value)` returns it.
export function slider(label, { format, change, ...range }) {
	const output = h("output"), input = h("input", { type: "range", ...range, oninput: () => {
		show();
		change(Number(input.value));
	} });
	const show = () => {
		output.textContent = format(Number(input.value));
		input.setAttribute("aria-valuetext", output.textContent);
	};
	show();
	return field(label, input, output);
}

// Call `work` once there was no call for `ms` milliseconds; `now` calls it immediately.
export function debounced(work, ms = 250) {
	let timer = 0;
	const later = (...args) => { clearTimeout(timer); timer = setTimeout(() => work(...args), ms); };
	later.now = (...args) => { clearTimeout(timer); return work(...args); };
	return later;
}

// Whether no modifier key is pressed: shortcuts of the browser and the system are not handled.
export const isPlain = event => !(event.altKey || event.ctrlKey || event.metaKey);

// The nearest item in the line of items above (direction −1) or below (1).
function verticalNeighbour(items, from, direction) {
	const here = items[from].getBoundingClientRect();
	let best, least = Infinity, line = null;
	for (let n = from + direction; items[n]; n += direction) {
		const there = items[n].getBoundingClientRect();
		if (Math.abs(there.top - here.top) < here.height / 2) continue;
		line ??= there.top;
		if (Math.abs(there.top - line) > here.height / 2) break;
		const distance = Math.abs(there.left - here.left);
		if (distance < least) [best, least] = [items[n], distance];
	}
	return best;
}

/**
 * Move the focus among `items()` with the arrow keys, Home and End; only one item is in the tab order. Left and right,
 * Home and End stay within `row(item)`.
 * @param {any} container
 * @param {() => any[]} items
 * @param {{ onfocus?: (item: any) => void, row?: (item: any) => any[] }} options
 */
export function roving(container, items, { onfocus, row = items } = {}) {
	const enter = element => {
		for (const item of items()) item.tabIndex = item === element ? 0 : -1;
	};
	if (container instanceof SVGElement) container.tabIndex = -1; // no Tab stop
	set(container, { onfocusin({ target }) {
		if (!items().includes(target)) return;
		enter(target);
		onfocus?.(target);
	}, onkeydown(event) {
		const all = items(), here = document.activeElement, at = all.indexOf(here);
		if (at < 0 || !isPlain(event)) return;
		const direction = { ArrowDown: 1, ArrowUp: -1 }[event.key], line = row(here), index = line.indexOf(here);
		const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: line.length - 1 }[event.key];
		if (direction === undefined && to === undefined) return;
		event.preventDefault();
		(direction ? verticalNeighbour(all, at, direction) : line[to])?.focus();
	} });
	const first = items()[0];
	if (first && !items().some(item => item.tabIndex === 0)) enter(first);
}

// Copy a text and report it on the button; if the page may not, `element`, which contains the text, is selected.
export async function copyText(control, text, element = null) {
	const label = control.textContent;
	if (element) getSelection()?.selectAllChildren(element);
	try {
		await navigator.clipboard.writeText(text);
		control.textContent = "Copied";
	} catch {
		control.textContent = element ? "Selected" : "Could not copy";
	}
	setTimeout(() => { control.textContent = label; }, 1500);
}

export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
