// What views of a text share: its boxes, a request once nobody types, and the last picture until the next one is there.
import { debounced, field, h } from "./dom.js";
import { quoted, tools } from "./save.js";

const MAX_CHARACTERS = 4000; // that the server looks at
const REFUSED = [400, 413, 422]; // what a person can mend in the boxes

const sentence = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`;

function box(label, value, placeholder, oninput) {
  const area = h("textarea", { rows: 3, maxlength: MAX_CHARACTERS, spellcheck: "false", placeholder, oninput });
  area.value = value;
  const made = field(label, area);
  made.classList.add("reading-field");
  return { made, area };
}

// `view` is the route's name. `draw(place, data)` draws an answer, `asked()` says what else is asked for; `options()`
// are words of the command, `reset` what no longer holds of another text, `controls` elements below the boxes,
// `svg(place)` the pictures. `begun(later)` is given what asks again, once nobody has called it for a moment.
export async function readingView(main, context, given) {
  const { view, draw, svg, asked = () => ({}), options = () => [], reset = [], controls = [], target = true,
    begun = () => {} } = given;
  const { info, state, api, signal } = context;
  const drawn = h("div", { class: "reading-drawn" });
  const about = h("p", { class: "soft about" });
  const problem = h("p", { class: "reading-problem", role: "alert" });
  const origin = h("p", { class: "soft reading-origin" });
  const none = Object.fromEntries(reset.map((name) => [name, undefined]));
  let own = "";
  let running = null;

  const ask = async () => {
    running?.abort();
    const mine = running = new AbortController();
    drawn.setAttribute("aria-busy", "true");
    const body = { model: info.id, input: state.text, target: target ? state.target : undefined, ...asked() };
    try {
      const answer = await api.post(`v1/explain/${view}`, body, AbortSignal.any([signal, mine.signal]));
      problem.textContent = "";
      about.textContent = answer[view].about;
      draw(drawn, answer[view]);
      if (!row.isConnected) main.append(row);
      context.done();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (REFUSED.includes(error.status)) problem.textContent = sentence(error.message);
      else context.fail(error);
    }
    if (mine === running) drawn.removeAttribute("aria-busy");
  };
  const later = debounced(ask);
  begun(later);

  const source = () => {
    const typed = text.area.value;
    context.set({ ...none, text: typed === own || !typed ? undefined : typed });
    origin.hidden = state.text !== undefined;
    later();
  };
  const text = box(info.writes ? "Source" : "Text", state.text ?? "", "", source);
  const written = box("Target", state.target ?? "", "what the model writes itself", () => {
    context.set({ ...none, target: written.area.value || undefined });
    later();
  });
  const command = () => ["weft explain", quoted(`runs/${info.id}`), `--only ${view}`,
    ...(state.text ? [`--text ${quoted(state.text)}`] : []),
    ...(target && state.target ? [`--target ${quoted(state.target)}`] : []), ...options()].join(" ");
  const boxes = [text.made, info.writes && target ? written.made : null];
  main.append(h("div", { class: "reading-boxes" }, boxes), origin, ...controls, problem,
    h("h2", { class: "unseen" }, "The text as the model sees it"), drawn, about);
  const row = tools({ svg: () => svg(drawn), name: view, command }); // once there is something to keep

  const first = ask();
  const found = await api.post("v1/explain/text", { model: info.id }, signal);
  own = found.text;
  text.area.placeholder = own;
  if (state.text === undefined && !text.area.value) text.area.value = own;
  origin.textContent = `The text is ${found.origin}.`;
  origin.hidden = state.text !== undefined;
  await first;
  return { close: () => running?.abort() };
}
