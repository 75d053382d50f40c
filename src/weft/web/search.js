// Greedy search, beam search and sampling as trees that grow one token at a time.
import { group, h, picture, prefersReducedMotion, s, soft } from "./dom.js";
import { player } from "./player.js";
import { indexIn, panel } from "./shaded.js";
import { scrollRegion, table } from "./table.js";
import { clamp, minus, showWhitespace } from "./words.js";

// explain/search.py uses the same measures
const [BOX, CURVE, EDGE, ROOT] = [19, 13, 5, 7];
const TITLES = { greedy: "Greedy search", beam: "Beam search", sampling: "Sampling", best: "Best of all paths" };
const STATES = ["unseen", "pruned", "kept", "chosen"];
const PACE = 900; // milliseconds per step
const OUTCOMES = { unseen: "not considered", pruned: "considered and dropped", kept: "kept", chosen: "part of the result" };

const fixed = value => minus(value.toFixed(2));

// For every node its depth in tokens, and the text from the prompt to it.
function prefixes(nodes) {
	const paths = [];
	for (const node of nodes) {
		const before = node.parent < 0 ? { depth: 0, text: "" } : paths[node.parent];
		paths.push({ depth: before.depth + 1, text: before.text + node.text });
	}
	return paths;
}

function branch(node, position, weight) {
	const { start_x: fromX, start_y: fromY } = position, curveStart = position.label_x - CURVE;
	const bend = curveStart + CURVE / 2;
	const curve = `C${bend} ${fromY} ${bend} ${position.y} ${position.label_x} ${position.y}`;
	const edge = `M${fromX} ${fromY}H${curveStart}${curve}H${position.x}`;
	return s("g",
		s("title", `${weight} ${fixed(-node.logprob)}, total ${fixed(-node.total)}`),
		s("path", { d: edge }),
		s("rect", { x: position.x, y: position.y - BOX / 2, width: position.width, height: BOX, rx: 4 }),
		s("text.search-token", { x: position.x + position.width / 2, y: position.y + 4.5 }, position.text),
		s("text.search-p", { x: position.label_x + 2, y: position.y - 4 }, position.label));
}

// The texts of a search with their weights, and the probability that it did not consider.
const resultList = lines => h("ul", lines.map(line => {
	const [text, ...weights] = line.split("   ");
	return h("li", weights.length ? [h("code", text || "(nothing)"), soft(` ${weights.join(" ")}`)] : soft(text));
}));

// One tree: its `element`, its number of `steps`, and `show(step)`, which shows the tree after this many tokens. Beam
// search knows the best beam only after the last one.
function drawing(tree, layout, { describe, results, weight }) {
	const title = TITLES[tree.name], paths = prefixes(tree.nodes);
	const steps = Math.max(0, ...paths.map(each => each.depth));
	const branches = tree.nodes.map((node, n) => branch(node, layout.positions[n], weight));
	branches.forEach((each, n) => each.addEventListener("pointerenter", () => {
		const node = tree.nodes[n];
		const numbers = `${weight} of the last token ${fixed(-node.logprob)}, total ${fixed(-node.total)}`;
		describe(h("p", h("b", showWhitespace(paths[n].text)), ` ${OUTCOMES[node.state]}: ${numbers}`));
	}));
	// the chosen path is drawn on top
	const order = STATES.flatMap(state => branches.filter((_, n) => tree.nodes[n].state === state));
	const svg = picture(layout.width, layout.height, { width: null, height: null, role: "img",
		"aria-label": `${title} as a tree; the table below has its nodes` },
	s("circle", { cx: EDGE + ROOT / 2, cy: layout.root, r: ROOT / 2 }), order);
	const texts = resultList(results);
	const rows = tree.nodes.map((node, n) =>
		[showWhitespace(paths[n].text), fixed(-node.logprob), fixed(-node.total), OUTCOMES[node.state]]);
	const nodes = table({ title: "All nodes as a table", header: ["text", weight, "total", "outcome"],
		rows, text: [0, 3], folds: true });
	nodes.querySelector(".scroll").setAttribute("aria-label", `${title}: table`);
	const element = h("figure.search-tree", { style: { "--width": `${Math.round(layout.width)}px` } },
		h("figcaption", h("b", title)),
		scrollRegion(`${title}: tree, scrolls sideways`, svg), texts, nodes);
	const show = (step, last) => {
		branches.forEach((each, n) => {
			const { state } = tree.nodes[n], open = tree.name === "beam" && step <= last && state === "chosen";
			each.setAttribute("class", `search-${open ? "kept" : state}`);
			each.classList.toggle("search-later", paths[n].depth > step);
			each.classList.toggle("search-new", paths[n].depth === step);
		});
		texts.classList.toggle("search-later", step <= last);
	};
	return { element, steps, show };
}

// `data` is the JSON of explain/search.py's SearchTrees. `options`: the initial `step`, by default the last; `play`
// starts at the first; `changed({ step })` is called when it stops, with undefined for the last step.
export function mount(element, data, /** @type {SearchOptions} */ { step, play = false, changed = () => {} } = {}) {
	const { element: details, show: describe } = panel("Bold: result. Dashed: dropped. Dotted: not considered. Point at a node for details.");
	const trees = data.trees.map((tree, n) => drawing(tree, data.layouts[n],
		{ describe, results: data.results[n], weight: data.weight }));
	const last = Math.max(...trees.map(tree => tree.steps)); // tokens; one more step shows the final texts
	let at = last + 1;
	const status = h("span.search-status", { role: "status" });
	const show = to => {
		at = clamp(to, 0, last + 1);
		trees.forEach(tree => tree.show(at, last));
		status.textContent = at > last ? "Result" : at === 0 ? "Prompt" : `Token ${at} of ${last}`;
		playing.setEnds(at === 0, at > last);
		return at <= last;
	};
	const playing = player({ pace: PACE, move: by => show(at + by), restart: () => show(0),
		onstop: () => changed({ step: at > last ? undefined : at }) });
	element.replaceChildren(h("div.search",
		data.prompt && h("p", data.translates ? "From " : "After ", h("code", showWhitespace(data.prompt))),
		h("div.search-steps", group("Search, token by token"),
			playing.buttons, status),
		details,
		h("div.search-trees", trees.map(tree => tree.element))));
	const animated = play && !prefersReducedMotion();
	show(animated ? 0 : indexIn({ length: last + 1 }, step) ?? last + 1);
	if (animated) playing.start();
	return { close: playing.stop };
}
