// Search: greedy search, beam search and sampling as growing trees.
import { field, h } from "./dom.js";
import { fetchDecoding, readingView } from "./reading.js";
import * as search from "./search.js";

// the settings of decode/config.py's Branching
const SETTINGS = [
	{ name: "depth", label: "Steps", min: 1, max: 12, usual: 3 },
	{ name: "beams", label: "Beams", min: 1, max: 10, usual: 3 },
	{ name: "alternatives", label: "Alternatives shown", min: 1, max: 10, usual: 3 },
	{ name: "samples", label: "Samples", min: 1, max: 20, usual: 4 },
	{ name: "temperature", label: "Temperature", min: 0.05, max: 10, usual: 1 },
	{ name: "top_k", label: "Top-k", min: 1, max: 1000000, usual: undefined },
	{ name: "seed", label: "Seed", min: 0, max: 1000000000, usual: 0 },
];

export const title = "Search";
export const about = "How greedy search, beam search and sampling continue a text, token by token.";
export const path = "search";
export const lacks = info => (info?.continues || info?.writes ? "" : "does not continue a text token by token");

export async function mount(main, context) {
	const { state } = context, { translate, generate } = await fetchDecoding(context);
	const usualOf = ({ name, usual, max }) => (name === "beams" && translate ? Math.min(max, translate.beams) : usual);
	const note = translate ? `weft translate searches with ${translate.beams} beams.`
		: generate.temperature ? `By default, weft generate samples at temperature ${generate.temperature}; --greedy and --beam search instead.`
			: "By default, weft generate is greedy with this model.";
	let drawing = null;
	const names = SETTINGS.map(({ name }) => name);
	const chosen = () => names.filter(name => state[name] !== undefined).map(name => [name, Number(state[name])]);
	const control = ({ name, label, min, max, usual }) => field(label, h("input", {
		type: "number", min, max, step: name === "temperature" ? 0.05 : 1, value: state[name] ?? usual,
		placeholder: usual === undefined ? "all" : undefined,
		oninput: ({ target }) => {
			if (!target.checkValidity()) return;
			const same = target.value === "" || Number(target.value) === usual;
			context.set({ step: undefined, [name]: same ? undefined : target.value });
			view.again();
		},
	}));
	const draw = (drawn, data) => {
		const play = drawing === null && state.step === undefined; // the trees grow once automatically
		drawing?.close();
		drawing = search.mount(drawn, data, { step: state.step, play, changed: changes => context.set(changes) });
	};
	const view = {
		view: "search",
		target: false,
		reset: ["step"],
		controls: [h("div.fields.search-settings",
			SETTINGS.map(each => control({ ...each, usual: usualOf(each) }))), h("p.soft.reading-origin", note)],
		request: () => (chosen().length ? { settings: Object.fromEntries(chosen()) } : {}),
		words: () => chosen().map(([name, value]) => `${name}=${value}`),
		draw,
		svg: drawn => [...drawn.querySelectorAll(".search-tree :is(figcaption, svg)")],
	};
	context.signal.addEventListener("abort", () => drawing?.close());
	return readingView(main, context, view);
}
