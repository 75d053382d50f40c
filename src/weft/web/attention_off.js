// What a text costs without some heads: its tokens shaded by the change, and what the model writes, side by side.
import { h, roving } from "./dom.js";

const LEAST_TOP = 0.5; // nats that are at least the strongest shade: less than that is next to nothing
const STRONGEST = 45; // percent of a colour behind a token, which can still be read

function signed(nats, digits = 3) {
  const size = Math.abs(nats).toFixed(digits);
  return Number(size) === 0 ? size : `${nats < 0 ? "−" : "+"}${size}`;
}

const shortly = value => value >= 1e6 ? value.toExponential(2)
  : value.toLocaleString("en", { maximumSignificantDigits: 4 });
// a line break is a sign, so that a model that writes nothing else takes one line
const visible = text => text.replaceAll("\n", "↵");

function mean(nats) {
  const scored = nats.filter(each => each !== null);
  return scored.reduce((sum, each) => sum + each, 0) / scored.length;
}

// Where two texts part.
function parting(a, b) {
  const [one, two] = [Array.from(a), Array.from(b)];
  let same = 0;
  while (same < one.length && one[same] === two[same]) same++;
  return [one.slice(0, same).join(""), one.slice(same).join(""), two.slice(same).join("")];
}

export function nothingOff() {
  return h("p", { class: "soft" }, "Switch a head off, by its button or with the key o in the grid, to see what the " +
    "text costs without it and what the model writes then.");
}

// `off`: the heads as "kind.layer.head"; `before` and `after` are answers of without_heads; `on` switches one on again.
export function comparison(off, before, after, on) {
  const parts = [heading(off, on)];
  if (before.surprise && after.surprise) parts.push(...surprises(before.surprise, after.surprise));
  else parts.push(h("p", {}, "There is no token to score: the model writes nothing from this text. Give it a target."));
  if (before.writes !== null) parts.push(written(before.writes, after.writes));
  return h("div", {}, parts);
}

export const named = off => {
  const several = new Set([...off].map(each => each.split(".")[0])).size > 1;
  return each => {
    const [kind, layer, head] = each.split(".");
    return `${several ? `${kind} ` : ""}${layer}.${head}`;
  };
};

function heading(off, on) {
  const name = named(off), all = [...off];
  return h("div", { class: "attention-heads" }, all.slice(0, 24).map(each =>
    h("button", { type: "button", onclick: () => on([each]), "aria-label": `Switch ${name(each)} on again` },
      `${name(each)} `, h("span", { "aria-hidden": "true" }, "×"))), all.length > 24 && h("span", {}, `and ${all.length - 24} more`),
  h("button", { type: "button", onclick: () => on(all) }, "All on again"));
}

export function totals(before, after) {
  const [one, two] = [mean(before.nats), mean(after.nats)], name = before.masked ? "Pseudo-perplexity" : "Perplexity";
  return `${name} ${shortly(Math.exp(one))} → ${shortly(Math.exp(two))}, ${signed(two - one)} nats a token`;
}

export function changes(before, after) {
  const found = before.nats.map((nats, place) => nats === null ? null : after.nats[place] - nats);
  return { found, top: Math.max(LEAST_TOP, ...found.map(each => Math.abs(each ?? 0))) };
}

function surprises(before, after) {
  const { found, top } = changes(before, after);
  const told = h("p", { class: "attention-told", "aria-live": "polite" },
    h("span", { class: "soft" }, "Point at a token, or go there with the arrow keys."));
  const tell = place => {
    const { piece } = before.tokens[place];
    told.textContent = found[place] === null ? `“${piece}”: nothing predicts it`
      : `“${piece}”: ${before.nats[place].toFixed(3)} → ${after.nats[place].toFixed(3)} nats (${signed(found[place])})`;
  };
  const tokens = before.tokens.map(({ piece }, place) => {
    const change = found[place] ?? 0, part = Math.round(STRONGEST * Math.abs(change) / top);
    const kind = part < 2 ? "" : change > 0 ? "attention-more" : "attention-less";
    return h("button", { type: "button", class: kind, tabindex: -1, style: { "--p": `${part}%` }, dataset: { place },
      "aria-label": `${piece}, ${found[place] === null ? "not scored" : `${signed(change, 2)} nats`}`,
      onclick: () => tell(place), onpointerenter: () => tell(place) }, piece);
  });
  const strip = h("div", { class: "attention-strip", role: "group",
    "aria-label": "Tokens by the change of their surprise" }, tokens);
  roving(strip, () => tokens, { onfocus: token => tell(Number(token.dataset.place)) });
  return [h("p", { class: "attention-totals", role: "status" }, totals(before, after)), strip, told,
    h("p", { class: "soft" }, h("span", { class: "attention-key attention-more" }, "more surprising"), " ",
      h("span", { class: "attention-key attention-less" }, "less surprising"),
      ` without these heads; the strongest shade is ${top.toFixed(2)} nats. ` +
      "The maps above are those of the whole model.")];
}

function written(before, after) {
  const [same, one, two] = parting(visible(before), visible(after));
  const column = (title, rest) => h("div", {}, h("h4", {}, title),
    h("p", { class: "attention-text" }, same, rest && h("mark", {}, rest),
      !same && !rest && h("span", { class: "soft" }, "nothing")));
  return h("div", {}, h("h3", {}, "What it writes ",
    h("span", { class: "soft" }, `(the likeliest token each time)${one || two ? "" : ": the same"}`)),
    h("div", { class: "attention-pair" }, column("with all heads", one), column("without these", two)));
}
