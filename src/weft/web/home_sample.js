// A sample of what a model does, written on its card: a continuation, a translation, a filled gap or a prediction.
import { h, soft } from "./dom.js";
import { firstWords, percent, short } from "./words.js";

const TOKENS = 36, PROMPT_WORDS = 5, SOURCE_WORDS = 14; // of a sample
const TEMPERATURE = 0.8; // of a continuation

const result = (text, ...others) => h("p", h("b", { dir: "auto" }, text), ...others);

export async function sampleOf(place, model, { api, signal, seed }) {
	if (model.inputs.length) return predicted(place, await api.post("v1/explain/prediction", { model: model.id }, signal));
	const { text } = await api.sampleText(model.id, signal);
	if (model.objective.startsWith("masked")) return filled(place, model, firstWords(text, SOURCE_WORDS), { api, signal });
	if (model.continues || model.writes) return written(place, model, text, { api, signal, seed });
	return place.replaceChildren(soft(short(text, 120)));
}

// The prompt, then the tokens as they arrive.
async function written(place, model, text, { api, signal, seed }) {
	const input = firstWords(text, model.writes ? SOURCE_WORDS : model.chat ? 2 * PROMPT_WORDS : PROMPT_WORDS);
	const output = h("b", { dir: "auto" });
	place.replaceChildren(h("p", soft(input), model.writes || model.chat ? h("br") : "", output));
	const request = model.chat ? { messages: [{ role: "user", content: input }] } : { input };
	const body = { model: model.id, ...request, tokens: [], top: 1, max_tokens: TOKENS, seed,
		temperature: model.writes ? 0 : TEMPERATURE };
	for await (const token of api.stream("v1/write", body, signal)) {
		if (token.id !== undefined) output.append(token.adds.replace(/\s+/g, " "));
	}
	if (!model.writes && !model.chat) output.textContent = output.textContent.replace(/[^\s.!?"]+$/, "…"); // part of a word
}

async function filled(place, model, text, { api, signal }) {
	const { mask } = await api.post("v1/fill", { model: model.id, input: text, top: 1 }, signal);
	const all = text.split(" "), at = Math.floor(all.length / 2), input = all.with(at, mask).join(" ");
	const { tokens } = await api.post("v1/fill", { model: model.id, input, top: 3 }, signal);
	const top = tokens.find(token => token.top)?.top ?? [];
	place.replaceChildren(h("p", soft(all.slice(0, at).join(" ")), " ", h("mark", mask), " ",
		soft(all.slice(at + 1).join(" "))), result(top.map(each => each.text).join(", "),
		soft(` was “${all[at]}”`)));
}

function predicted(place, { prediction }) {
	const { kind, texts, labels, score, words: tagged, answer, nearest } = prediction;
	const [label, p] = Object.entries(labels ?? {})[0] ?? [];
	const output = {
		classify: () => result(label, ` ${percent(p)}`),
		regress: () => result(+score.toPrecision(3)),
		tag: () => h("p", tagged.slice(0, 8).map(each => [h("b", each.text), " ", soft(each.tag), " "])),
		answer: () => result(answer.text || "no answer", ` ${percent(answer.probability)}`),
		contrastive: () => (nearest.length ? [h("p", soft("Nearest text:")), result(short(nearest[0].text, 80))] : ""),
	}[kind];
	place.replaceChildren(h("p", soft(short(texts.join(" · "), 120))), ...[output?.() ?? ""].flat());
}
