// Surprise: your text, each token shaded by its surprisal.
import { readingView } from "./reading.js";
import { aligned, counterpart } from "./sides.js";
import * as surprise from "./surprise.js";
import { titleOf } from "./variants.js";

export const title = "Surprise";
export const about = "How surprising each token is to the model, and what it expected instead.";
export const path = "surprise";
export const lacks = info => (info?.words || info?.kind === "elmo" ? "" : "predicts no tokens");

export function mount(main, context) {
	const shown = [];
	const across = (side, responses) => counterpart(aligned(responses.map(({ tokens }) =>
		tokens.map(token => token.text))), side);
	return readingView(main, context, {
		view: "surprise",
		reset: ["place"],
		draw(place, data, { side, responses }) {
			const beside = place => (responses[1] ? across(side, responses)(place) : []);
			return shown[side] = surprise.mount(place, data, { ...context.state, all: responses,
				point: place => shown[1 - side]?.light(beside(place)),
				changed({ unit, place }) {
					if (!side) context.set({ unit: unit === "nats" ? undefined : unit, place });
					const [first] = beside(place);
					if (first !== undefined) shown[1 - side]?.choose(first);
				} });
		},
		difference(place, responses) {
			const choose = n => { shown[0].choose(n); shown[1].choose(across(0, responses)(n)[0] ?? 0); };
			surprise.difference(place, responses, [context.info, context.other].map(titleOf), choose);
			choose(shown[0].place);
		},
		svg: drawn => [...drawn.querySelectorAll(".shaded-text, .surprise-chart")],
	});
}
