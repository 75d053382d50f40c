// What a text costs without some heads: its tokens shaded by the change, and what the model writes, side by side.
import { button, h, soft } from "./dom.js";
import { legend, panel, shaded } from "./shaded.js";
import { large, mean as meanOf, signs } from "./words.js";

const LEAST_TOP = 0.5; // nats that are at least the strongest shade: less than that is next to nothing

function signed(nats, digits = 3) {
  const size = Math.abs(nats).toFixed(digits);
  return Number(size) === 0 ? size : `${nats < 0 ? "−" : "+"}${size}`;
}

const mean = nats => meanOf(nats.filter(each => each !== null));

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

const named = off => {
  const several = new Set([...off].map(each => each.split(".")[0])).size > 1;
  return each => {
    const [kind, layer, head] = each.split(".");
    return `${several ? `${kind} ` : ""}${layer}.${head}`;
  };
};

function heading(off, on) {
  const name = named(off), all = [...off];
  return h("div", { class: "attention-heads" }, all.slice(0, 24).map(each =>
    button([`${name(each)} `, h("span", { "aria-hidden": "true" }, "×")], () => on([each]),
      { "aria-label": `Switch ${name(each)} on again` })),
  all.length > 24 && h("span", {}, `and ${all.length - 24} more`),
  button("All on again", () => on(all)));
}

function totals(before, after) {
  const [one, two] = [mean(before.nats), mean(after.nats)], name = before.masked ? "Pseudo-perplexity" : "Perplexity";
  return `${name} ${large(Math.exp(one))} → ${large(Math.exp(two))}, ${signed(two - one)} nats a token`;
}

function changes(before, after) {
  const found = before.nats.map((nats, place) => nats === null ? null : after.nats[place] - nats);
  return { found, top: Math.max(LEAST_TOP, ...found.map(each => Math.abs(each ?? 0))) };
}

function surprises(before, after) {
  const { found, top } = changes(before, after);
  const { element, tell } = panel("Point at a token, or go there with the arrow keys.");
  const show = place => tell(h("b", {}, before.tokens[place].piece), found[place] === null ? " nothing predicts it"
    : ` ${before.nats[place].toFixed(3)} → ${after.nats[place].toFixed(3)} nats (${signed(found[place])})`);
  const strip = shaded({ label: "The text, shaded by the change of its surprisal", tokens: before.tokens, choose: show,
    point: show });
  strip.shade(found.map(change => (Math.abs(change ?? 0) < 0.03 * top ? 0 : change / top)));
  return [h("p", { class: "attention-totals", role: "status" }, totals(before, after)),
    legend("change of surprisal, nats", top, { below: found.some(change => change < 0) }), element, strip.element,
    h("p", { class: "soft" }, "The maps above are those of the whole model.")];
}

function written(before, after) {
  // a line break is a sign, so that a model that writes nothing else takes one line
  const [same, one, two] = parting(signs(before), signs(after));
  const column = (title, rest) => h("div", {}, h("h4", {}, title),
    h("p", { class: "attention-text" }, same, rest && h("mark", {}, rest),
      !same && !rest && soft("nothing")));
  return h("div", {}, h("h3", {}, "What it writes ",
    soft(`(the likeliest token each time)${one || two ? "" : ": the same"}`)),
    h("div", { class: "attention-pair" }, column("with all heads", one), column("without these", two)));
}
