// The stage: one step of a model, from the text to the next token, with every token as a thread through all columns.
// `mount(element, data, hooks)` draws a response of /v1/explain/step and plays it; a page without a server has no
// hooks.
import { button, group, h, prefersReducedMotion, s, set, uniqueId } from "./dom.js";
import { drawn, sharesOf } from "./choice.js";
import { closer } from "./stage_closer.js";
import { layOut } from "./stage_layout.js";
import { formula } from "./stage_marks.js";
import { ngram, ngramSteps } from "./stage_ngram.js";
import { recurrent, recurrentSteps } from "./stage_recurrent.js";
import { valueTables } from "./stage_table.js";
import { encoderOf } from "./stage_threads.js";
import { transformer, transformerSteps } from "./stage_transformer.js";
import { temperatureSlider, updateWords } from "./stage_words.js";
import { clamp, isSpecial, numberWithin } from "./words.js";

const NARROW = { block: 90, source: 94, other: 54 }; // type sizes; a narrower picture is stacked
const FIRST_PACE = 2900, PACE = 1500; // milliseconds per step, for the first token and for later ones
const LONGER = { scores: 500, values: 500, choice: 1400 }; // further milliseconds of these steps
const MAX_ROUNDS = 8; // tokens that are appended while playing
const MAX_SAID = { narrow: 60, wide: 150 }; // letters of the headline
const MAP = 18; // pixels above a closer view: how far along the stream it is
const MAP_PARTS = { embedding: [0.02, 0.14], head: [0.2, 0.6], cross: [0.4, 0.7], align: [0.2, 0.4], layer: [0.3, 0.7],
	ff: [0.6, 0.76], order: [0.2, 0.7], logit: [0.84, 1] };
const FAMILIES = { recurrent: [recurrent, recurrentSteps], bahdanau: [recurrent, recurrentSteps],
	elmo: [recurrent, recurrentSteps], ngram: [ngram, ngramSteps], bengio: [ngram, ngramSteps] };
const ICONS = { back: "M12 3v14L3 10zM2 3h2v14H2z", next: "M2 3v14l9-7zM10 3h2v14h-2z", play: "M2 2v16l11-8z",
	pause: "M2 3h4v14H2zM8 3h4v14H8z" };

// The head of the open block in which the followed token looks hardest at one other than the first and itself.
export function selectiveHead({ threads: { block, rows }, place }) {
	const here = rows.indexOf(place), elsewhere = block?.attention.weights.map(head =>
		Math.max(0, ...head[here].filter((_, key) => key && key !== here)));
	return elsewhere ? elsewhere.indexOf(Math.max(...elsewhere)) : 0;
}

/**
 * @param {HTMLElement} element
 * @param {any} data  the response, the settings of sampling, and what to show first: `stage`, `head`, `zoom`; `beside`
 * is the response of the model beside this one, and a stage that `follows` another does not play
 * @param {any} hooks  `open(layer)`, `follow(place, inSource)`, `threads(places)`, `edit(which, text)`, `append(token)`,
 * `settings(values)`, `state(changes)`
 */
export function mount(element, data, hooks = {}) {
	const still = prefersReducedMotion(), clip = uniqueId("stage");
	let playing = false, timer = 0, round = 0, at = 0, path = [], wasPlaying = false, size = "";
	let stage = {};
	let whole = data.step, besideWhole = data.beside, step = whole, beside = besideWhole;
	let inSource = false; // the encoder's blocks are shown instead of the decoder's
	let head = numberWithin(data.head, 0, 1e4, selectiveHead(data.step)), settings = { ...data.settings };
	let chosen = null;

	const icon = name => s("svg", { viewBox: "0 0 14 20", width: 14, height: 20, "aria-hidden": "true" },
		s("path", { d: ICONS[name] }));
	const svg = s("svg", { ...group("The model, from the text to its prediction"),
		onclick: ({ target }) => use(target) });
	const slider = temperatureSlider(settings.temperature, temperature => {
		settings = { ...settings, temperature };
		pause();
		prepare();
		if (at < stage.indexOf("probabilities")) at = stage.indexOf("probabilities");
		speak();
		mark();
		hooks.settings?.(settings);
	});
	const picture = h("div.stage-picture", svg, slider);
	const says = { source: sentence("source"), text: sentence("text") };
	const crumbs = h("nav.stage-crumbs", { "aria-label": "Where you are" });
	const caption = h("p.stage-caption", { "aria-live": "polite" }), math = h("p.stage-formula");
	const back = button(icon("back"), () => go(at - 1), { "aria-label": "Back" });
	const play = button(icon("play"), () => toggle(), { "aria-label": "Play", class: "stage-play" });
	const next = button(icon("next"), () => go(at + 1), { "aria-label": "Next" });
	const ticks = h("div.stage-ticks", { "aria-hidden": "true" });
	const where = h("span.unseen", { role: "status" });
	const keys = h("span.stage-keys", ...[["Space", " play · "], ["Enter", " zoom · "],
		["Esc", " out"]].flatMap(([key, what]) => [h("kbd", key), what]));
	const tables = h("details.fold.stage-table", { ontoggle: () => showTables() },
		h("summary", "Values as a table"), h("div"));
	// after the mouse, Space and the arrows belong to the stage
	const root = h("div.stage", { onclick: ({ target, detail }) => detail && target.closest("button")?.blur() },
		h("div.stage-header", says.source, says.text, crumbs), picture, h("div.stage-foot", caption, math),
		h("div.stage-bar", back, play, next, ticks, where, keys));
	element.replaceChildren(root, tables);

	function prepare() {
		if (!whole.threads.source?.encoder) inSource = false;
		step = inSource ? encoderOf(whole) : whole;
		beside = !inSource ? besideWhole : besideWhole?.threads.source?.encoder ? encoderOf(besideWhole) : null;
		const { choice } = step, threads = step.threads;
		const predictsTokens = step.stages.some(each => each.id === "output.choice");
		const [scene, stepsOf] = FAMILIES[step.kind] ?? [transformer, transformerSteps];
		stage = { ...stage, step, threads, choice, head, settings, chosen, scene, predictsTokens,
			fills: step.kind === "encoder" && predictsTokens,
			names: threads.rows.map(row => step.pieces[row]), here: threads.rows.indexOf(step.place),
			sourceNames: threads.source?.rows.map(row => step.source_pieces[row]), canOpen: Boolean(hooks.open),
				canFollow: Boolean(hooks.follow), canReach: Boolean(hooks.threads) && !inSource,
			shares: choice ? sharesOf(choice, settings) : [], beside: besides() };
		stage.steps = stepsOf(stage).map(([id, title, say, formula, zoom]) => ({ id, title, say, formula, zoom }));
		stage.indexOf = id => stage.steps.findIndex(each => each.id === id);
		if (stage.indexOf("choice") < 0 && stage.indexOf("fill") < 0) stage.chosen = chosen = null;
	}

	// Probabilities of the other model by token, and its attention where it reads the same tokens.
	function besides() {
		if (!beside) return null;
		const same = JSON.stringify([step.pieces, step.threads.rows]) === JSON.stringify([beside.pieces, beside.threads.rows]);
		return { shares: beside.choice && beside.choice.vocab_size === step.choice?.vocab_size && new Map(sharesOf(beside.choice, settings).map((share, n) =>
			[beside.choice.candidates[n].piece, share])), block: same && step.place === beside.place ? beside.threads.block : null };
	}

	function measure() {
		root.style.setProperty("--top", `${Math.round(root.getBoundingClientRect().top + scrollY)}px`);
		const width = Math.max(280, Math.floor(picture.clientWidth || element.clientWidth));
		const fs = Math.max(12.5, Math.min(innerWidth * 0.0082, 18)) * (data.scale?.() ?? 1), { block, source, mix } = step.threads;
		const narrow = width < fs * (block && source ? NARROW.source : block || mix ? NARROW.block : NARROW.other);
		root.classList.toggle("stage-narrow", narrow);
		set(root, { style: { "--fs": `${fs}px`,
			"--cs": `${Math.max(16, Math.min(fs * (narrow ? 1.3 : 1.6), innerHeight * 0.03))}px` } });
		Object.assign(stage, { width, narrow, fs, height: Math.max(380, Math.floor(picture.clientHeight)) });
	}

	function draw({ morph = false } = {}) {
		const focused = root.contains(document.activeElement) ? document.activeElement?.getAttribute("data-key") : null;
		const before = morph && !still ? places() : null;
		prepare();
		at = clamp(at, 0, stage.steps.length - 1);
		showText();
		showTicks();
		measure();
		stage.near = path[0] === "block" && !stage.narrow;
		stage.temperatureBox = null;
		const deep = path.length > 0 && !stage.near, scene = stage.scene(stage);
		scene.panelGo = stage.scene === transformer ? "block" : null;
		scene.hasMask = step.threads.block?.attention.scores.flat(2).includes(null);
		const pattern = s("pattern", { id: `${clip}-hatch`, width: 5, height: 5, patternUnits: "userSpaceOnUse",
			patternTransform: "rotate(45)" },
			s("path.hatching", { d: "M0 0V5" }));
		const { width, height, children } = deep ? close() : layOut(stage, scene, clip);
		set(svg, { viewBox: `0 0 ${width} ${height}`, width, height,
			style: { "--fs": `${stage.fs}px`, "--hatch": `url(#${clip}-hatch)` } });
		svg.replaceChildren(s("defs", pattern), ...children.flat(Infinity).filter(Boolean));
		const box = stage.temperatureBox;
		slider.hidden = !box || deep;
		if (box) set(slider, { style: { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px` } });
		showCrumbs();
		speak();
		mark();
		if (before) animate(before);
		if (focused) /** @type {any} */ (svg.querySelector(`[data-key="${CSS.escape(focused)}"]`) ?? crumbs.querySelector("button"))?.focus({ preventScroll: true });
		showTables();
	}

	function close() {
		stage.height -= MAP;
		const fs = stage.fs;
		if (!stage.narrow) stage.fs *= 1.12;
		const view = stage.view = closer(stage, path), [from, to] = MAP_PARTS[path[0]] ?? [0, 1], w = stage.width - 40;
		stage.height += MAP;
		const map = [["band-later", 0, 1], ["band", 0, to], ["pointer", from, to]].map(([kind, a, b]) =>
			s("rect", { class: kind, x: 20 + w * Number(a), y: 5, width: w * (Number(b) - Number(a)), height: 4, rx: 2 }));
		queueMicrotask(() => { stage.fs = fs; });
		return { width: stage.width, height: stage.height,
			children: [...map, s("g", { transform: `translate(0 ${MAP})` }, view.children)] };
	}

	// a mark that both pictures have moves from where it was; all else fades in
	const places = () => new Map([...svg.querySelectorAll("[data-m]")].map(mark => [mark.getAttribute("data-m"),
		mark.getBoundingClientRect()]));
	function animate(before) {
		svg.animate([{ opacity: 0.25 }, { opacity: 1 }], { duration: 350, easing: "ease-out" });
		for (const mark of svg.querySelectorAll("[data-m]")) {
			const old = before.get(mark.getAttribute("data-m")), now = mark.getBoundingClientRect();
			if (!old || !now.width || !now.height) continue;
			const by = `translate(${old.x - now.x}px, ${old.y - now.y}px) scale(${old.width / now.width}, ${old.height / now.height})`;
			const frame = { transformBox: "fill-box", transformOrigin: "0 0" };
			mark.animate([{ transform: by, ...frame }, { transform: "none", ...frame }],
				{ duration: 480, easing: "cubic-bezier(.2, .8, .2, 1)" });
		}
	}

	function mark() {
		const [scores, softmax] = ["scores", "softmax"].map(stage.indexOf), deep = path.length > 0;
		const shown = deep && !stage.near ? stage.steps.length : at;
		for (const group of svg.querySelectorAll("[data-s]")) {
			const k = Number(group.getAttribute("data-s")), now = k === shown || (k === scores && shown === softmax);
			group.classList.toggle("later", k > shown);
			group.classList.toggle("now", now);
			group.classList.toggle("probing", k === scores && shown === scores);
		}
		for (const group of svg.querySelectorAll(".weave")) group.classList.toggle("settled", shown >= softmax || deep);
		/** @type {any} */
		const wipe = svg.querySelector(".wipe");
		if (wipe) {
			const by = Math.round(stage.fillTo[at] - Number(wipe.getAttribute(stage.narrow ? "height" : "width")));
			wipe.style.transform = stage.narrow ? `translateY(${by}px)` : `translateX(${by}px)`;
		}
		[...ticks.children].forEach((tick, n) => { tick.className = n < at ? "done" : n === at ? "now" : ""; });
		where.textContent = playing ? "" : `Step ${at + 1} of ${stage.steps.length}: ${stage.steps[at].title}`;
		caption.setAttribute("aria-live", playing ? "off" : "polite");
		const weights = step.threads.block?.attention.weights[Math.min(head,
			step.threads.block.attention.weights.length - 1)][stage.here];
		const looks = weights && at >= softmax && at <= stage.indexOf("heads");
		for (const word of says.text.querySelectorAll("[data-row]")) {
			const row = Number(word.getAttribute("data-row"));
			word.classList.toggle("attended", Boolean(looks && row >= 0));
			word.style.setProperty("border-bottom-width", looks && row >= 0 ? `${1 + weights[row] * 9}px` : "");
		}
		root.classList.toggle("stage-running", playing && !still);
		play.replaceChildren(icon(playing ? "pause" : "play"));
		play.setAttribute("aria-label", playing ? "Pause" : "Play");
		back.disabled = at === 0 && !path.length;
		if (stage.choice) updateWords(svg, stage);
		const to = stage.narrow && !deep ? stage.scrollTo?.[at] : undefined;
		if (Number.isFinite(to)) picture.scrollTo({ top: Math.max(0, to - stage.fs * 2.6), behavior: still ? "auto"
			: "smooth" });
	}

	function speak() {
		const [title, say, math2] = path.length && !stage.near ? stage.view.caption
			: [stage.steps[at].title, stage.steps[at].say, stage.steps[at].formula];
		caption.replaceChildren(h("b", title), ` ${say}`);
		math.replaceChildren(...formula(math2 ?? "", h));
		if (!still) for (const each of [caption, math]) each.animate([{ opacity: 0, transform: "translateY(5px)" },
			{ opacity: 1, transform: "none" }], { duration: 280, easing: "ease-out" });
	}

	function showTicks() {
		if (ticks.children.length === stage.steps.length) return;
		ticks.replaceChildren(...stage.steps.map(({ title }, n) => button("", () => { pause(); to(n); },
			{ title, tabindex: -1 })));
	}

	function showCrumbs() {
		const names = ["Model", ...inSource ? ["Encoder"] : [],
			...path.length ? stage.near ? [`Block ${step.threads.open}`] : stage.view.crumbs : []];
		const within = path.length && !stage.near ? levelPaths() : [[]];
		const levels = inSource ? [["model"], ...within] : within;
		crumbs.replaceChildren(...names.map((name, n) => [n ? h("span", { "aria-hidden": "true" }, "›") : "",
			n < names.length - 1
			? button(name, () => zoomTo(levels[n] ?? []), { "data-key": `crumb${n}` }) : h("b", name)]).flat(),
		h("span.stage-tip", inSource && !path.length ? "Esc back to the decoder" : path.length && !stage.near ? "← → next one, Esc out" : hooks.edit
			? "Click the sentence to change it, any part to look inside" : "Click any part to look inside"));
	}

	// the paths that the crumbs lead to
	const levelPaths = () => [[],
		...({ head: [["block"], ["head"], path.slice(0, 2)], cross: [["block"], ["cross"], path.slice(0, 2)], ff: [["ff"]],
		layer: [path.slice(0, 2)], logit: [[]] }[path[0]] ?? [])];

	function showTables() {
		if (tables.open) tables.lastElementChild?.replaceChildren(...valueTables(stage));
	}

	function sentence(which) {
		const isSource = which === "source";
		const rawText = () => (isSource || !step.source_pieces ? data.text?.() ?? step.text : data.target?.() ?? "");
		const box = h("div", { class: `stage-say${isSource ? " stage-source" : ""}`, spellcheck: "false", dir: "auto",
			"aria-label": isSource ? "The source. Edit it and press Enter." : hooks.edit
				? "The text. Edit it and press Enter." : null });
		return hooks.edit ? set(box, { contenteditable: "plaintext-only", role: "textbox", tabindex: 0,
			onfocus() { pause(); box.textContent = rawText(); },
			async onblur() {
				const typed = box.textContent;
				if (typed === rawText()) { showText(); mark(); return; }
				const isShown = await hooks.edit(isSource || !step.source_pieces ? "text" : "target", typed);
				root.classList.toggle("stage-stale", !isShown); // the picture is of the text before
				if (!isShown) box.textContent = typed;
			},
			onkeydown(event) {
				event.stopPropagation();
				if (event.key === "Escape") box.textContent = rawText();
				if (event.key === "Enter" || event.key === "Escape") { event.preventDefault(); box.blur(); }
			} }) : box;
	}

	// the tokens as text, each underlined; of a long text the end
	function words(pieces, { here = -1, rows = [] }) {
		const shown = pieces.map((piece, n) => ({ n, text: isSpecial(piece) && !(stage.fills && n === here) ? ""
			: piece.replaceAll("␣", " ") })).filter(({ text }) => text);
		if (shown[0]) shown[0].text = shown[0].text.trimStart() || shown[0].text;
		let letters = 0, from = shown.length;
		const most = stage.narrow ? MAX_SAID.narrow : MAX_SAID.wide;
		while (from > 0 && (letters += shown[from - 1].text.length) <= most) from -= 1;
		return [from > 0 ? h("span.stage-next", "…") : "", ...shown.slice(from).map(({ n, text: word }) =>
			h("span", { class: n === here ? "stage-here" : undefined, "data-row": rows.indexOf(n) }, stage.fills && n === here
				? " ____ " : word))];
	}

	function showText() {
		if (says.text.contains(document.activeElement) || says.text === document.activeElement) return;
		const sided = Boolean(step.source_pieces), best = step.choice?.candidates[0];
		const upTo = stage.predictsTokens && !stage.fills ? step.place + 1 : step.pieces.length;
		says.source.hidden = !sided;
		if (sided && document.activeElement !== says.source) says.source.replaceChildren(...words(step.source_pieces, {}));
		const end = stage.fills || !step.choice || step.threads.mix ? "" : stage.predictsTokens ? h("span.stage-next", " …")
			: h("span.stage-next", ` → ${best.piece}`);
		says.text.replaceChildren(...words(step.pieces.slice(0, upTo), { here: step.place, rows: step.threads.rows }), end);
		if (stage.fills && at === stage.indexOf("fill")) fillIn(best.piece);
		if (chosen && at === stage.indexOf("choice")) fillIn(chosen.piece);
	}

	// the element that the chosen word flies to
	function fillIn(piece) {
		const end = says.text.querySelector(stage.fills ? ".stage-here" : ".stage-next:last-child");
		if (!end) return null;
		end.textContent = piece.replaceAll("␣", " ") || "∅";
		end.classList.add("stage-new");
		return end;
	}

	function fly(piece, row) {
		const end = fillIn(piece), from = svg.querySelector(`.word[data-word="${row}"] text`)?.getBoundingClientRect(),
			goal = end?.getBoundingClientRect();
		if (!end || !from || !goal || still) return;
		const word = h("div.stage-fly", { "aria-hidden": "true" }, piece.replaceAll("␣", " ").trim());
		root.append(word);
		end.style.opacity = "0";
		word.animate([{ transform: `translate(${from.x}px, ${from.y}px) scale(.55)`, opacity: 0 },
			{ opacity: 1, offset: 0.15 },
			{ transform: `translate(${(from.x + goal.x) / 2}px, ${Math.min(from.y, goal.y) + 30}px) scale(1.15)`,
				offset: 0.6 },
			{ transform: `translate(${goal.x + 8}px, ${goal.y}px) scale(1)` }], { duration: 1100, delay: 700,
				fill: "backwards", easing: "cubic-bezier(.4, 0, .2, 1)" })
			.onfinish = () => { word.remove(); end.style.opacity = ""; };
	}

	function to(place) {
		const before = at;
		at = clamp(place, 0, stage.steps.length - 1);
		const { id } = stage.steps[at];
		if (id === "choice") {
			const number = data.number?.() ?? Math.random();
			chosen = stage.chosen = { ...drawn(stage.choice, stage.shares, number), number };
			prepare();
		} else if (before > at || id !== "choice") chosen = stage.chosen = null;
		showText();
		speak();
		mark();
		if (id === "choice") fly(chosen.piece, Math.min(chosen.rank, svg.querySelectorAll(".word").length - 1));
		if (id === "fill") fly(stage.choice.candidates[0].piece, 0);
		keep();
		hooks.step?.(id, at / (stage.steps.length - 1));
		return true;
	}

	function go(place) {
		pause();
		if (path.length && !stage.near && sibling(place < at ? -1 : 1)) return;
		to(place);
	}

	const wait = () => { clearTimeout(timer); if (playing) timer = setTimeout(tick, (round ? PACE : FIRST_PACE)
		+ (LONGER[stage.steps[at].id] ?? 0)); };
	async function tick() {
		if (!element.isConnected || !playing) return;
		if (document.hidden) return wait();
		if (at < stage.steps.length - 1) to(at + 1);
		else if (chosen && hooks.append && round < MAX_ROUNDS) {
			round += 1;
			const token = chosen;
			if (!await hooks.append(token)) return pause();
		} else return pause();
		wait();
	}
	function start() {
		if (at === stage.steps.length - 1 && !(chosen && hooks.append)) to(0);
		if (round >= MAX_ROUNDS) round = 0;
		playing = true;
		mark();
		wait();
	}
	function pause() {
		const ran = playing;
		playing = false;
		clearTimeout(timer);
		mark();
		if (ran) keep();
	}
	// the step is in the address once it is not on its way to the next
	const keep = () => hooks.state?.({ stage: playing || (still && stage.steps[at].id === "probabilities") ? undefined
		: stage.steps[at].id });
	const toggle = () => (playing ? pause() : start());

	// `["encoder", …]` is a path inside the encoder, `["model"]` leaves it; others stay on their side
	function zoomTo(target) {
		if (target.length && !path.length) { wasPlaying = playing; pause(); }
		const entered = target[0] === "encoder" ? true : target[0] === "model" ? false : inSource;
		path = ["encoder", "model"].includes(target[0]) ? target.slice(1) : target;
		turnTo(entered);
		hooks.state?.({ zoom: shownZoom() || undefined });
		draw({ morph: true });
		if (!path.length && wasPlaying) { wasPlaying = false; start(); }
		if (stage.narrow && path.length) picture.scrollTop = 0;
	}
	// The encoder is shown complete at first.
	function turnTo(side) {
		if (side === inSource) return;
		inSource = side;
		wasPlaying = false;
		prepare();
		at = inSource ? stage.steps.length - 1 : Math.max(0, stage.indexOf("source"));
	}
	const out = () => zoomTo(path.length > 1 && path[0] === "ff" ? ["ff"] : path.length > 2
		|| (path.length > 1 && ["head", "cross"].includes(path[0])) ? path.slice(0, -1)
		: ["head", "cross"].includes(path[0]) && !stage.narrow ? ["block"] : !path.length && inSource ? ["model"] : []);
	const shownZoom = () => [...inSource ? ["encoder"] : [], ...path].join("/");

	// The next head, row, number, neuron, token or unit of a closer view.
	function sibling(by) {
		const { siblings } = stage.view, last = path.length - 1;
		if (!siblings) return false;
		const turn = (value, count) => (value + by + count) % count;
		if ((path[0] === "head" || path[0] === "cross") && last === 0) return chooseHead(turn(head, siblings));
		if (path[0] === "ff") {
			const { units } = step.threads.block.feedforward, ordered = [...units].sort((a, b) => a - b);
			path = ["ff", String(ordered[turn(ordered.indexOf(Number(path[1])), ordered.length)])];
		} else path = [...path.slice(0, -1), String(turn(Number(path[last]), siblings))];
		draw({ morph: false });
		return true;
	}

	function chooseHead(value) {
		const heads = step.threads.block?.attention.q.length ?? 1;
		if (value >= heads) return false;
		head = value;
		hooks.state?.({ head: String(head) });
		draw({ morph: true });
		return true;
	}

	// an action of a part: "open=3", "head=2", "follow=7", "more=3-20", or a path
	function use(target) {
		const part = target.closest?.("[data-go]");
		if (!part) return false;
		const [action, value] = part.dataset.go.split("=");
		if (value === undefined) zoomTo(action.split("/"));
		else if (action === "head") chooseHead(Number(value));
		else if (action === "open") hooks.open?.(Number(value));
		else if (action === "follow") hooks.follow?.(Number(value), inSource);
		else if (action === "more") {
			const [from, until] = value.split("-").map(Number), count = Math.min(11, until - from);
			hooks.threads?.(Array.from({ length: count }, (_, n) => until - count + n));
		}
		return true;
	}
	function key(event) {
		const focused = document.activeElement?.closest?.(".stage-picture svg [data-go]");
		if (event.target.matches?.("input, .stage-say")) return false;
		if (event.target.closest?.("button, summary") && (event.key === " " || event.key === "Enter")) return false;
		const actions = { " ": () => (focused ? use(focused) : toggle()), ArrowRight: () => go(at + 1),
			ArrowLeft: () => go(at - 1), Home: () => { pause(); to(0); }, End: () => {
			pause();
			to(Math.max(stage.indexOf("probabilities"), stage.steps.length - (stage.indexOf("choice") < 0 ? 1 : 2)));
		}, Escape: () => (path.length > 0 || inSource) && (out(), true), Enter: () => {
			if (focused) return use(focused);
			const { zoom } = stage.steps[at];
			return zoom && !path.length ? zoomTo(zoom.split("/")) : false;
		} };
		const action = actions[event.key] ?? (/^\d$/.test(event.key) ? () => chooseHead(Number(event.key)) : null);
		return Boolean(action) && action?.() !== false;
	}

	const watch = new ResizeObserver(() => {
		const now = `${picture.clientWidth} ${innerHeight} ${innerWidth}`;
		if (now === size) return;
		size = now;
		draw();
	});
	prepare();
	openAt(data.zoom);
	if (data.stage || !inSource) at = Math.max(0, stage.indexOf(data.stage ?? (still ? "probabilities" : "")));
	draw();
	size = `${picture.clientWidth} ${innerHeight} ${innerWidth}`;
	draw(); // the header's height is known now
	watch.observe(picture);
	if (!still && data.stage === undefined && !shownZoom() && !data.follows) start();

	// the place in the picture that an address names, as far as this step has it
	function openAt(text) {
		const [first, ...others] = (text ?? "").split("/");
		turnTo(first === "encoder" && Boolean(whole.threads.source?.encoder));
		prepare();
		const inner = inSource ? others.join("/") : text;
		path = isPath(inner) ? inner.split("/") : [];
	}

	function isPath(text) {
		if (!text || !/^[a-z]+(\/\d+)*$/.test(text)) return false;
		const [kind, i, j] = text.split("/"), { threads, choice } = step, count = { embedding: threads.embedding?.x.length,
			head: threads.rows.length,
			cross: threads.rows.length, logit: choice?.factors?.rows.length, ff: threads.block?.feedforward?.hidden.length,
				layer: threads.layers?.length, order: (threads.order ?? 0) + 1 }[kind];
		const has = { block: threads.block, head: threads.block, cross: threads.block?.cross, ff: threads.block?.feedforward,
			align: threads.layers && threads.source }[kind];
		if (i === undefined) return Boolean(has);
		const inner = kind === "layer" ? threads.layers?.[i]?.state[0].length : kind === "cross"
			? threads.source?.rows.length : threads.rows.length;
		return count !== undefined && Number(i) < count && (kind !== "order" || Number(i) > 0)
			&& (j === undefined || Number(j) < inner);
	}

	return {
		/**
		 * Show another response: at the step with this id, or where it was.
		 * @param {any} response
		 * @param {{ stage?: string, settings?: any, beside?: any }} options
		 */
		update(response, { stage: id, settings: values, beside: other } = {}) {
			whole = response;
			besideWhole = other;
			root.classList.remove("stage-stale");
			if (values) settings = { ...values };
			chosen = null;
			openAt(shownZoom());
			if (id !== undefined) at = Math.max(0, stage.indexOf(id));
			draw();
			if (playing) wait();
		},
		// the server's response to settings that the page already shows
		confirm(response, other) {
			whole = response;
			besideWhole = other;
			const token = chosen;
			prepare();
			stage.chosen = token;
			mark();
			showTables();
		},
		// a step by its id; that of another kind of model by its share of the way
		goTo: (id, share = 0) => to(stage.indexOf(id) >= 0 ? stage.indexOf(id) : Math.round(share * (stage.steps.length - 1))),
		chooseHead: value => value !== head && chooseHead(value),
		light: rows => svg.querySelectorAll("[data-thread]").forEach(each =>
			each.classList.toggle("linked", rows.includes(Number(each.getAttribute("data-thread"))))),
		pause, key,
		zoom: shownZoom,
		zoomTo: text => { openAt(text); zoomTo(path); },
		redraw: () => draw(),
		set(values) { settings = { ...settings, ...values }; prepare(); speak(); mark(); },
		svg: () => svg,
		close() { clearTimeout(timer); playing = false; watch.disconnect(); },
	};
}
