// Predict: what a classifier, tagger, regression model, answer finder or embedding model predicts, and from which tokens.
import { barRow, button, debounced, group, h, roving, soft } from "./dom.js";
import { isRefused, latest, sampleNote, textBox } from "./reading.js";
import * as saliency from "./saliency.js";
import { saveTools, shellQuote } from "./save.js";
import { capitalised, minus, percent, short, withCommas } from "./words.js";

export const title = "Predict";
export const about = "What the model predicts for your text, and the tokens that the prediction depends on.";
export const path = "predict";
export const lacks = info => (info?.inputs.length ? "" : "predicts tokens, not labels, numbers or vectors");

const SECOND = { contrastive: "Compare with (optional)", classify: "Second text (optional)" };
const COLOURS = 4; // of tags
const cosine = value => minus(value.toFixed(3));
const decimal = value => minus(String(+value.toPrecision(4)));

// Names of the text boxes; the last one may be optional.
function boxNames({ objective, inputs, imported }) {
	if (objective === "contrastive") return { names: ["Text", SECOND.contrastive], optional: true };
	if (objective === "tag") return { names: ["Text"], optional: false };
	const names = inputs.map(capitalised), optional = imported && names.length === 1;
	return { names: optional ? [...names, SECOND.classify] : names, optional };
}

export async function mount(main, context) {
	const { info, state, api } = context, { names, optional } = boxNames(info);
	const result = h("div.predict-result", { "aria-live": "polite" }), marked = h("div");
	const depends = h("section.predict-depends", { "aria-label": "What the prediction depends on" });
	const drawn = h("div.write-columns"), problem = h("p.reading-problem", { role: "alert" });
	const origin = h("p.soft.reading-origin");
	let shown = null;

	const boxes = names.map(name => textBox(name, () => typed(), { rows: 2 }));
	const [first, second] = boxes.map(box => box.area);
	const typed = debounced(() => {
		const other = second && (second.value || !optional) ? second.value : undefined;
		context.set({ text: first.value, second: other, output: undefined });
		load();
	});
	const refused = error => {
		if (!isRefused(error)) return false;
		marked.replaceChildren();
		depends.hidden = true;
		problem.textContent = `${capitalised(error.message)}.`;
		return true;
	};
	const outputOf = () => (state.output === undefined ? undefined
		: info.objective === "classify" ? state.output : Number(state.output));
	const load = latest(context, result, async ending => {
		const body = { model: info.id, input: state.text, second: state.second, output: outputOf() };
		const { prediction } = await api.post("v1/explain/prediction", body, ending);
		problem.textContent = "";
		if (state.text === undefined) prediction.texts.forEach((text, n) => { boxes[n].area.value = text; });
		origin.textContent = state.text === undefined ? sampleNote(prediction.origin) : "";
		shown = prediction;
		draw();
		context.set({}); // the command contains the text
		return prediction;
	}, refused);

	const choose = output => {
		context.set({ output: String(output) });
		return load();
	};

	function draw() {
		const focused = document.activeElement?.getAttribute("data-output");
		const parts = KINDS[info.objective](shown, choose);
		result.replaceChildren(h("h2", parts.title), ...parts.side);
		marked.replaceChildren(...parts.main ?? []);
		const data = shown.saliency, read = data?.sides.some(side => side.tokens.length);
		depends.hidden = !read;
		if (read) {
			const drawing = h("div");
			saliency.mount(drawing, { rest: [], ...data }, { measure: state.measure, heading: parts.heading,
				changed: ({ measure }) => context.set({ measure: measure === "norm" ? undefined : measure }) });
			depends.replaceChildren(h("h2", "What it depends on"), drawing, h("p.soft.about",
				`Shades show how strongly ${parts.measured} changes with the embedding of each token (its gradient).`));
		}
		if (focused) drawn.querySelector(`[data-output="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
	}

	drawn.append(h("div.write-main", h("div.predict-boxes", boxes.map(box => box.field), origin,
		problem), marked, depends), h("aside", { "aria-label": "Prediction" }, result));
	main.append(drawn, saveTools({ name: "predict", svg: () => [result, ...marked.children, !depends.hidden && depends],
			command: () => command(info, boxes.map(box => box.area.value)) }));
	if (state.text !== undefined) {
		first.value = state.text;
		if (second) second.value = state.second ?? "";
	}
	await load();
	return {};
}

function command({ id, objective, inputs }, texts) {
	const run = shellQuote(`runs/${id}`);
	if (objective === "contrastive") {
		return `printf '%s\\n' ${texts.filter(Boolean).map(shellQuote).join(" ")} | weft embed ${run}`;
	}
	if (inputs.length === 1) return `echo ${shellQuote(texts[0])} | weft classify ${run} --json`;
	const row = JSON.stringify(Object.fromEntries(inputs.map((name, n) => [name, texts[n] ?? ""])));
	return `echo ${shellQuote(row)} > row.jsonl && weft classify ${run} row.jsonl --json`;
}

const headline = (value, ...about) => h("p.predict-headline", h("b", { dir: "auto" }, value), soft(...about));
const explained = (...parts) => h("p.saliency-target", ...parts, " It depends on:");

function rows(items, choose) {
	const list = h("div.predict-rows", group("Select one to see what it depends on"),
		items.map(({ output, text, share, number, chosen }) => barRow(h("bdi", text), share, number, () => choose(output),
			{ tabindex: chosen ? 0 : -1, "aria-current": chosen && "true", "data-output": output })));
	roving(list, () => [...list.children]);
	return list;
}

function classify({ labels, saliency: { target, value } }, choose) {
	const all = Object.entries(labels), [best, p] = all[0];
	return {
		title: "Label", measured: "the label's log-probability",
		side: [headline(best, percent(p)), rows(all.map(([label, share]) =>
			({ output: label, text: label, share, number: percent(share), chosen: label === target })), choose)],
		heading: explained(h("b", target), `: probability ${percent(labels[target])}, log p ${minus(value.toFixed(2))} nats.`),
	};
}

function regress({ score, range }) {
	const scale = () => {
		const [low, high] = [Math.min(range[0], score), Math.max(range[1], score)], span = high - low || 1;
		const at = value => `${(100 * (value - low)) / span}%`;
		return [h("div.predict-scale", { role: "img", "aria-label": `${decimal(score)} on a scale of the training `
			+ `data, from ${decimal(range[0])} to ${decimal(range[1])}` },
		h("span.predict-range", { style: { left: at(range[0]), right: `calc(100% - ${at(range[1])})` } }),
		h("span.predict-mark", { style: { left: at(score) } })),
		h("p.soft.predict-ends", h("span", decimal(range[0])), h("span", "range of the training data"),
			h("span", decimal(range[1])))];
	};
	return { title: "Number", measured: "the number", side: [headline(decimal(score)), ...range ? scale() : []],
		heading: explained("The predicted number is ", h("b", decimal(score)), ".") };
}

function tag({ words, tags = [], word }, choose) {
	if (!words.length) return { title: "Tags", side: [h("p.soft", "Type a text to tag its words.")] };
	const counts = new Map(words.map(each => [each.tag, words.filter(other => other.tag === each.tag).length]));
	const found = [...counts].sort((a, b) => b[1] - a[1]), common = found[0][1] > 1 && found[0][0];
	const colour = name => `predict-tag ${name === common ? "" : `tok-${tags.indexOf(name) % COLOURS}`}`;
	const chips = h("div.predict-words", group("Words and their tags"),
		words.map((each, n) => button([h("bdi", each.text), h("span", { class: colour(each.tag) }, each.tag)],
			() => choose(n), { class: "predict-word", tabindex: n === word ? 0 : -1, "aria-pressed": String(n === word),
				title: percent(each.probability), "data-output": n })));
	roving(chips, () => [...chips.children]);
	const chosen = words[word];
	return {
		title: "Tags", measured: "the tag's log-probability",
		main: [h("h2", "Tags of the words"), chips],
		side: [headline(chosen.text, `${chosen.tag}, ${percent(chosen.probability)}`),
			h("ul.predict-counts", found.map(([name, count]) => h("li",
				h("span", { class: colour(name) }, name), soft(`${withCommas(count)} ${count === 1 ? "word" : "words"}`))))],
		heading: explained(h("b", chosen.text), " is tagged ", h("b", chosen.tag),
			`: probability ${percent(chosen.probability)}.`),
	};
}

function answer({ answer: found, texts }) {
	const characters = [...texts[1] ?? ""]; // offsets are in characters, not in UTF-16 units
	const part = (from, to) => characters.slice(from, to).join("");
	const context = h("p.predict-context", { dir: "auto" }, part(0, found.start),
		found.text && h("mark", part(found.start, found.end)), part(found.end));
	return {
		title: "Answer", measured: "the log-probability of the answer's first and last token",
		main: [h("h2", "The answer in its context"), context],
		side: found.text ? [headline(found.text, percent(found.probability)),
			h("p.soft", `Characters ${found.start} to ${found.end - 1} of the context.`)]
			: [h("p.soft", "Type a context that contains the answer.")],
		heading: explained(h("b", found.text), `: probability ${percent(found.probability)}.`),
	};
}

function contrastive({ nearest, compared, chosen, texts }, choose) {
	if (!nearest.length) return { title: "Similar texts", side: [h("p.soft",
		"The run's data is not here; type a text to compare with.")] };
	const pair = texts.length > 1, target = nearest[chosen];
	return {
		title: pair ? "Similarity" : "Similar texts", measured: "the cosine similarity",
		side: pair ? [headline(cosine(target.cosine), "cosine similarity")]
			: [h("p.soft", `Nearest of ${withCommas(compared)} texts of the run's data, by cosine similarity.`),
				rows(nearest.map((each, n) => ({ output: n, text: each.text, share: Math.max(0, each.cosine),
					number: cosine(each.cosine), chosen: n === chosen })), choose)],
		heading: explained("Similarity to ", h("b", short(target.text, 60)), `: cosine ${cosine(target.cosine)}.`),
	};
}

const KINDS = { classify, regress, tag, answer, contrastive };
