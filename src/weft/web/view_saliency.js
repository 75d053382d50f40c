// Saliency: select a token and see which others its prediction depends on.
import { lacksTokens, readingView } from "./reading.js";
import * as saliency from "./saliency.js";

export const title = "Saliency";
export const about = "Select a token to see which others its prediction depends on.";
export const path = "saliency";
export const lacks = info => lacksTokens(info) || (info.kind === "ngram" ? "has counts and no gradients" : "");

export function mount(main, context) {
	const { state } = context;
	const explain = place => {
		context.set({ place });
		view.again();
	};
	const changed = ({ measure }) => context.set({ measure: measure === "norm" ? undefined : measure });
	const view = {
		view: "saliency",
		reset: ["place"],
		request: () => ({ place: state.place === undefined ? undefined : Number(state.place) }),
		words: () => (state.place === undefined ? [] : [`--place ${state.place}`]),
		draw: (drawn, data) => saliency.mount(drawn, data, { measure: state.measure, changed, explain }),
		svg: drawn => [...drawn.querySelectorAll(".saliency-target, .shaded-text")],
	};
	return readingView(main, context, view);
}
