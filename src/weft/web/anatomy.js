// Parts of a model, drawn and listed. Data: columns, each a part with nested parts, and diagrams of shapes on a plane
// whose y grows upwards (explain/anatomy/diagram.py). Of several columns, the first diagram shows all.
import { button, group, h, roving, s, set, soft, tip } from "./dom.js";
import { percent, round, withCommas as number } from "./words.js";

const UNIT = 52; // pixels per unit of a diagram
const LOOKS = { norm: "norm", attention: "attention", embedding: "table", positions: "table", logits: "out",
	sentence: "out" };

const MARGIN = 2; // left of the shapes, in a diagram's pixels
const LEGIBLE = 4 / 3; // scale at which the smallest texts have 12 pixels

function drawShape({ kind, points, text, size, anchor, look, part }, name) {
	const { x, y } = points[0], { x: endX, y: endY } = points.at(-1);
	const box = { x, y: endY, width: endX - x, height: y - endY };
	if (kind === "box") {
		return s("g", { class: `anat-box ${LOOKS[look] ?? "plain"}`, role: "button", tabindex: -1, "aria-label": name(part),
			"aria-pressed": "false", "data-part": part.join(".") }, s("rect", { ...box, rx: 5 }));
	}
	if (kind === "frame") return s("rect.anat-frame", { ...box, rx: 9 });
	if (kind === "text") {
		return s("text", { x, y: y + size * 0.36, "font-size": size, "text-anchor": anchor, class: look }, text);
	}
	if (kind === "sum") {
		const cross = `M${x - 6} ${y}h12m-6-6v12`;
		return s("g.anat-line", s("circle", { cx: x, cy: y, r: 6 }), s("path", { d: cross }));
	}
	if (kind === "loop") {
		const out = `M${x} ${y}C${x - 24} ${y - 8} ${x - 24} ${endY + 8} ${endX} ${endY}`;
		return s("path.anat-line", { d: out + tip({ x: endX, y: endY }, { x: endX - 18, y: endY - 7 }) });
	}
	const line = `M${points.map(point => `${point.x} ${point.y}`).join("L")}`;
	return s("path.anat-line", { d: line + (kind === "arrow" ? tip(points.at(-1), points.at(-2)) : "") });
}

// The left end of a shape; that of a text is estimated.
const leftOf = ({ kind, points, text, size, anchor }) => Math.min(...points.map(({ x }) => x))
	- (kind === "text" ? { middle: 0.3, end: 0.6 }[anchor] ?? 0 : 0) * size * (text?.length ?? 0) - (kind === "loop" ? 24 : 0);

function drawing({ width, height, shapes }, name, label) {
	const placed = shapes.map(shape => ({ ...shape,
		points: shape.points.map(({ x, y }) => ({ x: round(x * UNIT), y: round((height - y) * UNIT) })) }));
	const left = Math.max(0, Math.min(...placed.map(leftOf)) - MARGIN), wide = width * UNIT - left;
	// texts are above boxes, boxes above lines
	const order = shape => ["frame", "line", "arrow", "loop", "sum", "box", "text"].indexOf(shape.kind);
	placed.sort((a, b) => order(a) - order(b));
	return s("svg.anat-drawing", { viewBox: `${left} 0 ${wide} ${height * UNIT}`, ...group(label),
		style: { "--least": `${round(wide * LEGIBLE)}px` } }, placed.map(shape => drawShape(shape, name)));
}

// `around`: how often the enclosing part is repeated.
function card(part, path, total, choose, around = 1) {
	const times = part.repeats > 1 ? `${part.repeats} × ` : "", id = path.join("."), all = around * part.repeats;
	const each = all > 1 ? " each" : "", share = total ? ` · ${percent(all * part.parameters / total)}` : "";
	return h("li", { class: `anat-part${part.parts.length ? " anat-whole" : ""}`, "data-part": id },
		h("div.anat-head", button(`${times}${part.name}`, () => choose(id), { class: "anat-name" }),
			part.parameters > 0 && h("span", number(part.parameters) + each, soft(share))),
		part.formula && h("div.anat-formula", part.formula),
		part.shape && h("div", soft("shapes "), part.shape),
		part.note && h("div.soft", part.note),
		part.settings.length > 0 && h("div.anat-keys", part.settings.map(key => [h("code", key), " "])),
		part.code.map(({ place, text }) => h("details", h("summary", place),
			h("pre", { tabindex: 0, "aria-label": place }, h("code", text)))),
		part.parts.length > 0 && h("ol", part.parts.map((inside, n) => card(inside, [...path, n], total, choose, all))));
}

// `shown.part` is the path of the selected part.
export function mount(element, data, /** @type {AnatomyOptions} */ { shown = {}, changed = () => {} } = {}) {
	const at = path => path.slice(1).reduce((part, n) => part.parts[n], data.columns[path[0]]);
	const name = path => {
		const part = at(path);
		return `${part.name}${part.parameters ? `, ${number(part.repeats * part.parameters)} parameters` : ""}`;
	};
	const several = data.columns.length > 1, names = data.columns.map(column => column.name);
	const drawings = data.diagrams.map((diagram, n) => {
		const label = several && n ? names[n - 1] : names.join(" and ");
		return drawing(diagram, name, `${label}: boxes from the tokens below to the output above`);
	});
	const framed = (drawn, kind = "") => h("div", { class: `anat-picture scroll ${kind}` }, drawn);
	const body = [framed(drawings[0], several ? "anat-joint" : ""), h("div", data.columns.map((column, n) => [
		several && [h("h3.anat-title", column.name), framed(drawings[n + 1], "anat-single")],
		h("ol.anat-list", column.parts.map((part, place) => card(part, [n, place], data.parameters, choose)))]))];
	// a recurrent network over time
	const overTime = data.unrolled && drawing(data.unrolled, name, "the network over time: inputs below, losses above");
	if (overTime) drawings.push(overTime);
	const summary = h("p", data.parameters > 0 && [h("b", number(data.parameters)), " parameters. "],
		soft(data.letters));
	element.append(h("div.anatomy", summary,
		overTime && framed(overTime, "anat-time"),
		h("div", { class: `anat${several ? " anat-several" : ""}` }, body)));

	function mark(id) {
		for (const each of element.querySelectorAll(".anat-chosen")) each.classList.remove("anat-chosen");
		for (const each of element.querySelectorAll(".anat-box")) {
			// a part without a box is in the box of the part that contains it
			const contains = id !== undefined && `${id}.`.startsWith(`${each.dataset.part}.`);
			each.setAttribute("aria-pressed", contains);
			each.classList.toggle("anat-chosen", contains);
		}
		const item = id === undefined ? null : element.querySelector(`li[data-part="${CSS.escape(id)}"]`);
		item?.classList.add("anat-chosen");
		return item;
	}

	function choose(id) {
		mark(id)?.scrollIntoView({ block: "nearest" });
		changed({ part: id });
	}

	for (const svg of drawings) {
		const boxes = [...svg.querySelectorAll(".anat-box")].reverse(); // from the top
		roving(svg, () => boxes);
		set(svg, { onclick({ target }) {
			const box = target.closest(".anat-box");
			if (box) choose(box.dataset.part);
		}, onkeydown(event) {
			if (event.key !== "Enter" && event.key !== " ") return;
			event.preventDefault();
			choose(event.target.dataset.part);
		} });
	}
	if (shown.part !== undefined) mark(shown.part)?.scrollIntoView({ block: "nearest" });
	return { svg: () => drawings[0] };
}
