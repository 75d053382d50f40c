// Save a view as SVG or PNG; copy a link or its command.
import { button, copyText, h, picture, s, soft } from "./dom.js";
import { toSvg } from "./snapshot.js";

const pageColour = () => getComputedStyle(document.documentElement).getPropertyValue("--page").trim() || "#fff";

// The visible content of elements, stacked, as one SVG; null without any.
function stacked(elements, gap = 24) {
	const copies = [elements].flat().filter(Boolean).map(toSvg);
	if (!copies.length) return null;
	let y = 0, wide = 0;
	for (const copy of copies) {
		copy.setAttribute("y", y);
		y += Number(copy.getAttribute("height")) + gap;
		wide = Math.max(wide, Number(copy.getAttribute("width")));
	}
	return picture(wide, y - gap, { xmlns: "http://www.w3.org/2000/svg" },
		s("rect", { width: wide, height: y - gap, fill: pageColour() }), copies);
}

export function download(blob, name) {
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

export const shellQuote = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;

/**
 * @param {{ id: string, step?: number, off?: string[] }} info
 * @param {string} view
 * @param {{ text?: string, target?: string }} state
 * @param {(string | undefined)[]} options
 */
export function explainCommand(info, view, { text, target }, ...options) {
	if (info.step !== undefined || info.off?.length) return ""; // of a variant
	return ["weft explain", shellQuote(`runs/${info.id}`), `--only ${view}`, text && `--text ${shellQuote(text)}`,
		target && `--target ${shellQuote(target)}`, ...options].filter(Boolean).join(" ");
}

// The row of buttons below a view. `svg` returns the elements to save, `command` a line for a shell.
export function saveTools({ svg, name, command }) {
	const line = h("code"), show = () => { line.textContent = command(); shown.hidden = !line.textContent; };
	const shown = command && h("span.tools-command", soft("Command: "), line, " ",
		button("Copy", event => copyText(event.target, command(), line)));
	const save = (type, blob) => svg && button(`Save ${type}`, async () => {
		const drawn = stacked(svg());
		if (drawn) download(await blob(drawn), `${name}.${type.toLowerCase()}`);
	});
	const row = h("div.tools", save("SVG", asBlob), save("PNG", png),
		button("Copy link", event => copyText(event.target, location.href)), shown);
	if (command) {
		show();
		document.addEventListener("weft-state", () => row.isConnected && show());
	}
	return row;
}
