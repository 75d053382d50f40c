// Home: a first prediction to play with, the models of the server as cards, and the latest runs with their curves.
import { mount as mountChart } from "./chart.js";
import { button, copyText, debounced, group, h, soft } from "./dom.js";
import { glossary } from "./glossary.js";
import { sampleOf } from "./home_sample.js";
import { duration } from "./numbers.js";
import { latest } from "./reading.js";
import { add, charts, empty } from "./runs_curves.js";
import { STATES } from "./runs_parts.js";
import { abbreviate, capitalised, percent } from "./words.js";

export const title = "Home";
export const path = "";

const MIN_LETTERS = 20, MAX_LETTERS = 70; // of the text that the first prediction follows
const SURE = 0.5; // probability of the most probable token that makes a good first prediction
const CANDIDATES = 6; // tokens of the first prediction
const MAX_CARDS = 12; // models shown before "Show all" is pressed
const MAX_RUNS = 4; // latest runs with their curves
const LIVE_PARAMETERS = 60e6; // a larger model writes a sample only on request
const WAIT_MS = 3000; // between looks for a first model
const KINDS = { decoder: "Transformer decoder", encoder: "Transformer encoder",
	"encoder-decoder": "Transformer encoder and decoder", recurrent: "Recurrent network", bengio: "Neural n-gram", ngram: "N-gram model",
	bahdanau: "Recurrent encoder and decoder with attention", elmo: "LSTMs in both directions (ELMo)" };
const FILLS = "Fills in missing words from the text on both sides.";
const GOOD_AT = {
	"next-token": "Continues a text in the style of its training data.",
	chat: "Answers messages and remembers the conversation.",
	pairs: "Writes one text from another, such as a translation or a summary.",
	masked: FILLS, "masked+next": FILLS,
	classify: "Chooses a label for a text.", regress: "Predicts a number from a text.",
	tag: "Gives every word of a text a tag.", answer: "Finds the answer to a question in a text.",
	contrastive: "Turns texts into vectors that are close if the texts are similar.",
};
// the first steps of a person who has never seen a language model; the first of `views` that the model has is opened
const STEPS = [
	{ views: ["step"], label: "Watch one prediction", about: "Every step, down to a single number." },
	{ views: ["attention", "surprise"], label: "See what it looks at", about: "What each token attends to." },
	{ views: ["surprise", "predict"], label: "Find what surprises it",
		about: "Tokens shaded by how unexpected they were." },
	{ views: ["write", "predict"], label: "Let it write", about: "Choose another token and see where it leads." },
];

const newestFirst = (a, b) => b.created - a.created || (b.parameters ?? 0) - (a.parameters ?? 0);

export async function mount(main, context) {
	const home = new Home(main, context);
	await home.begin();
	return { close: () => home.close() };
}

class Home {
	opened = []; // charts and observers
	queue = Promise.resolve(); // one sample at a time
	runs = h("section", { hidden: true });

	constructor(main, context) {
		this.main = main;
		this.context = context;
		this.models = [...context.models].sort(newestFirst);
		main.classList.add("view-home");
	}

	close() {
		for (const each of this.opened) each.close();
	}

	async begin() {
		this.main.append(...this.models.length ? [this.first(), this.cards()] : [this.nothing()], this.broken(), this.runs,
			glossary());
		await this.showRuns();
	}

	nothing() {
		const line = (text, ...explained) => h("li", h("div.home-command", h("code", { tabindex: 0 }, text),
			button("Copy", event => copyText(event.target, text))), h("p.soft", ...explained));
		const timer = setInterval(async () => {
			const models = await this.context.refresh().catch(() => []);
			if (models.length) this.context.go("");
		}, WAIT_MS);
		this.opened.push({ close: () => clearInterval(timer) });
		return h("section.home-empty", h("h2.home-title", "No model here yet"),
			h("p", "Type one of these in a terminal, in the folder where you started weft. The model appears here with "
				+ "its first checkpoint."),
			h("ul",
				line("weft quickstart", "Trains a small Transformer on built-in tales: two minutes on two cores."),
				line("weft train gpt-tiny --data book.txt", "Trains on your own text."),
				line("weft import path/to/SmolLM2 runs/smol", "Converts a Hugging Face model.")));
	}

	// Models whose recipe cannot be read, and why.
	broken() {
		return h("div.home-cards", this.context.broken.map(({ id, problem }) => h("article.home-card", h("h3", id),
			h("p.reading-problem", `Cannot be loaded: ${problem}`))));
	}

	first() {
		const { context } = this, able = this.models.filter(model => model.continues && !model.chat && !model.problem);
		const model = able.find(each => each.heads) ?? able[0];
		const steps = h("nav.home-steps", { "aria-label": "Start here" });
		if (!model) {
			this.drawSteps(steps, this.models[0]);
			return h("section.home-first", h("div", h("h2.home-title", "Start here")), steps);
		}
		const area = h("textarea.home-sentence", { rows: 1, spellcheck: "false", dir: "auto",
			"aria-label": "Text to continue", maxlength: 400, oninput: debounced(() => load()) });
		const rows = h("div.home-candidates", group("Most probable next tokens"));
		const load = latest(context, rows, async (signal, token) => {
			const tokens = token ? [token.id] : [];
			const body = { model: model.id, input: area.value, tokens, temperature: 1, seed: 0, top: CANDIDATES,
				max_tokens: tokens.length + 1 };
			let last = null;
			for await (const each of context.api.stream("v1/write", body, signal)) {
				if (each.id === undefined) continue;
				if (token && last === null) area.value += each.adds;
				last = each;
			}
			if (last) draw(last.top ?? []);
		});
		const draw = top => {
			const focused = [...rows.children].indexOf(document.activeElement);
			rows.replaceChildren(...top.map(each => {
				const p = Math.exp(each.logprob);
				const [, space, piece] = /^(␣?)(.*)$/su.exec(each.text) ?? [];
				return button([h("bdi", soft(space), piece), h("span.home-bar",
					h("span", { style: { "--p": p / Math.exp(top[0].logprob) } })), h("span", percent(p))], () => load(each),
				{ class: "home-candidate", title: `Continue with ${each.text}` });
			}));
			rows.children[focused]?.focus();
			this.drawSteps(steps, model, area.value);
		};
		this.beginning(model).then(text => {
			area.value ||= text;
			return load();
		}).catch(error => {
			if (error.status !== 409) return context.fail(error);
			model.problem = error.message; // another one can be loaded
			return this.main.firstChild.replaceWith(this.first());
		});
		this.drawSteps(steps, model);
		return h("section.home-first", h("div", h("h2.home-title", "What comes next?"), area, rows, h("p.soft",
			"Predictions of ", h("b", model.id), ". Choose one to continue, or type a text of your own.")), steps);
	}

	// The beginning of a sample text, up to a word of which the model is neither certain nor ignorant.
	async beginning(model) {
		const { surprise } = await this.context.api.post("v1/explain/surprise", { model: model.id }, this.context.signal);
		let text = "", best = "", least = Infinity;
		for (const [n, token] of surprise.tokens.entries()) {
			const { piece = "", probability = 0 } = surprise.guesses[n]?.[0] ?? {};
			const distance = Math.abs(probability - SURE) + (/\p{L}{2}/u.test(piece) ? 0 : 1); // a word is best
			const isEnd = /^\s/u.test(token.text) && text.length >= MIN_LETTERS && text.length <= MAX_LETTERS;
			if (isEnd && distance < least) [best, least] = [text, distance];
			text += token.text;
		}
		return (best || text.slice(0, MAX_LETTERS)).trim();
	}

	// The steps of "Start here", for a model and the text on the page.
	drawSteps(place, model, text = undefined) {
		const { views, link } = this.context;
		const found = STEPS.map(({ views: names, ...step }) => ({ ...step,
			view: names.map(name => views.find(each => each.path === name)).find(view => view && !view.lacks(model)) }));
		const items = found.filter(({ view }, n) => view && found.findIndex(each => each.view === view) === n);
		place.replaceChildren(h("h2", "Start here"), h("ol", items.map(({ view, label, about }) => h("li",
			h("a", { href: link(view.path, { model: model.id, text }) }, h("b", label), soft(about))))));
	}

	cards() {
		const grid = h("div.home-cards");
		const more = button(`Show all ${this.models.length} models`, () => show(this.models.length));
		const observer = new IntersectionObserver(entries => {
			for (const { target } of entries.filter(each => each.isIntersecting)) {
				observer.unobserve(target);
				target.dispatchEvent(new CustomEvent("seen"));
			}
		});
		this.opened.push({ close: () => observer.disconnect() });
		const show = count => {
			for (const model of this.models.slice(grid.children.length, count)) {
				const card = this.card(model);
				grid.append(card);
				observer.observe(card);
			}
			more.hidden = count >= this.models.length;
		};
		show(MAX_CARDS);
		return h("section", h("h2", this.models.length === 1 ? "Your model" : "Your models"), grid, h("p", more));
	}

	card(model) {
		const { views, link } = this.context, sample = h("div.home-sample", { "aria-live": "off" }, soft("…"));
		const sizes = [model.parameters > 0 && `${abbreviate(model.parameters)} parameters`,
			model.layers && (model.layers === 1 ? "1 layer" : `${model.layers} layers`), model.heads && `${model.heads} heads`];
		const shown = views.filter(view => view.ofText && !view.lacks(model));
		const home = shown[0] ?? views.find(view => view.path === "tokens");
		let seed = 0;
		const write = () => {
			sample.setAttribute("aria-busy", "true");
			this.queue = this.queue.then(() => sampleOf(sample, model, { ...this.context, seed: seed++ })).catch(error => {
				if (error.name !== "AbortError") sample.replaceChildren(error.status === 409 ? h("p.reading-problem", capitalised(error.message))
					: soft(`No sample: ${error.message}`));
			}).finally(() => sample.removeAttribute("aria-busy"));
		};
		const again = button("↻", write, { class: "home-again", title: "Another sample", "aria-label": `Another sample of ${model.id}` });
		return h("article.home-card", { onseen() {
			if ((model.parameters ?? 0) <= LIVE_PARAMETERS) write();
			else sample.replaceChildren(button("Write a sample", write));
		} }, h("header", h("h3", h("a", { href: link(home.path, { model: model.id }) }, model.id)), model.continues && again),
		h("p.soft.home-kind", KINDS[model.kind] ?? capitalised(model.kind), h("br"), sizes.filter(Boolean).join(" · ")),
		sample, h("p", GOOD_AT[model.objective] ?? `${capitalised(model.makes)}.`),
		h("p.home-views", shown.map(view => h("a", { href: link(view.path, { model: model.id }) }, view.title))));
	}

	async showRuns() {
		const { api, signal, link } = this.context;
		const { now, runs } = await api.get("v1/runs", signal), shown = runs.filter(run => run.steps_done > 1).slice(0, MAX_RUNS);
		this.runs.hidden = !shown.length;
		const places = shown.map(run => {
			const age = Math.max(0, now - run.changed), unit = age < 60 ? 1 : age < 3600 ? 60 : 360;
			const facts = [STATES[run.state] ?? run.state, run.best_text, `${duration(Math.round(age / unit) * unit)} ago`];
			const place = h("div");
			return { run, place, card: h("article.home-run",
				h("h3", h("a", { href: link("runs", { runs: encodeURIComponent(run.name) }) }, run.name)),
				h("p.soft", facts.filter(Boolean).join(" · ")), place) };
		});
		this.runs.replaceChildren(h("h2", "Latest runs"), h("div.home-curves", places.map(each => each.card)),
			h("p", h("a", { href: link("runs", {}) }, "All runs")));
		await Promise.all(places.map(({ run, place }) => this.curve(run, place)));
	}

	async curve(run, place) {
		const { api, signal } = this.context, data = empty(run.name);
		add(data, await api.get(`v1/runs/${encodeURIComponent(run.name)}/metrics`, signal));
		const [chart] = charts([data], { x: "step", logX: false, logY: false });
		if (!chart) return place.append(soft("No metrics yet."));
		return this.opened.push(mountChart(place, { ...chart, size: { width: 340, height: 190 } }));
	}
}
