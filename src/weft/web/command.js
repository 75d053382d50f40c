// The command that repeats what a page tells.
import { button, copied, h } from "./dom.js";

export function mount(element, command) {
  const code = h("code", {}, command);
  element.append(h("div", { class: "command" }, h("p", { class: "soft" }, "Command to reproduce this:"),
    h("pre", { tabindex: 0, "aria-label": "Command" }, code),
    button("Copy", event => copied(event.target, command, code))));
}
