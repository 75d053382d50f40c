// Shared by the views of a text: text boxes, a debounced request, and the last picture until the next one arrives.
import { isAbort } from "./api.js";
import { debounced, field, h, select } from "./dom.js";
import { explainCommand, saveTools } from "./save.js";
import { panes } from "./sides.js";
import { capitalised } from "./words.js";

export const lacksTokens = info => (info?.words ? "" : "neither continues a text nor fills it in");

// Whether a person can correct an error in the text boxes.
export const isRefused = error => [400, 413, 422].includes(error.status);

// Run one request at a time: the next aborts the previous one, and `place` is busy meanwhile. `work(signal, …)` sends
// it; errors are shown by the page unless `refused(error)` returns true.
export function latest(context, place, work, refused = _ => false) {
	let running = null;
	return async (...args) => {
		running?.abort();
		const mine = running = new AbortController();
		place.setAttribute("aria-busy", "true");
		try {
			const result = await work(AbortSignal.any([context.signal, mine.signal]), ...args);
			context.done();
			place.hidden = false;
			return result;
		} catch (error) {
			if (!isAbort(error)) place.hidden = true; // an earlier picture is not that of the present text
			if (!refused(error)) context.fail(error);
			return undefined;
		} finally {
			if (mine === running) place.removeAttribute("aria-busy");
		}
	};
}

export function textBox(label, oninput, props = {}) {
	const area = h("textarea", { rows: 3, spellcheck: "false", dir: "auto", oninput, ...props });
	const labelled = field(label, area);
	labelled.classList.add("reading-field");
	return { field: labelled, area };
}

// Where a sample text comes from, as a sentence.
export const sampleNote = origin => (origin.startsWith("from") ? `Sample ${origin}.`
	: `${capitalised(origin)}.`);

// Default settings of decoding by command, as `Run.decoding` returns them.
export async function fetchDecoding({ api, info, signal }) {
	return (await api.get(`v1/settings?model=${encodeURIComponent(info.id)}`, signal)).decoding;
}

// The answer that a model which writes one text from another is shown with: found by its default search, or greedily.
export function answerSelect(context, beams, changed) {
	const { state } = context;
	return field("Answer", select([["", `beam search, ${beams} beams (weft translate)`], ["greedy", "greedy search"]], state.answer ?? "", value => {
		context.set({ answer: value || undefined, target: undefined });
		changed();
	}));
}

// The target of a request: the text box's, or the greedy answer; null is the answer of the default search.
export async function targetOf({ api, info, other, state }, source, ending) {
	const own = state.answer === "greedy" || other; // two models are compared on the answer of the first
	if (!info.writes || state.target !== undefined || !own) return state.target ?? null;
	const body = { model: info.id, input: await source, ...state.answer === "greedy" && { beams: 1 } };
	return (await api.post("v1/translate", body, ending)).translations[0];
}

// `view` is the command's option and the route, unless `route` is given. `draw(place, data)` draws a response;
// `request()` returns further parameters, `words()` the options of the command, `reset` the state to clear for another
// text, `controls` elements below the boxes, `svg(place)` the elements to save. They get `again()`, which sends the
// request after a pause. `missing()` says what has to be typed before the first request. Of two models each draws in its own place; `difference(place, responses)` draws above both.
export async function readingView(main, context, options) {
	const { view, route = view, draw, svg, request = () => ({}), words = () => [], reset = [], controls = [],
		target = true } = options;
	const { info, other, state, api, signal } = context, models = other ? [info, other] : [info];
	const drawn = h("div.reading-drawn"), apart = h("div.side-difference");
	const { places, element } = other ? panes(models) : { places: [drawn], element: null };
	if (element) drawn.append(apart, element);
	const about = h("p.soft.about");
	const problem = h("p.reading-problem", { role: "alert" });
	const origin = h("p.soft.reading-origin");
	const cleared = Object.fromEntries(reset.map(name => [name, undefined]));
	const sampled = api.sampleText(info.id, signal), sampledText = sampled.then(({ text }) => text);
	for (const each of [sampled, sampledText]) each.catch(() => {}); // where nothing waits for it
	const answers = info.writes && target && (await fetchDecoding(context)).translate;

	const refused = error => {
		if (isRefused(error)) problem.textContent = `${capitalised(error.message)}.`;
		return isRefused(error);
	};
	const load = latest(context, drawn, async ending => {
		problem.textContent = "";
		about.textContent = options.missing?.() ?? "";
		if (about.textContent) return;
		const text = state.text ?? sampledText;
		const body = { model: info.id, input: state.text, ...request(),
			...target ? { target: await targetOf(context, text, ending) ?? undefined } : {} };
		options.sent = body;
		const answers = await Promise.all(models.map(({ id }) => api.post(`v1/explain/${route}`, { ...body, model: id }, ending)));
		const responses = answers.map(answer => answer[route]);
		about.textContent = responses[0].about ?? "";
		const shown = await Promise.all(places.map((place, n) => draw(place, responses[n], { side: n, responses })));
		if (other) options.difference(apart, responses, shown);
		if (!row.isConnected) main.append(row);
		context.set({}); // the command contains the target
	}, refused);
	const later = debounced(load);
	options.again = later;

	const textField = textBox(info.writes ? "Source" : "Text", () => {
		context.set({ ...cleared, text: textField.area.value });
		origin.hidden = true;
		later();
	});
	const targetBox = textBox("Target", () => {
		context.set({ ...cleared, target: targetBox.area.value || undefined });
		later();
	}, { placeholder: "Leave empty for the model's own answer" });
	textField.area.value = state.text ?? "";
	targetBox.area.value = state.target ?? "";
	const command = () => explainCommand(info, view, { ...state, target: target && options.sent?.target }, ...words());
	const boxes = h("div.reading-boxes", textField.field, answers ? targetBox.field : "");
	const answer = answers && answerSelect(context, answers.beams, () => { targetBox.area.value = ""; later.now(); });
	main.append(boxes, origin, answer || "", ...controls, problem, h("h2.unseen", "The text as the model reads it"),
		drawn, about);
	const row = saveTools({ svg: () => svg(drawn), name: view, command }); // once there is something to save

	const first = load();
	if (state.text === undefined) {
		const example = await sampled;
		if (state.text === undefined) textField.area.value = example.text;
		origin.textContent = sampleNote(example.origin);
	}
	await first;
	return {};
}
