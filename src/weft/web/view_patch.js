// Patching: two texts, and where in the model the activations are that make their answers differ.
import { h } from "./dom.js";
import * as patch from "./patch.js";
import { isRefused, lacksTokens, readingView, textBox } from "./reading.js";
import { shellQuote } from "./save.js";

export const title = "Patch";
export const about = "Put activations of one text into another, and see where its answer comes back.";
export const path = "patch";
export const lacks = info => lacksTokens(info) || (info.kind === "ngram" ? "has counts and no activations" : "");

export async function mount(main, context) {
	const { state, info, api, signal } = context;
	if (state.text === undefined && state.other === undefined) {
		try { // a pair of the model's own
			const { pair } = await api.post("v1/explain/pair", { model: info.id }, signal);
			context.set({ text: pair.clean, other: pair.corrupt, a: pair.answer, b: pair.wrong, target: pair.target || undefined });
		} catch (error) { if (!isRefused(error)) throw error; }
	}
	const box = (name, label) => {
		const { field, area } = textBox(label, () => {
			context.set({ site: undefined, row: undefined, column: undefined, [name]: area.value });
			view.again();
		}, { rows: name === "other" ? 3 : 1 });
		area.value = state[name] ?? "";
		return field;
	};
	const answers = () => (state.a && state.b ? [state.a, state.b] : []);
	const changed = ({ site, row, column }) => context.set({ site: site || undefined, row, column });
	const view = {
		view: "patch",
		target: false,
		reset: ["site", "row", "column"],
		controls: [h("div.reading-boxes", box("other", "Other text, of the same length"),
			info.writes ? box("target", "Target so far") : "", box("a", "Answer to the text"), box("b", "Answer to the other"))],
		missing: () => (answers().length && state.other ? "" : "Type a second text that has as many tokens and differs in one "
			+ "respect, and the token that should follow each: “The key to the doors” with “ is”, “The keys to the doors” with “ are”."),
		request: () => ({ input: main.querySelector("textarea").value || undefined, other: state.other || undefined,
			answer: answers().length ? answers() : undefined, target: info.writes && state.target || undefined }),
		words: () => [state.other && `--other ${shellQuote(state.other)}`, state.target && `--target ${shellQuote(state.target)}`,
			answers().length && `--answer ${answers().map(shellQuote).join(" ")}`],
		draw: (drawn, data) => patch.mount(drawn, data, { ...state, changed }),
		svg: drawn => drawn.querySelector("table"),
	};
	return readingView(main, context, view);
}
