"use strict";
/* A computation graph that opens and closes. Its data: nodes [function, name, kind, shape, formulas, backward number],
   groups [kind, label, path, children, formulas, open], edges as pairs of nodes, and the formulas' texts. */
(() => {
  const SVG = "http://www.w3.org/2000/svg", MARGIN = 10, ROW = 15, SMALL = 13.5, BOX = 26;
  const make = (name, parent, attributes = {}, text) => {
    const element = parent.appendChild(document.createElement(name));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  function start(root) {
    const data = JSON.parse(root.querySelector(".graph-data").textContent);
    const plane = root.querySelector(".graph-plane"), detail = root.querySelector(".graph-detail");
    const { nodes, groups, texts } = data, first = nodes.length;
    const above = new Map(), level = [0];
    groups.forEach((group, n) => {
      for (const child of group[3]) {
        above.set(child, first + n);
        if (child >= first) level[child - first] = level[n] + 1;
      }
    });
    const members = groups.map(() => null);
    const inside = n => members[n] ??= groups[n][3].flatMap(child => child < first ? [child] : inside(child - first));
    const initial = new Set(groups.flatMap((group, n) => group[5] ? [n] : []));
    let open = new Set(initial), marks = new Map(), joins = [], drawn = [], focused = null;
    const spare = document.createDocumentFragment(), known = new Map();
    const svg = document.createElementNS(SVG, "svg"), paths = {}, layer = document.createElement("div");
    svg.setAttribute("aria-hidden", "true");
    for (const name of ["edge", "quiet", "near", "tip"]) {
      paths[name] = svg.appendChild(document.createElementNS(SVG, "path"));
      paths[name].setAttribute("class", name);
    }
    plane.replaceChildren(svg, layer);
    const curve = l => {
      const mid = (l.bend + l.straight) / 2;
      return `M${l.x} ${l.y}V${l.bend}C${l.x} ${mid} ${l.toX} ${mid} ${l.toX} ${l.straight}V${l.toY}`;
    };
    const style = getComputedStyle(plane), measure = document.createElement("canvas").getContext("2d");
    const widths = new Map();
    const length = (text, size) => {
      const key = size + text;
      if (!widths.has(key)) {
        measure.font = `${size}px ${style.fontFamily}`;
        widths.set(key, measure.measureText(text).width + 1);
      }
      return widths.get(key);
    };
    const on = name => root.querySelector(`.graph-${name}`).checked;
    const goes = key => key < first ? nodes[key][5] > 0 : inside(key - first).some(place => nodes[place][5] > 0);

    function describe(key) {
      const back = on("backward");
      if (key < first) {
        const [inner, name, kind, shape, formulas, number] = nodes[key], order = back ? number : key + 1;
        const line = [order || "", on("shapes") ? shape : ""].filter(Boolean).join(" · ");
        return { inner, name, kind, lines: [line, ...back ? texts[formulas] : []].filter(Boolean), order, shape };
      }
      const [kind, label, path, , formulas] = groups[key - first], places = inside(key - first);
      const orders = places.map(place => back ? nodes[place][5] : place + 1).filter(Boolean);
      const low = Math.min(...orders), high = Math.max(...orders), result = nodes[Math.max(...places)][3];
      const order = !orders.length ? "" : low === high ? `${low}` : `${low} – ${high}`;
      const line = [order, on("shapes") ? result : ""].filter(Boolean).join(" · ");
      const lines = [line, ...back ? texts[formulas] : []].filter(Boolean);
      return { inner: kind, name: label, kind: "group", lines, order, shape: result, path };
    }

    function boxFor(key, showing) {
      const n = key - first;
      if (key >= first && open.has(n)) {
        const about = { inner: groups[n][0], name: groups[n][1], kind: "frame", lines: [] };
        const box = { key, about, inside: groups[n][3].map(child => boxFor(child, showing)) };
        box.port = length(`▾ ${about.name} · ${about.inner}`, 13) + 22;
        return box;
      }
      for (const place of key < first ? [key] : inside(n)) showing.set(place, key);
      const about = describe(key), wide = Math.max(BOX * 1.6, length(about.inner, 13) + 20);
      const beside = Math.max(length(about.name, 13), ...about.lines.map(line => length(line, 11.5)));
      const height = Math.max(BOX, ROW + SMALL * about.lines.length);
      return { key, about, wide, width: wide + 7 + beside, height, port: wide / 2 };
    }

    function render() {
      const showing = new Map(), top = boxFor(first, showing), seen = new Set(), edges = [];
      for (let n = 0; n < data.edges.length; n += 2) {
        const a = showing.get(data.edges[n]), b = showing.get(data.edges[n + 1]), key = a * (first + groups.length) + b;
        if (a !== b && !seen.has(key)) { seen.add(key); edges.push([a, b]); }
      }
      drawn = window.weftGraphLayout(top, edges, known);
      joins = edges;
      const width = top.width + 2 * MARGIN, height = top.height + 2 * MARGIN, back = on("backward");
      svg.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width} ${height}`);
      svg.setAttribute("width", width); svg.setAttribute("height", height);
      const tips = new Set(), passing = [], quiet = [];
      for (const l of drawn) {
        const silent = back && !goes(l.source);
        (silent ? quiet : passing).push(curve(l));
        if (!back && l.arrives) tips.add(`M${l.toX} ${l.toY}l-3 -6h6z`);
        if (back && l.leaves && !silent) tips.add(`M${l.x} ${l.y}l-3 6h6z`);
      }
      paths.edge.setAttribute("d", passing.join(""));
      paths.quiet.setAttribute("d", quiet.join(""));
      paths.tip.setAttribute("d", [...tips].join(""));
      paths.near.setAttribute("d", "");
      // elements are kept from one state to the next: most of them only move
      const before = marks, order = [];
      marks = new Map();
      const put = box => {
        if (box !== top) {
          const mark = markFor(box, before.get(box.key));
          marks.set(box.key, mark);
          order.push(...mark.parts);
        }
        for (const child of box.inside || []) put(child);
      };
      put(top);
      plane.style.width = `${width}px`; plane.style.height = `${height}px`;
      const kept = new Set(order);
      for (const element of [...layer.children]) if (!kept.has(element)) element.remove();
      let next = layer.firstChild;
      for (const element of order) {
        if (element === next) next = next.nextSibling; else layer.insertBefore(element, next);
      }
      for (const { button } of marks.values()) if (button.tabIndex === 0) button.tabIndex = -1;
      const entry = marks.get(focused) || marks.values().next().value;
      if (entry) entry.button.tabIndex = 0;
    }

    function markFor(box, old) {
      const { about } = box, shape = on("shapes") ? about.shape : "";
      const text = [about.kind, about.inner, about.name, about.order, shape, ...about.lines].join("\n");
      const mark = old && old.text === text ? old : box.inside ? frameMark(box) : boxMark(box, shape);
      mark.text = text;
      mark.box = box;
      const x = box.x + MARGIN, y = box.y + MARGIN;
      const styles = box.inside
        ? [`left:${x}px;top:${y}px;width:${box.width}px;height:${box.height}px`,
          `left:${x + box.titleX - 5}px;top:${y + 2}px;width:${box.port}px`]
        : [`left:${x}px;top:${y}px;width:${box.wide}px;height:${box.height}px`,
          `left:${x + box.wide + 7}px;top:${y + (box.height - ROW - SMALL * about.lines.length) / 2}px`];
      mark.parts.forEach((part, n) => {
        if (part.where !== styles[n]) { part.where = styles[n]; part.style.cssText = styles[n]; }
      });
      return mark;
    }

    function frameMark({ key, about }) {
      const frame = make("div", spare, { class: "graph-frame" });
      const button = make("button", spare, { type: "button", class: "graph-head", "aria-expanded": "true", tabindex: -1,
        "data-key": key, "aria-label": `${about.name}, ${about.inner}, open` }, `▾ ${about.name} · ${about.inner}`);
      return { button, parts: [frame, button] };
    }

    function boxMark({ key, about }, shape) {
      const kind = about.kind === "variable" || about.kind === "group" ? "" : about.kind;
      const spoken = [about.name, about.inner, kind, about.order ? `number ${about.order}` : "", shape,
        ...about.lines.slice(about.lines.length && (about.order || shape) ? 1 : 0)];
      const given = { type: "button", class: `graph-box ${about.kind}`, tabindex: -1, "data-key": key,
        "aria-label": [...new Set(spoken.filter(Boolean))].join(", ") };
      if (about.kind === "group") given["aria-expanded"] = "false";
      const button = make("button", spare, given, about.inner);
      const label = make("div", spare, { class: "graph-label", "aria-hidden": "true" });
      make("span", label, {}, about.name);
      for (const line of about.lines) make("small", label, {}, line);
      return { button, parts: [button, label] };
    }

    function select(key, move = true) {
      const mark = marks.get(key);
      if (!mark) return;
      for (const { button } of marks.values()) if (button.tabIndex === 0) button.tabIndex = -1;
      mark.button.tabIndex = 0;
      focused = key;
      if (move) mark.button.focus();
      const near = drawn.filter(l => l.source === key || l.targets.includes(key));
      paths.near.setAttribute("d", near.map(curve).join(""));
      tell(key);
    }

    function tell(key) {
      const about = describe(key), formulas = texts[key < first ? nodes[key][4] : groups[key - first][4]];
      const named = place => place < first ? nodes[place][1] : groups[place - first][1];
      const from = joins.filter(edge => edge[1] === key).map(edge => named(edge[0]));
      const to = joins.filter(edge => edge[0] === key).map(edge => named(edge[1]));
      detail.textContent = [
        `${about.path || about.name}: ${about.inner}, ${about.shape}`,
        from.length ? `from ${from.join(", ")}` : "", to.length ? `to ${to.join(", ")}` : "",
        formulas.length ? `passes back ${formulas.join("; ")}` : "",
      ].filter(Boolean).join(" · ");
    }

    function toggle(key) {
      if (key < first) return;
      const n = key - first;
      if (open.has(n)) open.delete(n); else open.add(n);
      const was = marks.get(key), before = was && was.button.getBoundingClientRect();
      focused = key;
      render();
      const now = marks.get(key);
      if (!now) return;
      // what was clicked stays where it was
      const after = now.button.getBoundingClientRect();
      if (before) {
        root.querySelector(".graph-view").scrollLeft += after.left - before.left;
        window.scrollBy(0, after.top - before.top);
      }
      now.button.focus({ preventScroll: true });
      select(key, false);
    }

    function step(key, name) {
      const down = name === "ArrowDown", here = marks.get(key);
      if (down || name === "ArrowUp") {
        const ends = joins.filter(edge => edge[down ? 0 : 1] === key).map(edge => edge[down ? 1 : 0]);
        if (ends.length) return ends[0];
      }
      const middle = mark => {
        const box = mark.button;
        return [box.offsetLeft + box.offsetWidth / 2, box.offsetTop + box.offsetHeight / 2];
      };
      const [x, y] = middle(here), across = name === "ArrowLeft" || name === "ArrowRight";
      const sign = name === "ArrowRight" || down ? 1 : -1;
      let best = null, least = Infinity;
      for (const [other, mark] of marks) {
        const [u, v] = middle(mark), along = sign * (across ? u - x : v - y), aside = Math.abs(across ? v - y : u - x);
        const cost = along + 3 * aside;
        if (other !== key && along > 2 && cost < least) { best = other; least = cost; }
      }
      return best;
    }

    plane.addEventListener("click", event => {
      const button = event.target.closest("button");
      if (!button) return;
      const key = Number(button.dataset.key);
      if (key < first) select(key); else toggle(key);
    });
    plane.addEventListener("focusin", event => {
      const key = Number(event.target.dataset.key);
      if (key !== focused || !detail.textContent.trim()) select(key, false);
    });
    plane.addEventListener("keydown", event => {
      const key = Number(event.target.dataset.key);
      if (event.key.startsWith("Arrow")) {
        const next = step(key, event.key);
        if (next !== null) select(next);
        event.preventDefault();
      } else if (event.key === "Escape" || event.key === "Backspace") {
        const around = key >= first && open.has(key - first) ? key : above.get(key);
        if (around !== undefined && around !== first) toggle(around);
        event.preventDefault();
      }
    });
    for (const name of ["shapes", "backward"]) {
      root.querySelector(`.graph-${name}`).addEventListener("change", () => {
        render();
        if (focused !== null && marks.has(focused)) tell(focused);
      });
    }
    const tool = (name, change) => {
      const button = root.querySelector(`.graph-${name}`);
      if (button) button.addEventListener("click", () => { change(); render(); });
    };
    const shown = n => {
      for (let at = above.get(first + n); at !== undefined; at = above.get(at)) if (!open.has(at - first)) return false;
      return true;
    };
    tool("deeper", () => {
      const next = [...groups.keys()].filter(n => !open.has(n) && shown(n) && groups[n][0] !== "constants");
      for (const n of next) open.add(n);
    });
    tool("shallower", () => {
      const deepest = Math.max(0, ...[...open].filter(n => n && shown(n)).map(n => level[n]));
      for (const n of [...open]) if (n && level[n] >= deepest) open.delete(n);
    });
    tool("reset", () => { open = new Set(initial); });
    render();
  }

  document.querySelectorAll(".graph").forEach(start);
})();
