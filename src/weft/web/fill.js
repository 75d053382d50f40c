// Write view of a masked model: tokens are masked, and the model predicts them.
import { barRow, button, debounced, group, h, roving, soft } from "./dom.js";
import { latest, textBox } from "./reading.js";
import { explainCommand, saveTools } from "./save.js";
import { firstWords, percent } from "./words.js";

const WORDS = 14; // of the model's sample text
const TOP = 8; // predictions per mask

export async function mountFill(main, context) {
	const { info, api, state, signal } = context;
	const { field, area: box } = textBox("Text with masked words",
		debounced(() => change(box.value)), { id: "write-prompt", rows: 2 });
	const pieces = h("div.write-text", group("Tokens; each can be masked"));
	const predictions = h("div.write-fills", { "aria-live": "polite" });
	let text = state.text, mask = "[MASK]", tokens = [];

	// Replace a whole word, since models like BERT were trained with whole words masked.
	const replaceWord = (token, word) => {
		const characters = [...text]; // offsets are in characters, not in UTF-16 units
		let { start, end: to } = token;
		while (start < to && /\s/.test(characters[start])) start += 1;
		const isWithinWord = n => !token.top && /^[\p{L}\p{N}\p{M}]{2}$/u.test(`${characters[n - 1]}${characters[n]}`);
		while (start > 0 && isWithinWord(start)) start -= 1;
		while (to < characters.length && isWithinWord(to)) to += 1;
		box.value = [...characters.slice(0, start), word, ...characters.slice(to)].join("");
		return change(box.value);
	};

	function draw() {
		const masks = tokens.filter(token => token.top);
		const name = token => `${mask}${masks.length > 1 ? ` ${masks.indexOf(token) + 1}` : ""}`;
		pieces.replaceChildren(...tokens.map(token => button(h("bdi", token.top ? name(token) : token.text),
			() => replaceWord(token, token.top ? withoutMarker(token.top[0].text) : mask), { class: "write-hide",
				tabindex: -1, "aria-pressed": String(Boolean(token.top)), title: token.top ? "" : "Mask this token",
				disabled: token.start === token.end })));
		roving(pieces, () => [...pieces.querySelectorAll("button")]);
		predictions.replaceChildren(...masks.map(token => h("section.write-fill",
			h("h2", `Predictions for ${name(token)}`),
			...token.top.map(each => barRow(h("bdi.write-piece", each.text), Math.exp(each.logprob
				- token.top[0].logprob), percent(Math.exp(each.logprob)), () => replaceWord(token, withoutMarker(each.text)))))));
		const read = tokens.at(-1)?.end ?? 0, long = [...text.trimEnd()].length > read;
		if (long) pieces.append(soft(" … the rest exceeds the model's context."));
		if (!predictions.children.length) predictions.append(h("p.soft",
			tokens.length ? "Select a token above to mask it." : "Type a text, then select a token to mask it."));
	}

	const request = latest(context, predictions, async ending => {
		({ mask, tokens } = await api.post("v1/fill", { model: info.id, input: text, top: TOP }, ending));
		const focused = [...pieces.children].indexOf(document.activeElement);
		draw();
		pieces.children[focused]?.focus();
	});

	function change(value) {
		text = value;
		context.set({ text });
		return request();
	}

	main.append(field,
		h("p.soft.write-label", "Input of the model. Select a token to mask it."), pieces, predictions,
		saveTools({ name: "fill", svg: () => [pieces, predictions],
			command: () => explainCommand(info, "surprise", { text }) }));
	if (text === undefined) {
		text = firstWords((await api.sampleText(info.id, signal)).text, WORDS);
		box.value = text;
		await change(text);
		const middle = tokens[Math.floor(tokens.length / 2)];
		if (middle) await replaceWord(middle, mask); // something to predict immediately
	} else {
		box.value = text;
		await change(text);
	}
	return {};
}

const withoutMarker = piece => piece.replace(/^(##|␣)+/u, "");
