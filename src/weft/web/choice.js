// From logits to a token: the candidates as bars, and what temperature, top-k and top-p leave of them. What a slider
// does is computed here at once from the candidates' logits; the server, which sees the whole vocabulary, confirms it.
import { Distribution, row } from "./distribution.js";
import { button, h, roving, slider } from "./dom.js";
import { number } from "./matrix.js";
import { counted, short, sum, visible } from "./words.js";

export const NEUTRAL = { temperature: 1, top_k: null, top_p: null };
const MOST_ROWS = 16;

// What all tokens that are not among the candidates weigh together, as if they had one logit each.
function restLogit(choice) {
  const count = choice.vocab_size - choice.candidates.length, [first] = choice.candidates;
  const rest = 1 - sum(choice.candidates.map(each => each.probability));
  if (count <= 0 || rest <= 1e-9 || !first?.probability) return null;
  const each = choice.temperature ? Math.log(rest / count / first.probability) * choice.temperature : -Infinity;
  return { count, logit: first.logit + each };
}

// The candidates under other settings: those of the vocabulary that are not among them weigh alike.
function chosen({ candidates }, full, settings) {
  const { temperature, top_k, top_p } = { ...NEUTRAL, ...settings };
  const { probabilities } = full.left({ temperature }), left = full.left({ temperature, top_k, top_p });
  const order = [...candidates].sort((a, b) => b.logit - a.logit);
  return order.map((each, place) => ({ ...each, kept: place < left.kept, probability: probabilities[place] ?? 0,
    final: left.probabilities[place] ?? 0 }));
}

// The logits of the whole vocabulary, as far as they are known.
function whole(choice) {
  const rest = restLogit(choice);
  return new Distribution(Float64Array.from([...choice.candidates.map(each => each.logit),
    ...Array(rest?.count ?? 0).fill(rest?.logit)]));
}

// one of the candidates at random, each as often as its probability says; the rest of the vocabulary is left out
function drawn(candidates) {
  const kept = candidates.filter(each => each.final > 0);
  let left = Math.random() * sum(kept.map(each => each.final));
  return kept.find(each => (left -= each.final) <= 0) ?? kept[0];
}

// bars of the candidates: grey is what temperature gives, blue is what is left after the cut
function bars(candidates, picked, choose) {
  const shown = candidates.slice(0, MOST_ROWS);
  const widest = Math.max(...shown.map(each => Math.max(each.final, each.probability)), 1e-9);
  return shown.map(each => {
    const made = row({ ...each, text: visible(each.piece) }, each.probability, each.final,
      { chosen: each.id === picked, widest, choose });
    made.title = `logit ${number(each.logit)}`;
    made.tabIndex = each.id === picked ? 0 : -1;
    return made;
  });
}

// The last box, enlarged. `settings` are the reader's; `change(settings)` asks the server, `append(candidate)` writes.
export function choicePanel(choice, { settings, picked, change, pick, append }) {
  const full = whole(choice); // other settings change no logits
  let now = { ...NEUTRAL, ...settings }, candidates = same(now, choice) ? choice.candidates : chosen(choice, full, now);
  let on = candidates.some(each => each.id === picked) ? picked : best(candidates);
  const holder = h("div", { class: "step-candidates" }), told = h("p", { class: "step-kept", "aria-live": "polite" });
  const current = () => candidates.find(each => each.id === on);
  const go = button("", () => append(current()), { class: "primary" });
  const redraw = focus => {
    holder.replaceChildren(...bars(candidates, on, ({ id }) => {
      on = id;
      pick?.(id);
      redraw(true);
    }));
    if (focus) holder.querySelector("[aria-current]")?.focus();
    const kept = candidates.filter(each => each.kept).length, exact = same(now, choice);
    // where no candidate is cut, no other token need be
    const all = exact ? choice.kept : kept === candidates.length ? choice.vocab_size : kept;
    const more = candidates.length - MOST_ROWS;
    const [left, size] = [all, choice.vocab_size].map(counted);
    told.textContent = `${exact ? "" : "about "}${left} of ${size} tokens are kept`
      + (more > 0 ? `; the ${MOST_ROWS} most probable are shown.` : ".");
    go.textContent = `Append “${short(visible(current().piece), 24)}” and continue`;
  };
  const set = part => {
    now = { ...now, ...part };
    candidates = chosen(choice, full, now);
    if (!candidates.find(each => each.id === on)?.kept) on = best(candidates);
    redraw();
    change?.(now);
  };
  redraw();
  roving(holder, () => [...holder.children]);
  const off = choice.candidates.length + 1;
  return { element: h("div", { class: "step-choice" },
    change ? h("div", { class: "write-settings" },
      slider("Temperature", { min: 0.1, max: 2.5, step: 0.05, value: now.temperature, told: t => t.toFixed(2),
        change: t => set({ temperature: t }) }),
      slider("Top-k", { min: 1, max: off, step: 1, value: now.top_k ?? off, told: k => (k >= off ? "off" : String(k)),
        change: k => set({ top_k: k >= off ? null : k }) }),
      slider("Top-p", { min: 0.05, max: 1, step: 0.01, value: now.top_p ?? 1,
        told: p => (p >= 1 ? "off" : p.toFixed(2)), change: p => set({ top_p: p >= 1 ? null : p }) })) : null,
    told, holder,
    append ? h("p", { class: "step-append" }, go, " ", button("Sample one", () => {
      on = drawn(candidates).id;
      pick?.(on);
      redraw();
    })) : null),
  // the server's answer to the settings that were asked for
  confirm(answer) {
    choice = answer;
    if (!same(now, choice)) return;
    candidates = choice.candidates;
    redraw(holder.contains(document.activeElement));
  },
  current };
}

const best = candidates => candidates.reduce((most, each) => (each.final > most.final ? each : most)).id;
const same = (settings, choice) =>
  Object.keys(NEUTRAL).every(name => (settings[name] ?? null) === (choice[name] ?? null));
