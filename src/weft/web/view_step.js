// Inside a step: a text, a token, and the token's path through the model.
import { button, debounced, h, isPlain, roving } from "./dom.js";
import { explainCommand, saveTools } from "./save.js";
import { NEUTRAL } from "./choice.js";
import { sourcePlace } from "./flow.js";
import { latest, textBox } from "./reading.js";
import { mount as draw } from "./step.js";
import { visibleToken } from "./words.js";

export const title = "Inside a step";
export const about = "The path of one token through the model, value by value.";
export const path = "step";
export const shows = info => info !== null;

const MOST_LETTERS = 48; // words of the model's sample text at first

const whole = text => (/^\d+$/.test(text ?? "") ? Number(text) : null);
const real = text => (text !== undefined && Number.isFinite(Number(text)) ? Number(text) : null);

export async function mount(main, context) {
  const { info, state, api, signal } = context;
  let step = null, drawing = null, sourceOpen = state.source === "open";
  const settings = () => ({ temperature: real(state.temperature) ?? NEUTRAL.temperature, top_k: whole(state.top_k),
    top_p: real(state.top_p) });

  const source = textBox(info.writes ? "Source" : "Text", () => typed({ text: input.value }), { rows: 2 });
  const written = info.writes && textBox("Generated so far",
    () => typed({ target: target.value, fresh: target.value ? undefined : "1" }), { rows: 1 });
  const input = source.area, target = written ? written.area : null;
  const strip = (kind, name) => h("div", { class: `step-tokens ${kind}`, role: "group", "aria-label": name });
  const tokens = strip("step-places", "Tokens: select one to follow its path");
  const sources = info.writes ? strip("step-sources", "The source’s tokens") : null;
  const told = h("p", { class: "soft step-told-text", role: "status" }), body = h("div", { class: "step-body" });
  const texts = h("div", { class: "step-texts" }, source.made, written && written.made);
  main.append(...[texts, sources, tokens, told, body,
    saveTools({ svg: () => drawing?.svg(), name: `step-${info.id}`,
      command: () => explainCommand(info, "step", { text: input.value, target: target?.value },
        ...["place", "layer"].map(name => state[name] && `--${name} ${state[name]}`)) })].filter(Boolean));

  // ---- requests
  const ask = latest(context, body, async ending => {
    const layer = info.heads ? whole(state.layer) : null; // only Transformers have blocks to unfold
    const given = state.fresh ? "" : state.target ?? null; // null: the token that the model predicts
    const { step: answer } = await api.post("v1/explain/step", { model: info.id, input: input.value || null, layer,
      target: target && given, place: whole(state.place), ...settings() }, ending);
    if (target && given === null) {
      const own = await api.post("v1/detokenize", { model: info.id, tokens: answer.ids }, ending);
      target.value = own.text;
    }
    return answer;
  });

  async function renew(where) {
    const answer = await ask();
    if (!answer || signal.aborted) return false;
    step = answer;
    showTokens();
    if (drawing) drawing.update(step, where);
    else drawing = draw(body, { step, stage: state.stage, head: state.head, settings: settings(),
      picked: whole(state.pick) }, hooks);
    return true;
  }

  const typed = debounced(changes => {
    context.set({ ...changes, place: undefined, pick: undefined });
    renew();
  });
  const confirm = debounced(async () => {
    const answer = await ask();
    if (answer) drawing?.confirm(answer);
  });

  const hooks = {
    stage: id => context.set({ stage: id === step.stages[0].id ? undefined : id }),
    head: head => context.set({ head: head ? String(head) : undefined }),
    pick: id => context.set({ pick: String(id) }),
    open: group => {
      const layer = group.match(/\d+$/)[0];
      context.set({ layer: layer === "0" ? undefined : layer });
      renew({ block: group });
    },
    settings: now => {
      const told = name => (now[name] === NEUTRAL[name] ? undefined : String(now[name]));
      context.set({ temperature: told("temperature"), top_k: told("top_k"), top_p: told("top_p") });
      confirm();
    },
    append: info.continues || info.writes ? append : null,
    sourceOpen: () => sourceOpen,
    toggledSource: open => { sourceOpen = open; context.set({ source: open ? "open" : undefined }); },
  };

  // the text up to the selected token, and the chosen candidate
  async function append(candidate) {
    const box = target ?? input, before = box.value;
    try {
      const tokens = [...step.ids.slice(0, step.place + 1), candidate.id];
      const { text } = await api.post("v1/detokenize", { model: info.id, tokens }, signal);
      if (text === before) { told.textContent = `${candidate.piece} ends the text.`; return false; }
      box.value = text;
      const gone = { fresh: undefined, place: undefined, pick: undefined, stage: undefined };
      context.set({ ...gone, [target ? "target" : "text"]: text });
      return await renew({ stage: step.stages[0].id });
    } catch (error) {
      context.fail(error);
      return false;
    }
  }

  // ---- tokens
  function showTokens() {
    const pieces = step.pieces.map((piece, at) => button(visibleToken(piece), () => follow(at),
      { "aria-pressed": String(at === step.place), title: `token ${at}, id ${step.ids[at]}` }));
    tokens.replaceChildren(...pieces);
    pieces.forEach((piece, at) => { piece.tabIndex = at === step.place ? 0 : -1; });
    sources?.replaceChildren(...(step.source_pieces ?? []).map((piece, at) =>
      h("span", { class: at === sourcePlace(step) ? "step-here" : undefined }, visibleToken(piece))));
    told.textContent = step.masked ? `“${visibleToken(step.masked)}” is masked.` : "";
  }
  roving(tokens, () => [...tokens.children]);

  async function follow(place) {
    const last = step.pieces.length - 1;
    context.set({ place: place === last ? undefined : String(place), pick: undefined });
    await renew();
    tokens.children[place]?.focus();
  }

  document.addEventListener("keydown", event => {
    if (!drawing || event.defaultPrevented || !isPlain(event)) return;
    if (event.target.closest?.("input, textarea, select, .step-tokens, pre")) return;
    if (event.key === " " && event.target.closest?.("button, summary, a")) return;
    if (drawing.key(event)) event.preventDefault();
  }, { signal });

  input.value = state.text || await ownText();
  if (target) target.value = state.target ?? "";
  await renew();
  context.set({}); // the command contains the text
  return { close() { drawing?.close(); } };

  async function ownText() {
    const { text } = await api.post("v1/explain/text", { model: info.id }, signal);
    if (text.length <= MOST_LETTERS) return text;
    return text.slice(0, MOST_LETTERS).replace(/\s+\S*$/, "");
  }
}
