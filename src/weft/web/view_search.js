// Search: greedy search, beam search and sampling as growing trees.
import { field, h } from "./dom.js";
import { readingView } from "./reading.js";
import * as search from "./search.js";

// decode/config.py's Branching: name, label, minimum, maximum and default of each setting
const SETTINGS = [
  ["depth", "Steps", 1, 12, 3],
  ["beams", "Beams", 1, 10, 3],
  ["alternatives", "Alternatives shown", 1, 10, 3],
  ["samples", "Samples", 1, 20, 4],
  ["temperature", "Temperature", 0.05, 10, 1],
  ["top_k", "Top-k", 1, 1000000, undefined],
  ["seed", "Seed", 0, 1000000000, 0],
];

export const title = "Search";
export const about = "How greedy search, beam search and sampling continue a text, token by token.";
export const path = "search";
export const shows = info => Boolean(info?.continues || info?.writes);

export function mount(main, context) {
  const { state } = context;
  let drawing = null;
  const names = SETTINGS.map(([name]) => name);
  const chosen = () => names.filter(name => state[name] !== undefined).map(name => [name, Number(state[name])]);
  const control = ([name, label, min, max, usual]) => field(label, h("input", {
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
    controls: [h("div", { class: "fields search-settings" }, SETTINGS.map(control))],
    asked: () => (chosen().length ? { settings: Object.fromEntries(chosen()) } : {}),
    options: () => chosen().map(([name, value]) => `${name}=${value}`),
    draw,
    svg: drawn => [...drawn.querySelectorAll(".search-tree :is(figcaption, svg)")],
  };
  context.signal.addEventListener("abort", () => drawing?.close());
  return readingView(main, context, view);
}
