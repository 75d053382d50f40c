/* Computation graph whose groups open and close (explain/graph/picture.py, GraphPicture.data).

	 nodes:    { function, name, kind, shape, formulas, forward, backward }; `formulas` is an index into data.formulas,
						 `forward` and `backward` the position in the order of either pass ("" if no gradient reaches the node)
	 groups:   { kind, name, path, open, children, layout, bundles, main } and the last four fields of a node
	 edges:    { sources, targets }, the node indices of all edges
	 layouts:  layout of a group with its children closed (explain/graph/layered.py)
	 rules:    { operation, forward, gradients }

	 A key is the index of a node, or that of a group plus the number of nodes. Group 0 is the whole graph. */
import { button, field, h, s, set } from "./dom.js";
import { place } from "./graph_layout.js";
import { table } from "./table.js";
import { textWidth } from "./words.js";

const MARGIN = 10, LINE_HEIGHT = 15, SMALL_LINE_HEIGHT = 13.5, BOX_HEIGHT = 26, LABEL_GAP = 7;
const FONT_SIZE = 13, SMALL_FONT_SIZE = 11.5;
const KEYS = "Arrow keys move along edges and to neighbouring boxes";
const MODULE_KEYS = "; Enter opens or closes a module, Escape closes the enclosing one";
const RULES = "g_x is the gradient of the loss with respect to x; ⊙ and ÷ are element-wise. The gradient of a broadcast"
	+ " operand is summed over the copies.";

const curve = line => {
	const mid = (line.bend + line.straight) / 2;
	return `M${line.x} ${line.y}V${line.bend}C${line.x} ${mid} ${line.toX} ${mid} ${line.toX} ${line.straight}`
		+ `V${line.toY}`;
};

const joined = (...parts) => parts.filter(Boolean).join(" · ");

// `shown` is a state as `changed` receives it: { open, at, shapes, backward }, strings; initial values are left out.
export function mount(element, data, /** @type {GraphOptions} */ { shown = {}, changed = () => {} } = {}) {
	const { nodes, groups, title } = data, first = nodes.length, modules = groups.length > 1;
	const checkbox = (name, label) => {
		const checked = shown[name] === undefined ? data[name] : shown[name] === "1";
		const input = h("input", { type: "checkbox", class: `graph-${name}`, checked, onchange: () => switched() });
		return [input, h("label", input, ` ${label}`)];
	};
	const [shapesBox, shapesLabel] = checkbox("shapes", "shapes");
	const [backwardBox, backwardLabel] = checkbox("backward", "backward pass, with the gradients' formulas");
	const find = h("input.graph-find", { type: "search", oninput: () => search(0), onkeydown: event => {
		if (event.key === "Enter") { event.preventDefault(); search(event.shiftKey ? -1 : 1); }
	} });
	const matchStatus = h("span.soft.graph-found", { role: "status" });
	const paths = Object.fromEntries(["edge", "quiet", "near", "tip"].map(name => [name, s("path", { class: name })]));
	const svg = s("svg", { "aria-hidden": "true" }, Object.values(paths)), layer = h("div");
	const plane = h("div.graph-plane", { role: "group", "aria-label": title }, svg, layer);
	const detail = h("p.graph-detail", { role: "status" }, "\u00a0");
	const view = h("div.scroll.graph-view", plane);
	const tool = (name, label, change) => button(label, () => {
		change();
		render();
		if (!marks.has(focused)) showEntry();
		changed(state());
	}, { class: `graph-${name}` });
	const tools = h("div.graph-tools", { role: "group", "aria-label": "Graph options" },
		shapesLabel, backwardLabel, modules && [
			tool("deeper", "Open one more level", () => {
				const next = [...groups.keys()].filter(n => !open.has(n) && isVisible(n) && groups[n].kind !== "constants");
				for (const n of next) open.add(n);
			}),
			tool("shallower", "Close one level", () => {
				const deepest = Math.max(0, ...[...open].filter(n => n && isVisible(n)).map(n => depth[n]));
				for (const n of [...open]) if (n && depth[n] >= deepest) open.delete(n);
			}),
			tool("reset", "Reset", () => { open = new Set(initial); })],
		field("Find", find), matchStatus);
	element.append(h("div.graph", tools,
		h("p.soft.graph-keys",
			`${KEYS}${modules ? MODULE_KEYS : ""}. Details of the selected box are shown below.`),
		view, detail, data.rules.length > 0 && h("details", { open: backwardBox.checked },
			h("summary", "Formulas of this graph's operations"), h("p.soft", RULES),
			table({ header: ["operation", "forward", "backward"], text: [0, 1, 2], folds: false, named: true,
				rows: data.rules.map(({ operation, forward, gradients }) =>
					[operation, forward, h("div", gradients.map(line => h("div", line)))]) }))));

	const parent = new Map(), depth = [0];
	groups.forEach(({ children }, n) => {
		for (const child of children) {
			parent.set(child, first + n);
			if (child >= first) depth[child - first] = depth[n] + 1;
		}
	});
	const members = groups.map(() => null);
	const nodesOf = n => members[n] ??= groups[n].children.flatMap(key => key < first ? [key] : nodesOf(key - first));
	const initial = new Set([...groups.keys()].filter(n => groups[n].open));
	const valid = n => Number.isInteger(n) && n >= 0 && n < groups.length;
	let open = shown.open === undefined ? new Set(initial) : new Set(shown.open.split(".").map(Number).filter(valid));
	let marks = new Map(), edges = [], connectors = [], focused = null, shownAs = new Map(), matches = [], match = -1;
	const { fontFamily } = getComputedStyle(plane);
	const width = (text, size) => textWidth(text, `${size}px ${fontFamily}`) + 1;
	const item = key => key < first ? nodes[key] : groups[key - first];

	// Texts of a closed box.
	function describe(key) {
		const { name, kind, shape, path, forward, backward, ...rest } = item(key);
		const order = backwardBox.checked ? backward : forward, formulas = data.formulas[rest.formulas];
		const lines = [joined(order, shapesBox.checked && shape), ...backwardBox.checked ? formulas : []].filter(Boolean);
		const looks = key < first ? { inside: rest.function, kind } : { inside: kind, kind: "group" };
		return { ...looks, name, lines, order, shape, path, formulas };
	}

	/** @returns {any} */
	function boxFor(key) {
		const n = key - first;
		if (key >= first && open.has(n)) {
			const { kind, name, children, bundles, main } = groups[n];
			const group = { layout: data.layouts[groups[n].layout], bundles, main };
			const about = { inside: kind, name, kind: "frame", lines: [] };
			return { key, about, title: width(`▾ ${name} · ${kind}`, FONT_SIZE) + 22, inside: children.map(boxFor), group };
		}
		for (const node of key < first ? [key] : nodesOf(n)) shownAs.set(node, key);
		const about = describe(key), rectangle = Math.max(BOX_HEIGHT * 1.6, width(about.inside, FONT_SIZE) + 20);
		const labels = [width(about.name, FONT_SIZE), ...about.lines.map(line => width(line, SMALL_FONT_SIZE))];
		const height = Math.max(BOX_HEIGHT, LINE_HEIGHT + SMALL_LINE_HEIGHT * about.lines.length);
		return { key, about, rectangle, width: rectangle + LABEL_GAP + Math.max(...labels), height, port: rectangle / 2 };
	}

	function render() {
		shownAs = new Map();
		open.add(0);
		const root = boxFor(first), pairs = new Map();
		data.edges.sources.forEach((node, number) => {
			const source = shownAs.get(node), target = shownAs.get(data.edges.targets[number]);
			if (source !== target) pairs.set(source * (first + groups.length) + target, { source, target });
		});
		edges = [...pairs.values()];
		connectors = place(root);
		const width = root.width + 2 * MARGIN, height = root.height + 2 * MARGIN;
		set(svg, { viewBox: `${-MARGIN} ${-MARGIN} ${width} ${height}`, width, height });
		set(plane, { style: { width: `${width}px`, height: `${height}px` } });
		drawConnectors(backwardBox.checked);
		// Elements are reused between states: most of them only move.
		const before = marks, order = [];
		marks = new Map();
		const put = box => {
			if (box !== root) {
				const mark = markFor(box, before.get(box.key));
				marks.set(box.key, mark);
				order.push(...mark.parts);
			}
			for (const child of box.inside ?? []) put(child);
		};
		put(root);
		const reused = new Set(order);
		for (const part of [...layer.children]) if (!reused.has(part)) part.remove();
		let next = layer.firstChild;
		for (const part of order) {
			if (part === next) next = next.nextSibling; else layer.insertBefore(part, next);
		}
		highlight(marks.has(focused) ? focused : null);
	}

	function drawConnectors(backward) {
		const tips = new Set(), solid = [], faint = [];
		for (const line of connectors) {
			const isFaint = backward && !line.sources.some(node => nodes[node].backward);
			(isFaint ? faint : solid).push(curve(line));
			if (!backward && line.arrives) tips.add(`M${line.toX} ${line.toY}l-3 -6h6z`);
			if (backward && line.leaves && !isFaint) tips.add(`M${line.x} ${line.y}l-3 6h6z`);
		}
		paths.edge.setAttribute("d", solid.join(""));
		paths.quiet.setAttribute("d", faint.join(""));
		paths.tip.setAttribute("d", [...tips].join(""));
	}

	function markFor(box, old) {
		const { about } = box, shape = shapesBox.checked ? about.shape : "";
		const text = [about.kind, about.inside, about.name, about.order, shape, ...about.lines].join("\n");
		const mark = old && old.text === text ? old : box.inside ? frameMark(box) : boxMark(box, shape);
		mark.text = text;
		mark.box = box;
		const x = box.x + MARGIN, y = box.y + MARGIN, labels = LINE_HEIGHT + SMALL_LINE_HEIGHT * about.lines.length;
		const styles = box.inside
			? [`left:${x}px;top:${y}px;width:${box.width}px;height:${box.height}px`,
				`left:${x + box.titleX - 5}px;top:${y + 2}px;width:${box.title}px`]
			: [`left:${x}px;top:${y}px;width:${box.rectangle}px;height:${box.height}px`,
				`left:${x + box.rectangle + LABEL_GAP}px;top:${y + (box.height - labels) / 2}px`];
		mark.parts.forEach((part, n) => {
			if (part.position !== styles[n]) { part.position = styles[n]; part.style.cssText = styles[n]; }
		});
		return mark;
	}

	function frameMark({ key, about }) {
		const head = button(`▾ ${about.name} · ${about.inside}`, null, { class: "graph-head", "aria-expanded": "true",
			tabindex: -1, "data-key": key, "aria-label": `${about.name}, ${about.inside}, open` });
		return { button: head, parts: [h("div.graph-frame"), head] };
	}

	function boxMark({ key, about }, shape) {
		const kind = about.kind === "variable" || about.kind === "group" ? "" : about.kind;
		const spoken = [about.name, about.inside, kind, about.order ? `number ${about.order}` : "", shape,
			...about.lines.slice(about.lines.length && (about.order || shape) ? 1 : 0)];
		const box = button(about.inside, null, { class: `graph-box ${about.kind}`, tabindex: -1, "data-key": key,
			"aria-expanded": about.kind === "group" && "false",
			"aria-label": [...new Set(spoken.filter(Boolean))].join(", ") });
		const label = h("div.graph-label", { "aria-hidden": "true" }, h("span", about.name),
			about.lines.map(line => h("small", line)));
		return { button: box, parts: [box, label] };
	}

	// Marks the selected box and its connectors, and makes it the only box in the tab order.
	function highlight(key) {
		for (const { button } of marks.values()) {
			if (button.tabIndex === 0) button.tabIndex = -1;
			button.classList.remove("chosen");
		}
		const mark = marks.get(key);
		(mark ?? marks.values().next().value).button.tabIndex = 0;
		mark?.button.classList.add("chosen");
		const touches = line => [...line.sources, ...line.targets].some(node => shownAs.get(node) === key);
		const near = key === null ? [] : connectors.filter(touches);
		paths.near.setAttribute("d", near.map(curve).join(""));
	}

	function select(key, focus = true) {
		const mark = marks.get(key);
		if (!mark) return;
		focused = key;
		highlight(key);
		if (focus) mark.button.focus();
		showDetail(key);
		changed(state());
	}

	function showDetail(key) {
		const about = describe(key), names = (end, other) =>
			edges.filter(edge => edge[end] === key).map(edge => item(edge[other]).name).join(", ");
		const from = names("target", "source"), to = names("source", "target");
		detail.textContent = joined(`${about.path || about.name}: ${about.inside}, ${about.shape}`,
			from && `from ${from}`, to && `to ${to}`, about.formulas.length && `passes back ${about.formulas.join("; ")}`);
	}

	function state() {
		const numbers = groupNumbers => [...groupNumbers].sort((a, b) => a - b).join(".");
		const flag = (name, input) => input.checked === data[name] ? undefined : input.checked ? "1" : "0";
		return { open: numbers(open) === numbers(initial) ? undefined : numbers(open),
			at: focused === null ? undefined : String(focused), shapes: flag("shapes", shapesBox),
			backward: flag("backward", backwardBox) };
	}

	function toggle(key) {
		if (key < first) return;
		const n = key - first;
		if (open.has(n)) open.delete(n); else open.add(n);
		const before = marks.get(key)?.button.getBoundingClientRect();
		focused = key;
		render();
		const mark = marks.get(key);
		if (!mark) return;
		// Scroll so that the clicked box does not move on the screen.
		const after = mark.button.getBoundingClientRect();
		if (before) {
			view.scrollLeft += after.left - before.left;
			window.scrollBy(0, after.top - before.top);
		}
		mark.button.focus({ preventScroll: true });
		select(key, false);
	}

	// The key of the box that an arrow key moves to: along an edge, else the nearest in that direction.
	function neighbour(key, arrow) {
		const down = arrow === "ArrowDown", vertical = down || arrow === "ArrowUp";
		const edge = vertical && edges.find(each => (down ? each.source : each.target) === key);
		if (edge) return down ? edge.target : edge.source;
		const middle = ({ box: { x, y, width, height, inside, titleX } }) =>
			inside ? [x + titleX, y] : [x + width / 2, y + height / 2];
		const [x, y] = middle(marks.get(key)), sign = arrow === "ArrowRight" || down ? 1 : -1;
		let best = null, least = Infinity;
		for (const [other, mark] of marks) {
			const [u, v] = middle(mark), along = sign * (vertical ? v - y : u - x);
			const cost = along + 3 * Math.abs(vertical ? u - x : v - y);
			if (other !== key && along > 2 && cost < least) { best = other; least = cost; }
		}
		return best;
	}

	// A graph may be wider than a phone: it begins at the uppermost box, where the computation begins.
	function showEntry() {
		const [entry] = [...marks.values()].map(mark => mark.box).filter(box => !box.inside).sort((a, b) => a.y - b.y);
		if (entry) view.scrollLeft = entry.x + MARGIN + entry.port - view.clientWidth / 2;
	}

	function reveal(key) {
		for (let at = parent.get(key); at !== undefined; at = parent.get(at)) open.add(at - first);
		render();
		show(key);
	}

	function show(key) {
		select(key, false);
		marks.get(key)?.button.scrollIntoView({ block: "nearest", inline: "center" });
	}

	// Finds boxes by name or kind; `step` is 1 for the next match, −1 for the previous one, 0 for a new search.
	function search(step) {
		const words = find.value.trim().toLowerCase();
		if (!step || !matches.length) {
			const has = (...names) => names.some(name => name.toLowerCase().includes(words));
			matches = !words ? [] : [
				...groups.flatMap(({ kind, path }, n) => n && has(kind, path) ? [first + n] : []),
				...nodes.flatMap((node, n) => has(node.function, node.name) ? [n] : [])];
			match = 0;
		} else {
			match = (match + step + matches.length) % matches.length;
		}
		matchStatus.textContent = !words ? "" : !matches.length ? "no match"
			: `${match + 1} of ${matches.length}; Enter for the next`;
		if (matches.length) reveal(matches[match]);
	}

	function switched() {
		render();
		if (focused !== null && marks.has(focused)) showDetail(focused);
		changed(state());
	}

	function isVisible(n) {
		for (let at = parent.get(first + n); at !== undefined; at = parent.get(at)) if (!open.has(at - first)) return false;
		return true;
	}

	const keyOf = ({ target }) => Number(target.closest("button")?.dataset.key);
	set(plane, { onclick(event) {
		const key = keyOf(event);
		if (key < first) select(key); else if (key) toggle(key);
	}, onfocusin(event) {
		const key = keyOf(event);
		if (key !== focused || !detail.textContent.trim()) select(key, false);
	}, onkeydown(event) {
		const key = keyOf(event);
		if (event.key.startsWith("Arrow")) {
			const next = neighbour(key, event.key);
			if (next !== null) select(next);
			event.preventDefault();
		} else if (event.key === "Escape" || event.key === "Backspace") {
			const around = key >= first && open.has(key - first) ? key : parent.get(key);
			if (around !== undefined && around !== first) toggle(around);
			event.preventDefault();
		}
	} });
	render();
	const at = Number(shown.at ?? NaN);
	if (marks.has(at)) show(at); else showEntry();
	return { svg: () => plane };
}
