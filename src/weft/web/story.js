// Stories: a sequence of views with two lines of text each. The story and the slide are in the address of its view.
import * as api from "./api.js";
import { button, h, isPlain } from "./dom.js";
import { isPresenting, listen, present } from "./present.js";
import { saveStory } from "./story_save.js";
import { beginning, clamp } from "./words.js";

const ONE_TEXT = ["step", "attention", "lens", "saliency", "search"]; // views that share a short text

let page = null; // address, open, models and views of the Explorer
let known = null;
let typed = null, given = {}; // a text that replaces the story's, and the text and model of the last slide
const samples = new Map();
const bar = h("footer.story", { "aria-label": "Story", hidden: true });

// What the address says: the story, its name and the number of the slide, from 0.
function told() {
	const { state } = page.address(), name = state.story ?? api.savedStory ?? "", story = known?.[name];
	return story ? { name, story, at: clamp(Math.floor(Number(state.slide) || 1), 1, story.slides.length) - 1 } : null;
}

// The model of a slide: the first that it names, of those that have the view; of several the present or the newest one.
function modelOf(slide, view) {
	const { state } = page.address(), able = page.models.filter(model => !view.lacks(model));
	const rank = model => {
		const at = slide.model.findIndex(name => [model.id, model.kind, model.objective].includes(name));
		return slide.model.length && at < 0 ? -1 : slide.model.length - at;
	};
	const found = able.filter(model => rank(model) >= 0).sort((a, b) => rank(b) - rank(a)
		|| Number(b.id === state.model) - Number(a.id === state.model) || b.created - a.created);
	return found[0] ?? null;
}

async function textOf(slide, info) {
	if (slide.text !== null || !ONE_TEXT.includes(slide.view)) return slide.text ?? undefined;
	if (typed !== null) return typed;
	if (!samples.has(info.id)) {
		samples.set(info.id, beginning((await api.sampleText(info.id)).text));
	}
	return samples.get(info.id);
}

async function show(at, push = true) {
	const { name, story } = /** @type {any} */ (told()), slide = story.slides[at];
	const view = page.views.find(each => each.path === slide.view), info = modelOf(slide, view);
	const { state } = page.address(), where = { story: name, slide: String(at + 1) };
	if (given.text !== undefined && given.text !== state.text && given.model === state.model) typed = state.text ?? null;
	if (view.lacks(info)) return page.open("anatomy", { preset: slide.preset, ...where }, push);
	const text = await textOf(slide, info);
	given = slide.text === null && ONE_TEXT.includes(slide.view) ? { text, model: info?.id } : {};
	const settings = Object.fromEntries(Object.entries(slide.settings).map(([key, value]) => [key, String(value)]));
	return page.open(slide.view, { model: info?.id, text, ...settings, ...where }, push);
}

function turn(by) {
	const now = told();
	if (!now || bar.hidden) return false;
	const to = clamp(now.at + by, 0, now.story.slides.length - 1);
	if (to !== now.at) show(to).catch(error => console.error(error));
	return true;
}

function draw() {
	const now = told();
	bar.hidden = !now || !isPresenting();
	document.body.classList.toggle("telling", !bar.hidden);
	if (!now || bar.hidden) return;
	const { story, at } = now, slide = story.slides[at], { path } = page.address(), count = story.slides.length;
	const save = button("Save", () => keep(now), { title: "Save the story as one HTML file", class: "story-save" });
	bar.replaceChildren(
		h("div.story-says", { "aria-live": "polite" }, slide.says.map(line => h("p", line)),
			path !== slide.view && h("p.story-lacks", "No model here shows this. To train one: ", h("code", slide.train))),
		h("div.story-turn", !api.savedStory && save,
			button("‹", () => turn(-1), { "aria-label": "Previous slide", disabled: at === 0 }),
			h("span", `${at + 1} / ${count}`), button("›", () => turn(1), { "aria-label": "Next slide", disabled: at === count - 1 })));
}

async function keep({ name, story, at }) {
	await saveStory({ name, title: story.title, count: story.slides.length, show: n => show(n, false),
		says: text => bar.querySelector(".story-save")?.replaceChildren(text) });
	await show(at, false);
}

// Start the story of the address; false if there is none, and the page is shown as it is.
export async function begin(explorer) {
	const isFirst = !page;
	page = explorer;
	if (isFirst) {
		document.body.append(bar);
		listen(turn);
		for (const event of ["weft-state", "weft-present"]) document.addEventListener(event, draw);
		addEventListener("popstate", draw);
		document.addEventListener("keydown", event => {
			const to = { Home: 0, End: (told()?.story.slides.length ?? 1) - 1 }[event.key];
			if (to === undefined || bar.hidden || !isPlain(event)) return;
			event.stopImmediatePropagation();
			show(to);
		}, { capture: true });
	}
	const { state, path } = page.address();
	if (!state.story && !api.savedStory) return false;
	known ??= (await api.get("v1/stories")).data;
	if (!told()) {
		page.open(path, { ...state, story: undefined });
		return true;
	}
	present(true);
	document.title = `${told()?.story.title} · weft`;
	if (!state.slide) await show(0, false); else { draw(); return false; }
	return true;
}
