// Logit lens: prediction of each layer, layers by tokens.
import * as lens from "./lens.js";
import { lacksTokens, readingView } from "./reading.js";

export const title = "Lens";
export const about = "What each layer would predict if the model ended there.";
export const path = "lens";
export const lacks = info => lacksTokens(info) || (info.heads ? "" : "has no residual stream to look at after each layer");

export function mount(main, context) {
	const changed = ({ show, row, column }) => context.set({ show: show === "guess" ? undefined : show, row, column });
	return readingView(main, context, {
		view: "lens",
		reset: ["row", "column"],
		draw: (drawn, data) => lens.mount(drawn, data, { ...context.state, changed }),
		svg: drawn => {
			const scroll = drawn.querySelector(".scroll"), at = scroll.scrollLeft;
			scroll.scrollLeft = 0; // past the sticky names of the layers
			requestAnimationFrame(() => { scroll.scrollLeft = at; });
			return drawn.querySelector("table");
		},
	});
}
