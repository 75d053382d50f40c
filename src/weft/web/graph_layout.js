// Placing rule of a computation graph, as in explain/graph/placing.py; tests/explain/test_graph_layout.py compares the
// two. Python lays every group out once, with its children closed; here boxes have the sizes that the browser measures.
const PAD = 12, TITLE_HEIGHT = 24, LAYER_GAP = 30, PASSING_GAP = 18, SLOPE = 0.06, MAX_EXTRA_GAP = 46, LINE_GAP = 12;
const OUTSIDE = -1;

const sorted = numbers => [...new Set(numbers)].sort((a, b) => a - b);

/* Places everything in `root`, an open box without a frame, and returns the connectors. A box has `width`, `height` and
	 `port`, where lines meet it. An open one has `inside` boxes, their `group` layout and the width of its `title`; it
	 gets its size and `titleX`. All boxes get absolute `x` and `y`. */
export function place(root) {
	const connectors = placeInside(root, false);
	root.x = root.y = 0;
	toAbsolute(root);
	return connectors;
}

function toAbsolute(box) {
	for (const child of box.inside ?? []) {
		child.x += box.x;
		child.y += box.y;
		toAbsolute(child);
	}
}

// Places the content of an open box in its coordinates, and sets its size and ports.
function placeInside(box, frame) {
	const { inside: children, group: { layout, bundles, main } } = box, { vertices, segments } = layout;
	const nested = children.map(child => child.inside ? placeInside(child, true) : []);
	const columns = columnPositions(layout, children).map(x => x + (frame ? PAD : 0));
	box.entries = new Map();
	for (const { child, column, entry } of vertices) {
		if (child !== OUTSIDE) children[child].x = columns[column] - children[child].port;
		if (entry !== null) for (const source of bundles[entry].sources) box.entries.set(source, columns[column]);
	}
	const startX = ({ child, column }, source) => child === OUTSIDE ? columns[column]
		: children[child].x + (children[child].exits?.get(source) ?? children[child].port);
	const endX = ({ child, column, exit }, source) => child !== OUTSIDE
		? children[child].x + (children[child].entries?.get(source) ?? children[child].port)
		: exit ? box.exits.get(source) : columns[column];
	// A line leaves the frame right below the box that it comes from.
	const below = segments.filter(({ end }) => vertices[end].exit).flatMap(({ start, edge }) =>
		bundles[edge].sources.map(source => [source, startX(vertices[start], source)]));
	let last = -PAD;
	const apart = new Map(sorted(below.map(([, x]) => x)).map(x => [x, last = Math.max(x, last + LINE_GAP)]));
	box.exits = new Map(below.map(([source, x]) => [source, apart.get(x)]));
	const joins = segments.map(({ start, end, edge }) => {
		const ends = new Map();
		for (const source of bundles[edge].sources) {
			const x = startX(vertices[start], source), toX = endX(vertices[end], source), key = `${x} ${toX}`;
			if (!ends.has(key)) ends.set(key, { x, toX, sources: [] });
			ends.get(key).sources.push(source);
		}
		return [...ends.values()];
	});
	const { tops, bottoms } = layerPositions(layout, children, joins, frame ? TITLE_HEIGHT : 0);
	for (const { layer, child, bottom } of vertices) {
		if (child !== OUTSIDE) children[child].y = bottom ? bottoms[layer] - children[child].height : tops[layer];
	}
	const connectors = segments.flatMap(({ start, end, edge, reached }, n) => {
		const from = vertices[start], to = vertices[end], above = children[from.child], under = children[to.child];
		return joins[n].map(ends => ({
			...ends,
			y: above ? above.y + above.height : frame && !from.layer ? 0 : tops[from.layer],
			bend: bottoms[from.layer],
			straight: tops[to.layer],
			toY: under ? under.y : tops[to.layer],
			leaves: !!above && !above.inside,
			arrives: !!under && !under.inside,
			targets: reached.flatMap(target => bundles[edge].targets[target]),
		}));
	});
	children.forEach(({ x, y }, n) => {
		for (const line of nested[n]) {
			line.x += x; line.toX += x;
			line.y += y; line.bend += y; line.straight += y; line.toY += y;
			connectors.push(line);
		}
	});
	box.width = Math.max(0, ...columns, ...box.exits.values());
	box.height = bottoms.at(-1);
	if (frame) {
		box.titleX = titlePosition(sorted(box.entries.values()), box.title);
		box.width = Math.max(box.width, box.titleX + box.title) + PAD;
		box.height += box.exits.size ? 0 : PAD;
		box.port = box.entries.get(main) ?? box.exits.get(main) ?? box.width / 2;
	}
	return connectors;
}

function columnPositions({ gaps, spans }, children) {
	const positions = [];
	let next = 0;
	gaps.forEach((gap, number) => {
		let x = gap + (number ? positions[number - 1] : 0);
		for (; next < spans.length && spans[next].end === number; next++) {
			const { start, child, right } = spans[next], { width, port } = children[child];
			x = Math.max(x, positions[start] + (right ? width - port : port));
		}
		positions.push(x);
	});
	return positions;
}

// The top and the bottom of every layer, the first of which begins at `top`.
function layerPositions({ vertices, segments }, children, joins, top) {
	const heights = [0], distances = [0], tops = [], bottoms = [];
	for (const { layer, child } of vertices) {
		heights[layer] = Math.max(heights[layer] ?? 0, child === OUTSIDE ? 0 : children[child].height);
	}
	segments.forEach(({ end }, n) => {
		const { layer } = vertices[end];
		distances[layer] = Math.max(distances[layer] ?? 0, ...joins[n].map(({ x, toX }) => Math.abs(x - toX)));
	});
	Array.from(heights, height => height ?? 0).forEach((height, layer) => {
		if (layer) {
			const gap = height && heights[layer - 1] ? LAYER_GAP : PASSING_GAP;
			top += gap + Math.min(MAX_EXTRA_GAP, SLOPE * (distances[layer] ?? 0));
		}
		tops.push(top);
		bottoms.push(top += height);
	});
	return { tops, bottoms };
}

// The first x at which a title of this width fits between the lines that enter.
function titlePosition(entries, width) {
	let x = PAD;
	for (const entry of entries) {
		if (entry - 6 >= x + width) break;
		x = Math.max(x, entry + 8);
	}
	return x;
}
