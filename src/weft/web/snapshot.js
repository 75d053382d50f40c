// Converts part of a page to a standalone SVG: drawings keep their shapes, other elements become boxes and texts.
import { s, set } from "./dom.js";
import { ruler } from "./words.js";

const PROPERTIES = ["stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
	"font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "paint-order",
	"visibility", "display", "writing-mode", "image-rendering", "shape-rendering", "text-decoration-line",
	"letter-spacing", "white-space"];
const EDGE = 8; // pixels around the content

// A colour as #rrggbb and an opacity: not every program reads color(srgb 0.5 0.6 0.7 / 0.5).
function colourOf(value) {
	if (!/^(rgb|color\(srgb )/.test(value)) return { colour: value, opacity: 1 }; // transparent
	const [red, green, blue, opacity = 1] = value.match(/\d[\d.]*(e-\d+)?/g), scale = value.startsWith("color") ? 255 : 1;
	const two = part => Math.round(scale * part).toString(16).padStart(2, "0");
	return { colour: `#${[red, green, blue].map(two).join("")}`, opacity };
}

function setColours(element, style) {
	for (const name of ["fill", "stroke"]) {
		const { colour, opacity } = colourOf(style.getPropertyValue(name));
		element.setAttribute(name, colour);
		element.setAttribute(`${name}-opacity`, opacity * style.getPropertyValue(`${name}-opacity`));
	}
}

// A copy of an SVG that needs no style sheet: its computed style is in its attributes.
function withoutStyleSheet(svg) {
	const box = svg.viewBox.baseVal, copy = svg.cloneNode(true);
	const width = box?.width || svg.clientWidth || 800, height = box?.height || svg.clientHeight || 400;
	const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
	const outside = !svg.isConnected;
	if (outside) { document.body.append(svg); svg.style.setProperty("position", "absolute"); }
	from.forEach((element, index) => {
		const style = getComputedStyle(element);
		for (const name of PROPERTIES) {
			const value = style.getPropertyValue(name);
			if (value) to[index].setAttribute(name.replace(/-line$/, ""), value); // the SVG property
		}
		setColours(to[index], style);
		for (const name of ["class", "style", "tabindex"]) to[index].removeAttribute(name);
	});
	if (outside) svg.remove();
	return set(copy, { width, height, viewBox: `${box?.x ?? 0} ${box?.y ?? 0} ${width} ${height}` });
}

// Parts of a text node, one per line, with their positions; clipped text is left out.
function lines(node) {
	const parent = node.parentElement;
	const clipped = getComputedStyle(parent).overflowX === "hidden" && parent.scrollWidth > parent.clientWidth;
	const edge = parent.getBoundingClientRect().right, range = document.createRange();
	const parts = [];
	let at = 0;
	for (const character of node.data) {
		range.setStart(node, at);
		range.setEnd(node, at += character.length);
		const box = range.getClientRects()[0];
		if (!box || character === "\n") continue;
		if (clipped && box.right > edge) {
			const last = parts.at(-1);
			if (last) last.text += "…";
			break;
		}
		const line = parts.at(-1);
		if (line && Math.abs(line.top - box.top) < 2) line.text += character;
		else parts.push({ text: character, left: box.left, top: box.top });
	}
	return parts.filter(line => line.text.trim());
}

function boxes(element, style) {
	const edge = parseFloat(style.borderLeftWidth) && parseFloat(style.borderTopWidth) ? style.borderTopColor : "none";
	const fill = /, 0\)$|transparent|\/ 0\)$/.test(style.backgroundColor) ? "none" : style.backgroundColor;
	if (edge === "none" && fill === "none") return [];
	return [...element.getClientRects()].map(box => ({ box, fill, stroke: edge, rx: parseFloat(style.borderRadius) || 0,
		"stroke-dasharray": style.borderTopStyle === "dashed" ? "4 2" : undefined }));
}

// `clip` is the box of the scrolling element around this one; invisible content is left out.
function elementToSvg(root) {
	const bounds = root.getBoundingClientRect();
	const [x, y] = [value => value - bounds.left + EDGE, value => value - bounds.top + EDGE], parts = [];
	const walk = (element, clip) => {
		const style = getComputedStyle(element), seen = box => box.top < clip.bottom - 1 && box.bottom > clip.top + 1;
		for (const { box, ...look } of boxes(element, style).filter(each => seen(each.box))) {
			parts.push(s("rect", { x: x(box.left), y: y(box.top), width: box.width, height: box.height, ...look }));
		}
		parts.push(...["::before", "::after"].map(which => pseudoLine(element, which, x, y)).filter(Boolean));
		ruler.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
		const rise = ruler.measureText("x").fontBoundingBoxAscent, rectangle = element.getBoundingClientRect();
		const inner = element === root || style.overflowY === "visible" ? clip : rectangle;
		for (const child of element.childNodes) {
			if (child.localName === "svg") parts.push(embeddedSvg(child, x, y));
			else if (child.nodeType === Node.ELEMENT_NODE && !child.matches(".plot-controls")) walk(child, inner);
			if (child.nodeType !== Node.TEXT_NODE) continue;
			for (const { text, left, top } of lines(child)) {
				if (seen({ top, bottom: top + rise })) parts.push(s("text", { x: x(left), y: y(top) + rise, fill: style.color,
					"font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight,
					"xml:space": "preserve", "text-decoration": style.textDecorationLine }, text));
			}
		}
	};
	walk(root, { top: -Infinity, bottom: Infinity });
	const wide = Math.max(Math.ceil(bounds.width), root.scrollWidth);
	return s("svg", { viewBox: `0 0 ${wide + 2 * EDGE} ${Math.ceil(bounds.height) + 2 * EDGE}` }, parts);
}

// A line that joins elements, as in a tree, is the border of a pseudo-element.
function pseudoLine(element, which, x, y) {
	const style = getComputedStyle(element, which), rectangle = element.getBoundingClientRect();
	if (style.position !== "absolute" || style.content === "none") return null;
	const [left, top, width, height] = ["left", "top", "width", "height"].map(name => parseFloat(style[name]));
	const across = parseFloat(style.borderTopWidth) > 0, line = across ? `h${width}` : `v${height}`;
	return s("path", { d: `M${x(rectangle.left) + left} ${y(rectangle.top) + top}${line}`, fill: "none",
		stroke: across ? style.borderTopColor : style.borderLeftColor });
}

function embeddedSvg(svg, x, y) {
	const { left, top, width, height } = svg.getBoundingClientRect();
	return set(withoutStyleSheet(svg), { x: x(left), y: y(top), width, height });
}

export const toSvg = element => withoutStyleSheet(element.localName === "svg" ? element : elementToSvg(element));
