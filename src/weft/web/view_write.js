// Write: generated text token by token, the alternatives at every position, and the branches they lead to.
import { drawTree, packBranches, parseBranches, spanOf, textOf, turnsOf } from "./branches.js";
import { Distribution, drawPosition, MAX_LISTED, unpackLogprobs } from "./distribution.js";
import { button, debounced, h, roving, uniqueId } from "./dom.js";
import { mountFill } from "./fill.js";
import { latest, textBox } from "./reading.js";
import { saveTools } from "./save.js";
import { panes } from "./sides.js";
import { numberWithin } from "./words.js";
import { command, controls, fetchSettings, MAX_TOKENS, settingsOf } from "./write_settings.js";

const WORDS = 6; // words of the model's sample text that are continued at first
const MAX_BRANCHES = 24, MAX_CACHED = 24; // distributions that are cached
const ADDED_TOKENS = 48; // tokens added to a text that is continued

export const title = "Write";
export const about = "Text generated token by token, with alternatives at every position.";
export const path = "write";

const masked = info => info.objective.startsWith("masked");
export const lacks = info => (info && (info.continues || info.writes || masked(info)) ? "" : "writes no text");

export async function mount(main, context) {
	if (masked(context.info)) return mountFill(main, context);
	const chats = chatsWith(context), known = await fetchSettings(context, chats), { info, other } = context;
	if (!other) {
		const writer = new Writer(main, context, known);
		await writer.begin();
		return { close: () => writer.end.abort() };
	}
	// a second writer beside the first has its prompt and its settings, and no controls
	const { places, element } = panes([info, other]), writer = new Writer(main, context, known, places[0]);
	const second = new Writer(h("div"), { ...context, info: other, set: () => {} }, known, places[1]);
	main.querySelector(".tools").before(element);
	link([writer, second]);
	await writer.begin();
	return { close: () => { writer.end.abort(); second.end.abort(); } };
}

// Texts of two models: the first tokens that differ are marked, and a token that is pointed at lights its counterpart,
// whose alternatives are shown beside those of the first.
function link(writers) {
	const textBefore = (writer, place) => textOf(writer.branch.tokens.slice(0, place)).length;
	writers.forEach((writer, n) => {
		const beside = writers[1 - n];
		writer.changedText = () => {
			const [a, b] = writers.map(each => textOf(each.branch.tokens));
			let same = 0;
			while (same < a.length && a[same] === b[same]) same += 1;
			for (const each of writers) each.spans().forEach((span, at) => span.classList.toggle("write-differs",
				textBefore(each, at) <= same && textBefore(each, at + 1) > same));
		};
		writer.selectedPlace = place => {
			const at = textBefore(writer, place), { tokens } = beside.branch;
			const there = tokens.findIndex((_, k) => textBefore(beside, k + 1) > at);
			for (const each of [...writer.spans(), ...beside.spans()]) each.classList.remove("linked");
			if (place >= writer.branch.tokens.length || there < 0) return;
			beside.spans()[there]?.classList.add("linked");
			if (beside.place !== there) beside.select(there, true);
		};
	});
	writers[0].follower = writers[1];
}

const chatsWith = ({ info, state }) => info.chat && !info.writes && state.mode !== "complete";

const LABELS = { chat: { prompt: "You", text: "The model" }, pairs: { prompt: "Source", text: "Generated text" },
	text: { prompt: "Prompt", text: "Continuation" } };

class Writer {
	changedText = () => {};
	selectedPlace = _place => {};
	follower; // writes what this one is asked for
	end = new AbortController();
	cache = new Map(); // distributions by token ids
	failed = false;
	writing = false;
	treeFrame = 0;
	topFrame = 0;
	place = null; // index of the selected token; null: the next one
	pinned = false;
	soon = debounced(() => this.run(), 300);
	fetchSoon = debounced(() => this.fetchSelected(), 120);

	/** @param {any} pane  the place of the text, of one of two writers beside each other */
	constructor(main, context, known, pane = null) {
		this.main = main;
		this.pane = pane;
		this.context = context;
		this.known = known; // settings
		this.info = context.info;
		this.input = context.state.text;
		this.chats = chatsWith(context);
		this.turns = this.chats ? turnsOf(context.state.turns) : [];
		this.branches = parseBranches(context.state.tree);
		this.at = Math.floor(numberWithin(context.state.at, 0, this.branches.length - 1, 0));
		this.build();
		this.fetchNext = latest(context, this.rows, (signal, tokens, key) => this.next(signal, tokens, key));
	}

	spans() { return [...this.text.children]; }
	get branch() { return this.branches[this.at]; }
	get settings() { return settingsOf(this.context.state, this.known); }
	ids(to) { return this.branch.tokens.slice(0, to).map(token => token.id); }

	build() {
		const { prompt: promptLabel, text: textLabel } = LABELS[this.chats ? "chat" : this.info.writes ? "pairs" : "text"];
		const { field, area } = textBox(promptLabel, debounced(() => this.setInput(area.value)),
			{ id: "write-prompt", rows: 2, placeholder: this.chats || this.info.writes ? undefined
				: "Leave empty to let the model begin" });
		this.prompt = area;
		const placeOf = target => this.spans().indexOf(target.closest("[role=option]"));
		this.text = h("div.write-text", { role: "listbox", "aria-label": textLabel, "aria-orientation": "horizontal",
			dir: "auto", onpointerover: ({ target, pointerType }) => {
				const place = placeOf(target);
				if (pointerType === "mouse" && !this.pinned && place >= 0) this.select(place);
			}, onclick: ({ target }) => {
				const span = target.closest("[role=option]");
				if (!span) return;
				this.pinned = span !== this.caret;
				span.focus({ preventScroll: true });
			}, onkeydown: event => {
				if (event.key !== "Enter" && event.key !== " ") return;
				event.preventDefault();
				this.pinned = true;
				this.rows.querySelector("button")?.focus();
			} });
		roving(this.text, () => this.spans(), { onfocus: span => this.select(placeOf(span)) });
		this.caret = h("span.write-caret", { role: "option", tabindex: 0, "aria-selected": "true",
			"aria-label": "the next token" });
		this.stopButton = button("Stop", () => this.stop());
		this.continueButton = button("Continue", () => this.continue());
		this.restartButton = button("Restart", () => this.reset());
		this.sendButton = this.chats && button("Send", () => this.nextTurn());
		this.state = h("span.soft", { role: "status" });
		this.treeBox = h("section.write-tree", { hidden: true, "aria-label": "Branches" });
		const id = uniqueId();
		this.heading = h("h2", { id }, "The next token");
		this.facts = h("p.write-facts", { "aria-live": "polite" });
		this.rows = h("div.write-rows", { role: "group", "aria-labelledby": id });
		roving(this.rows, () => [...this.rows.querySelectorAll("button")]);
		this.sum = h("p.soft.write-sum");
		this.transcript = h("div");
		const mode = this.info.chat && !this.info.writes && h("p", button(this.chats ? "Complete a text instead"
			: "Chat instead", () => this.context.go("write", { mode: this.chats ? "complete" : undefined })));
		const label = h("p.soft.write-label", textLabel);
		const place = h("section.write-place", this.heading, this.facts, this.rows, this.sum);
		this.pane?.append(this.text, this.state, this.treeBox, place);
		this.main.append(
			h("div.write-columns",
				h("div.write-main", mode, this.transcript, field, !this.pane && [label, this.text],
					h("div.fields", this.stopButton, this.continueButton, this.restartButton, this.sendButton,
						!this.pane && this.state),
					h("p.soft.write-hint", "The stronger its shade, the more surprising a token was to the model. "
						+ "Point at one or use the arrow keys to see alternatives.",
					this.pane && " The first token that differs is underlined."), !this.pane && this.treeBox),
				h("aside.write-side", { "aria-label": "Sampling settings" },
					controls(this.context.state, this.known, changes => this.changed(changes)), !this.pane && place)),
			saveTools({ name: "write", svg: () => [this.text, !this.treeBox.hidden && this.treeBox],
				command: () => command(this.info, this.settings, this.known,
					{ prompt: this.input ?? "", chats: this.chats }) }));
		const { signal } = this.context;
		document.addEventListener("keydown", event => {
			if (event.key !== "Escape") return;
			if (this.writing) this.stop();
			else if (this.rows.contains(document.activeElement)) this.spans()[this.selected]?.focus();
			this.pinned = false;
		}, { signal });
		signal.addEventListener("abort", () => this.end.abort());
	}

	async begin() {
		const { state, api, signal } = this.context;
		this.input ??= state.text;
		if (this.input === undefined && !this.turns.length) {
			const { text } = await api.sampleText(this.info.id, signal);
			this.input = this.info.writes ? text
				: text.match(new RegExp(`^(\\s*\\S+){1,${WORDS * (this.chats ? 2 : 1)}}`, "u"))[0];
		}
		if (this.follower) Object.assign(this.follower, { input: this.input }).begin();
		this.prompt.value = this.input ?? "";
		this.context.set({}); // the command contains the prompt
		this.drawTurns();
		this.drawText();
		this.run();
	}

	setInput(text) {
		if (text === this.input) return;
		this.input = text;
		this.cache.clear();
		this.context.set({ text });
		if (this.follower) Object.assign(this.follower, { input: text }).cache.clear();
		this.reset();
	}

	changed(changes) {
		const restarts = Object.keys(changes).some(name => name === "how" || name === "beams");
		Object.assign(this.context.state, changes);
		this.context.set(restarts ? { ...changes, tree: undefined, at: undefined } : changes);
		if (restarts) this.clear();
		this.drawSelected();
		this.soon();
		this.follower?.changed(changes);
	}

	reset() {
		this.follower?.reset();
		this.clear();
		this.remember();
		this.run();
	}

	clear() {
		this.branches = parseBranches("");
		this.show(0);
	}

	show(branch) {
		this.at = branch;
		this.place = null;
		this.pinned = false;
		this.drawText();
	}

	// What is missing before the model can write; a language model can begin a text without a prompt.
	get lacks() {
		if (!(this.chats || this.info.writes) || this.input?.trim()) return "";
		return this.chats ? "Type a message." : "Type a source text.";
	}

	get body() {
		const { id: model } = this.info, { input } = this;
		return this.chats ? { model, messages: [...this.turns, input].map((content, turn) =>
			({ role: turn % 2 ? "assistant" : "user", content })) } : { model, input };
	}

	async run() {
		this.end.abort();
		this.end = new AbortController();
		const { signal } = this.end, { how } = this.settings;
		if (this.lacks) return this.showState(this.lacks, false);
		this.showState("writing …", true);
		try {
			if (how === "beam") await this.search(signal);
			const order = [this.branch, ...this.branches.filter(each => each !== this.branch)];
			for (const branch of order) await this.write(branch, signal);
			if (this.failed) this.context.done();
			this.failed = false;
			this.showState("", false);
			this.drawTree();
			if (!this.pinned && this.place === null) this.selectEnd();
			else this.fetchSelected();
		} catch (error) {
			if (error.name === "AbortError") return;
			this.failed = true;
			this.showState("", false);
			this.context.fail(error);
		}
	}

	async search(signal) {
		const { beams, length, limited } = this.settings, before = this.branches[0].before ?? this.branches[0].forced;
		const { texts } = await this.context.api.post("v1/beams",
			{ ...this.body, tokens: before, beams, max_tokens: limited || !this.info.writes ? length : undefined }, signal);
		this.branches = texts.map(text => ({ score: text.score, forced: [...before, ...text.ids], tokens: [] }));
		this.at = Math.min(this.at, this.branches.length - 1);
		this.branches[0].before = before; // position from which beam search restarts when settings change
		this.drawText();
	}

	async write(branch, signal) {
		const { length, drawing, seed } = this.settings;
		const maxTokens = branch.score === undefined
			? branch.stopped ?? Math.max(length, branch.forced.length) : branch.forced.length;
		let place = 0;
		if (!maxTokens) return;
		const body = { ...this.body, ...drawing, seed, tokens: branch.forced, max_tokens: maxTokens, top: 10 };
		for await (const token of this.context.api.stream("v1/write", body, signal)) {
			if (signal.aborted) return;
			if (token.id === undefined) continue;
			if (branch.tokens[place]?.id !== token.id) branch.tokens.length = place;
			branch.tokens[place] = token;
			place += 1;
			if (branch === this.branch) this.drawToken(place - 1);
			this.drawTreeSoon();
			this.changedText();
		}
		if (branch.tokens.length > place) { branch.tokens.length = place; if (branch === this.branch) this.drawText(); }
	}

	stop() {
		this.follower?.stop();
		this.end.abort();
		for (const branch of this.branches) {
			if (branch.tokens.at(-1)?.finish || branch.score !== undefined) continue;
			branch.stopped = Math.max(branch.tokens.length, branch.forced.length);
		}
		this.remember();
		this.showState("stopped", false);
		this.select(this.branch.tokens.length);
	}

	continue() {
		this.follower?.continue();
		delete this.branch.stopped;
		const length = Math.min(MAX_TOKENS, this.branch.tokens.length + ADDED_TOKENS);
		if (length > this.settings.length) {
			const input = [...this.main.querySelectorAll(".write-settings .field")].at(-1).querySelector("input");
			input.value = length;
			this.context.set({ length: String(length) });
		}
		this.remember();
		this.run();
	}

	nextTurn() {
		this.turns.push(this.input, textOf(this.branch.tokens));
		if (this.follower) Object.assign(this.follower, { turns: this.turns, input: "" });
		this.input = "";
		this.cache.clear();
		this.prompt.value = "";
		this.context.set({ turns: JSON.stringify(this.turns), text: undefined });
		this.drawTurns();
		this.reset();
		this.prompt.focus();
	}

	get ended() { return ["eos", "stop"].includes(this.branch.tokens.at(-1)?.finish); }

	showState(message, writing) {
		this.writing = writing;
		this.state.textContent = message || (this.ended && !writing ? "The model ended the text." : "");
		this.stopButton.disabled = !writing;
		this.facts.setAttribute("aria-live", writing ? "off" : "polite"); // it changes with every token
		const long = this.branch.tokens.length >= MAX_TOKENS;
		this.restartButton.disabled = Boolean(this.lacks);
		this.continueButton.disabled = writing || this.lacks || this.ended || long || this.settings.how === "beam";
		if (this.sendButton) this.sendButton.disabled = writing || !this.branch.tokens.length;
		this.text.setAttribute("aria-busy", writing);
	}

	remember() {
		const tree = packBranches(this.settings.how === "beam" ? [{ forced: this.branches[0].before ?? [] }] : this.branches);
		this.context.set({ tree: tree || undefined, at: this.at || undefined });
	}

	choose(token) {
		const place = this.selected, forced = [...this.ids(place), token.id];
		const known = this.branches.findIndex(each => forced.every((id, at) => each.tokens[at]?.id === id));
		if (known >= 0) return this.goTo(known);
		if (this.settings.how === "beam") this.branches = [{ forced, before: forced, tokens: [] }];
		else {
			const before = this.branch.tokens.slice(0, place);
			this.branches.push({ forced, tokens: [...before, { ...token, adds: token.text, top: [], finish: null }] });
			if (this.branches.length > MAX_BRANCHES) this.branches.shift();
		}
		this.show(this.branches.length - 1);
		this.remember();
		this.run();
		this.spans()[place]?.focus({ preventScroll: true });
		this.place = null;
	}

	goTo(number) {
		this.show(number);
		this.remember();
		this.showState(this.writing ? "writing …" : "", this.writing);
		this.selectEnd();
	}

	drawTurns() {
		this.transcript.replaceChildren(...this.turns.map((text, turn) => h("div.write-turn",
			h("b", turn % 2 ? "The model" : "You"), h("p", { dir: "auto" }, text))));
	}

	drawText() {
		this.text.replaceChildren(...this.branch.tokens.map((token, place, all) => spanOf(token, all[place - 1])),
			this.caret);
		this.drawTree();
	}

	drawToken(place) {
		const span = spanOf(this.branch.tokens[place], this.branch.tokens[place - 1]), old = this.text.children[place];
		if (old && old !== this.caret) {
			if (old.textContent !== span.textContent) old.replaceWith(span);
		} else this.caret.before(span);
		if (this.place === null) this.drawTopSoon(place);
	}

	drawTree() {
		this.treeBox.hidden = this.branches.length < 2;
		if (this.treeBox.hidden) return;
		const start = this.info.writes || this.chats ? "" : this.input;
		drawTree(this.treeBox, { branches: this.branches, at: this.at, start, choose: number => this.goTo(number) });
	}

	drawTreeSoon() {
		if (this.branches.length < 2 || this.treeFrame) return;
		this.treeFrame = requestAnimationFrame(() => { this.treeFrame = 0; this.drawTree(); });
	}

	// During generation, the distribution of each token is shown briefly.
	drawTopSoon(place) {
		cancelAnimationFrame(this.topFrame);
		this.topFrame = requestAnimationFrame(() => {
			const token = this.branch.tokens[place];
			if (this.place === null && this.writing && token) this.drawPanel(token, token.top);
		});
	}

	select(place, quiet = false) {
		if (place < 0) return;
		if (!quiet) this.selectedPlace(place);
		this.place = place >= this.branch.tokens.length ? null : place;
		this.spans().forEach((span, at) => span.setAttribute("aria-selected", at === this.selected));
		this.drawSelected();
		this.fetchSoon();
	}

	// The next token, or the end if the model has ended the text.
	selectEnd() {
		this.select(this.branch.tokens.length - (this.ended ? 1 : 0));
	}

	get selected() { return this.place ?? this.branch.tokens.length; }
	keyOf(place) { return this.ids(place).join("."); }

	drawSelected() {
		const place = this.selected, token = this.branch.tokens[place], known = this.cache.get(this.keyOf(place));
		if (known) this.drawPanel(token, known.tokens, known.full);
		else if (token?.top.length) this.drawPanel(token, token.top);
	}

	fetchSelected() {
		const place = this.selected, key = this.keyOf(place);
		if (this.cache.has(key)) return this.drawSelected();
		const moves = this.place === null && (this.ended || this.writing); // nothing follows, or something else
		return !this.lacks && !moves && this.fetchNext(this.ids(place), key);
	}

	async next(ending, tokens, key) {
		const body = { ...this.body, tokens, top: MAX_LISTED, logprobs: true };
		const next = await this.context.api.post("v1/next", body, ending);
		this.cache.set(key, { tokens: next.tokens, full: new Distribution(unpackLogprobs(next.logprobs)) });
		if (this.cache.size > MAX_CACHED) this.cache.delete(this.cache.keys().next().value);
		if (key === this.keyOf(this.selected)) this.drawSelected();
	}

	drawPanel(token, tokens, full = null) {
		const { how, drawing } = this.settings, choose = each => this.choose(each);
		drawPosition(this, { token, tokens, full, settings: how === "beam" ? undefined : drawing, choose });
	}
}
