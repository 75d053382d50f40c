// A masked model's way of writing: words are hidden, and it says what could stand there.
import { button, debounced, h, roving, soft } from "./dom.js";
import { latest, textBox } from "./reading.js";
import { explained, tools } from "./save.js";
import { percent } from "./words.js";

const WORDS = 14; // of the model's own text
const TOP = 8;

export async function mountFill(main, context) {
  const { info, api, state, signal } = context;
  const { made, area: box } = textBox("Text with masked words",
    debounced(() => box.value.trim() && change(box.value)), { id: "write-prompt", rows: 2 });
  const pieces = h("div", { class: "write-text", role: "group", "aria-label": "Tokens; each can be masked" });
  const places = h("div", { class: "write-fills", "aria-live": "polite" });
  let text = state.text, mask = "[MASK]", found = [];

  // Put a word in the place of another: models like BERT learned from whole words that were hidden.
  const put = (token, word) => {
    const signs = [...text]; // places are counted in characters, not in JavaScript's units
    let { start, end: to } = token;
    while (start < to && /\s/.test(signs[start])) start += 1;
    const joined = place => !token.top && /^[\p{L}\p{N}\p{M}]{2}$/u.test(`${signs[place - 1]}${signs[place]}`);
    while (start > 0 && joined(start)) start -= 1;
    while (to < signs.length && joined(to)) to += 1;
    box.value = [...signs.slice(0, start), word, ...signs.slice(to)].join("");
    return change(box.value);
  };

  function draw() {
    const masks = found.filter(token => token.top);
    const name = token => `${mask}${masks.length > 1 ? ` ${masks.indexOf(token) + 1}` : ""}`;
    pieces.replaceChildren(...found.map(token => button(h("bdi", {}, token.top ? name(token) : token.text),
      () => put(token, token.top ? unmarked(token.top[0].text) : mask), { class: "write-hide", tabindex: -1,
        "aria-pressed": String(Boolean(token.top)), title: token.top ? "" : "Mask this token",
        disabled: token.start === token.end })));
    roving(pieces, () => [...pieces.querySelectorAll("button")]);
    places.replaceChildren(...masks.map(token => h("section", { class: "write-fill" },
      h("h2", {}, `Predictions for ${name(token)}`),
      ...token.top.map(each => button([h("bdi", { class: "write-piece" }, each.text), h("span", { class: "write-bars" },
        h("span", { class: "write-bar write-after", style: { "--p": Math.exp(each.logprob - token.top[0].logprob) } })),
      h("span", { class: "write-number" }, percent(Math.exp(each.logprob)))],
      () => put(token, unmarked(each.text)), { class: "write-row" })))));
    const read = found.at(-1)?.end ?? 0, long = [...text.trimEnd()].length > read;
    if (long) pieces.append(soft(" … the rest exceeds the model's context."));
    if (!places.children.length) places.append(h("p", { class: "soft" }, "Select a token above to mask it."));
  }

  const look = latest(context, places, async ending => {
    ({ mask, tokens: found } = await api.post("v1/fill", { model: info.id, input: text, top: TOP }, ending));
    const focused = [...pieces.children].indexOf(document.activeElement);
    draw();
    pieces.children[focused]?.focus();
  });

  function change(value) {
    text = value;
    context.set({ text });
    return look();
  }

  main.append(made,
    h("p", { class: "soft write-label" }, "Input of the model. Select a token to mask it."), pieces, places,
    tools({ name: "fill", svg: () => [pieces, places], command: () => explained(info, "surprise", { text }) }));
  if (!text) {
    const own = await api.post("v1/explain/text", { model: info.id }, signal);
    text = own.text.trim().split(/\s+/).slice(0, WORDS).join(" ");
    box.value = text;
    await change(text);
    const middle = found[Math.floor(found.length / 2)];
    if (middle) await put(middle, mask); // something to guess at once
  } else {
    box.value = text;
    await change(text);
  }
  return {};
}

// As it stands in a text: without the signs that say how a piece is joined to others.
const unmarked = piece => piece.replace(/^(##|␣)+/u, "");

