// Shared by the views of a text: text boxes, a debounced request, and the last picture until the next one arrives.
import { debounced, field, h } from "./dom.js";
import { explained, tools } from "./save.js";

const MAX_CHARACTERS = 4000; // characters that the server reads
const REFUSED = [400, 413, 422]; // errors that a person can correct in the text boxes

const sentence = text => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`;

// Run one request at a time: the next aborts the previous one, and `place` is busy meanwhile. `work(signal, …)` sends it;
// errors are shown by the page unless `refused(error)` returns true.
export function latest(context, place, work, refused = () => false) {
  let running = null;
  return async (...given) => {
    running?.abort();
    const mine = running = new AbortController();
    place.setAttribute("aria-busy", "true");
    try {
      const found = await work(AbortSignal.any([context.signal, mine.signal]), ...given);
      context.done();
      return found;
    } catch (error) {
      if (!refused(error)) context.fail(error);
      return undefined;
    } finally {
      if (mine === running) place.removeAttribute("aria-busy");
    }
  };
}

// A labelled text box.
export function textBox(label, oninput, props = {}) {
  const area = h("textarea", { rows: 3, maxlength: MAX_CHARACTERS, spellcheck: "false", dir: "auto", oninput,
    ...props });
  const made = field(label, area);
  made.classList.add("reading-field");
  return { made, area };
}

// `view` is the command's option and the route, unless `route` is given. `draw(place, data)` draws a response;
// `request()` returns further parameters, `options()` the words of the command, `reset` the state to clear for another
// text, `controls` elements below the boxes, `svg(place)` the elements to save. They get `again()`, which sends the
// request after a pause.
export async function readingView(main, context, given) {
  const { view, route = view, draw, svg, asked = () => ({}), options = () => [], reset = [], controls = [],
    target = true } = given;
  const { info, state, api, signal } = context;
  const drawn = h("div", { class: "reading-drawn" });
  const about = h("p", { class: "soft about" });
  const problem = h("p", { class: "reading-problem", role: "alert" });
  const origin = h("p", { class: "soft reading-origin" });
  const none = Object.fromEntries(reset.map(name => [name, undefined]));
  let own = "";

  const refused = error => {
    if (REFUSED.includes(error.status)) problem.textContent = sentence(error.message);
    return REFUSED.includes(error.status);
  };
  const ask = latest(context, drawn, async ending => {
    const body = { model: info.id, input: state.text, target: target ? state.target : undefined, ...asked() };
    const answer = (await api.post(`v1/explain/${route}`, body, ending))[route];
    problem.textContent = "";
    about.textContent = answer.about ?? "";
    await draw(drawn, answer);
    if (!row.isConnected) main.append(row);
  }, refused);
  const later = debounced(ask);
  given.again = later;

  const text = textBox(info.writes ? "Source" : "Text", () => {
    const typed = text.area.value;
    context.set({ ...none, text: typed === own || !typed ? undefined : typed });
    origin.hidden = state.text !== undefined;
    later();
  });
  const written = textBox("Target", () => {
    context.set({ ...none, target: written.area.value || undefined });
    later();
  }, { placeholder: "empty: the model's own continuation" });
  text.area.value = state.text ?? "";
  written.area.value = state.target ?? "";
  const command = () => explained(info, view, { ...state, target: target && state.target }, ...options());
  main.append(h("div", { class: "reading-boxes" }, text.made, info.writes && target ? written.made : ""), origin,
    ...controls, problem, h("h2", { class: "unseen" }, "The text as the model reads it"), drawn, about);
  const row = tools({ svg: () => svg(drawn), name: view, command }); // once there is something to save

  const first = ask();
  const found = await api.post("v1/explain/text", { model: info.id }, signal);
  own = found.text;
  text.area.placeholder = own;
  if (state.text === undefined && !text.area.value) text.area.value = own;
  origin.textContent = `The text is ${found.origin}.`;
  origin.hidden = state.text !== undefined;
  await first;
  return {};
}
