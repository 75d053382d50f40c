// Attention: what each head attends to in a text, and what changes without some heads.
import { mount as drawAttention } from "./attention.js";
import { difference } from "./attention_difference.js";
import { h } from "./dom.js";
import { readingView } from "./reading.js";
import { aligned, counterpart } from "./sides.js";
import { difference as surpriseDifference } from "./surprise.js";
import { idOf, titleOf } from "./variants.js";

export const title = "Attention";
export const about = "What each token attends to.";
export const path = "attention";

const KINDS = ["bahdanau", "encoder", "encoder-decoder", "decoder"];

export const lacks = info => (KINDS.includes(info?.kind) ? ""
	: `has no attention: it ${info?.kind === "ngram" ? "counts n-grams" : "is recurrent"}`);

export async function mount(main, context) {
	const { info, other } = context;
	const sides = (other ? [info, other] : [info]).map(model => new AttentionView({ ...context, info: model }));
	const options = { view: "attention", route: "maps", svg: () => sides.flatMap(side => side.shown?.pictures() ?? []),
		draw: (place, maps, { side }) => sides[side].draw(place, maps), words: () => sides[0].words(),
		difference: place => link(place, sides, options.sent).catch(context.fail) };
	await readingView(main, context, options);
	return { close: () => sides.forEach(side => side.shown?.close()) };
}

// Two models beside each other select the same head and token, and point at the same cell.
async function link(place, sides, body) {
	const [a, b] = sides.map(side => side.shown), { info, other, api, signal } = sides[0].context;
	const maps = h("div"), texts = h("div"), across = (side, axis) => {
		const segments = aligned([a, b].map(view => view.maps[axis]));
		return n => counterpart(segments, side)(n)[0];
	};
	const draw = () => difference(maps, [a, b], query => a.chooseToken(query));
	place.replaceChildren(texts, maps);
	sides.forEach((side, n) => {
		const there = sides[1 - n].shown;
		side.chosen = changes => {
			const token = changes.token === undefined ? undefined : across(n, "queries")(changes.token);
			there.follow({ ...changes, token });
			if (n) side.context.set({ ...changes, ...changes.token !== undefined && { token: a.query } });
			draw();
		};
		side.read = (row, column) => {
			const [query, key] = [across(n, "queries")(row), across(n, "keys")(column)];
			if (query !== undefined && key !== undefined && there.maps.block === 1) there.heat.read(query, key);
		};
	});
	b.follow({ kind: a.maps.kind, layer: a.layer, head: a.head, token: across(0, "queries")(a.query) });
	draw();
	if (!other.off.length || !info.words) return;
	const asked = [info, other].map(({ id }) => api.post("v1/explain/surprise", { ...body, model: id }, signal));
	const answers = (await Promise.all(asked)).map(answer => answer.surprise);
	surpriseDifference(texts, answers, [info, other].map(titleOf), place => a.chooseToken(place));
}

class AttentionView {
	shown;
	kinds;
	chosen = _changes => {}; // called with what is selected here
	read = (_row, _column) => {};

	constructor(context) {
		const { info, other } = context;
		this.context = context;
		// heads are switched off in the model beside the full one
		this.switches = info.heads && info.words && (!other || (info === other && other.off.length > 0));
	}

	async draw(place, maps) {
		const { context } = this, { info, other } = context, before = this.shown;
		this.shown = await drawAttention(place, maps, { chosen: { ...context.state }, off: new Set(info.off),
			onchoose: changed => {
				if (info !== other) context.set(changed);
				this.chosen(changed);
			},
			onread: (row, column) => this.read(row, column),
			onoff: this.switches ? off => context.beside(off.size ? idOf({ ...info, off: [...off] }) : undefined) : undefined });
		before?.close();
		this.kinds = maps.parts.map(part => part.kind);
		return this.shown;
	}

	// of several kinds, the command shows cross-attention
	words() {
		const { kind, layer, head } = this.context.state, selected = layer !== undefined && head !== undefined;
		return selected && (!kind || !this.kinds || kind === this.kinds.at(-1)) ? [`--layer ${layer} --head ${head}`] : [];
	}
}
