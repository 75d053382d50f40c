// From logits to a token: the candidates as bars, and what temperature, top-k and top-p leave of them. What a slider
// does is computed here at once from the candidates' logits; the server, which sees the whole vocabulary, confirms it.
import { h, percent, s } from "./dom.js";
import { fitted, number, visible } from "./matrix.js";

export const NEUTRAL = { temperature: 1, top_k: null, top_p: null };
const ROW = 22, MOST_ROWS = 16;

// What all tokens that are not among the candidates weigh together, as if they had one logit each.
function restLogit(choice) {
  const count = choice.vocab_size - choice.candidates.length, [first] = choice.candidates;
  const rest = 1 - choice.candidates.reduce((sum, each) => sum + each.probability, 0);
  if (count <= 0 || rest <= 1e-9 || !first?.probability) return null;
  const each = choice.temperature ? Math.log(rest / count / first.probability) * choice.temperature : -Infinity;
  return { count, logit: first.logit + each };
}

// The candidates under other settings: temperature, then top-k, then top-p, as weft samples.
export function chosen(choice, settings) {
  const { temperature, top_k, top_p } = { ...NEUTRAL, ...settings };
  const order = [...choice.candidates].sort((a, b) => b.logit - a.logit), best = order[0].logit;
  const weight = logit => (temperature > 0 ? Math.exp((logit - best) / temperature) : logit === best ? 1 : 0);
  const rest = restLogit(choice), restWeight = rest ? rest.count * weight(rest.logit) : 0;
  const total = order.reduce((sum, each) => sum + weight(each.logit), restWeight);
  const least = top_k && top_k <= order.length ? order[top_k - 1].logit : -Infinity;
  const left = order.filter(each => each.logit >= least);
  const cutRest = top_k && top_k <= order.length;
  const among = left.reduce((sum, each) => sum + weight(each.logit), cutRest ? 0 : restWeight);
  const kept = new Set();
  let before = 0;
  for (const each of left) {
    if (kept.size && top_p !== null && top_p < 1 && before >= top_p) break;
    kept.add(each.id);
    before += weight(each.logit) / among;
  }
  const restKept = !cutRest && (top_p === null || top_p >= 1 || before < top_p) ? restWeight : 0;
  const final = order.reduce((sum, each) => sum + (kept.has(each.id) ? weight(each.logit) : 0), restKept);
  return order.map(each => ({ ...each, kept: kept.has(each.id), probability: weight(each.logit) / total,
    scaled: temperature > 0 ? each.logit / temperature : each.logit,
    final: kept.has(each.id) ? weight(each.logit) / final : 0 }));
}

// one of the candidates at random, each as often as its probability says; the rest of the vocabulary is left out
export function drawn(candidates) {
  const kept = candidates.filter(each => each.final > 0);
  let left = Math.random() * kept.reduce((sum, each) => sum + each.final, 0);
  return kept.find(each => (left -= each.final) <= 0) ?? kept[0];
}

function slider(label, { min, max, step, value, told, change }) {
  const shown = h("output", {}, told(value));
  const input = h("input", { type: "range", min, max, step, value, "aria-label": label, "aria-valuetext": told(value),
    oninput: () => {
      const now = Number(input.value);
      shown.textContent = told(now);
      input.setAttribute("aria-valuetext", told(now));
      change(now);
    } });
  return h("label", { class: "step-slider" }, h("span", {}, label), input, shown);
}

// bars of the candidates: outlined is what temperature gives, filled is what is left after the cut
export function bars(candidates, { width, picked, choose, most = MOST_ROWS }) {
  const shown = candidates.slice(0, most), label = Math.min(110, width * 0.3), numbers = 62;
  const room = width - label - numbers, height = Math.max(1, shown.length) * ROW;
  const top = Math.max(...shown.map(each => Math.max(each.final, each.probability)), 1e-9);
  const rows = shown.map((each, at) => {
    const y = at * ROW, on = each.id === picked;
    const kinds = `${each.kept ? "" : " step-dropped"}${on ? " step-picked" : ""}`;
    const row = s("g", { class: `step-candidate${kinds}`, "data-id": each.id },
      s("rect", { class: "step-hit", x: 0, y, width, height: ROW }),
      s("text", { x: label - 8, y: y + 15, "text-anchor": "end" }, fitted(visible(each.piece), label - 14)),
      s("rect", { class: "step-before", x: label, y: y + 3.5, height: ROW - 7,
        width: Math.max(0.5, (each.probability / top) * room) }),
      s("rect", { class: "step-after", x: label, y: y + 6.5, height: ROW - 13, width: (each.final / top) * room }),
      s("text", { x: width - 2, y: y + 15, "text-anchor": "end", class: "step-number" },
        each.kept ? percent(each.final) : "cut"));
    row.append(s("title", {}, `${each.piece}: logit ${number(each.logit)}, probability ${percent(each.probability)}, `
      + (each.kept ? `${percent(each.final)} after the cut` : "cut away")));
    if (choose) {
      row.setAttribute("role", "radio");
      row.setAttribute("aria-checked", String(on));
      row.setAttribute("aria-label", `${visible(each.piece)}, ${each.kept ? percent(each.final) : "cut away"}`);
      row.setAttribute("tabindex", on ? "0" : "-1");
    }
    return row;
  });
  const svg = s("svg", { class: "step-bars", width, height, viewBox: `0 0 ${width} ${height}`,
    role: choose ? "radiogroup" : "img", "aria-label": "Candidates for the next token" }, ...rows);
  if (!choose) return svg;
  svg.addEventListener("click", event => {
    const row = event.target.closest("[data-id]");
    if (row) choose(Number(row.dataset.id));
  });
  svg.addEventListener("keydown", event => {
    const at = rows.indexOf(event.target.closest("[data-id]"));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (at < 0 || to === undefined || !rows[to]) return;
    event.preventDefault();
    event.stopPropagation();
    choose(shown[to].id, true);
  });
  return svg;
}

// The last box, enlarged. `settings` are the reader's; `change(settings)` asks the server, `append(candidate)` writes.
export function choicePanel(choice, { width, settings, picked, change, pick, append }) {
  let now = { ...NEUTRAL, ...settings }, candidates = same(now, choice) ? choice.candidates : chosen(choice, now);
  let on = candidates.some(each => each.id === picked) ? picked : best(candidates);
  const holder = h("div", { class: "step-candidates" }), told = h("p", { class: "step-kept", "aria-live": "polite" });
  const current = () => candidates.find(each => each.id === on);
  const go = h("button", { type: "button", class: "primary", onclick: () => append(current()) });
  const redraw = focus => {
    holder.replaceChildren(bars(candidates, { width, picked: on, choose: append && ((id, keep) => {
      on = id;
      pick?.(id);
      redraw(keep);
    }) }));
    if (focus) holder.querySelector('[aria-checked="true"]')?.focus();
    const kept = candidates.filter(each => each.kept).length, exact = same(now, choice);
    // where no candidate is cut, no other token need be
    const all = exact ? choice.kept : kept === candidates.length ? choice.vocab_size : kept;
    const more = candidates.length - MOST_ROWS;
    const [left, size] = [all, choice.vocab_size].map(count => count.toLocaleString("en"));
    told.textContent = `${exact ? "" : "about "}${left} of ${size} tokens are left`
      + (more > 0 ? `; the ${MOST_ROWS} likeliest are shown.` : ".");
    go.textContent = `Append “${Array.from(visible(current().piece)).slice(0, 24).join("")}” and go on`;
  };
  const set = part => {
    now = { ...now, ...part };
    candidates = chosen(choice, now);
    if (!candidates.find(each => each.id === on)?.kept) on = best(candidates);
    redraw();
    change?.(now);
  };
  redraw();
  const off = choice.candidates.length + 1;
  return { element: h("div", { class: "step-choice" },
    change ? h("div", { class: "step-sliders" },
      slider("Temperature", { min: 0.1, max: 2.5, step: 0.05, value: now.temperature, told: t => t.toFixed(2),
        change: t => set({ temperature: t }) }),
      slider("Top-k", { min: 1, max: off, step: 1, value: now.top_k ?? off, told: k => (k >= off ? "off" : String(k)),
        change: k => set({ top_k: k >= off ? null : k }) }),
      slider("Top-p", { min: 0.05, max: 1, step: 0.01, value: now.top_p ?? 1,
        told: p => (p >= 1 ? "off" : p.toFixed(2)), change: p => set({ top_p: p >= 1 ? null : p }) })) : null,
    told, holder,
    append ? h("p", { class: "step-append" }, go, " ", h("button", { type: "button", onclick: () => {
      on = drawn(candidates).id;
      pick?.(on);
      redraw();
    } }, "Draw one")) : null),
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
