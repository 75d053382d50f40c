// Inside a step: the stage of a model and a text, played from the tokens to the next one.
import { debounced, field, h, isPlain, select, slider } from "./dom.js";
import { NEUTRAL } from "./choice.js";
import { stageScale } from "./present.js";
import { answerSelect, fetchDecoding, latest, sampleNote, targetOf, textBox } from "./reading.js";
import { explainCommand, saveTools } from "./save.js";
import { mount as draw } from "./stage.js";
import { visibleToken } from "./words.js";

export const title = "Inside a step";
export const about = "The path of one token through the model, value by value.";
export const path = "step";
export const lacks = info => (info ? "" : "has no steps");

const MIN_TEMPERATURE = 0.1; // of the slider
const MAX_LETTERS = 48; // letters of the model's sample text at first
const MAX_TOP_K = 100; // of the slider; more is off

const integer = text => (/^\d+$/.test(text ?? "") ? Number(text) : null);
const real = text => (text !== undefined && Number.isFinite(Number(text)) ? Number(text) : null);

export async function mount(main, context) {
  const { info, state, api, signal } = context;
  /** @type {any} */
  let step = null;
  /** @type {any} */
  let stage = null;
  let origin = "", text = "", target = info.writes ? state.target ?? "" : null;
  const { generate, translate } = info.continues || info.writes ? await fetchDecoding(context) : {};
  // the model's default settings of sampling
  const usual = generate?.temperature >= MIN_TEMPERATURE
    ? { temperature: generate.temperature, top_k: generate.top_k, top_p: generate.top_p } : NEUTRAL;
  const settings = () => ({ temperature: real(state.temperature) ?? usual.temperature,
    top_k: state.top_k === "off" ? null : integer(state.top_k) ?? usual.top_k,
    top_p: state.top_p === "off" ? null : real(state.top_p) ?? usual.top_p });
  const writes = info.continues || info.writes;

  const status = h("p", { class: "soft step-status", role: "status" }), body = h("div", { class: "step-body" });
  const tokens = h("div", { class: "step-follow" });
  const answer = translate && answerSelect(context, translate.beams, () => {
    target = "";
    context.set({ place: undefined, threads: undefined });
    renew({ stage: "tokens" });
  });
  const cuts = writes && h("div", { class: "fields" },
    slider("Top-k", { min: 1, max: MAX_TOP_K + 1, step: 1, value: settings().top_k ?? MAX_TOP_K + 1,
      format: k => (k > MAX_TOP_K ? "off" : String(k)), change: k => changed({ ...settings(), top_k: k > MAX_TOP_K
        ? null : k }) }),
    slider("Top-p", { min: 0.05, max: 1, step: 0.01, value: settings().top_p ?? 1,
      format: p => (p >= 1 ? "off" : p.toFixed(2)), change: p => changed({ ...settings(), top_p: p >= 1 ? null
        : p }) }));
  main.append(...[body, h("div", { class: "step-below" }, status, h("div", { class: "fields" }, tokens, answer), cuts),
    saveTools({ svg: () => stage?.svg(), name: `step-${info.id}`,
      command: () => explainCommand(info, "step", { text, target: target ?? undefined },
        ...["place", "layer"].map(name => state[name] && `--${name} ${state[name]}`)) })].filter(Boolean));

  // ---- requests
  const load = latest(context, body, async ending => {
    const layer = info.heads ? integer(state.layer) : null; // only Transformers have blocks to open
    const threads = (state.threads ?? "").split(",").filter(each => /^\d+$/.test(each)).map(Number);
    const { step: response } = await api.post("v1/explain/step", { model: info.id, input: text, layer, threads,
      target: target === null ? null : await targetOf(context, text, ending), place: integer(state.place),
        ...settings() }, ending);
    if (target !== null && state.target === undefined) {
      target = (await api.post("v1/detokenize", { model: info.id, tokens: response.ids }, ending)).text;
    }
    return response;
  });

  /** @param {{ stage?: string }} [where]  step to show */
  async function renew(where = {}) {
    const response = await load();
    if (signal.aborted) return false;
    if (!response) {
      body.hidden = false; // its sentence can be corrected
      if (!stage) body.replaceChildren(textBox("Text", event => { text = event.target.value; again(); }).field);
      return false;
    }
    step = response;
    if (stage) stage.update(step, { ...where, settings: settings() });
    else stage = draw(body, { step, scale: stageScale, stage: state.stage, zoom: state.zoom, head: state.head, settings: settings(),
      text: () => text, target: () => target }, hooks);
    showStatus();
    return true;
  }

  const confirm = debounced(async () => {
    const response = await load();
    if (!response) return;
    step = response;
    stage?.confirm(response);
  });
  const again = debounced(() => { context.set({ text }); renew(); });
  const asked = changes => { context.set(changes); return renew(); };
  function changed(values) {
    const shown = name => (values[name] === usual[name] ? undefined : String(values[name] ?? "off"));
    context.set({ temperature: shown("temperature"), top_k: shown("top_k"), top_p: shown("top_p") });
    stage?.set(values);
    confirm();
  }

  const hooks = {
    state: changes => context.set(changes),
    open: info.heads ? layer => asked({ layer: layer ? String(layer) : undefined }) : null,
    follow: place => asked({ place: place === step.pieces.length - 1 ? undefined : String(place), threads: undefined }),
    threads: places => asked({ threads: places.join(",") }),
    settings: changed,
    edit(which, typed) {
      if (which === "text") text = typed; else target = typed;
      context.set({ [which]: typed, place: undefined, threads: undefined, stage: undefined, zoom: undefined });
      return renew({ stage: "tokens" });
    },
    append: writes ? append : null,
  };

  // the text up to the followed token, and the chosen one
  async function append(token) {
    const before = target ?? text;
    try {
      const ids = [...step.ids.slice(0, step.place + 1), token.id];
      const { text: longer } = await api.post("v1/detokenize", { model: info.id, tokens: ids }, signal);
      if (longer === before) { status.textContent = `${token.piece} ends the text.`; return false; }
      if (target === null) text = longer; else target = longer;
      context.set({ place: undefined, threads: undefined, stage: undefined,
        [target === null ? "text" : "target"]: longer });
      return await renew({ stage: "tokens" });
    } catch (error) {
      context.fail(error);
      return false;
    }
  }

  function showStatus() {
    status.textContent = `Following token ${step.place + 1} of ${step.pieces.length}.`
      + (step.masked ? ` “${visibleToken(step.masked)}” is masked.` : "")
      + (state.text === undefined && origin ? ` ${origin}` : "");
    tokens.replaceChildren(field("Follow",
      select(step.pieces.map((piece, at) => [at, `${at + 1}: ${visibleToken(piece)}`]), step.place,
      place => hooks.follow(Number(place)))));
  }

  document.addEventListener("keydown", event => {
    if (!stage || event.defaultPrevented || !isPlain(event)) return;
    const target = /** @type {Element} */ (event.target);
    if (target.closest?.("input, textarea, select, pre, [contenteditable]")) return;
    if (stage.key(event)) event.preventDefault();
  }, { signal });

  document.addEventListener("weft-present", () => stage?.redraw(), { signal });

  text = state.text ?? await sampleText();
  await renew();
  context.set({}); // the command contains the text
  return { close() { stage?.close(); }, move };

  // Go to another step or zoom of the same picture; false if the address is of another one.
  function move(path, next) {
    const { slide: _, stage: __, zoom: ___, ...of } = next, { slide: _1, stage: _2, zoom: _3, ...now } = state;
    const known = JSON.stringify(Object.entries(of).sort()) === JSON.stringify(Object.entries(now).filter(([, value]) => value !== undefined).sort());
    if (!stage || path !== "step" || !next.stage || !known) return false;
    stage.pause();
    Object.assign(state, { slide: next.slide, stage: next.stage, zoom: next.zoom });
    if (next.zoom !== (stage.zoom() || undefined)) stage.zoomTo(next.zoom);
    stage.goTo(next.stage);
    return true;
  }

  async function sampleText() {
    const { text: sample, origin: from } = await api.post("v1/explain/text", { model: info.id }, signal);
    origin = sampleNote(from);
    if (sample.length <= MAX_LETTERS) return sample;
    return sample.slice(0, MAX_LETTERS).replace(/\s+\S*$/, "");
  }
}
