// Two layouts of the same columns. Left to right: all columns share the threads, and the stream runs below them. Top to
// bottom, for narrow windows: one section per column, and the stream runs down the left edge.
import { s } from "./dom.js";
import { line, part, rect, text } from "./stage_marks.js";
import { sum } from "./words.js";

const GAP = { wide: 0.55, tight: 1 }; // of a row, where tokens are left out
const EDGE = 20, STREAM_X = 26, SECTION_X = 58, ROW = 27; // pixels; the last three of the narrow layout

// Outline of a band through [position, thickness] points, along x or, in the narrow layout, along y.
function outline(points, middle, vertical) {
	const point = (along, across) => (vertical ? `${across} ${along}` : `${along} ${across}`);
	const side = sign => points.map(([along, thick]) => point(along, middle + (sign * thick) / 2));
	return `M${side(-1).join("L")}L${side(1).reverse().join("L")}z`;
}

// How thick the stream is for a norm, at most `most` pixels.
function thickness(parts, start, most) {
	const norms = [start, ...parts.flatMap(part => (part.band ?? []).map(each => each.norm))];
	const top = Math.max(...norms.filter(Number.isFinite), 1e-9);
	return norm => most * (0.35 + 0.65 * Math.min(1, (norm ?? 0) / top));
}

// The steps' positions along the stream: where the band is filled up to.
function fills(stage, parts, endOf, last) {
	let reached = 0;
	return stage.steps.map((_, n) => {
		const begun = id => stage.indexOf(id) >= 0 && stage.indexOf(id) <= n;
		for (const part of parts) if (begun(part.at)) reached = Math.max(reached, endOf(part));
		return begun("logits") ? last : reached;
	});
}

function stream(shape, grains, { width, height, id }) {
	const clip = s("clipPath", { id }, s("rect.wipe", { x: 0, y: 0, width, height }));
	return [s("defs", clip), line(shape, "band-later"), s("g", { "clip-path": `url(#${id})` }, line(shape, "band"),
		grains.map(d => line(d, "grain")))];
}

export function layOut(stage, scene, id) {
	return stage.narrow ? stacked(stage, scene, id) : sideBySide(stage, scene, id);
}

// Middles of rows in units of a row: a gap in the text takes up part of one.
function spaced(rows, size, gap = GAP.wide) {
	let place = 0, before = -1;
	const places = rows.map(row => {
		if (row > before + 1) place += gap;
		before = row;
		place += 1;
		return place - 0.5;
	});
	return { places, total: place + (before < size - 1 ? gap : 0) };
}

// Widths of columns: some are fixed, the others share the rest, but none is narrower than its least.
function widths(parts, free) {
	const flexible = parts.filter(part => part.flex), least = new Set();
	const share = () => {
		const rest = flexible.filter(part => !least.has(part));
		const room = free - sum([...least].map(part => part.least));
		return room / (sum(rest.map(part => part.flex)) || 1);
	};
	for (let unit = share(), again = true; again; unit = share()) {
		again = false;
		for (const part of flexible) if (!least.has(part)
			&& part.least > unit * part.flex) { least.add(part); again = true; }
	}
	const unit = Math.max(0, share()), wish = part => (least.has(part) ? part.least : part.flex * unit);
	const scale = Math.min(1, free / (sum(flexible.map(wish)) || 1));
	return part => part.width ?? wish(part) * scale;
}

function sideBySide(stage, scene, id) {
	const { fs, width: W, height: H, indexOf } = stage, { band, source } = scene;
	const parts = stage.near ? scene.parts.filter(part => part.panel || part.isTokens) : scene.parts;
	const most = fs * 2.9, streamY = H - fs * 1.9 - most / 2, first = fs * 8, last = streamY - most / 2 - fs;
	const gap = fs * 0.9, inner = fs * 0.7;
	// rows of the two sheaves: the source above, the text below
	const between = source ? fs * 7.6 : 0;
	const own = spaced(stage.threads.rows, stage.step.pieces.length, source ? GAP.tight : GAP.wide);
	const other = source ? spaced(source.rows, stage.step.source_pieces.length, GAP.tight) : { total: 0, places: [] };
	const sourceTop = source ? fs * 3.2 : first;
	const each = Math.min((last - sourceTop - between) / (own.total + other.total), fs * 6);
	const top = last - own.total * each;
	const sourceEach = source ? Math.min((top - between - sourceTop) / other.total, fs * 4.2) : 0;
	const ysOf = [own.places.map(place => top + place * each), other.places.map(place => sourceTop + place * sourceEach)];
	const yA = Math.max(source ? top : first, last - fs * 40);
	const boxes = {};
	Object.assign(stage, { boxes, streamY, top: source ? top - fs * 4.9 : fs * 2.4, bottom: streamY + most / 2 + fs * 0.5,
		y: n => ysOf[0][n] });

	// widths: fixed ones, the rest by share
	const panelled = parts.filter(part => part.panel), space = part => (part.panel ? inner
		: gap * (part.close ? 0.2 : part.folded ? 0.5 : 1));
	const fan = parts.some(part => part.id === "words") ? fs * 2.6 : 0, after = inner + gap * 0.5;
	const taken = sum(parts.map(part => (part.width ?? 0) + space(part))) + (panelled.length ? inner + after : 0) + fan;
	const widthOf = widths(parts, W - 2 * EDGE - taken);
	let x = EDGE;
	for (const part of parts) {
		if (part.id === "words") x = Math.max(x + fan, W - EDGE - part.width);
		if (part === panelled[0]) x += inner;
		const w = widthOf(part);
		boxes[part.id] = { x, w, y: yA, h: last - yA, ys: ysOf[0], sh: Math.min(each * 0.78, fs * 3.4), narrow: false,
			rows: sheaf => ysOf[sheaf], rh: sheaf => (sheaf ? sourceEach : each) };
		x += w + space(part) + (part === panelled.at(-1) ? after : 0);
	}
	if (source) {
		let left = EDGE;
		for (const part of source.parts) {
			boxes[part.id] = { ...boxes.tokens, x: left, w: part.width, y: sourceTop, h: other.total * sourceEach };
			left += part.width + gap;
		}
	}

	const thick = thickness(scene.parts, band.start, most), end = boxes.words ? boxes.words.x - fan : W - EDGE;
	stage.thick = thick;
	const isLow = stage.here === own.places.length - 1, from = isLow ? boxes.tokens.x + boxes.tokens.w / 2 : boxes.tokens.x - 12,
		points = [[from, thick(band.start)]];
	let norm = band.start;
	const skipped = stage.near ? scene.parts.slice(0, scene.parts.indexOf(panelled[0])) : [];
	for (const part of skipped) norm = part.band?.at(-1)?.norm ?? norm;
	if (stage.near) points[0][1] = thick(norm);
	for (const part of parts) for (const place of part.band ?? []) {
		const along = boxes[part.id].x + place.at * boxes[part.id].w;
		points.push([along - fs * 0.4, thick(norm)], [along + fs * 0.4, thick(place.norm)]);
		norm = place.norm;
	}
	points.push([end, thick(norm)]);
	const y = fs * (indexOf("choice") >= 0 ? 6.4 : 4);
	if (boxes.words)
		Object.assign(boxes.words, { y, h: last - y, from: { x: end, y: streamY }, under: streamY - fs * 1.1 });
	stage.fillTo = fills(stage, parts, part => boxes[part.id].x + boxes[part.id].w, end + 2);
	stage.fillTo[0] = from;

	const children = [], add = (...all) => children.push(...all);
	if (panelled.length) {
		const left = boxes[panelled[0].id].x - inner, right = boxes[panelled.at(-1).id];
		add(panel(scene, stage.near ? null : scene.panelGo,
			rect(left, stage.top, right.x + right.w + inner * 2 - left, stage.bottom - stage.top, "panel", 8)));
		if (scene.panelTitle) add(heading(left + inner, stage.top - fs * 0.9, scene.panelTitle, indexOf(scene.panelStep)));
	}
	for (const part of parts) add(...part.under?.(boxes[part.id]) ?? []);
	if (!scene.bare) add(...ysOf[0].map((y, n) => line(`M${boxes.tokens.x + boxes.tokens.w} ${y}`
		+ `H${n === stage.here ? (boxes.q ?? boxes[parts.at(-2)?.id] ?? boxes.tokens).x : end - 4}`, n === stage.here
			? "thread" : "thread faint")));
	const reach = (boxes.cross ?? boxes.context)?.x ?? end;
	if (source) add(...ysOf[1].map(y => line(`M${boxes.source.x + boxes.source.w} ${y}H${reach}`, "thread faint")));
	const shape = outline(points, streamY, false), followed = ysOf[0][stage.here];
	add(line(isLow ? `M${from} ${followed + fs}V${streamY}`
		: `M${boxes.tokens.x} ${followed}H${from + 3}V${streamY}`, "stem"),
		...stream(shape,
			[-0.3, 0, 0.3].map((part, n) => `M${EDGE + n * 7} ${streamY + part * most * 0.6}H${end}`),
			{ width: W, height: H, id }));
	add(text(EDGE, H - fs * 0.35, band.label, "soft"), ...W > fs * 72 && !scene.bare
		? legend(end - fs * 0.6, H - fs * 0.35, fs, scene.hasMask) : []);
	for (const part of [...source?.parts ?? [], ...parts]) {
		const box = boxes[part.id];
		const above = !source || part.id === "words" ? fs * 1.5 : part.sheaf === 1 ? sourceTop - fs * 0.9 : part.panel
			? stage.top - fs * 0.9
			: top - fs * (part.headRoom ?? 0.9);
		if (part.title) add(heading(box.x, above, part.title, indexOf(part.at)));
		const { second } = part, low = part.sheaf === 1 ? sourceTop : part.rowsNarrow ? ysOf[0][0] - each / 2 : box.y;
		if (second) add(heading(box.x + box.w * 0.26 + fs * 0.9, fs * 1.5, second.title, indexOf(second.at)));
		if (part.sub && !source) add(text(box.x, fs * 3, part.sub, "soft"));
		if (part.label) add(text(box.x, low - fs * 0.7, part.label, "head", { "data-s": indexOf(part.at) }));
		add(...part.draw(box));
	}
	return { width: W, height: H, children };
}

const heading = (x, y, title, step) => text(x, y, title, "head bold", { "data-s": step });

const panel = ({ panelTitle }, go, shape) => part(go, `Zoom into ${panelTitle?.toLowerCase()}`, shape);

// What the signs mean; each differs in shape as well as in colour.
function legend(x, y, fs, hasMask) {
	const size = fs * 0.7, children = [];
	let end = x;
	const add = (name, wide, draw) => {
		const left = end - wide * fs - size;
		children.push(text(end, y, name, "soft end"), draw(left));
		end = left - fs * 1.2;
	};
	const bar = (from, kind) => left => [rect(left, y - size * from, size, size * 0.75, kind, 1),
		line(`M${left - 2} ${y - size * 0.45}h${size + 4}`, "axis")];
	if (hasMask) add("masked", 4.1, left => rect(left, y - size, size, size, "hatch", 0));
	add("below: negative", 8.4, bar(0.55, "neg"));
	add("above: positive", 8.3, bar(1.1, "pos"));
	return children;
}

function stacked(stage, scene, id) {
	const { fs, width: W, indexOf } = stage, { band, source } = scene, most = 26, w = W - SECTION_X - 14;
	const thick = thickness(scene.parts, band.start, most), children = [], under = [], boxes = {}, ends = {};
	Object.assign(stage, { boxes, thick, streamY: 0 });
	let y = 8, norm = band.start, begin = 0;
	const points = [], sheaves = [spaced(stage.threads.rows, stage.step.pieces.length),
		source ? spaced(source.rows, stage.step.source_pieces.length) : { places: [], total: 0 }];
	let top = 0, bottom = 0; // of the panel
	const order = [...scene.parts.slice(0, 1), ...source?.parts ?? [], ...scene.parts.slice(1)];
	for (const part of order) {
		if (part.heightNarrow === 0) { ends[part.id] = y; continue; }
		const start = y, sheaf = part.sheaf ?? 0, title = part.title ?? (part.label
			&& `${scene.panelTitle ?? ""} · ${part.label}`);
		if (part.panel && !top) { top = y; y += 8; }
		const from = y + (title ? fs * 2.1 : 0) + (part.extraNarrow ?? 0), isWords = part.id === "words";
		const ys = sheaves[sheaf].places.map(place => from + place * ROW);
		const labelled = part.rowsNarrow && !part.isTokens, indent = labelled ? 76 : 0;
		const h = part.rowsNarrow ? sheaves[sheaf].total * ROW : part.heightNarrow;
		const box = boxes[part.id] = { x: SECTION_X + indent, w: w - indent, y: from, h, ys, sh: 22, narrow: true,
			streamX: STREAM_X, rows: _ => ys, rh: _ => ROW, from: isWords ? { x: STREAM_X, y: from - 14 } : null };
		stage.y = n => ys[n];
		if (title) children.push(heading(SECTION_X, y + fs * 1.2, title, indexOf(part.at)));
		if (labelled) children.push(...(sheaf ? stage.sourceNames : stage.names).map((name, n) =>
			text(SECTION_X, ys[n] + fs * 0.35, name.length > 8 ? `${name.slice(0, 7)}…` : name, !sheaf && n === stage.here
				? "mono bold" : "mono soft")));
		if (part.isTokens && !sheaf) begin = from + h;
		under.push(...part.under?.(box) ?? []);
		children.push(...part.draw(box));
		y = from + h + (part.folded ? 8 : 22);
		if (part.panel) bottom = y;
		ends[part.id] = y - 10;
		for (const place of part.band ?? []) {
			const along = part.folded ? start + 42 * place.at : y - 30;
			points.push([along - 6, thick(norm)], [along + 6, thick(place.norm)]);
			norm = place.norm;
		}
		if (isWords) ends.stream = from - 14;
	}
	const end = ends.stream ?? y, here = boxes.tokens.ys[stage.here];
	const shape = outline([[begin, thick(band.start)], ...points, [end, thick(norm)]], STREAM_X, true);
	if (top) under.push(panel(scene, scene.panelGo && "head", rect(6, top, W - 18, bottom - top - 8, "panel", 8)));
	under.push(line(`M${SECTION_X} ${here}H${STREAM_X}V${begin + 4}`, "stem"),
		...stream(shape, [-4, 4].map(by => `M${STREAM_X + by} ${begin}V${end}`), { width: W, height: y, id }));
	stage.fillTo = fills(stage, scene.parts, part => ends[part.id] ?? 0, end);
	let seen = 0;
	stage.scrollTo = stage.steps.map((_, n) => {
		const now = order.filter(part => [part.at, part.second?.at].some(at => indexOf(at) === n) && boxes[part.id]);
		if (now.length) seen = Math.min(...now.map(part => boxes[part.id].y - (part.extraNarrow ?? 0)));
		return seen;
	});
	return { width: W, height: y, children: [...under, ...children] };
}
