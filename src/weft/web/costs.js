// Costs of a model as stacked bars; pointing at a segment shows its value.
import { h, roving, s, set } from "./dom.js";

const WIDTH = 1000, HEIGHT = 34;

function strip(bar) {
	let left = 0;
	return s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "cost-bar", role: "group",
		"aria-label": bar.title }, bar.pieces.map(({ share, shade, tells }) => {
			const piece = s("rect.cost-piece", { x: left * WIDTH, y: 0, width: share * WIDTH, height: HEIGHT,
				role: "img", tabindex: -1, "aria-label": tells, style: { "--p": shade / 100 } });
			left += share;
			return piece;
		}));
}

function drawBar(bar) {
	const status = h("span.soft", { role: "status" }, bar.total), svg = strip(bar);
	const key = h("ul.cost-key", bar.pieces.map(({ name, label, shade }, n) => name && h("li",
		{ "data-piece": n }, h("i", { style: { "--p": shade / 100 }, "aria-hidden": "true" }), `${name} ${label}`)));
	const pieces = [...svg.children];
	const describe = n => {
		status.textContent = bar.pieces[n]?.tells ?? bar.total;
		pieces.forEach((piece, at) => piece.classList.toggle("chosen", at === n));
		for (const each of key.children) each.classList.toggle("chosen", Number(each.dataset.piece) === n);
	};
	roving(svg, () => pieces, { onfocus: piece => describe(pieces.indexOf(piece)) });
	const leave = () => describe(-1);
	set(svg, { onpointermove: event => describe(pieces.indexOf(event.target)), onpointerleave: leave, onfocusout: leave });
	set(key, { onpointerover: ({ target }) => describe(Number(target.closest("li")?.dataset.piece ?? -1)),
		onpointerleave: leave });
	return h("div.cost-part", h("p.cost-head", h("b", bar.title), " ", status), svg, key);
}

export function mount(element, { bars }) {
	const list = element.appendChild(h("div.costs", bars.map(drawBar)));
	return { svg: () => list };
}
