// The command that reproduces a page.
import { button, copyText, h } from "./dom.js";

export function mount(element, command) {
	const code = h("code", command);
	element.append(h("div.command", h("p.soft", "Command to reproduce this:"),
		h("pre", { tabindex: 0, "aria-label": "Command" }, code),
		button("Copy", event => copyText(event.target, command, code))));
}
