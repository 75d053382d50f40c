"use strict";
/* A computation graph that opens and closes. Its data: nodes [function, name, kind, shape, formulas, backward number],
   groups [kind, label, path, formulas, open, children, level, bundles, main], edges as pairs of nodes, the formulas' texts, and
   the levels: how the inside of a group is laid out while its children are closed (explain/graph/level.py). */
(() => {
  const SVG = "http://www.w3.org/2000/svg", MARGIN = 10, ROW = 15, SMALL = 13.5, BOX = 26;
  const PAD = 12, HEAD = 24, GAP = 30, SLOPE = 0.06, MAX_MORE = 46, NARROW = 12, OUTSIDE = -1;
  const make = (name, parent, attributes = {}, text) => {
    const element = parent.appendChild(document.createElement(name));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  /* Puts the levels of open boxes together: the sums of explain/graph/layout.py. A box has width, height and port, where
     lines meet it; an open one has `inside`, `laid` and the width of its `title`, and gets its size. Gives the lines. */
  function arrange(box, frame) {
    const { inside, laid: [[gaps, spans, places, pieces, entries], bundles, main] } = box;
    const within = inside.map(child => child.inside ? arrange(child, true) : []), pad = frame ? PAD : 0, stops = [];
    gaps.forEach(gap => stops.push(gap + (stops.length ? stops[stops.length - 1] : pad)));
    let moved = 0, next = 0;
    stops.forEach((stop, n) => {
      stops[n] = stop + moved;
      for (; next < spans.length && spans[next][1] === n; next++) {
        const [from, , child, right] = spans[next], { width, port } = inside[child];
        stops[n] = Math.max(stops[n], stops[from] + (right ? width - port : port));
      }
      moved = stops[n] - stop;
    });
    for (const [, stop, child] of places) if (child !== OUTSIDE) inside[child].x = stops[stop] - inside[child].port;
    box.entries = new Map(entries.flatMap(([trunk, at]) => bundles[trunk][0].map(node => [node, stops[places[at][1]]])));
    const meets = (at, node, ports) => {
      const [, stop, child] = places[at];
      return child === OUTSIDE ? stops[stop] : inside[child].x + (inside[child][ports]?.get(node) ?? inside[child].port);
    };
    // what goes out does so right below where it comes from
    const out = pieces.filter(piece => places[piece[1]][4]).flatMap(([from, , trunk]) =>
      bundles[trunk][0].map(node => [node, meets(from, node, "exits")]));
    let free = -PAD;
    const apart = new Map([...new Set(out.map(pair => pair[1]))].sort((a, b) => a - b).map(x =>
      [x, free = Math.max(x, free + NARROW)]));
    box.exits = new Map(out.map(([node, x]) => [node, apart.get(x)]));
    const highs = [], far = [], tops = [], bottoms = [];
    for (const [rank, , child] of places) {
      highs[rank] = Math.max(highs[rank] ?? 0, child === OUTSIDE ? 0 : inside[child].height);
    }
    const joins = pieces.map(([from, to, trunk]) => {
      const ends = new Map();
      for (const node of bundles[trunk][0]) {
        const x = meets(from, node, "exits"), toX = places[to][4] ? box.exits.get(node) : meets(to, node, "entries");
        const end = ends.get(`${x} ${toX}`) ?? { x, toX, sources: [] };
        end.sources.push(node);
        ends.set(`${x} ${toX}`, end);
        far[places[to][0]] = Math.max(far[places[to][0]] ?? 0, Math.abs(x - toX));
      }
      return [...ends.values()];
    });
    let y = frame ? HEAD : 0;
    highs.forEach((high, rank) => {
      if (rank) y += (high && highs[rank - 1] ? GAP : 0.6 * GAP) + Math.min(MAX_MORE, SLOPE * (far[rank] ?? 0));
      tops.push(y);
      bottoms.push(y += high);
    });
    for (const [rank, , child, low] of places) {
      if (child !== OUTSIDE) inside[child].y = low ? bottoms[rank] - inside[child].height : tops[rank];
    }
    const lines = pieces.flatMap(([from, to, trunk, reached], n) => {
      const above = inside[places[from][2]], below = inside[places[to][2]], rank = places[from][0], end = places[to][0];
      const targets = reached.flatMap(each => bundles[trunk][1][each]), top = frame && !rank ? 0 : tops[rank];
      return joins[n].map(ends => ({
        ...ends, targets, y: above ? above.y + above.height : top, bend: bottoms[rank], straight: tops[end],
        toY: below ? below.y : tops[end], leaves: !!above && !above.inside, arrives: !!below && !below.inside,
      }));
    });
    inside.forEach(({ x, y }, n) => {
      for (const l of within[n]) {
        l.x += x; l.toX += x; l.y += y; l.bend += y; l.straight += y; l.toY += y;
        lines.push(l);
      }
    });
    box.width = Math.max(0, ...stops, ...box.exits.values());
    box.height = bottoms[bottoms.length - 1];
    if (frame) {
      box.titleX = PAD;
      for (const port of [...new Set(box.entries.values())].sort((a, b) => a - b)) {
        if (port - 6 >= box.titleX + box.title) break;
        box.titleX = Math.max(box.titleX, port + 8);
      }
      box.width = Math.max(box.width, box.titleX + box.title) + PAD;
      box.height += box.exits.size ? 0 : PAD;
      box.port = box.entries.get(main) ?? box.exits.get(main) ?? box.width / 2;
    }
    return lines;
  }

  const settle = (box, x, y) => {
    box.x = (box.x ?? 0) + x; box.y = (box.y ?? 0) + y;
    for (const child of box.inside || []) settle(child, box.x, box.y);
  };

  function start(root) {
    const data = JSON.parse(root.querySelector(".graph-data").textContent);
    const plane = root.querySelector(".graph-plane"), detail = root.querySelector(".graph-detail");
    const { nodes, groups, texts, levels } = data, first = nodes.length;
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
    let open = new Set(initial), marks = new Map(), joins = [], drawn = [], focused = null;
    const spare = document.createDocumentFragment();
    let showing = new Map();
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

    function describe(key) {
      const back = on("backward");
      if (key < first) {
        const [inner, name, kind, shape, formulas, number] = nodes[key], order = back ? number : key + 1;
        const line = [order || "", on("shapes") ? shape : ""].filter(Boolean).join(" · ");
        return { inner, name, kind, lines: [line, ...back ? texts[formulas] : []].filter(Boolean), order, shape };
      }
      const [kind, label, path, formulas] = groups[key - first], places = inside(key - first);
      const orders = places.map(place => back ? nodes[place][5] : place + 1).filter(Boolean);
      const low = Math.min(...orders), high = Math.max(...orders), result = nodes[Math.max(...places)][3];
      const order = !orders.length ? "" : low === high ? `${low}` : `${low} – ${high}`;
      const line = [order, on("shapes") ? result : ""].filter(Boolean).join(" · ");
      const lines = [line, ...back ? texts[formulas] : []].filter(Boolean);
      return { inner: kind, name: label, kind: "group", lines, order, shape: result, path };
    }

    function boxFor(key) {
      const n = key - first;
      if (key >= first && open.has(n)) {
        const about = { inner: groups[n][0], name: groups[n][1], kind: "frame", lines: [] };
        const title = length(`▾ ${about.name} · ${about.inner}`, 13) + 22, 
          [, , , , , children, level, bundles, main] = groups[n];
        return { key, about, title, inside: children.map(boxFor), laid: [levels[level], bundles, main] };
      }
      for (const place of key < first ? [key] : inside(n)) showing.set(place, key);
      const about = describe(key), wide = Math.max(BOX * 1.6, length(about.inner, 13) + 20);
      const beside = Math.max(length(about.name, 13), ...about.lines.map(line => length(line, 11.5)));
      const height = Math.max(BOX, ROW + SMALL * about.lines.length);
      return { key, about, wide, width: wide + 7 + beside, height, port: wide / 2 };
    }

    function render() {
      showing = new Map();
      const top = boxFor(first), seen = new Set(), edges = [];
      for (let n = 0; n < data.edges.length; n += 2) {
        const a = showing.get(data.edges[n]), b = showing.get(data.edges[n + 1]), key = a * (first + groups.length) + b;
        if (a !== b && !seen.has(key)) { seen.add(key); edges.push([a, b]); }
      }
      drawn = arrange(top, false);
      settle(top, 0, 0);
      joins = edges;
      const width = top.width + 2 * MARGIN, height = top.height + 2 * MARGIN, back = on("backward");
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
          `left:${x + box.titleX - 5}px;top:${y + 2}px;width:${box.title}px`]
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
      const near = drawn.filter(l => [...l.sources, ...l.targets].some(node => showing.get(node) === key));
      paths.near.setAttribute("d", near.map(curve).join(""));
      tell(key);
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
