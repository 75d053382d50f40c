// Presentation mode (key P): the view alone, its type grown to the screen, a pen, and the keys of a presenter.
import { button, h, isPlain, s } from "./dom.js";

const SMALLEST = 11, LEGIBLE = 18, SCREEN = 1920; // pixels: the views' smallest type, and what it becomes on this screen
const TYPED = "input, textarea, select, [contenteditable]";
const STEPPED = ".att-queries, .shaded-text, .write-text, table[role=grid], .tok-pieces"; // whose items the arrow keys step through
const CLICKER = { PageDown: "ArrowRight", PageUp: "ArrowLeft" };
const HINT_MS = 6000;

export const isPresenting = () => document.body.classList.contains("presenting");
// How much larger the type of the stage is: 1.02 % of the width.
export const stageScale = () => (isPresenting() ? Math.max(1, (innerWidth * 0.0102) / Math.max(12.5, Math.min(innerWidth * 0.0082, 18))) : 1);

export function present(on) {
	if (on === isPresenting()) return;
	document.body.classList.toggle("presenting", on);
	pen.use(false);
	if (on) showHint();
	document.dispatchEvent(new CustomEvent("weft-present"));
}

function showHint() {
	const hint = h("p.present-hint", { role: "status" },
		...[["← →", " step"], ["D", " draw"], ["P", " or "], ["Esc", " leave"]].map(([key, does]) => [h("kbd", key), does]));
	document.querySelector(".present-hint")?.remove();
	document.body.append(hint);
	setTimeout(() => hint.remove(), HINT_MS);
}

const pen = {
	/** @type {any} */
	page: null,
	use(on) {
		this.page?.remove();
		this.page = null;
		if (!on) return;
		let line = null;
		const point = event => `${Math.round(event.clientX)} ${Math.round(event.clientY)}`;
		const end = () => { line = null; };
		this.page = s("svg.pen", { "aria-label": "Drawing; press D or Esc to end", onpointerdown: event => {
			this.page.setPointerCapture(event.pointerId);
			line = s("path", { d: `M${point(event)}l0 .1` });
			this.page.append(line);
		}, onpointermove: event => line?.setAttribute("d", `${line.getAttribute("d")}L${point(event)}`),
		onpointerup: end, onpointercancel: end });
		document.body.append(this.page);
	},
	clear() { this.page?.replaceChildren(); },
};

// Focus the current item of the view, and pass the key on to it.
function stepInView(key) {
	const list = document.querySelector(`main :is(${STEPPED})`), item = list?.querySelector('[tabindex="0"]');
	if (!list || !item || list.contains(document.activeElement)) return false;
	/** @type {HTMLElement} */ (item).focus();
	return !item.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
}

/** @param {(by: number) => boolean} turn  opens the next or previous slide of a story; false if none is played */
export function listen(turn) {
	const grow = () => document.documentElement.style.setProperty("--grow", String(Math.max(1, (innerWidth * LEGIBLE) / SMALLEST / SCREEN)));
	addEventListener("resize", grow);
	grow();
	document.getElementById("views")?.before(button("Present", () => present(true), { class: "present-start", title: "Key P" }));
	document.body.append(button("×", () => present(false), { class: "present-end", "aria-label": "End the presentation" }));

	function use(key) {
		const arrow = CLICKER[key] ?? key, by = { ArrowRight: 1, ArrowLeft: -1 }[arrow];
		if (key === "p") { present(!isPresenting()); return true; }
		if (!isPresenting()) return false;
		if (key === "d") { pen.use(!pen.page); return true; }
		if (key === "Escape" && pen.page) { pen.use(false); return true; }
		if (!by) return false;
		pen.clear();
		if (turn(by) || stepInView(arrow)) return true;
		if (arrow === key) return false;
		document.dispatchEvent(new KeyboardEvent("keydown", { key: arrow, bubbles: true, cancelable: true }));
		return true;
	}
	// before the view's own keys
	document.addEventListener("keydown", event => {
		if (!isPlain(event) || /** @type {Element} */ (event.target).closest?.(TYPED)) return;
		if (!use(event.key.length === 1 ? event.key.toLowerCase() : event.key)) return;
		event.preventDefault();
		event.stopImmediatePropagation();
	}, { capture: true });
	// after them: Escape first leads out of a zoom
	addEventListener("keydown", event => {
		if (event.key === "Escape" && !event.defaultPrevented && isPresenting()) present(false);
	});
}
