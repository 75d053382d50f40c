// The distribution of a next token: as the model gives it, and what temperature, top-k, top-p and min-p leave of it.
import { button, h } from "./dom.js";
import { bytesOf, counted, percent } from "./words.js";

const NEVER = -9999; // how the server writes the log-probability of what a model excludes
export const SHOWN = 40; // of the likeliest tokens

// Float32 log-probabilities from base64, by id.
export const unpacked = text => new Float32Array(bytesOf(text).buffer);

function softmax(values) {
  let total = 0;
  for (const value of values) total += Math.exp(value - values[0]);
  return values.map(value => Math.exp(value - values[0]) / total);
}

function entropy(probabilities) {
  let sum = 0;
  for (const p of probabilities) if (p > 0) sum -= p * Math.log(p);
  return sum;
}

// Every filter keeps the likeliest tokens, so all of them are lengths of one list, sorted once.
export class Distribution {
  constructor(logprobs) {
    this.logprobs = logprobs;
    this.order = Uint32Array.from(logprobs.keys()).sort((a, b) => logprobs[b] - logprobs[a] || a - b);
    this.sorted = Float64Array.from(this.order, id => logprobs[id]);
    this.raw = this.sorted.map(Math.exp);
    this.entropy = entropy(this.raw);
  }

  // 1 for the likeliest token; equals share a rank.
  rank(id) {
    let before = 0;
    while (before < this.sorted.length && this.sorted[before] > this.logprobs[id]) before += 1;
    return before + 1;
  }

  // What settings leave: probabilities of the tokens of `order` that are kept. Temperature, top_k, top_p and min_p, in
  // this order, as src/weft/decode/sampling.py has them; temperature 0 takes the likeliest.
  left({ temperature = 1, top_k: k, top_p: p, min_p: least }) {
    let kept = this.sorted.length;
    const heated = this.sorted.map(value => value / (temperature || 1));
    if (!temperature) kept = 1;
    else {
      if (k && k < kept) kept = this.until(heated, kept, value => value < heated[k - 1]); // what ties is kept
      if (p && p < 1) {
        let before = 0;
        const shares = softmax(heated.subarray(0, kept));
        kept = this.until(shares, kept, share => before >= p || ((before += share), false));
      }
      if (least) kept = this.until(heated, kept, value => value < heated[0] + Math.log(least));
    }
    while (kept > 1 && this.sorted[kept - 1] === -Infinity) kept -= 1;
    const probabilities = softmax(heated.subarray(0, kept));
    let mass = 0;
    for (let place = 0; place < kept; place += 1) mass += this.raw[place];
    return { kept, mass, probabilities, entropy: entropy(probabilities) };
  }

  // The first place, after the likeliest, that is dropped.
  until(values, end, dropped) {
    for (let place = 0; place < end; place += 1) if (dropped(values[place]) && place) return place;
    return end;
  }
}

function bar(share, kind) {
  return h("span", { class: `write-bar ${kind}`, style: { "--p": share } });
}

// One row a token: its name, its probability, and what the settings make of it. `choose(id)` is called for a row.
export function row(token, raw, after, { chosen, widest, choose }) {
  const dropped = after === 0, now = after ?? raw;
  const bars = h("span", { class: "write-bars" }, bar(raw / widest, "write-raw"),
    after !== undefined && bar(now / widest, "write-after"));
  return button([h("bdi", { class: "write-piece" }, token.text), bars,
    h("span", { class: "write-number" }, " ", percent(raw)), after !== undefined && h("span", { class: "write-number" },
      h("span", { class: "unseen" }, ", with the settings "), dropped ? "–" : percent(after))], () => choose(token),
  { class: `write-row${dropped ? " write-dropped" : ""}`, tabindex: -1, "aria-current": chosen && "true" });
}

// `tokens` are the likeliest, with names; `full` a Distribution, where all log-probabilities are known.
function drawDistribution(box, { tokens, full, settings, chosen, choose }) {
  const rows = tokens.slice(0, SHOWN).filter(token => token.logprob > NEVER);
  const left = settings && full?.left(settings); // a search has no settings of this kind
  const after = place => left && (place < left.kept ? left.probabilities[place] : 0);
  const raw = rows.map(token => Math.exp(token.logprob));
  const widest = Math.max(...raw, left ? left.probabilities[0] : 0, 1e-9);
  const places = left && new Map(rows.map((token, place) => [token.id, place]));
  if (left) full.order.subarray(0, SHOWN).forEach((id, place) => places.set(id, place));
  const drawn = rows.map((token, place) => row(token, raw[place], left && after(places.get(token.id)),
    { chosen: token.id === chosen, widest, choose }));
  if (drawn.length) drawn[0].tabIndex = 0;
  const shown = drawn.length;
  const others = full && full.sorted.length - shown;
  box.replaceChildren(
    h("div", { class: "write-row write-names soft", "aria-hidden": "true" }, h("span", {}, "token"), h("span"),
      h("span", { class: "write-number" }, "model"), left && h("span", { class: "write-number" }, "settings")),
    ...drawn,
    others > 0 && h("div", { class: "write-row write-others soft" }, h("span", {}, `${counted(others)} others`),
      h("span"), h("span", { class: "write-number" }, percent(total(full.raw, shown))),
      left && h("span", { class: "write-number" },
        left.kept > shown ? percent(total(left.probabilities, shown)) : "–")) || "");
  return left;
}

function total(values, from) {
  let sum = 0;
  for (let place = from; place < values.length; place += 1) sum += values[place];
  return sum;
}

// What stands, or could stand, at a place: of `token`, or of the next one where there is none.
export function drawPlace({ heading, facts, rows, sum }, { token, tokens, full, ...more }) {
  const focused = rows.contains(document.activeElement), among = full && counted(full.sorted.length);
  const rank = token && (full ? full.rank(token.id) : tokens.findIndex(each => each.id === token.id) + 1);
  heading.textContent = token ? "What else could it have said" : "The next token";
  facts.replaceChildren(...token ? [h("bdi", { class: "write-piece" }, token.text),
    ` has probability ${percent(Math.exp(token.logprob))}, ${(-token.logprob).toFixed(2)} nats`,
    rank ? `, rank ${counted(rank)}${full ? ` of ${among}` : ""}.` : "."]
    : ["What the model expects after the text so far. Choose one, and it goes on from there."]);
  const left = drawDistribution(rows, { tokens, full, chosen: token?.id, ...more });
  sum.textContent = left ? told(full, left) : full ? `Entropy ${full.entropy.toFixed(2)} nats.` : "";
  if (focused) rows.querySelector("button")?.focus();
}

// What the settings leave, in a sentence.
function told(full, left) {
  const size = counted(full.sorted.length), kept = counted(left.kept);
  return `The settings keep ${kept} of ${size} tokens, which have ${percent(left.mass)} of the model's probability; `
    + `entropy ${full.entropy.toFixed(2)} → ${left.entropy.toFixed(2)} nats.`;
}
