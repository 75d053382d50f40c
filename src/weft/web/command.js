// The command that repeats what a page tells.
import { button, copied, h, uniqueId } from "./dom.js";

export function mount(element, command) {
  const code = h("code", {}, command), id = uniqueId();
  element.append(h("div", { class: "command" }, h("p", { class: "soft", id }, "This command repeats it:"),
    h("pre", { tabindex: 0, "aria-labelledby": id }, code),
    button("Copy", event => copied(event.target, command, code))));
}
