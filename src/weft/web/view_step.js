// Inside a step: the stage of a model and a text, played from the tokens to the next one.
import { debounced, field, h, isPlain, select, slider } from "./dom.js";
import { NEUTRAL } from "./choice.js";
import { stageScale } from "./present.js";
import { answerSelect, fetchDecoding, latest, sampleNote, targetOf, textBox } from "./reading.js";
import { explainCommand, saveTools } from "./save.js";
import { aligned, counterpart, panes } from "./sides.js";
import { mount as draw, selectiveHead } from "./stage.js";
import { beginning, visibleToken } from "./words.js";

export const title = "Inside a step";
export const about = "The path of one token through the model, value by value.";
export const path = "step";
export const lacks = info => (!info || /word2vec|glove/.test(info.kind) ? "has no steps: vectors are looked up" : "");

const MIN_TEMPERATURE = 0.1; // of the slider
const MAX_TOP_K = 100; // of the slider; more is off

const NOTE = "pale: more than the other, hatched: less, dashed ring: the other’s weight";

const integer = text => (/^\d+$/.test(text ?? "") ? Number(text) : null);
const real = text => (text !== undefined && Number.isFinite(Number(text)) ? Number(text) : null);

export async function mount(main, context) {
	const { info, other, state, api, signal } = context, models = other ? [info, other] : [info];
	let step = null;
	let stage = null; // the stage of the model, which leads
	let stages = [];
	let origin = "", text = "", target = info.writes ? state.target ?? "" : null;
	const writes = info.continues || info.writes, { generate, translate } = writes ? await fetchDecoding(context) : {};
	const usual = generate?.temperature >= MIN_TEMPERATURE
		? { temperature: generate.temperature, top_k: generate.top_k, top_p: generate.top_p } : NEUTRAL;
	const settings = () => ({ temperature: real(state.temperature) ?? usual.temperature,
		top_k: state.top_k === "off" ? null : integer(state.top_k) ?? usual.top_k,
		top_p: state.top_p === "off" ? null : real(state.top_p) ?? usual.top_p });

	const status = h("p.soft.step-status", { role: "status" }), body = h("div.step-body");
	const { places, element } = other ? panes(models, NOTE) : { places: [body], element: null };
	const tokens = h("div.step-follow");
	const answer = translate && answerSelect(context, translate.beams, () => {
		target = "";
		context.set({ place: undefined, threads: undefined });
		renew({ stage: "tokens" });
	});
	const cut = (name, value) => changed({ ...settings(), [name]: value });
	const cuts = writes && h("div.fields",
		slider("Top-k", { min: 1, max: MAX_TOP_K + 1, step: 1, value: settings().top_k ?? MAX_TOP_K + 1,
			format: k => (k > MAX_TOP_K ? "off" : String(k)), change: k => cut("top_k", k > MAX_TOP_K ? null : k) }),
		slider("Top-p", { min: 0.05, max: 1, step: 0.01, value: settings().top_p ?? 1,
			format: p => (p >= 1 ? "off" : p.toFixed(2)), change: p => cut("top_p", p >= 1 ? null : p) }));
	main.append(...[body, h("div.step-below", status, h("div.fields", tokens, answer), cuts),
		saveTools({ svg: () => stages.map(each => each.svg()), name: `step-${info.id}`,
			command: () => explainCommand(info, "step", { text, target: target ?? undefined },
				...["place", "layer"].map(name => state[name] && `--${name} ${state[name]}`)) })].filter(Boolean));

	const load = latest(context, body, async ending => {
		const layer = info.heads ? integer(state.layer) : null; // only Transformers have blocks to open
		const threads = (state.threads ?? "").split(",").filter(each => /^\d+$/.test(each)).map(Number);
		const request = { input: text, threads, target: target === null ? null : await targetOf(context, text, ending),
			...settings() };
		const responses = await Promise.all(models.map(async (model, n) => (await api.post("v1/explain/step", { ...request,
			model: model.id, layer: model === info ? layer : layer !== null && model.heads ? Math.min(layer, model.layers - 1) : null,
			place: n ? null : integer(state.place), source_place: n ? null : integer(state.source_place) }, ending)).step));
		const [response] = responses;
		if (other && state.place !== undefined) responses[1] = await beside(request, responses, ending);
		if (target !== null && state.target === undefined) {
			target = (await api.post("v1/detokenize", { model: info.id, tokens: response.ids }, ending)).text;
		}
		return responses;
	});

	// The other model's step at the same place of the text.
	async function beside(request, responses, ending) {
		const [own, its] = responses;
		const [place] = counterpart(aligned([own.pieces, its.pieces]), 0)(own.place).slice(-1);
		return place === undefined || place === its.place ? its
			: (await api.post("v1/explain/step", { ...request, model: other.id, place }, ending)).step;
	}

	/** @param {{ stage?: string }} [where]  step to show */
	async function renew(where = {}) {
		const responses = await load();
		if (signal.aborted) return false;
		if (!responses) {
			body.hidden = false; // its sentence can be corrected
			if (!stage) body.replaceChildren(textBox("Text", event => { text = event.target.value; again(); }).field);
			return false;
		}
		[step] = responses;
		if (element && !element.isConnected) body.replaceChildren(element);
		responses.forEach((response, n) => {
			const shown = { settings: settings(), beside: responses[1 - n] };
			if (stages[n]) stages[n].update(response, { ...where, ...shown });
			else stages[n] = draw(places[n], { ...shown, step: response, scale: stageScale, stage: state.stage, zoom: state.zoom,
				head: state.head ?? selectiveHead(step), text: () => text, target: () => target, follows: n > 0 },
			n ? { ...hooks, step: null, state: changes => follow(changes, stages[0]) } : hooks);
		});
		[stage] = stages;
		if (element) linkThreads(responses);
		showStatus();
		return true;
	}

	const confirm = debounced(async () => {
		const responses = await load();
		if (!responses) return;
		[step] = responses;
		stages.forEach((each, n) => each.confirm(responses[n], responses[1 - n]));
	});
	const again = debounced(() => { context.set({ text }); renew(); });
	const asked = changes => { context.set(changes); return renew(); };
	function changed(values) {
		const shown = name => (values[name] === usual[name] ? undefined : String(values[name] ?? "off"));
		context.set({ temperature: shown("temperature"), top_k: shown("top_k"), top_p: shown("top_p") });
		for (const each of stages) each.set(values);
		confirm();
	}

	// What the reader does on one stage happens on the other.
	function follow(changes, to) {
		if (!to) return;
		if ("zoom" in changes && changes.zoom !== (to.zoom() || undefined)) to.zoomTo(changes.zoom);
		if (changes.head !== undefined) to.chooseHead(Number(changes.head));
	}

	// A token that the reader points at is lit on both sides.
	function linkThreads(responses) {
		const segments = aligned(responses.map(response => response.pieces));
		places.forEach((place, n) => {
			place.onpointerover = event => {
				const row = event.target.closest?.("[data-thread]")?.getAttribute("data-thread");
				const other = row === undefined ? [] : counterpart(segments, n)(Number(row));
				stages[n].light(row === undefined ? [] : [Number(row)]);
				stages[1 - n].light(other);
			};
			place.onpointerleave = () => { for (const each of stages) each.light([]); };
		});
	}

	const hooks = {
		state(changes) {
			context.set(changes);
			if (stages[1]) follow({ ...changes, ..."head" in changes && { head: changes.head ?? 0 } }, stages[1]);
		},
		step: (id, share) => stages[1]?.goTo(id, share), // the step that is shown
		open: info.heads ? layer => asked({ layer: layer ? String(layer) : undefined }) : null,
		follow: (place, inSource) => asked(inSource ? { source_place: String(place) }
			: { place: place === step.pieces.length - 1 ? undefined : String(place), threads: undefined }),
		threads: places => asked({ threads: places.join(",") }),
		settings: changed,
		edit(which, typed) {
			if (which === "text") text = typed; else target = typed;
			context.set({ [which]: typed, place: undefined, source_place: undefined, threads: undefined, stage: undefined, zoom: undefined });
			return renew({ stage: "tokens" });
		},
		append: writes ? append : null,
	};

	// the text up to the followed token, and the chosen one
	async function append(token) {
		const before = target ?? text;
		try {
			const ids = [...step.ids.slice(0, step.place + 1), token.id];
			const { text: longer } = await api.post("v1/detokenize", { model: info.id, tokens: ids }, signal);
			if (longer === before) { status.textContent = `${token.piece} ends the text.`; return false; }
			if (target === null) text = longer; else target = longer;
			context.set({ place: undefined, threads: undefined, stage: undefined,
				[target === null ? "text" : "target"]: longer });
			return await renew({ stage: "tokens" });
		} catch (error) {
			context.fail(error);
			return false;
		}
	}

	function showStatus() {
		status.textContent = `Following position ${step.place}; the text has ${step.pieces.length} tokens.`
			+ (step.masked ? ` “${visibleToken(step.masked)}” is masked.` : "")
			+ (state.text === undefined && origin ? ` ${origin}` : "");
		tokens.replaceChildren(field("Follow",
			select(step.pieces.map((piece, at) => [at, `${at}: ${visibleToken(piece)}`]), step.place,
			place => hooks.follow(Number(place)))));
	}

	document.addEventListener("keydown", event => {
		if (!stage || event.defaultPrevented || !isPlain(event)) return;
		const target = /** @type {Element} */ (event.target);
		if (target.closest?.("input, textarea, select, pre, [contenteditable]")) return;
		if (stage.key(event)) event.preventDefault();
	}, { signal });

	document.addEventListener("weft-present", () => stages.forEach(each => each.redraw()), { signal });
	if (state.text === undefined) {
		const sample = await api.sampleText(info.id, signal);
		origin = sampleNote(sample.origin);
		text = beginning(sample.text);
	} else text = state.text;
	await renew();
	context.set({}); // the command contains the text
	return { close() { for (const each of stages) each.close(); }, move };

	// Go to another step or zoom of the same picture; false if the address is of another one.
	function move(path, next) {
		const others = of => JSON.stringify(Object.entries({ ...of, slide: undefined, stage: undefined, zoom: undefined })
			.filter(([, value]) => value !== undefined).sort());
		if (!stage || path !== "step" || !next.stage || others(next) !== others(state)) return false;
		stage.pause();
		Object.assign(state, { slide: next.slide, stage: next.stage, zoom: next.zoom });
		if (next.zoom !== (stage.zoom() || undefined)) stage.zoomTo(next.zoom);
		stage.goTo(next.stage);
		return true;
	}
}
