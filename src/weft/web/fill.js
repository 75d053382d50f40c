// A masked model's way of writing: words are hidden, and it says what could stand there.
import { debounced, h, percent, roving } from "./dom.js";
import { quoted, svgOfText, tools } from "./save.js";

const WORDS = 14; // of the model's own text
const TOP = 8;

export async function mountFill(main, context) {
  const { info, api, state, signal } = context;
  const box = h("textarea", { id: "write-prompt", rows: 2, dir: "auto", spellcheck: "false" });
  const pieces = h("div", { class: "write-text", role: "group", "aria-label": "Tokens; each can be hidden" });
  const places = h("div", { class: "write-fills", "aria-live": "polite" });
  let text = state.text, mask = "[MASK]", found = [], failed = false, end = new AbortController();

  // Put a word in the place of another: models like BERT learned from whole words that were hidden.
  const put = (token, word) => {
    const signs = [...text]; // places are counted in characters, not in JavaScript's units
    let { start, end: to } = token;
    while (start < to && /\s/.test(signs[start])) start += 1;
    while (!token.top && start > 0 && /[\p{L}\p{N}\p{M}]/u.test(signs[start - 1]) && /[\p{L}\p{N}\p{M}]/u.test(signs[start])) start -= 1;
    while (!token.top && to < signs.length && /[\p{L}\p{N}\p{M}]/u.test(signs[to]) && /[\p{L}\p{N}\p{M}]/u.test(signs[to - 1])) to += 1;
    box.value = [...signs.slice(0, start), word, ...signs.slice(to)].join("");
    return change(box.value);
  };

  function draw() {
    const masks = found.filter(token => token.top), name = token => `${mask}${masks.length > 1 ? ` ${masks.indexOf(token) + 1}` : ""}`;
    pieces.replaceChildren(...found.map(token => h("button", { type: "button", class: "write-hide", tabindex: -1,
      "aria-pressed": String(Boolean(token.top)), title: token.top ? "" : "Hide it", disabled: token.start === token.end,
      onclick: () => put(token, token.top ? unmarked(token.top[0].text) : mask) },
    h("bdi", {}, token.top ? name(token) : token.text))));
    roving(pieces, () => [...pieces.querySelectorAll("button")]);
    places.replaceChildren(...masks.map(token => h("section", { class: "write-fill" },
      h("h2", {}, `What could stand in place of ${name(token)}`),
      ...token.top.map(each => h("button", { type: "button", class: "write-row", onclick: () => put(token, unmarked(each.text)) },
        h("bdi", { class: "write-piece" }, each.text),
        h("span", { class: "write-bars" }, h("span", { class: "write-bar write-after", style: { "--p": Math.exp(each.logprob - token.top[0].logprob) } })),
        h("span", { class: "write-number" }, percent(Math.exp(each.logprob))))))));
    const read = found.at(-1)?.end ?? 0, long = [...text.trimEnd()].length > read;
    if (long) pieces.append(h("span", { class: "soft" }, " … the model reads no further."));
    if (!places.children.length) places.append(h("p", { class: "soft" }, "Choose a token above to hide it."));
  }

  async function change(value) {
    text = value;
    context.set({ text: value });
    end.abort();
    end = new AbortController();
    places.setAttribute("aria-busy", "true");
    try {
      const answer = await api.post("v1/fill", { model: info.id, input: value, top: TOP }, end.signal);
      ({ mask, tokens: found } = answer);
      const focused = [...pieces.children].indexOf(document.activeElement);
      draw();
      pieces.children[focused]?.focus();
      if (failed) context.done();
      failed = false;
    } catch (error) {
      failed = error.name !== "AbortError";
      context.fail(error);
    }
    places.removeAttribute("aria-busy");
  }

  box.addEventListener("input", debounced(() => box.value.trim() && change(box.value), 250));
  signal.addEventListener("abort", () => end.abort());
  main.append(h("label", { for: "write-prompt", class: "soft" }, "A text with hidden words"), box,
    h("p", { class: "soft write-label" }, "What the model reads. Choose a token to hide it."), pieces, places,
    tools({ name: "fill", svg: () => picture(found), command: () =>
      `weft explain ${quoted(`runs/${info.id}`)} --only surprise --text ${quoted(text ?? "")}` }));
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
  return { close: () => end.abort() };
}

// As it stands in a text: without the signs that say how a piece is joined to others.
const unmarked = piece => piece.replace(/^(##|␣)+/u, "");

const picture = found => svgOfText([found.map(token => ({ text: `${token.text} `, shade: token.top ? 0.6 : 0 })),
  ...found.filter(token => token.top).flatMap(token => ["", "What could stand there:",
    ...token.top.map(each => `${percent(Math.exp(each.logprob)).padStart(8)}  ${each.text}`)])]);
