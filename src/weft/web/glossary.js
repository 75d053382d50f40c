// The glossary (explain/glossary.toml): one entry per term. A term shows its entry when pointed at or focused.
import { get } from "./api.js";
import { button, h, set, soft } from "./dom.js";

let loading = null;
const load = () => (loading ??= get("web/glossary.json"));

const sourceOf = (lectures, { lecture, paper }) =>
	[lecture && `Lecture ${lecture}: ${lectures[lecture - 1]}`, paper].filter(Boolean).join(" · ");

const card = h("div.term-card", { role: "tooltip", id: "term-card", hidden: true, // it can be read and copied
	onpointerenter: () => clearTimeout(hiding), onpointerleave: () => hide(null) });
let hiding = 0;

function show(target, name, { lectures, terms }) {
	clearTimeout(hiding);
	const source = sourceOf(lectures, terms[name]);
	card.replaceChildren(h("b", name), h("p", terms[name].about), source && h("p.soft", source));
	document.body.append(card);
	card.hidden = false;
	const box = target.getBoundingClientRect(), { offsetWidth: wide, offsetHeight: high } = card;
	const below = box.bottom + 6 + high < innerHeight;
	set(card, { style: { left: `${Math.max(8, Math.min(box.left, innerWidth - wide - 8))}px`,
		top: `${below ? box.bottom + 6 : Math.max(8, box.top - high - 6)}px` } });
	target.setAttribute("aria-describedby", card.id);
}

function hide(target) {
	clearTimeout(hiding);
	hiding = setTimeout(() => { card.hidden = true; target?.removeAttribute("aria-describedby"); }, 120);
}
document.addEventListener("keydown", event => { if (event.key === "Escape") card.hidden = true; });
document.addEventListener("scroll", () => { card.hidden = true; }, { capture: true, passive: true });

const term = (name, all) => {
	const open = () => show(word, name, all), close = () => hide(word), word = button(name, open, { class: "term",
		onpointerenter: open, onfocus: open, onpointerleave: close, onblur: close });
	return word;
};

// The terms of a view that apply to a model; all of them without a model.
export function termsOf(path, info) {
	const line = h("p.terms"), kinds = info && [info.kind, info.cell, info.objective, info.heads && "transformer",
		info.kind !== "ngram" && "neural", (info.continues || info.writes) && "generator"];
	const applies = ({ models }) => !info || !models || models.some(kind => kinds.includes(kind));
	load().then(all => line.append(...all.views[path] ? [soft("Terms: "),
		...all.views[path].filter(name => applies(all.terms[name])).map(name => term(name, all))] : []), () => line.remove());
	return line;
}

export function glossary() {
	const summary = h("summary", "Glossary"), list = h("dl");
	load().then(({ lectures, terms }) => list.append(...Object.entries(terms).map(([name, entry]) =>
		h("div", h("dt", name), h("dd", entry.about, " ", soft(sourceOf(lectures, entry)))))), () => {});
	return h("details.fold.glossary", summary, list);
}
