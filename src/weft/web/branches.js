// Texts with a common beginning as a tree: a shared part is shown once, and the tree forks where texts diverge.
import { button, h, soft } from "./dom.js";
import { minus, percent, sum } from "./words.js";

// Branches [{ tokens: [{ id, … }] }] as segments { tokens, from (index of the first), branches (indices), children }.
function tree(branches) {
	const grow = (indices, from) => {
		const id = (index, place) => branches[index].tokens[place]?.id;
		let to = from;
		const longest = Math.max(...indices.map(index => branches[index].tokens.length));
		while (to < longest && indices.every(index => id(index, to) === id(indices[0], to))) to += 1;
		const groups = new Map();
		for (const index of indices) {
			if (to >= branches[index].tokens.length) continue;
			groups.set(id(index, to), [...groups.get(id(index, to)) ?? [], index]);
		}
		return { tokens: branches[indices[0]].tokens.slice(from, to), from, branches: indices,
			children: indices.length > 1 ? [...groups.values()].map(group => grow(group, to)) : [] };
	};
	return grow(branches.map((_, index) => index), 0);
}

export const textOf = tokens => tokens.map(token => token.adds).join("");
const flat = text => text.replace(/\n+/g, "↵ ").replace(/\s+/g, " ");
const shown = tokens => flat(textOf(tokens)).trim() || tokens.map(token => token.text).join("");
const ending = text => [...text].length > 30
	? `…${[...flat(text)].slice(-28).join("").replace(/^\S*\s/, " ")} `
	: `${flat(text) || "…"} `;
const leaves = segment => segment.children.length ? sum(segment.children.map(leaves)) : 1;

// `at` is the current branch, `choose(index)` switches to another, and `start` is the text before all of them.
export function drawTree(box, { branches, at, start, choose }) {
	const draw = (segment, depth) => {
		const here = segment.branches.includes(at), index = here ? at : segment.branches[0];
		const first = segment.tokens[0], leaf = !segment.children.length, score = leaf && branches[index].score;
		const facts = [depth > 0 && first && percent(Math.exp(first.logprob)),
			typeof score === "number" && `score ${minus(score.toFixed(2))}`].filter(Boolean).join(", ");
		return h("li", { style: { "--leaves": leaves(segment) } },
			button([h("bdi", !depth && soft(ending(start)), shown(segment.tokens)),
				facts && h("small", ` ${facts}`)], () => choose(index),
			{ class: "write-segment", "aria-current": here && "true" }),
			segment.children.length > 0 && h("ul", segment.children.map(child => draw(child, depth + 1))));
	};
	const focused = document.activeElement?.closest?.(".write-segment") && box.contains(document.activeElement)
		? [...box.querySelectorAll("button")].indexOf(document.activeElement) : -1;
	box.replaceChildren(h("ul.write-branches", draw(tree(branches), 0)));
	box.querySelectorAll("button")[focused]?.focus();
}

export const packBranches = branches => branches.map(each => each.forced.join(".")
	+ (each.stopped === undefined ? "" : `*${each.stopped}`)).join("_");

export function parseBranches(text) {
	return (text ?? "").split("_").slice(0, 64).map(part => {
		const [ids, stopped] = part.split("*");
		const forced = ids.split(".").filter(id => /^\d{1,9}$/.test(id)).map(Number);
		return { forced, tokens: [], ...(/^\d{1,4}$/.test(stopped ?? "") ? { stopped: Number(stopped) } : {}) };
	});
}

export function turnsOf(text) {
	try {
		const turns = JSON.parse(text ?? "[]");
		return Array.isArray(turns) && turns.length % 2 === 0 && turns.every(turn => typeof turn === "string") ? turns : [];
	} catch { return []; }
}

const DARK_NATS = 8; // nats of surprisal with the darkest shade

// A token without text has a symbol: the end, part of a character, or the name of a special token.
function symbolOf({ adds, finish, text }) {
	if (adds) return adds.includes("\n") ? "↵" : undefined;
	return finish === "eos" || finish === "stop" ? "■" : text.includes("\\x") ? "·" : text;
}

// `before` is the previous token: of several empty lines only the first takes space.
export function spanOf(token, before) {
	const blank = /^\n+$/.test(token.adds) && /\n$/.test(before?.adds ?? "");
	return h("span", { class: `shaded-token write-token${blank ? " write-blank" : ""}`, role: "option", tabindex: -1,
		"aria-selected": "false", "data-sign": symbolOf(token),
		"aria-label": `${token.text}, ${percent(Math.exp(token.logprob))}`,
		style: { "--s": Math.min(1, -token.logprob / DARK_NATS) } }, token.adds);
}
