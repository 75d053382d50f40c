// Experts: which expert of a mixture reads which token.
import * as experts from "./experts.js";
import { readingView } from "./reading.js";

export const title = "Experts";
export const about = "Which expert of a mixture reads which token, in each layer.";
export const path = "experts";
export const lacks = info => (info?.experts ? "" : "has no mixture of experts");

export function mount(main, context) {
	const changed = ({ layer, place }) => context.set({ layer: layer || undefined, place: place || undefined });
	return readingView(main, context, {
		view: "experts",
		reset: ["place"],
		draw: (drawn, data) => experts.mount(drawn, data, { ...context.state, changed }),
		svg: drawn => [...drawn.querySelectorAll(".shaded-text, .experts-load")],
	});
}
