/* A computation graph that opens and closes. Its data: nodes [function, name, kind, shape, formulas, backward number],
   groups [kind, label, path, formulas, open, children, level, bundles, main], edges as pairs of nodes, the formulas'
   texts, the levels: how the inside of a group is laid out while its children are closed (explain/graph/level.py); and
   rules [operation, forward, gradients]. */
import { button, field, h, s } from "./dom.js";
import { arrange, settle } from "./graph_layout.js";
import { table } from "./table.js";
import { textWidth } from "./words.js";

const MARGIN = 10, ROW = 15, SMALL = 13.5, BOX = 26;
const KEYS = "Arrow keys go along the edges and to neighbours";
const KEYS_OF_MODULES = "; Enter opens and closes a module, Escape closes the one around";
const RULES = "g_x is the gradient of the loss by x, ⊙ and ÷ work element by element; where an operand was broadcast,"
  + " its gradient is summed over the copies.";

const curve = l => {
  const mid = (l.bend + l.straight) / 2;
  return `M${l.x} ${l.y}V${l.bend}C${l.x} ${mid} ${l.toX} ${mid} ${l.toX} ${l.straight}V${l.toY}`;
};

// `shown` is a state as `changed` is told it: { open, at, shapes, backward }, texts; only what is not as at first.
export function mount(element, data, { shown = {}, changed = () => {} } = {}) {
  const { nodes, groups, texts, levels, title } = data, first = nodes.length, modules = groups.length > 1;
  const box = (name, label, on) => {
    const input = h("input", { type: "checkbox", class: `graph-${name}`, checked: on, onchange: () => turned() });
    return [input, h("label", {}, input, ` ${label}`)];
  };
  const switched = name => (shown[name] === undefined ? data[name] : shown[name] === "1");
  const [shapesBox, shapesLabel] = box("shapes", "shapes", switched("shapes"));
  const [backBox, backLabel] = box("backward", "backward pass, with the gradients' formulas", switched("backward"));
  const find = h("input", { type: "search", class: "graph-find", oninput: () => search(0), onkeydown: event => {
    if (event.key === "Enter") { event.preventDefault(); search(event.shiftKey ? -1 : 1); }
  } });
  const found = h("span", { class: "soft graph-found", role: "status" });
  const paths = Object.fromEntries(["edge", "quiet", "near", "tip"].map(name => [name, s("path", { class: name })]));
  const svg = s("svg", { "aria-hidden": "true" }, Object.values(paths)), layer = h("div");
  const plane = h("div", { class: "graph-plane", role: "group", "aria-label": title }, svg, layer);
  const detail = h("p", { class: "graph-detail", role: "status" }, "\u00a0");
  const view = h("div", { class: "scroll graph-view" }, plane);
  const tool = (name, label, change) => button(label, () => {
    change();
    render();
    tellState();
  }, { class: `graph-${name}` });
  const tools = h("div", { class: "graph-tools", role: "group", "aria-label": "What the graph shows" },
    shapesLabel, backLabel, modules && [
      tool("deeper", "Open one level more", () => {
        const next = [...groups.keys()].filter(n => !open.has(n) && isShown(n) && groups[n][0] !== "constants");
        for (const n of next) open.add(n);
      }),
      tool("shallower", "Close one level", () => {
        const deepest = Math.max(0, ...[...open].filter(n => n && isShown(n)).map(n => level[n]));
        for (const n of [...open]) if (n && level[n] >= deepest) open.delete(n);
      }),
      tool("reset", "As at first", () => { open = new Set(initial); })],
    field("Find", find), found);
  element.append(h("div", { class: "graph" }, tools,
    h("p", { class: "soft graph-keys" },
      `${KEYS}${modules ? KEYS_OF_MODULES : ""}. What is known of a box stands below.`),
    view, detail, data.rules.length > 0 && h("details", { open: backBox.checked },
      h("summary", {}, "Formulas of this graph's operations"), h("p", { class: "soft" }, RULES),
      table({ header: ["operation", "forward", "backward"], text: [0, 1, 2], folds: false, named: true,
        rows: data.rules.map(([name, forward, gradients]) =>
          [name, forward, h("div", {}, gradients.map(line => h("div", {}, line)))]) }))));

  const above = new Map(), level = [0];
  groups.forEach((group, n) => {
    for (const child of group[5]) {
      above.set(child, first + n);
      if (child >= first) level[child - first] = level[n] + 1;
    }
  });
  const members = groups.map(() => null);
  const inside = n => members[n] ??= groups[n][5].flatMap(child => child < first ? [child] : inside(child - first));
  const initial = new Set(groups.flatMap((group, n) => group[4] ? [n] : []));
  const valid = n => Number.isInteger(n) && n >= 0 && n < groups.length;
  let open = shown.open === undefined ? new Set(initial) : new Set(shown.open.split(".").map(Number).filter(valid));
  let marks = new Map(), joins = [], drawn = [], focused = null, showing = new Map(), matches = [], match = -1;
  const { fontFamily } = getComputedStyle(plane);
  const length = (text, size) => textWidth(text, `${size}px ${fontFamily}`) + 1;

  function describe(key) {
    const back = backBox.checked, shapes = shapesBox.checked;
    if (key < first) {
      const [inner, name, kind, shape, formulas, number] = nodes[key], order = back ? number : key + 1;
      const line = [order || "", shapes ? shape : ""].filter(Boolean).join(" · ");
      return { inner, name, kind, lines: [line, ...back ? texts[formulas] : []].filter(Boolean), order, shape };
    }
    const [kind, label, path, formulas] = groups[key - first], places = inside(key - first);
    const orders = places.map(place => back ? nodes[place][5] : place + 1).filter(Boolean);
    const low = Math.min(...orders), high = Math.max(...orders), result = nodes[Math.max(...places)][3];
    const order = !orders.length ? "" : low === high ? `${low}` : `${low} – ${high}`;
    const line = [order, shapes ? result : ""].filter(Boolean).join(" · ");
    const lines = [line, ...back ? texts[formulas] : []].filter(Boolean);
    return { inner: kind, name: label, kind: "group", lines, order, shape: result, path };
  }

  function boxFor(key) {
    const n = key - first;
    if (key >= first && open.has(n)) {
      const about = { inner: groups[n][0], name: groups[n][1], kind: "frame", lines: [] };
      const wide = length(`▾ ${about.name} · ${about.inner}`, 13) + 22;
      const [, , , , , children, inner, bundles, main] = groups[n];
      return { key, about, title: wide, inside: children.map(boxFor), laid: [levels[inner], bundles, main] };
    }
    for (const place of key < first ? [key] : inside(n)) showing.set(place, key);
    const about = describe(key), wide = Math.max(BOX * 1.6, length(about.inner, 13) + 20);
    const beside = Math.max(length(about.name, 13), ...about.lines.map(line => length(line, 11.5)));
    const height = Math.max(BOX, ROW + SMALL * about.lines.length);
    return { key, about, wide, width: wide + 7 + beside, height, port: wide / 2 };
  }

  function render() {
    showing = new Map();
    open.add(0);
    const top = boxFor(first), seen = new Set(), edges = [];
    for (let n = 0; n < data.edges.length; n += 2) {
      const a = showing.get(data.edges[n]), b = showing.get(data.edges[n + 1]), key = a * (first + groups.length) + b;
      if (a !== b && !seen.has(key)) { seen.add(key); edges.push([a, b]); }
    }
    drawn = arrange(top, false);
    settle(top, 0, 0);
    joins = edges;
    const width = top.width + 2 * MARGIN, height = top.height + 2 * MARGIN, back = backBox.checked;
    svg.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width} ${height}`);
    svg.setAttribute("width", width); svg.setAttribute("height", height);
    const tips = new Set(), passing = [], quiet = [];
    for (const l of drawn) {
      const silent = back && !l.sources.some(node => nodes[node][5]);
      (silent ? quiet : passing).push(curve(l));
      if (!back && l.arrives) tips.add(`M${l.toX} ${l.toY}l-3 -6h6z`);
      if (back && l.leaves && !silent) tips.add(`M${l.x} ${l.y}l-3 6h6z`);
    }
    paths.edge.setAttribute("d", passing.join(""));
    paths.quiet.setAttribute("d", quiet.join(""));
    paths.tip.setAttribute("d", [...tips].join(""));
    // elements are kept from one state to the next: most of them only move
    const before = marks, order = [];
    marks = new Map();
    const put = each => {
      if (each !== top) {
        const mark = markFor(each, before.get(each.key));
        marks.set(each.key, mark);
        order.push(...mark.parts);
      }
      for (const child of each.inside || []) put(child);
    };
    put(top);
    plane.style.width = `${width}px`; plane.style.height = `${height}px`;
    const kept = new Set(order);
    for (const each of [...layer.children]) if (!kept.has(each)) each.remove();
    let next = layer.firstChild;
    for (const each of order) {
      if (each === next) next = next.nextSibling; else layer.insertBefore(each, next);
    }
    choose(marks.has(focused) ? focused : null);
  }

  function markFor(each, old) {
    const { about } = each, shape = shapesBox.checked ? about.shape : "";
    const text = [about.kind, about.inner, about.name, about.order, shape, ...about.lines].join("\n");
    const mark = old && old.text === text ? old : each.inside ? frameMark(each) : boxMark(each, shape);
    mark.text = text;
    mark.box = each;
    const x = each.x + MARGIN, y = each.y + MARGIN;
    const styles = each.inside
      ? [`left:${x}px;top:${y}px;width:${each.width}px;height:${each.height}px`,
        `left:${x + each.titleX - 5}px;top:${y + 2}px;width:${each.title}px`]
      : [`left:${x}px;top:${y}px;width:${each.wide}px;height:${each.height}px`,
        `left:${x + each.wide + 7}px;top:${y + (each.height - ROW - SMALL * about.lines.length) / 2}px`];
    mark.parts.forEach((part, n) => {
      if (part.where !== styles[n]) { part.where = styles[n]; part.style.cssText = styles[n]; }
    });
    return mark;
  }

  function frameMark({ key, about }) {
    const head = button(`▾ ${about.name} · ${about.inner}`, null, { class: "graph-head", "aria-expanded": "true",
      tabindex: -1, "data-key": key, "aria-label": `${about.name}, ${about.inner}, open` });
    return { button: head, parts: [h("div", { class: "graph-frame" }), head] };
  }

  function boxMark({ key, about }, shape) {
    const kind = about.kind === "variable" || about.kind === "group" ? "" : about.kind;
    const spoken = [about.name, about.inner, kind, about.order ? `number ${about.order}` : "", shape,
      ...about.lines.slice(about.lines.length && (about.order || shape) ? 1 : 0)];
    const box = button(about.inner, null, { class: `graph-box ${about.kind}`, tabindex: -1, "data-key": key,
      "aria-expanded": about.kind === "group" && "false",
      "aria-label": [...new Set(spoken.filter(Boolean))].join(", ") });
    const label = h("div", { class: "graph-label", "aria-hidden": "true" }, h("span", {}, about.name),
      about.lines.map(line => h("small", {}, line)));
    return { button: box, parts: [box, label] };
  }

  // Marks what is chosen: its lines, and that it is the one box in the tab order.
  function choose(key) {
    for (const { button } of marks.values()) {
      if (button.tabIndex === 0) button.tabIndex = -1;
      button.classList.remove("chosen");
    }
    const entry = marks.get(key);
    (entry ?? marks.values().next().value).button.tabIndex = 0;
    entry?.button.classList.add("chosen");
    const touches = l => [...l.sources, ...l.targets].some(node => showing.get(node) === key);
    const near = key === null ? [] : drawn.filter(touches);
    paths.near.setAttribute("d", near.map(curve).join(""));
  }

  function pick(key, move = true) {
    const mark = marks.get(key);
    if (!mark) return;
    focused = key;
    choose(key);
    if (move) mark.button.focus();
    tell(key);
    tellState();
  }

  function tell(key) {
    const about = describe(key), formulas = texts[key < first ? nodes[key][4] : groups[key - first][3]];
    const named = place => place < first ? nodes[place][1] : groups[place - first][1];
    const from = joins.filter(edge => edge[1] === key).map(edge => named(edge[0]));
    const to = joins.filter(edge => edge[0] === key).map(edge => named(edge[1]));
    detail.textContent = [
      `${about.path || about.name}: ${about.inner}, ${about.shape}`,
      from.length ? `from ${from.join(", ")}` : "", to.length ? `to ${to.join(", ")}` : "",
      formulas.length ? `passes back ${formulas.join("; ")}` : "",
    ].filter(Boolean).join(" · ");
  }

  function state() {
    const opened = [...open].sort((a, b) => a - b).join(".");
    const of = (name, input) => input.checked === data[name] ? undefined : input.checked ? "1" : "0";
    return { open: opened === [...initial].sort((a, b) => a - b).join(".") ? undefined : opened,
      at: focused === null ? undefined : String(focused), shapes: of("shapes", shapesBox),
      backward: of("backward", backBox) };
  }
  const tellState = () => changed(state());

  function toggle(key) {
    if (key < first) return;
    const n = key - first;
    if (open.has(n)) open.delete(n); else open.add(n);
    const before = marks.get(key)?.button.getBoundingClientRect();
    focused = key;
    render();
    const now = marks.get(key);
    if (!now) return;
    // what was clicked stays where it was
    const after = now.button.getBoundingClientRect();
    if (before) {
      view.scrollLeft += after.left - before.left;
      window.scrollBy(0, after.top - before.top);
    }
    now.button.focus({ preventScroll: true });
    pick(key, false);
  }

  function step(key, name) {
    const down = name === "ArrowDown", here = marks.get(key);
    if (down || name === "ArrowUp") {
      const ends = joins.filter(edge => edge[down ? 0 : 1] === key).map(edge => edge[down ? 1 : 0]);
      if (ends.length) return ends[0];
    }
    const middle = mark => {
      const { x, y, width, height } = mark.box;
      return mark.box.inside ? [x + mark.box.titleX, y] : [x + width / 2, y + height / 2];
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

  // Opens what is around a box.
  function reveal(key) {
    for (let at = above.get(key); at !== undefined; at = above.get(at)) open.add(at - first);
    render();
    pick(key, false);
    marks.get(key)?.button.scrollIntoView({ block: "nearest", inline: "center" });
  }

  // What holds the words in its name or kind; `way` 1 goes to the next, −1 to the one before.
  function search(way) {
    const words = find.value.trim().toLowerCase();
    if (!way || !matches.length) {
      const has = (...names) => names.some(name => name.toLowerCase().includes(words));
      matches = !words ? [] : [
        ...groups.flatMap(([kind, , path], n) => n && has(kind, path) ? [first + n] : []),
        ...nodes.flatMap(([inner, name], n) => has(inner, name) ? [n] : [])];
      match = 0;
    } else {
      match = (match + way + matches.length) % matches.length;
    }
    found.textContent = !words ? "" : !matches.length ? "nothing has this name"
      : `${match + 1} of ${matches.length}; Enter goes on`;
    if (matches.length) reveal(matches[match]);
  }

  function turned() {
    render();
    if (focused !== null && marks.has(focused)) tell(focused);
    tellState();
  }

  const isShown = n => {
    for (let at = above.get(first + n); at !== undefined; at = above.get(at)) if (!open.has(at - first)) return false;
    return true;
  };
  plane.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    const key = Number(button.dataset.key);
    if (key < first) pick(key); else toggle(key);
  });
  plane.addEventListener("focusin", event => {
    const key = Number(event.target.dataset.key);
    if (key !== focused || !detail.textContent.trim()) pick(key, false);
  });
  plane.addEventListener("keydown", event => {
    const key = Number(event.target.dataset.key);
    if (event.key.startsWith("Arrow")) {
      const next = step(key, event.key);
      if (next !== null) pick(next);
      event.preventDefault();
    } else if (event.key === "Escape" || event.key === "Backspace") {
      const around = key >= first && open.has(key - first) ? key : above.get(key);
      if (around !== undefined && around !== first) toggle(around);
      event.preventDefault();
    }
  });
  render();
  const at = Number(shown.at ?? NaN), entry = [...marks.values()].find(mark => !mark.box.inside)?.box;
  if (marks.has(at)) {
    pick(at, false);
    marks.get(at).button.scrollIntoView({ block: "nearest", inline: "center" });
  } else if (entry) {
    view.scrollLeft = entry.x + MARGIN + entry.port - view.clientWidth / 2; // a graph may be wider than a phone
  }
  return { svg: () => plane };
}

