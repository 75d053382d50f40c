// Surprise: your text, each token shaded by its surprisal.
import { readingView } from "./reading.js";
import * as surprise from "./surprise.js";

export const title = "Surprise";
export const about = "How surprising each token is to the model, and what it expected instead.";
export const path = "surprise";
export const lacks = info => (info?.words ? "" : "predicts no tokens");

export function mount(main, context) {
  const changed = ({ unit, place }) => context.set({ unit: unit === "nats" ? undefined : unit, place });
  return readingView(main, context, {
    view: "surprise",
    reset: ["place"],
    draw: (drawn, data) => surprise.mount(drawn, data, { ...context.state, changed }),
    svg: drawn => [drawn.querySelector(".shaded-text"), drawn.querySelector(".surprise-chart")],
  });
}
