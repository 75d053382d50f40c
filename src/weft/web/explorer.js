// The Explorer: views of models and of a folder of runs. The state of a view is in the address, after the #.
import * as api from "./api.js";
import { button, field, h } from "./dom.js";
import { termsOf } from "./glossary.js";
import * as stories from "./story.js";
import { chooser as modelControls, infoOf } from "./variants.js";

// views of what a model does with a text, then views that every model has
const OF_A_TEXT = ["write", "predict", "step", "attention", "surprise", "lens", "saliency", "patch", "search", "experts"];
const VIEWS = ["home", ...OF_A_TEXT, "tokens", "abilities", "runs", "compare", "anatomy"];
const COMPARED = ["write", "step", "attention", "surprise"]; // views that show two models side by side
const MAY_BE_EMPTY = ["text", "second", "target"]; // an empty text is a text
const RETRY_MS = 1500; // between requests to a server that does not respond
const [main, chooser, navigation, busy] = ["main", "chooser", "views", "busy"].map(id =>
	/** @type {HTMLElement} */ (document.getElementById(id)));
/** @type {any[]} */
let views = [], models = [], broken = []; // their recipes cannot be read
let current = null;
let busyTimer = 0;

function address() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
	return { path, state: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function link(path, state) {
	const values = Object.entries(state).filter(([name, value]) => value !== undefined && value !== null
		&& (value !== "" || MAY_BE_EMPTY.includes(name)));
	return `#/${path}${values.length ? `?${new URLSearchParams(values)}` : ""}`;
}

function show(path, state, push) {
	history[push ? "pushState" : "replaceState"](null, "", link(path, state));
	document.dispatchEvent(new CustomEvent("weft-state"));
}

function frame(info, other = null, how = "") {
	const { path, state } = address(), here = views.find(view => view.path === path);
	// a chosen model is kept; Runs begins with the one in training
	const kept = view => (state.model || (path && view.path !== "runs" && models.length > 1) ? info?.id : undefined);
	const item = view => h("a", { href: link(view.path, { model: kept(view),
		with: COMPARED.includes(view.path) && COMPARED.includes(path) ? state.with : undefined }),
		"aria-current": view.path === path && "page", title: lacks(view) && lacking(view, info),
		class: lacks(view) && "lacking" }, view.title);
	const listed = views.filter(view => view.path), lacks = view => path && info && view.lacks(info);
	const [available, others] = [listed.filter(view => !lacks(view)), listed.filter(lacks)];
	navigation.replaceChildren(...available.map(item),
		...others.length ? [h("span.soft", "Unavailable:"), ...others.map(item)] : []);
	navigation.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
	if (how === "slid") return; // the reader holds the slider
	const fits = here?.ofText && (COMPARED.includes(path) ? model => fitsBeside(here, info, model) : () => false);
	// comparisons are of no model, and chosen runs may be of others
	chooser.replaceChildren(...path && path !== "compare" && !state.runs ? modelControls({ info, other, models, broken, fits }, { choose: id => openModel(path, id),
		move: (changes, how) => move(info, changes, how) }) : []);
}

// Show the view of another checkpoint, or beside another model.
function move(info, changes, how = "moved") {
	const { path, state } = address();
	show(path, { ...state, model: state.model ?? info.id, ...changes }, false);
	return render(how);
}

// Whether two models can be shown side by side: both have the view, and take the same kind of text.
const fitsBeside = (view, info, other) => !view.lacks(other) && other.writes === info.writes
	&& (view.path !== "write" || !other.objective.startsWith("masked"));

// Open the same view of another model, or the first view that it has.
function openModel(path, id) {
	const info = models.find(model => model.id === id), has = view => view.path && !view.lacks(info);
	const view = views.find(one => one.path === path && has(one)) ?? views.find(has);
	return open(view.path, { model: id }, true);
}

// The model of a view if none is chosen: the newest one that has the view; a step shows most in a Transformer.
function suited(view) {
	const rank = model => (view.lacks(model) || model.problem ? 0 : view.path === "step" && model.heads ? 2 : 1);
	return models.reduce((best, model) => best && (rank(best) - rank(model) || best.created - model.created) >= 0 ? best
		: model, null);
}

const lacking = (view, info) => `${info.id} is ${info.makes}, which ${view.lacks(info)}.`;

function instead(view, info) {
	const others = views.filter(each => OF_A_TEXT.includes(each.path) && !each.lacks(info)).slice(0, 3);
	return h("p", lacking(view, info), others.length > 0 && [" Open ", others.map((each, n) =>
		[n === 0 ? "" : n === others.length - 1 ? " or " : ", ",
			h("a", { href: link(each.path, { model: info.id }) }, each.title)]), " instead."]);
}

/** @param {(() => void) | null} retry */
function problem(message, retry = null) {
	return h("div.problem", { role: "alert" }, h("p", message), retry && h("p", button("Try again", retry)));
}

function requestKey() {
	const key = h("input", { type: "password", autocomplete: "off", required: true });
	main.replaceChildren(h("form", { onsubmit: event => { event.preventDefault(); api.setKey(key.value); begin(); } },
		h("p", "This server requires an API key."), field("Key", key), " ", h("button.primary", "Continue")));
	key.focus();
}

// Show an error above the view; if the server does not respond, retry until it does.
/** @param {any} view  where the error occurred; ignored if it is no longer shown */
function fail(error, view = null) {
	if (api.isAbort(error) || (view && view !== current)) return;
	if (error.status === 401) return requestKey();
	main.querySelector(".problem")?.remove();
	const below = main.querySelector(".view");
	const place = shown => { if (below) below.before(shown); else main.append(shown); };
	const { status, message } = error;
	if (status === undefined) console.error(error);
	if (status !== 0) return place(problem(status ? message : `Unexpected error: ${message}`, () => render()));
	place(problem("The server is not responding. This page reconnects when it is back."));
	const retry = setInterval(async () => {
		try {
			await api.get("health");
			clearInterval(retry);
			await begin();
		} catch { /* not yet */ }
	}, RETRY_MS);
	current?.signal.addEventListener("abort", () => clearInterval(retry));
}

export function open(path, state, push = false) {
	show(path, state, push);
	return render();
}

// "moved" or "slid" to another model or checkpoint: the picture before stays until the next one is complete.
async function render(how = "") {
	if (!api.isRecording() && current?.shown?.move?.(address().path, address().state)) return;
	current?.end.abort();
	current?.shown?.close?.();
	const { path, state } = address();
	const view = views.find(one => one.path === path) ?? views.find(one => !one.path);
	if (view.path !== path) return open(view.path, state);
	const known = infoOf(models, state.model), info = known ? view.ofText ? known : infoOf(models, known.base)
		: infoOf(models, suited(view)?.id);
	const beside = COMPARED.includes(path) && info && infoOf(models, state.with);
	const other = beside && fitsBeside(view, info, beside) ? beside : null;
	frame(info, other, how);
	document.body.classList.toggle("comparing", Boolean(other));
	document.title = `${view.title}${path && info ? ` · ${info.id}` : ""} · weft`;
	const end = new AbortController();
	/** @type {{ end: AbortController, signal: AbortSignal, shown: any }} */
	const mine = { end, signal: end.signal, shown: null };
	current = mine;
	const whole = !path || path === "step"; // home and the stage fill the window
	const place = h("div", { class: `view view-${view.path}` }), before = main.querySelector(".view");
	if (how) {
		for (const old of main.querySelectorAll(".arriving")) old.remove();
		place.classList.add("arriving");
		before?.after(place);
	} else main.replaceChildren(h("h1", { class: whole ? "unseen" : "" }, view.title),
		view.about && h("p", { class: `soft about ${whole ? "unseen" : ""}` }, view.about), place);
	if (path && !how) (whole ? place : main.children[1]).after(termsOf(path, state.preset ? null : info));
	if (state.model && !known) {
		const { problem } = broken.find(model => model.id === state.model) ?? {};
		main.append(h("p.notice", problem ? `Model '${state.model}' cannot be loaded: ${problem}`
			: `No model '${state.model}' on this server`, info && `; showing '${info.id}'`, "."));
	}
	if (view.lacks(info)) return info ? place.append(instead(view, info)) : open("", {});
	const context = {
		info, other, models, broken, views, link, api, signal: end.signal, state: { ...state },
		set(changes, { push = false } = {}) {
			if (mine !== current) return;
			Object.assign(context.state, changes);
			show(view.path, context.state, push);
		},
		go: (to, changes = {}) => open(to, { model: to ? context.state.model ?? info?.id : undefined, ...changes }, true),
		beside: id => move(info, { with: id }),
		fail: error => fail(error, mine),
		done: () => main.querySelector(".problem")?.remove(), // a retry succeeded
		refresh: async () => { await list(); frame(info); return models; },
	};
	try {
		mine.shown = await view.mount(place, context);
		if (mine !== current) mine.shown?.close?.();
	} catch (error) {
		fail(error, mine);
	}
	if (how && mine === current) { before?.remove(); place.classList.remove("arriving"); }
}

async function list() {
	const { data } = await api.get("v1/models");
	models = data.filter(model => model.weft).map(({ id, created, problem, weft }) => ({ id, created, problem, ...weft }));
	broken = data.filter(model => !model.weft);
}

async function begin() {
	try {
		await list();
		if (!await stories.begin({ address, open, views, get models() { return models; } })) await render();
	} catch (error) {
		fail(error);
	}
}

document.addEventListener("weft-busy", event => {
	clearTimeout(busyTimer);
	if (!(/** @type {CustomEvent} */ (event)).detail) busy.textContent = "";
	else busyTimer = setTimeout(() => { busy.textContent = "computing …"; }, 400);
});
addEventListener("popstate", () => render());
const loaded = await Promise.allSettled(VIEWS.map(name => import(`./view_${name}.js`)));
for (const result of loaded) {
	if (result.status === "fulfilled") views.push({ about: "", lacks: () => "", ...result.value, ofText: OF_A_TEXT.includes(result.value.path) });
	else console.error(result.reason);
}
await begin();
