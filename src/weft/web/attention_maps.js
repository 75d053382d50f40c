// Attention: unpacks the probabilities of all heads, and maps them to colours.
import { h } from "./dom.js";
import { decodeBase64 } from "./words.js";

async function inflate(text) {
	const stream = new Blob([decodeBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
	return new Uint8Array(await new Response(stream).arrayBuffer());
}

export const unpackMaps = parts => Promise.all(parts.map(async part =>
	new Maps(part, await inflate(part.weights), part.best && await inflate(part.best))));

// One kind of attention: probabilities by (layer, head, row, column); rows and columns are blocks of tokens.
class Maps {
	kind; name; layers; heads; queries; keys; rows; columns; levels;
	block; // tokens per row and column
	past; // whether only the lower triangle is stored
	count; // strongest keys per query in `best`

	constructor({ weights: _, ...part }, bytes, best) {
		Object.assign(this, part);
		this.bytes = bytes;
		this.best = best;
		this.single = part.layers * part.heads === 1; // recurrent models with attention have one map, of no layer and head
		this.perMap = this.past ? (this.rows * (this.rows + 1)) / 2 : this.rows * this.columns;
		this.square = Float32Array.from({ length: this.levels + 1 }, (_, n) => (n / this.levels) ** 2);
	}

	// Which map: "layer 2, head 0", or nothing where there is only one; `before` separates it from the text before.
	where(layer, head, before = "") { return this.single ? "" : `${before}layer ${layer}, head ${head}`; }

	level(layer, head, row, column) {
		if (this.past && column > row) return 0;
		const inside = this.past ? (row * (row + 1)) / 2 + column : row * this.columns + column;
		return this.bytes[(layer * this.heads + head) * this.perMap + inside];
	}

	weight(layer, head, row, column) { return this.square[this.level(layer, head, row, column)]; }

	// [key, weight] of a query, the strongest first
	strongest(layer, head, query) {
		const result = [];
		if (this.best) {
			const each = this.layers * this.heads * this.queries.length, all = each * this.count;
			for (let rank = 0; rank < this.count; rank++) {
				const at = rank * each + (layer * this.heads + head) * this.queries.length + query;
				result.push([this.best[at] + 256 * this.best[all + at], this.square[this.best[2 * all + at]]]);
			}
		} else {
			for (let key = 0; key < this.keys.length; key++) result.push([key, this.weight(layer, head, query, key)]);
		}
		return result.filter(([, weight]) => weight > 0).sort((a, b) => b[1] - a[1]);
	}

	// levels of a rectangle of a map, row by row
	part(layer, head, { top, bottom, left, right }) {
		const result = new Uint8Array((bottom - top) * (right - left));
		let at = 0;
		for (let row = top; row < bottom; row++)
			for (let column = left; column < right; column++) result[at++] = this.level(layer, head, row, column);
		return result;
	}

	// every map max-pooled to at most this many pixels per side: { columns, maps: [levels] }
	maxPool(maxCells) {
		const size = Math.ceil(Math.max(this.rows, this.columns) / maxCells);
		const rows = Math.ceil(this.rows / size), columns = Math.ceil(this.columns / size), maps = [];
		let at = 0;
		for (let map = 0; map < this.layers * this.heads; map++) {
			const levels = new Uint8Array(rows * columns);
			for (let row = 0; row < this.rows; row++)
				for (let column = 0, end = this.past ? row + 1 : this.columns; column < end; column++, at++) {
					const to = Math.floor(row / size) * columns + Math.floor(column / size);
					if (this.bytes[at] > levels[to]) levels[to] = this.bytes[at];
				}
			maps.push(levels);
		}
		return { columns, maps };
	}
}

// a colour of the style sheet as [red, green, blue, opacity]
function rgb(text) {
	const canvas = h("canvas").getContext("2d", { willReadFrequently: true });
	canvas.fillStyle = text;
	canvas.fillRect(0, 0, 1, 1);
	return canvas.getImageData(0, 0, 1, 1).data;
}

// Maps levels to the colours of the page, light or dark.
export class Shades {
	constructor(root) {
		this.root = root;
		this.palette = new Uint32Array(256);
		this.table = new Uint8Array(2); // brightness of each level
		this.take();
	}

	take() {
		const style = getComputedStyle(this.root), bytes = new Uint8Array(this.palette.buffer);
		const [card, deep] = ["--card", "--deep"].map(name => rgb(style.getPropertyValue(name)));
		this.ink = style.getPropertyValue("--ink");
		this.soft = style.getPropertyValue("--soft");
		this.mark = style.getPropertyValue("--ink");
		for (let n = 0; n < 256; n++)
			for (let part = 0; part < 4; part++)
				bytes[4 * n + part] = Math.round(card[part] + ((deep[part] - card[part]) * n) / 255);
	}

	choose(how, maps) {
		this.table = Uint8Array.from({ length: maps.levels + 1 }, (_, n) =>
			255 * Math.min(1, how === "root" ? n / maps.levels : maps.square[n]));
	}

	// draw maps of levels (rows × columns) side by side on a canvas of one pixel per cell
	paint(canvas, maps, columns) {
		const rows = maps[0].length / columns, width = columns * maps.length;
		[canvas.width, canvas.height] = [width, rows];
		const context = canvas.getContext("2d"), image = context.createImageData(width, rows);
		const points = new Uint32Array(image.data.buffer);
		maps.forEach((levels, map) => {
			for (let row = 0, at = 0; row < rows; row++) {
				let to = row * width + map * columns;
				for (const end = at + columns; at < end; at++) points[to++] = this.palette[this.table[levels[at]]];
			}
		});
		context.putImageData(image, 0, 0);
	}
}
