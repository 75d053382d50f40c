// Attention: a grid of all heads, one head enlarged, the tokens of the text, and the lines of one token.
import { button, group, h, isPlain, roving, select, soft } from "./dom.js";
import { Heat } from "./attention_heat.js";
import { lines } from "./attention_lines.js";
import { Shades, unpackMaps } from "./attention_maps.js";
import { capitalised, clamp, numberWithin, percent, share, short, sum } from "./words.js";

const GRID_POINTS = 40; // pixels along a side of a small map
const SAMPLED = 24; // queries whose attention decides which head is shown first
const LISTED = 8; // heads of one role that are shown before "more" is pressed
const SHADES = [["root", "square root of the probability"], ["weight", "probability"]];
// Roles of heads (explain/heads.py): letter, description, and the statistic behind it.
const ROLES = {
	"induction": { letter: "I", interest: 9, does: "attend to the token after an earlier copy of the current one",
		value: head => percent(head.induction) },
	"long distance": { letter: "D", interest: 2, does: "attend to a token far away",
		value: head => `${head.pair}, ${percent(head.distant)}` },
	"previous token": { letter: "P", does: "attend to the previous token", value: head => percent(head.previous) },
	"same token": { letter: "S", does: "attend to the token itself", value: head => percent(head.itself) },
	"first token (sink)": { letter: "F", interest: -9, does: "attend to the first token", value: head => percent(head.first) },
	"local": { letter: "L", does: "attend to the nearest tokens", value: head => `${head.distance.toFixed(1)} tokens` },
	"uniform": { letter: "U", interest: -9, does: "attend to all tokens equally", value: head => `${head.entropy.toFixed(2)} nats` },
};

// Draw attention. `data` has parts (see explain/attention/page.py), notes, and optionally the heads with roles. The
// options are the Explorer's: `chosen` is the initial selection, `onchoose` is called with a new one, `onread` with a
// cell of the map, `off` is the set of heads "kind.layer.head" that are switched off, `onoff` switches heads.
export async function mount(element, data, options = {}) {
	try {
		const view = new View(data, await unpackMaps(data.parts), options);
		element.replaceChildren(view.root);
		view.begin();
		return view;
	} catch (error) {
		element.replaceChildren(h("p", `The probabilities cannot be drawn here: ${error.message}`));
		throw error;
	}
}

const focusButton = event => event.target.closest("button")?.focus();

// Press one of several buttons, and make it the one in the tab order.
function pressed(before, now) {
	for (const [each, on] of [[before, false], [now, true]]) {
		each?.setAttribute("aria-pressed", on);
		if (each) each.tabIndex = on ? 0 : -1;
	}
	return now;
}

class View {
	tokens = []; // buttons of the queries
	targets = []; // elements of the keys
	buttons = []; // of all heads
	canvases = [];
	pressedHead;
	pressedToken;
	layer = 0;
	head = 0;
	query = 0;
	width = 0;
	room = 0; // pixels for the lines
	closing = new AbortController();
	shades; // known once the element is in the page
	small; // pooled maps of the grid

	constructor(data, parts, /** @type {any} */ { chosen = {}, onchoose = () => {}, onread = () => {}, off = new Set(), onoff }) {
		this.parts = parts;
		this.chosen = chosen;
		this.onchoose = onchoose;
		this.off = off;
		this.onoff = onoff;
		this.heads = data.named ?? []; // heads with roles
		const at = parts.findIndex(part => part.kind === chosen.kind);
		this.maps = parts[at < 0 ? parts.length - 1 : at];
		this.heat = new Heat({ read: onread, query: query => this.chooseToken(query),
			zoom: value => { this.range.value = value; } });
		this.resizeObserver = new ResizeObserver(() => requestAnimationFrame(() => { // drawing may change the size again
			if (this.root.clientWidth === this.width) return;
			this.resize();
			this.heat.resize();
			this.heat.draw();
			this.drawLines();
		}));
		this.root = h("div.att", this.controls(),
			h("div.att-three", this.overview(), this.headPanel(), this.linesPanel()),
			h("div.att-two", this.tokenPanel(), this.roles),
			data.notes.map(note => h("p.soft", note)));
	}

	// sizes and colours are known only once the element is in the page
	begin() {
		this.shades = new Shades(this.root);
		this.heat.shades = this.shades;
		const on = { signal: this.closing.signal };
		const redraw = () => { this.shades.take(); this.heat.draw(); this.drawGrid(); };
		matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, on);
		addEventListener("beforeprint", redraw, on);
		this.resize();
		this.usePart(this.chosen);
		if (this.heat.high) { this.heat.resize(); this.heat.draw(); } // the strip above the map is filled now
		this.resizeObserver.observe(this.root);
	}

	resize() {
		this.width = this.root.clientWidth;
		this.room = this.lines.clientWidth || 360;
	}

	close() {
		this.closing.abort();
		this.resizeObserver.disconnect();
	}

	controls() {
		const { parts, maps } = this;
		this.kind = select(parts.map(part => [part.kind, part.name]), maps.kind, kind => {
			this.maps = this.parts.find(part => part.kind === kind);
			this.usePart({});
			this.onchoose({ kind, layer: undefined, head: undefined, token: undefined });
		});
		this.layerSelect = select([], 0, value => this.choose(Number(value), this.head));
		this.headSelect = select([], 0, value => this.choose(this.layer, Number(value)));
		this.shadeSelect = select(SHADES, "root", how => {
			this.shades.choose(how, this.maps);
			this.drawLegend();
			this.heat.draw();
			this.drawGrid();
		});
		this.range = select([], "all", value => {
			if (value === "all") { this.heat.resetZoom(); this.heat.draw(); } else this.heat.part(Number(value));
		});
		const label = (name, control) => h("label", `${name} `, control);
		this.layerLabel = label("Layer", this.layerSelect);
		this.headLabel = label("Head", this.headSelect);
		const zoom = (sign, name, factor) => button(sign, () => this.heat.zoom(factor), { "aria-label": name });
		return h("div.att-controls", parts.length > 1 && label("Attention", this.kind),
			this.layerLabel, this.headLabel, label("Shades", this.shadeSelect),
			label("Tokens", this.range), h("span.att-zoom", zoom("+", "Zoom in on the selected cell", 0.6), " ",
				zoom("−", "Zoom out", 1 / 0.6)));
	}

	overview() {
		this.grid = h("div.att-grid", { ...group(`All heads: arrow keys select a neighbour${
			this.onoff ? ", o switches one off" : ""}`), onclick: focusButton, onkeydown: event => {
			if (event.key === "o" && this.onoff && isPlain(event)) this.toggle();
		} });
		const line = ({ dataset: { layer } }) => this.buttons.filter(button => button.dataset.layer === layer);
		roving(this.grid, () => this.buttons, { row: line, onfocus: ({ dataset: { layer, head } }) => {
			if (this.layer !== Number(layer) || this.head !== Number(head)) this.choose(Number(layer), Number(head));
		} });
		this.roles = h("div.att-roles");
		this.legend = h("p.att-legend.soft");
		this.all = h("div", h("h3", "All heads ", soft("(layers down, heads across)")),
			h("div.scroll", { role: "region", tabindex: -1, "aria-label": "Grid of all heads" }, this.grid));
		return h("div.att-all", this.all, this.legend);
	}

	// the colour bar: a swatch for each of some probabilities
	drawLegend() {
		const how = this.shadeSelect.value;
		const swatch = p => h("span", h("i", { style: { background: `color-mix(in srgb, var(--deep) ${
			100 * (how === "root" ? Math.sqrt(p) : p)}%, var(--card))` } }), p);
		this.legend.replaceChildren("probability ", ...[0, 0.01, 0.1, 0.25, 0.5, 1].map(swatch));
	}

	headPanel() {
		this.headTitle = h("h3");
		this.offHead = button("", () => this.toggle());
		return h("div.att-map", this.headTitle, this.heat.canvas, this.heat.readout,
			this.onoff && h("p.att-switch", this.offHead));
	}

	tokenPanel() {
		this.from = h("h3");
		this.strip = h("div.att-strip.att-queries",
			{ ...group("Query tokens: arrow keys move between them"), onclick: focusButton });
		roving(this.strip, () => this.tokens, { onfocus: ({ dataset: { place } }) => {
			if (this.query !== Number(place)) this.chooseToken(Number(place));
		} });
		this.other = h("div.att-strip.att-keys", { role: "list", "aria-label": "Tokens of the source" });
		this.caption = h("caption.unseen");
		this.strongest = h("tbody");
		return h("div.att-side", this.from,
			h("p.soft.att-hint", "Select a query token. Shades show what it attends to."), this.strip, this.other,
			h("div.scroll", h("table.att-table", this.caption, h("thead", h("tr",
				["strongest keys", "position", "probability"].map(name => h("th", { scope: "col" }, name)))), this.strongest)));
	}

	linesPanel() {
		const choices = [["all", "all heads of the layer"], ["one", "the selected head"]];
		this.linesSelect = select(choices, this.chosen.lines ?? "all", value => {
			this.drawLines();
			this.onchoose({ lines: value === "all" ? undefined : value });
		});
		this.lines = h("div.scroll", { role: "region", tabindex: 0, "aria-label": "Lines between tokens" });
		this.linesLabel = h("label", "Show ", this.linesSelect);
		return h("div.att-lines", h("h3", "Lines"), this.linesLabel, this.lines);
	}

	/** @param {{ layer?: any, head?: any, token?: any }} selection */
	usePart({ layer, head, token }) {
		const { maps } = this, first = this.mostInteresting();
		const options = count => Array.from({ length: count }, (_, n) => h("option", { value: n }, n));
		this.layerSelect.replaceChildren(...options(maps.layers));
		this.headSelect.replaceChildren(...options(maps.heads));
		this.layerLabel.hidden = maps.layers < 2;
		this.headLabel.hidden = this.linesLabel.hidden = maps.heads < 2;
		this.all.hidden = maps.single;
		this.root.classList.toggle("att-single", maps.single);
		const index = (text, otherwise, count) => Math.floor(numberWithin(text, 0, count - 1, otherwise));
		this.layer = index(layer, first.layer, maps.layers);
		this.head = index(head, first.head, maps.heads);
		this.query = index(token, first.query, maps.queries.length);
		this.shades.choose(this.shadeSelect.value, maps);
		this.drawLegend();
		this.fillRange();
		this.heat.use(maps);
		this.fillStrips();
		this.fillGrid();
		this.fillRoles();
		this.showHead();
		this.scrollToToken();
	}

	// The head that looks hardest at other tokens than the first and its own, and the query that looks farthest.
	mostInteresting() {
		const { maps } = this, own = maps.kind !== "cross", step = Math.max(1, Math.floor(maps.queries.length / SAMPLED));
		let best = { layer: 0, head: 0, query: 0 }, most = -Infinity;
		for (let layer = 0; layer < maps.layers; layer++) for (let head = 0; head < maps.heads; head++) {
			let interest = sum(this.namesOf(layer, head).map(name => ROLES[name].interest)), query = 0, farthest = 0;
			for (let at = 1; at < maps.queries.length; at += step) {
				const others = maps.strongest(layer, head, at).filter(([key]) => !own || (key !== 0 && key !== at));
				const [key, weight] = others[0] ?? [at, 0], reach = weight * (own ? at - key : 1);
				interest += weight * step / maps.queries.length;
				if (reach > farthest) [query, farthest] = [at, reach];
			}
			if (interest > most) [best, most] = [{ layer, head, query }, interest];
		}
		return best;
	}

	choose(layer, head) {
		this.follow({ layer, head });
		this.onchoose({ kind: this.maps.kind, layer, head });
	}

	chooseToken(query) {
		this.follow({ token: clamp(query, 0, this.maps.queries.length - 1) });
		this.onchoose({ token: this.query });
	}

	// Show a selection; unknown heads are ignored.
	/** @param {{ kind?: string, layer?: any, head?: any, token?: any }} selection */
	follow({ kind, layer, head, token }) {
		const { maps } = this, part = this.parts.find(one => one.kind === kind);
		if (part && part !== maps) {
			this.maps = part;
			this.kind.value = kind;
			return this.usePart({ layer, head });
		}
		if (layer < maps.layers && head < maps.heads) {
			[this.layer, this.head] = [layer, head];
			this.showHead();
		}
		if (token === undefined) return;
		this.query = token;
		this.scrollToToken();
		this.heat.show(this.layer, this.head, this.query);
		this.showToken();
	}

	// measured before any change, so that the page is not laid out twice
	scrollToToken() {
		const { strip } = this, top = this.tokens[this.query].offsetTop, { scrollTop, clientHeight } = strip;
		if (top < scrollTop || top > scrollTop + clientHeight - 30) strip.scrollTop = top - clientHeight / 2;
	}

	showHead() {
		const { layer, head } = this, before = this.pressedHead, now = this.buttons[layer * this.maps.heads + head];
		this.layerSelect.value = layer;
		this.headSelect.value = head;
		this.pressedHead = pressed(before, now);
		const names = this.namesOf(layer, head);
		const title = capitalised(this.maps.where(layer, head) || this.maps.name);
		this.headTitle.textContent = names.length ? `${title}: ${names.join(", ")}` : title;
		this.offHead.textContent = `Switch this head ${this.isOff(this) ? "on" : "off"}`;
		this.heat.show(layer, head, this.query);
		this.showToken();
	}

	namesOf(layer, head) {
		const { kind } = this.maps;
		return this.heads.find(each => each.kind === kind && each.layer === layer && each.head === head)?.names ?? [];
	}

	showToken() {
		const { maps, layer, head, query } = this, found = maps.strongest(layer, head, query), label = maps.queries[query];
		const verb = maps.kind === "cross" ? "Generating" : "From", weights = new Map(found);
		this.from.textContent = `${verb} “${short(label, 24)}” (${query})${maps.where(layer, head, ", ")}`;
		this.targets.forEach((target, key) => {
			// medium shades, on which neither dark nor light letters are legible, are skipped
			const shade = Math.sqrt(weights.get(key) ?? 0), strong = shade > 0.5;
			target.style.setProperty("--p", `${Math.round(strong ? 40 + 60 * shade : 84 * shade)}%`);
			target.classList.toggle("att-strong", strong);
		});
		this.pressedToken = pressed(this.pressedToken, this.tokens[query]);
		this.caption.textContent = `The strongest keys of ${label}`;
		this.strongest.replaceChildren(...found.slice(0, 8).map(([key, weight]) =>
			h("tr", h("td", short(maps.keys[key], 24)), h("td", key), h("td", share(weight)))));
		this.drawLines();
	}

	drawLines() {
		const heads = this.linesSelect.value === "one" ? [this.head] : [...Array(this.maps.heads).keys()];
		const selection = { layer: this.layer, heads, query: this.query };
		this.lines.replaceChildren(lines(this.maps, selection, this.room));
	}

	pictures() {
		const { maps, headTitle: { textContent: title } } = this;
		return [this.heat.picture(maps.single ? title : `${maps.name}, ${title.toLowerCase()}`), this.lines.firstChild];
	}

	fillRange() {
		const { queries, block } = this.maps, size = 32 * block;
		/** @type {[string | number, string][]} */
		const choices = [["all", `all ${queries.length}`]];
		for (let start = 0; queries.length > size && start < queries.length; start += size)
			choices.push([start / block, `${start} to ${Math.min(start + size, queries.length) - 1}`]);
		this.range.replaceChildren(...choices.map(([value, name]) => h("option", { value }, name)),
			h("option", { value: "part", hidden: true }, "a part"));
	}

	fillStrips() {
		const { maps } = this, cross = maps.kind === "cross";
		this.pressedToken = null;
		this.tokens = maps.queries.map((label, place) =>
			button(label, null, { tabindex: -1, "aria-pressed": "false", dataset: { place } }));
		this.strip.replaceChildren(...this.tokens);
		this.targets = cross ? maps.keys.map(label => h("span", { role: "listitem" }, label)) : this.tokens;
		this.other.replaceChildren(...cross ? this.targets : []);
		this.other.hidden = !cross;
	}

	fillGrid() {
		const { maps, grid } = this, tick = text => h("span.att-tick", text), found = [tick("")];
		this.buttons = [];
		this.canvases = []; // one canvas per layer, below its buttons; one per head would be slow
		this.pressedHead = null;
		for (let head = 0; head < maps.heads; head++) found.push(tick(head));
		for (let layer = 0; layer < maps.layers; layer++) {
			const row = 2 * layer + 2, canvas = h("canvas", { style: { "grid-row": row } }); // badges are in the row below
			this.canvases.push(canvas);
			found.push(h("span.att-tick", { style: { "grid-area": `${row} / 1` } }, layer), canvas);
			for (let head = 0; head < maps.heads; head++) {
				const names = this.namesOf(layer, head);
				if (names.length) found.push(h("span.att-badge", { "aria-hidden": "true",
					style: { "grid-area": `${row + 1} / ${head + 2}` } }, names.map(name => ROLES[name]?.letter ?? "").join("")));
				const box = button("", null, { tabindex: -1, "aria-pressed": "false", dataset: { layer, head },
					style: { "grid-area": `${row} / ${head + 2}` } });
				this.buttons.push(box);
				found.push(box);
			}
		}
		grid.style.setProperty("--att-heads", maps.heads);
		grid.replaceChildren(...found);
		this.small = maps.maxPool(GRID_POINTS);
		this.drawGrid();
		this.showOff();
	}

	drawGrid() {
		const { heads } = this.maps, { maps, columns } = this.small;
		this.canvases.forEach((canvas, layer) =>
			this.shades.paint(canvas, maps.slice(layer * heads, (layer + 1) * heads), columns));
	}

	fillRoles() {
		const { roles, maps } = this, mine = this.heads.filter(each => each.kind === maps.kind);
		const rows = Object.entries(ROLES).map(([name, { letter, does, value }]) => {
			const heads = mine.filter(each => each.names.includes(name)), rest = heads.slice(LISTED);
			const found = each => maps.single ? soft(value(each)) : button([`${each.layer}.${each.head} `, soft(value(each))],
				() => this.choose(each.layer, each.head));
			return heads.length > 0 && h("li", h("b", h("span.att-letter", letter), ` ${name}`),
				soft(` ${does}`), h("div.att-found", heads.slice(0, LISTED).map(found),
					rest.length > 0 && h("details", h("summary", `${rest.length} more`), rest.map(found))));
		}).filter(Boolean);
		roles.hidden = !rows.length;
		roles.replaceChildren(h("h3", ...maps.single ? ["Role"] : ["Heads with a role ", soft("(layer.head)")]),
			h("ul", rows));
	}

	isOff({ layer, head }) { return this.off.has(`${this.maps.kind}.${layer}.${head}`); }

	toggle() {
		const off = new Set(this.off);
		off[this.isOff(this) ? "delete" : "add"](`${this.maps.kind}.${this.layer}.${this.head}`);
		this.onoff?.(off);
	}

	showOff() {
		for (const button of this.buttons) {
			const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)], off = this.isOff({ layer, head });
			button.classList.toggle("att-off", off);
			button.setAttribute("aria-label", [this.maps.where(layer, head) || this.maps.name, ...this.namesOf(layer, head),
				...off ? ["switched off"] : []].join(", "));
		}
	}
}
