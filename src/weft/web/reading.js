// Shared by the views of a text: text boxes, a debounced request, and the last picture until the next one arrives.
import { isAbort } from "./api.js";
import { debounced, field, h } from "./dom.js";
import { explainCommand, saveTools } from "./save.js";

const REFUSED = [400, 413, 422]; // errors that a person can correct in the text boxes

const sentence = text => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`;

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

// A labelled text box.
export function textBox(label, oninput, props = {}) {
  const area = h("textarea", { rows: 3, spellcheck: "false", dir: "auto", oninput, ...props });
  const labelled = field(label, area);
  labelled.classList.add("reading-field");
  return { field: labelled, area };
}

// `view` is the command's option and the route, unless `route` is given. `draw(place, data)` draws a response;
// `request()` returns further parameters, `words()` the options of the command, `reset` the state to clear for another
// text, `controls` elements below the boxes, `svg(place)` the elements to save. They get `again()`, which sends the
// request after a pause.
/** @param {any} options */
export async function readingView(main, context, options) {
  const { view, route = view, draw, svg, request = () => ({}), words = () => [], reset = [], controls = [],
    target = true } = options;
  const { info, state, api, signal } = context;
  const drawn = h("div", { class: "reading-drawn" });
  const about = h("p", { class: "soft about" });
  const problem = h("p", { class: "reading-problem", role: "alert" });
  const origin = h("p", { class: "soft reading-origin" });
  const cleared = Object.fromEntries(reset.map(name => [name, undefined]));
  let sample = ""; // the model's sample text

  const refused = error => {
    if (REFUSED.includes(error.status)) problem.textContent = sentence(error.message);
    return REFUSED.includes(error.status);
  };
  const load = latest(context, drawn, async ending => {
    const body = { model: info.id, input: state.text, target: target ? state.target : undefined, ...request() };
    const response = (await api.post(`v1/explain/${route}`, body, ending))[route];
    problem.textContent = "";
    about.textContent = response.about ?? "";
    await draw(drawn, response);
    if (!row.isConnected) main.append(row);
  }, refused);
  const later = debounced(load);
  options.again = later;

  const textField = textBox(info.writes ? "Source" : "Text", () => {
    const typed = textField.area.value;
    context.set({ ...cleared, text: typed === sample || !typed ? undefined : typed });
    origin.hidden = state.text !== undefined;
    later();
  });
  const targetBox = textBox("Target", () => {
    context.set({ ...cleared, target: targetBox.area.value || undefined });
    later();
  }, { placeholder: "empty: the model's own continuation" });
  textField.area.value = state.text ?? "";
  targetBox.area.value = state.target ?? "";
  const command = () => explainCommand(info, view, { ...state, target: target && state.target }, ...words());
  const boxes = h("div", { class: "reading-boxes" }, textField.field, info.writes && target ? targetBox.field : "");
  main.append(boxes, origin, ...controls, problem, h("h2", { class: "unseen" }, "The text as the model reads it"),
    drawn, about);
  const row = saveTools({ svg: () => svg(drawn), name: view, command }); // once there is something to save

  const first = load();
  const example = await api.post("v1/explain/text", { model: info.id }, signal);
  sample = example.text;
  textField.area.placeholder = sample;
  if (state.text === undefined && !textField.area.value) textField.area.value = sample;
  origin.textContent = `The text is ${example.origin}.`;
  origin.hidden = state.text !== undefined;
  await first;
  return {};
}
