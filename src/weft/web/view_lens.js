// Logit lens: prediction of each layer, layers by tokens.
import * as lens from "./lens.js";
import { readingView } from "./reading.js";

export const title = "Lens";
export const about = "Prediction of each layer if the model ended there.";
export const path = "lens";
export const shows = info => Boolean(info?.words && info.heads); // a model with heads has a residual stream

export function mount(main, context) {
  const changed = ({ show, row, column }) => context.set({ show: show === "guess" ? undefined : show, row, column });
  return readingView(main, context, {
    view: "lens",
    reset: ["row", "column"],
    draw: (drawn, data) => lens.mount(drawn, data, { ...context.state, changed }),
    svg: drawn => {
      const scroll = drawn.querySelector(".scroll");
      const at = scroll.scrollLeft;
      scroll.scrollLeft = 0; // past the sticky names of the layers
      requestAnimationFrame(() => { scroll.scrollLeft = at; });
      return drawn.querySelector("table");
    },
  });
}
