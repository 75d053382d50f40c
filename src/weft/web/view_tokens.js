// Tokens: how all available tokenizers split a text, live and side by side.
import { debounced, group, h, roving, soft } from "./dom.js";
import { latest, textBox } from "./reading.js";
import { saveTools, shellQuote } from "./save.js";
import { table } from "./table.js";
import { withCommas } from "./words.js";

export const title = "Tokens";
export const about = "How each available tokenizer splits a text.";
export const path = "tokens";

const EXAMPLE = "The tokenizer's untranslatable naïveté: 3.14159, 東京, שלום, 😀!";
const NAMES = { byte: "bytes", char: "characters", word: "words", bpe: "byte-pair encoding",
	wordpiece: "WordPiece", unigram: "unigram" };
const MAX_LENGTH = 10_000;

export async function mount(main, context) {
	const { api, state } = context;
	const { field, area: box } = textBox("Text", debounced(() => {
		context.set({ text: box.value === EXAMPLE ? undefined : box.value });
		tokenize(box.value);
	}), { id: "tokens-text", maxlength: MAX_LENGTH });
	box.value = state.text ?? EXAMPLE;
	const list = h("div.tokens-list"), totals = h("div.tokens-counts");
	const facts = h("p.tokens-facts", { "aria-live": "polite" });
	let tokenizers = [];

	const tokenize = latest(context, list, async (ending, text) => {
		({ tokenizers } = await api.post("v1/tokenizers", { input: text }, ending));
		const own = each => each.models.some(name => name.replace(/ \(source\)$/, "") === context.info?.id);
		tokenizers.sort((a, b) => Number(own(b)) - Number(own(a))); // that of the model first
		draw(text);
	});

	function draw(text) {
		const characters = [...text].length, bytes = new TextEncoder().encode(text).length;
		list.replaceChildren(...tokenizers.map(each => sectionOf(each, mark)));
		totals.replaceChildren(counts(tokenizers, characters, bytes));
		mark(null);
	}

	// Describe a token, and show the same characters in the other tokenizers.
	function mark(token, piece) {
		for (const each of list.querySelectorAll(".tokens-same, .tokens-here"))
			each.classList.remove("tokens-same", "tokens-here");
		if (!token) return facts.replaceChildren("Point at a token or use the arrow keys to see its id and bytes.");
		piece.classList.add("tokens-here");
		const { start, end: to } = token;
		for (const each of list.querySelectorAll(".tok-piece")) {
			if (each !== piece && each.token.start < to && each.token.end > start) each.classList.add("tokens-same");
		}
		const entry = token.token === token.text ? [] : [", in the vocabulary ", h("code", h("bdi", token.token))];
		return facts.replaceChildren(h("bdi.write-piece", token.text), ` is token ${token.id}`, ...entry,
			piece.classList.contains("tok-unknown") ? "; the unknown token"
				: `; bytes ${token.bytes.match(/../g)?.join(" ") ?? "none"}`,
			`; characters ${start} to ${Math.max(start, to - 1)}.`);
	}

	main.append(field, facts, list, totals,
		saveTools({ name: "tokens", svg: () => list, command: () =>
			`weft tokenize ${shellQuote(box.value)} --tokenizer ${context.info
				? shellQuote(`runs/${context.info.id}`) : "byte"} --ids` }));
	await tokenize(box.value);
	return {};
}

const nameOf = each => each.models.length ? each.models.join(", ")
	: `${NAMES[each.kind]}${each.kind === "byte" ? "" : ", trained on this text"}`;

function sectionOf(each, mark) {
	const pieces = h("p.tok-pieces", { ...group(nameOf(each)), dir: "auto" });
	each.tokens.forEach((token, place) => {
		const show = () => mark(token, piece);
		const piece = h("span", { class: `tok-piece tok-${token.id === each.unknown ? "unknown" : place % 4}`,
			tabindex: -1, role: "button", onfocus: show, onpointerenter: show,
			"aria-label": `${token.text}, token ${token.id}` }, h("bdi", token.text));
		piece.token = token;
		pieces.append(piece);
	});
	roving(pieces, () => [...pieces.querySelectorAll(".tok-piece")]);
	const more = each.count - each.tokens.length;
	const kind = each.models.length ? ` ${NAMES[each.kind]}, ${withCommas(each.vocab_size)} in the vocabulary` : "";
	return h("section.tok-row", h("h2.tokens-name", h("bdi", nameOf(each))),
		soft(`${withCommas(each.count)} ${each.count === 1 ? "token" : "tokens"}${kind && `;${kind}`}`),
		each.error ? h("p", each.error) : pieces,
		more > 0 && h("p.soft", `… and ${withCommas(more)} more`));
}

function counts(tokenizers, characters, bytes) {
	const per = (amount, tokens) => tokens ? (amount / tokens).toFixed(2) : "–";
	return table({ title: "Counts", named: true, folds: false,
		header: ["tokenizer", "tokens", "characters per token", "bytes per token", "vocabulary"],
		rows: tokenizers.map(each => [h("bdi", nameOf(each)), withCommas(each.count), per(characters, each.count),
			per(bytes, each.count), each.models.length || each.kind === "byte" ? withCommas(each.vocab_size) : "–"]) });
}
