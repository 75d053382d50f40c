// A shaded text: a token that is clicked or reached with the arrow keys tells more of itself.
(() => {
  const make = (name, text, kind) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  for (const box of document.querySelectorAll(".shaded")) {
    const { told, shades } = JSON.parse(box.querySelector(".shaded-data").textContent);
    const tokens = [...box.querySelectorAll(".shaded-token")];
    const panel = box.querySelector(".shaded-told");
    let chosen = 0;

    const choose = (number) => {
      tokens[chosen].tabIndex = -1;
      tokens[chosen].setAttribute("aria-selected", "false");
      chosen = number;
      tokens[chosen].tabIndex = 0;
      tokens[chosen].setAttribute("aria-selected", "true");
      const [piece, facts, others] = told[number];
      const line = make("p");
      line.append(make("b", piece), " ", facts);
      panel.replaceChildren(line);
      if (others.length) {
        const list = make("ol");
        for (const [other, share, percent] of others) {
          const item = make("li", undefined, "shaded-swatch");
          item.style.setProperty("--s", share);
          item.append(make("b", other), " " + percent);
          list.append(item);
        }
        panel.append(list);
      }
    };

    // the token nearest to this one in the line above or below
    const beside = (from, way) => {
      const here = tokens[from].getClientRects()[0];
      let best = from, least = Infinity, line = null;
      for (let n = from + way; n >= 0 && n < tokens.length; n += way) {
        const there = tokens[n].getClientRects()[0];
        if (!there || Math.abs(there.top - here.top) < here.height / 2) continue;
        if (line === null) line = there.top;
        if (Math.abs(there.top - line) > here.height / 2) break;
        if (Math.abs(there.left - here.left) < least) [best, least] = [n, Math.abs(there.left - here.left)];
      }
      return best;
    };

    const text = box.querySelector(".shaded-text");
    const number = (event) => tokens.indexOf(event.target.closest(".shaded-token"));
    text.addEventListener("focusin", (event) => { if (number(event) >= 0) choose(number(event)); });
    text.addEventListener("click", (event) => { if (number(event) >= 0) tokens[number(event)].focus({ preventScroll: true }); });
    text.addEventListener("keydown", (event) => {
      const last = tokens.length - 1;
      const to = { ArrowRight: Math.min(last, chosen + 1), ArrowLeft: Math.max(0, chosen - 1), Home: 0, End: last }[event.key]
        ?? (event.key === "ArrowDown" ? beside(chosen, 1) : event.key === "ArrowUp" ? beside(chosen, -1) : null);
      if (to === null || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      tokens[to].focus();
    });

    const measure = box.querySelector(".shaded-measure");
    const legends = box.querySelectorAll(".shaded-legend");
    measure?.addEventListener("change", () => {
      legends.forEach((legend, n) => { legend.hidden = n !== measure.selectedIndex; });
      shades[measure.selectedIndex].forEach((shade, n) => {
        tokens[n].style.setProperty("--s", Math.abs(shade));
        tokens[n].classList.toggle("shaded-below", shade < 0);
      });
    });
  }
})();
