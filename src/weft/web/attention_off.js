// Loss of a text without some heads: tokens shaded by the change, and the two continuations side by side.
import { button, h, soft } from "./dom.js";
import { legend, panel, shadedText } from "./shaded.js";
import { formatLarge, mean as meanOf, showWhitespace } from "./words.js";

const MIN_TOP = 0.5; // nats; the darkest shade is at least this, so that tiny changes stay pale

function signed(nats, digits = 3) {
  const size = Math.abs(nats).toFixed(digits);
  return Number(size) === 0 ? size : `${nats < 0 ? "−" : "+"}${size}`;
}

const mean = nats => meanOf(nats.filter(each => each !== null));

// Index at which two texts diverge.
function diverge(a, b) {
  const [one, two] = [Array.from(a), Array.from(b)];
  let same = 0;
  while (same < one.length && one[same] === two[same]) same++;
  return [one.slice(0, same).join(""), one.slice(same).join(""), two.slice(same).join("")];
}

export function switchOffHint() {
  return h("p", { class: "soft" }, "Switch a head off, with its button or the key o in the grid, to see the loss of " +
    "the text and the continuation without it.");
}

// `off`: heads "kind.layer.head"; `before` and `after`: responses of without_heads; `on` switches a head on again.
export function comparison(off, before, after, on) {
  const parts = [heading(off, on)];
  if (before.surprise && after.surprise) parts.push(...surprises(before.surprise, after.surprise));
  else parts.push(h("p", {}, "No token to score: the model generates nothing from this text. Enter a target."));
  if (before.writes !== null) parts.push(continuations(before.writes, after.writes));
  return h("div", {}, parts);
}

const headName = off => {
  const several = new Set([...off].map(each => each.split(".")[0])).size > 1;
  return each => {
    const [kind, layer, head] = each.split(".");
    return `${several ? `${kind} ` : ""}${layer}.${head}`;
  };
};

function heading(off, on) {
  const name = headName(off), all = [...off];
  return h("div", { class: "attention-heads" }, all.slice(0, 24).map(each =>
    button([`${name(each)} `, h("span", { "aria-hidden": "true" }, "×")], () => on([each]),
      { "aria-label": `Switch ${name(each)} on again` })),
  all.length > 24 && h("span", {}, `and ${all.length - 24} more`),
  button("Switch all on", () => on(all)));
}

function perplexities(before, after) {
  const [one, two] = [mean(before.nats), mean(after.nats)], name = before.masked ? "Pseudo-perplexity" : "Perplexity";
  return `${name} ${formatLarge(Math.exp(one))} → ${formatLarge(Math.exp(two))}, ${signed(two - one)} nats per token`;
}

function changes(before, after) {
  const values = before.nats.map((nats, place) => nats === null ? null : after.nats[place] - nats);
  return { values, top: Math.max(MIN_TOP, ...values.map(each => Math.abs(each ?? 0))) };
}

function surprises(before, after) {
  const { values, top } = changes(before, after);
  const { element, show: describe } = panel("Point at a token or use the arrow keys.");
  const show = place => describe(h("b", {}, before.tokens[place].piece), values[place] === null ? " not predicted"
    : ` ${before.nats[place].toFixed(3)} → ${after.nats[place].toFixed(3)} nats (${signed(values[place])})`);
  const strip = shadedText({ label: "The text, shaded by the change in surprisal", tokens: before.tokens, choose: show,
    point: show });
  strip.shade(values.map(change => (Math.abs(change ?? 0) < 0.03 * top ? 0 : change / top)));
  return [h("p", { class: "attention-totals", role: "status" }, perplexities(before, after)),
    legend("change in surprisal, nats", top, { below: values.some(change => change < 0) }), element, strip.element,
    h("p", { class: "soft" }, "The maps above are of the full model.")];
}

function continuations(before, after) {
  // line breaks are symbols, so that a text of line breaks takes one line
  const [same, one, two] = diverge(showWhitespace(before), showWhitespace(after));
  const column = (title, rest) => h("div", {}, h("h4", {}, title),
    h("p", { class: "attention-text" }, same, rest && h("mark", {}, rest),
      !same && !rest && soft("nothing")));
  return h("div", {}, h("h3", {}, "Continuation ",
    soft(`(greedy)${one || two ? "" : ": identical"}`)),
    h("div", { class: "attention-pair" }, column("with all heads", one), column("without these", two)));
}
