// From logits to a token: the candidates as bars, before and after temperature, top-k and top-p. A slider's effect is
// computed here from the candidates' logits; the server, which knows the whole vocabulary, confirms it.
import { Distribution, row } from "./distribution.js";
import { button, h, roving, slider } from "./dom.js";
import { number } from "./matrix.js";
import { short, sum, visibleToken, withCommas } from "./words.js";

export const NEUTRAL = { temperature: 1, top_k: null, top_p: null };
const MAX_ROWS = 16;

// The number of tokens that are not candidates, and the logit that gives them their total probability.
function restLogit(choice) {
  const count = choice.vocab_size - choice.candidates.length, [first] = choice.candidates;
  const rest = 1 - sum(choice.candidates.map(each => each.probability));
  if (count <= 0 || rest <= 1e-9 || !first?.probability) return null;
  const each = choice.temperature ? Math.log(rest / count / first.probability) * choice.temperature : -Infinity;
  return { count, logit: first.logit + each };
}

// The candidates under other settings; all other tokens are assumed to have equal logits.
function withSettings({ candidates }, full, settings) {
  const { temperature, top_k, top_p } = { ...NEUTRAL, ...settings };
  const { probabilities } = full.filter({ temperature }), left = full.filter({ temperature, top_k, top_p });
  const order = [...candidates].sort((a, b) => b.logit - a.logit);
  return order.map((each, place) => ({ ...each, kept: place < left.kept, probability: probabilities[place] ?? 0,
    final: left.probabilities[place] ?? 0 }));
}

// The distribution over the whole vocabulary, as far as it is known.
function fullDistribution(choice) {
  const rest = restLogit(choice);
  return new Distribution(Float64Array.from([...choice.candidates.map(each => each.logit),
    ...Array(rest?.count ?? 0).fill(rest?.logit)]));
}

// sample one of the candidates; the rest of the vocabulary is left out
function sampleOne(candidates) {
  const kept = candidates.filter(each => each.final > 0);
  let left = Math.random() * sum(kept.map(each => each.final));
  return kept.find(each => (left -= each.final) <= 0) ?? kept[0];
}

// bars of the candidates: grey after temperature, blue after truncation
function bars(candidates, picked, choose) {
  const shown = candidates.slice(0, MAX_ROWS);
  const widest = Math.max(...shown.map(each => Math.max(each.final, each.probability)), 1e-9);
  return shown.map(each => {
    const element = row({ ...each, text: visibleToken(each.piece) }, each.probability, each.final,
      { chosen: each.id === picked, widest, choose });
    element.title = `logit ${number(each.logit)}`;
    element.tabIndex = each.id === picked ? 0 : -1;
    return element;
  });
}

// The last stage, enlarged. `settings` are the reader's; `change(settings)` requests the server's result,
// `append(candidate)` continues the text.
export function choicePanel(choice, { settings, picked, change, pick, append }) {
  const full = fullDistribution(choice); // settings do not change logits
  let settingsNow = { ...NEUTRAL, ...settings };
  let candidates = same(settingsNow, choice) ? choice.candidates : withSettings(choice, full, settingsNow);
  let selected = candidates.some(each => each.id === picked) ? picked : best(candidates);
  const holder = h("div", { class: "step-candidates" }), status = h("p", { class: "step-kept", "aria-live": "polite" });
  const current = () => candidates.find(each => each.id === selected);
  const appendButton = button("", () => append(current()), { class: "primary" });
  const redraw = focus => {
    holder.replaceChildren(...bars(candidates, selected, ({ id }) => {
      selected = id;
      pick?.(id);
      redraw(true);
    }));
    if (focus) holder.querySelector("[aria-current]")?.focus();
    const kept = candidates.filter(each => each.kept).length, exact = same(settingsNow, choice);
    // if no candidate is dropped, assume that no other token is
    const all = exact ? choice.kept : kept === candidates.length ? choice.vocab_size : kept;
    const more = candidates.length - MAX_ROWS;
    const [left, size] = [all, choice.vocab_size].map(withCommas);
    status.textContent = `${exact ? "" : "about "}${left} of ${size} tokens are kept`
      + (more > 0 ? `; the ${MAX_ROWS} most probable are shown.` : ".");
    appendButton.textContent = `Append “${short(visibleToken(current().piece), 24)}” and continue`;
  };
  const set = part => {
    settingsNow = { ...settingsNow, ...part };
    candidates = withSettings(choice, full, settingsNow);
    if (!candidates.find(each => each.id === selected)?.kept) selected = best(candidates);
    redraw();
    change?.(settingsNow);
  };
  redraw();
  roving(holder, () => [...holder.children]);
  const off = choice.candidates.length + 1;
  return { element: h("div", { class: "step-choice" },
    change ? h("div", { class: "write-settings" },
      slider("Temperature", { min: 0.1, max: 2.5, step: 0.05, value: settingsNow.temperature, format: t => t.toFixed(2),
        change: t => set({ temperature: t }) }),
      slider("Top-k", { min: 1, max: off, step: 1, value: settingsNow.top_k ?? off,
        format: k => (k >= off ? "off" : String(k)), change: k => set({ top_k: k >= off ? null : k }) }),
      slider("Top-p", { min: 0.05, max: 1, step: 0.01, value: settingsNow.top_p ?? 1,
        format: p => (p >= 1 ? "off" : p.toFixed(2)), change: p => set({ top_p: p >= 1 ? null : p }) })) : null,
    status, holder,
    append ? h("p", { class: "step-append" }, appendButton, " ", button("Sample one", () => {
      selected = sampleOne(candidates).id;
      pick?.(selected);
      redraw();
    })) : null),
  // show the server's result for the requested settings
  confirm(result) {
    choice = result;
    if (!same(settingsNow, choice)) return;
    candidates = choice.candidates;
    redraw(holder.contains(document.activeElement));
  },
  current };
}

const best = candidates => candidates.reduce((most, each) => (each.final > most.final ? each : most)).id;
const same = (settings, choice) =>
  Object.keys(NEUTRAL).every(name => (settings[name] ?? null) === (choice[name] ?? null));
