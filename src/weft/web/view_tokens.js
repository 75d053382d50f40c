// Tokens: how every tokenizer at hand cuts a text, live and side by side.
import { debounced, h, roving } from "./dom.js";
import { quoted, svgOfText, tools } from "./save.js";

export const title = "Tokens";
export const about = "How each tokenizer at hand cuts a text.";
export const path = "tokens";
export const shows = () => true;

const EXAMPLE = "The tokenizer's untranslatable naïveté: 3.14159, 東京, שלום, 😀!";
const NAMES = { byte: "bytes", char: "characters", word: "words", bpe: "byte-pair encoding", wordpiece: "WordPiece", unigram: "unigram" };
const MAX_LENGTH = 10_000;
const counted = value => value.toLocaleString("en");

export async function mount(main, context) {
  const { api, state, signal } = context;
  const box = h("textarea", { id: "tokens-text", rows: 3, dir: "auto", spellcheck: "false", maxlength: MAX_LENGTH }, state.text ?? EXAMPLE);
  const list = h("div", { class: "tokens-list" }), table = h("div", { class: "scroll table tokens-counts", tabindex: 0, role: "region", "aria-label": "Counts" });
  const facts = h("p", { class: "tokens-facts", "aria-live": "polite" });
  let end = new AbortController(), found = [], failed = false;

  async function cut(text) {
    end.abort();
    end = new AbortController();
    list.setAttribute("aria-busy", "true");
    try {
      found = (await api.post("v1/tokenizers", { input: text }, end.signal)).tokenizers;
      draw(text);
      if (failed) context.done();
      failed = false;
    } catch (error) {
      failed = error.name !== "AbortError";
      context.fail(error);
    }
    list.removeAttribute("aria-busy");
  }

  function draw(text) {
    const characters = [...text].length, bytes = new TextEncoder().encode(text).length;
    list.replaceChildren(...found.map(each => cutOf(each, mark)));
    table.replaceChildren(counts(found, characters, bytes));
    mark(null);
  }

  // What a piece is, and the same characters wherever else they were cut.
  function mark(token, piece) {
    for (const each of list.querySelectorAll(".tokens-same, .tokens-here")) each.classList.remove("tokens-same", "tokens-here");
    if (!token) return facts.replaceChildren("Point at a token, or go there with the arrow keys, to see its id and its bytes.");
    piece.classList.add("tokens-here");
    const { start, end: to } = token;
    for (const each of list.querySelectorAll(".tok-piece")) {
      if (each !== piece && each.token.start < to && each.token.end > start) each.classList.add("tokens-same");
    }
    const entry = token.token === token.text ? [] : [", in the vocabulary ", h("code", {}, h("bdi", {}, token.token))];
    return facts.replaceChildren(h("bdi", { class: "write-piece" }, token.text), ` is token ${token.id}`, ...entry,
      piece.classList.contains("tok-unknown") ? "; it stands for what the vocabulary lacks" : `; bytes ${token.bytes.match(/../g)?.join(" ") ?? "none"}`,
      `; characters ${start + 1} to ${Math.max(start + 1, to)}.`);
  }

  const soon = debounced(() => {
    context.set({ text: box.value === EXAMPLE ? undefined : box.value });
    cut(box.value);
  }, 250);
  box.addEventListener("input", soon);
  signal.addEventListener("abort", () => end.abort());
  main.append(h("label", { for: "tokens-text", class: "soft" }, "Text"), box, facts, list, h("h2", {}, "Counts"), table,
    tools({ name: "tokens", svg: () => picture(found), command: () =>
      `weft tokenize ${quoted(box.value)} --tokenizer ${context.info ? quoted(`runs/${context.info.id}`) : "byte"} --ids` }));
  await cut(box.value);
  return { close: () => end.abort() };
}

const nameOf = each => each.models.length ? each.models.join(", ")
  : `${NAMES[each.kind]}${each.kind === "byte" ? "" : ", of this text alone"}`;

function cutOf(each, mark) {
  const pieces = h("p", { class: "tok-pieces", role: "group", "aria-label": nameOf(each), dir: "auto" });
  each.tokens.forEach((token, place) => {
    const piece = h("span", { class: `tok-piece tok-${token.id === each.unknown ? "unknown" : place % 4}`, tabindex: -1, role: "button",
      "aria-label": `${token.text}, token ${token.id}` }, h("bdi", {}, token.text));
    piece.token = token;
    piece.addEventListener("focus", () => mark(token, piece));
    piece.addEventListener("pointerenter", () => mark(token, piece));
    pieces.append(piece);
  });
  roving(pieces, () => [...pieces.querySelectorAll(".tok-piece")]);
  const more = each.count - each.tokens.length;
  const kind = each.models.length ? ` ${NAMES[each.kind]}, ${counted(each.vocab_size)} in the vocabulary` : "";
  return h("section", { class: "tok-row" }, h("h2", { class: "tokens-name" }, h("bdi", {}, nameOf(each))),
    h("span", { class: "soft" }, `${counted(each.count)} ${each.count === 1 ? "token" : "tokens"}${kind && `;${kind}`}`),
    each.error ? h("p", {}, each.error) : pieces, more > 0 && h("p", { class: "soft" }, `… and ${counted(more)} more`));
}

function counts(found, characters, bytes) {
  const per = (amount, count) => count ? (amount / count).toFixed(2) : "–";
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "tokenizer"),
    ["tokens", "characters per token", "bytes per token", "vocabulary"].map(name => h("th", { class: "n", scope: "col" }, name)))),
  h("tbody", {}, found.map(each => h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, nameOf(each))),
    [counted(each.count), per(characters, each.count), per(bytes, each.count), each.models.length || each.kind === "byte"
      ? counted(each.vocab_size) : "–"].map(value => h("td", { class: "n" }, value))))));
}

const picture = found => svgOfText(found.flatMap(each => [[{ text: `${nameOf(each)}: ${counted(each.count)} tokens`, bold: true }],
  each.tokens.flatMap((token, place) => [{ text: token.text, shade: place % 2 ? 0.3 : 0.6 }, " "]), ""]));
