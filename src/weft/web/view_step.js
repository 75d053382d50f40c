// Inside a step: a text, a token, and the token's path through the model.
import { button, debounced, h, isPlain, roving } from "./dom.js";
import { explainCommand, saveTools } from "./save.js";
import { NEUTRAL } from "./choice.js";
import { sourcePosition } from "./flow.js";
import { answerSelect, fetchDecoding, latest, sampleNote, targetOf, textBox } from "./reading.js";
import { mount as draw } from "./step.js";
import { visibleToken } from "./words.js";

export const title = "Inside a step";
export const about = "The path of one token through the model, value by value.";
export const path = "step";
export const lacks = info => (info ? "" : "has no steps");

const MIN_TEMPERATURE = 0.1; // of the slider
const MAX_LETTERS = 48; // letters of the model's sample text at first

const integer = text => (/^\d+$/.test(text ?? "") ? Number(text) : null);
const real = text => (text !== undefined && Number.isFinite(Number(text)) ? Number(text) : null);

export async function mount(main, context) {
  const { info, state, api, signal } = context;
  /** @type {any} */
  let step = null;
  /** @type {any} */
  let drawing = null;
  let origin = ""; // of the sample text
  let sourceOpen = state.source === "open";
  const { generate, translate } = info.continues || info.writes ? await fetchDecoding(context) : {};
  // the model's default settings of sampling
  const usual = generate?.temperature >= MIN_TEMPERATURE
    ? { temperature: generate.temperature, top_k: generate.top_k, top_p: generate.top_p } : NEUTRAL;
  const settings = () => ({ temperature: real(state.temperature) ?? usual.temperature,
    top_k: state.top_k === "off" ? null : integer(state.top_k) ?? usual.top_k,
    top_p: state.top_p === "off" ? null : real(state.top_p) ?? usual.top_p });

  const source = textBox(info.writes ? "Source" : "Text", () => typed({ text: input.value }), { rows: 2 });
  const written = info.writes && textBox("Generated so far",
    () => typed({ target: target.value }), { rows: 1 });
  const answer = translate && answerSelect(context, translate.beams, () => {
    context.set({ place: undefined, pick: undefined });
    renew();
  });
  const input = source.area, target = written ? written.area : null;
  const strip = (kind, name) => h("div", { class: `step-tokens ${kind}`, role: "group", "aria-label": name });
  const tokens = strip("step-places", "Tokens: select one to follow its path");
  const sources = info.writes ? strip("step-sources", "The source’s tokens") : null;
  const status = h("p", { class: "soft step-status", role: "status" }), body = h("div", { class: "step-body" });
  const texts = h("div", { class: "step-texts" }, source.field, answer, written && written.field);
  main.append(...[texts, sources, tokens, status, body,
    saveTools({ svg: () => drawing?.svg(), name: `step-${info.id}`,
      command: () => explainCommand(info, "step", { text: input.value, target: target?.value },
        ...["place", "layer"].map(name => state[name] && `--${name} ${state[name]}`)) })].filter(Boolean));

  // ---- requests
  const load = latest(context, body, async ending => {
    const layer = info.heads ? integer(state.layer) : null; // only Transformers have blocks to unfold
    const { step: response } = await api.post("v1/explain/step", { model: info.id, input: input.value, layer,
      target: target && await targetOf(context, input.value, ending), place: integer(state.place), ...settings() }, ending);
    if (target && state.target === undefined) {
      const generated = await api.post("v1/detokenize", { model: info.id, tokens: response.ids }, ending);
      target.value = generated.text;
    }
    return response;
  });

  // the token that the text continues with, which may not be the likeliest
  const nextOf = ({ ids, place }) => (info.continues || info.writes ? ids[place + 1] : undefined);

  /** @param {{ stage?: string, block?: string }} [where]  stage to show */
  async function renew(where) {
    const response = await load();
    if (!response || signal.aborted) return false;
    step = response;
    showTokens();
    if (drawing) drawing.update(step, where);
    else drawing = draw(body, { step, stage: state.stage, head: state.head, settings: settings(),
      nextOf, picked: integer(state.pick) ?? nextOf(step) }, hooks);
    return true;
  }

  const typed = debounced(changes => {
    context.set({ ...changes, place: undefined, pick: undefined });
    renew();
  });
  const confirm = debounced(async () => {
    const response = await load();
    if (response) drawing?.confirm(response);
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
    settings: values => {
      const text = name => (values[name] === usual[name] ? undefined : String(values[name] ?? "off"));
      context.set({ temperature: text("temperature"), top_k: text("top_k"), top_p: text("top_p") });
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
      if (text === before) { status.textContent = `${candidate.piece} ends the text.`; return false; }
      box.value = text;
      const cleared = { place: undefined, pick: undefined, stage: undefined };
      context.set({ ...cleared, [target ? "target" : "text"]: text });
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
      h("span", { class: at === sourcePosition(step) ? "step-here" : undefined }, visibleToken(piece))));
    status.textContent = `Following token ${step.place + 1} of ${step.pieces.length}.`
      + (step.masked ? ` “${visibleToken(step.masked)}” is masked.` : "")
      + (state.text === undefined && origin ? ` ${origin}` : "");
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
    const target = /** @type {Element} */ (event.target);
    if (target.closest?.("input, textarea, select, .step-tokens, pre")) return;
    if (event.key === " " && target.closest?.("button, summary, a")) return;
    if (drawing.key(event)) event.preventDefault();
  }, { signal });

  input.value = state.text ?? await sampleText();
  if (target) target.value = state.target ?? "";
  await renew();
  context.set({}); // the command contains the text
  return { close() { drawing?.close(); } };

  async function sampleText() {
    const { text, origin: from } = await api.post("v1/explain/text", { model: info.id }, signal);
    origin = sampleNote(from);
    if (text.length <= MAX_LETTERS) return text;
    return text.slice(0, MAX_LETTERS).replace(/\s+\S*$/, "");
  }
}
