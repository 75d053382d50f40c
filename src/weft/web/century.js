// A timeline of models: the chart of all of them, revealed step by step, and a card on the last one that is shown.
import * as chart from "./chart.js";
import { button, group, h, isPlain } from "./dom.js";
import { player } from "./player.js";
import { facts, fold } from "./table.js";

const PACE = 2600; // milliseconds per model

// `plot`: rows at y = 0, −1, −2 …, oldest first; `cards`: { title, about, rows, sample } of each row.
export function mount(element, { plot, cards }) {
	const last = cards.length - 1;
	let at = last;
	const place = h("div"), card = h("div", { "aria-live": "polite" });
	const shown = () => plot.series.map(each => {
		const kept = each.y.map((y, n) => (y > -at - 0.5 ? n : -1)).filter(n => n >= 0);
		return { ...each, x: kept.map(n => each.x[n]), y: kept.map(n => each.y[n]) };
	});
	const steps = player({ pace: PACE, move, restart: () => show(0) });
	const drawn = chart.mount(place, { ...plot, x: { ...plot.x, includes: range() }, controls: false });

	// The axis stays the same while rows appear.
	function range() {
		const values = plot.series.flatMap(each => each.x);
		return [Math.min(...values) * 0.97, Math.max(...values) * 1.03];
	}

	function show(row) {
		at = row;
		const { title, about, rows, sample } = cards[at];
		drawn.update({ series: shown() });
		card.replaceChildren(h("h3", title), h("p", about), facts(rows),
			...sample ? [fold("What it writes", h("pre", { tabindex: 0 }, sample))] : []);
		steps.setEnds(at === 0, at === last);
	}

	function move(by) {
		if (at + by < 0 || at + by > last) return false;
		show(at + by);
		return at < last;
	}

	element.addEventListener("keydown", event => {
		if (!isPlain(event) || !["PageUp", "PageDown"].includes(event.key)) return;
		event.preventDefault();
		steps.go(event.key === "PageDown" ? 1 : -1);
	});
	const first = button("From the beginning", () => { steps.pause(); show(0); });
	element.replaceChildren(place, h("div.fields.century-steps", group("Step through the years"),
		first, ...steps.buttons), card);
	show(last);
}
