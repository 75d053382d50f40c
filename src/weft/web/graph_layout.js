"use strict";
/* Layers from top to bottom, for boxes that may hold boxes: the steps of explain/graph_layers.py and
   explain/graph_layout.py, in the same order. A box has key, width, height and port; an open one has `inside`, and its
   port is the width of its name. */
(() => {
  const PAD = 12, HEAD = 24, APART = 18, NARROW = 12, GAP = 30, ASIDE = 0.03, ORDERINGS = 8, SWEEPS = 40;
  const spotOf = (rank, width, more) => ({ rank, width, box: null, entry: null, exit: null, x: 0, order: 0, ...more });
  const room = spot => spot.box ? APART : NARROW;
  const startX = p => p.start.box ? p.start.box.exits.get(p.source) ?? p.start.box.port : 0;
  const endX = p => p.end.box ? p.end.box.entries.get(p.source) ?? p.end.box.port : 0;
  const push = (map, key, value) => { const l = map.get(key); if (l) l.push(value); else map.set(key, [value]); };
  const median = values => {
    const v = values.slice().sort((a, b) => a - b), half = v.length >> 1;
    return v.length % 2 ? v[half] : (v[half - 1] + v[half]) / 2;
  };

  /* `known` keeps the insides of frames from call to call: what has not changed is not laid out again. */
  function arrange(root, edges, known) {
    const chains = new Map();
    const note = (box, chain) => {
      const mine = [...chain, box];
      chains.set(box.key, mine);
      box.entries = new Map(); box.exits = new Map(); box.x = box.y = 0;
      for (const child of box.inside || []) note(child, mine);
    };
    note(root, []);
    const joined = new Map();
    for (const [a, b] of edges) {
      const mine = chains.get(a), other = chains.get(b);
      let same = 0;
      while (mine[same] === other[same]) same++;
      for (let n = same; n < mine.length - 1; n++) push(joined, mine[n].key, [a, mine[n + 1], null, b]);
      push(joined, mine[same - 1].key, [a, mine[same], other[same], b]);
      for (let n = same; n < other.length - 1; n++) push(joined, other[n].key, [a, null, other[n + 1], b]);
    }
    const lines = place(root, joined, false, known);
    const settle = (box, x, y) => {
      box.x += x; box.y += y;
      for (const child of box.inside || []) settle(child, box.x, box.y);
    };
    settle(root, 0, 0);
    return lines;
  }

  function place(box, joined, frame, known) {
    const within = new Map(), links = joined.get(box.key) || [];
    for (const child of box.inside) if (child.inside) within.set(child, place(child, joined, true, known));
    const lines = inner(box, links, frame, known);
    for (const [child, moved] of within) {
      for (const l of moved) {
        l.x += child.x; l.toX += child.x; l.y += child.y; l.bend += child.y; l.straight += child.y; l.toY += child.y;
        lines.push(l);
      }
    }
    return lines;
  }

  function inner(box, links, frame, known) {
    const state = [box.port, ...links.map(([s, a, b, t]) => `${s} ${a ? a.key : ""} ${b ? b.key : ""} ${t}`),
      ...box.inside.map(c => [c.key, c.width, c.height, c.port, ...c.entries, "", ...c.exits].join(" "))].join("\n");
    let found = known.get(box.key);
    if (!found || found.state !== state) {
      const [layers, pieces] = ranked(box.inside, links);
      uncross(layers, pieces);
      spread(layers, pieces);
      const lines = draw(box, layers, pieces, frame), { width, height, titleX, entries, exits } = box;
      found = { state, lines, box: { width, height, titleX, entries, exits }, at: box.inside.map(c => [c.x, c.y]) };
      known.set(box.key, found);
    }
    Object.assign(box, found.box);
    box.inside.forEach((child, n) => { [child.x, child.y] = found.at[n]; });
    return found.lines.map(l => ({ ...l }));
  }

  function ranked(boxes, links) {
    const after = new Map(boxes.map(box => [box.key, new Set()])), fed = new Set();
    let enter = false;
    for (const [, a, b] of links) {
      if (a && b) after.get(a.key).add(b.key);
      if (!a) enter = true;
      if (b) fed.add(b.key);
    }
    const rank = new Map(boxes.map(box => [box.key, enter ? 1 : 0])), waiting = new Map();
    for (const targets of after.values()) for (const t of targets) waiting.set(t, (waiting.get(t) || 0) + 1);
    const order = [...after.keys()].filter(key => !waiting.get(key));
    for (let n = 0; n < order.length; n++) {
      for (const t of [...after.get(order[n])].sort((a, b) => a - b)) {
        rank.set(t, Math.max(rank.get(t), rank.get(order[n]) + 1));
        waiting.set(t, waiting.get(t) - 1);
        if (!waiting.get(t)) order.push(t);
      }
    }
    for (const key of order.slice().reverse()) {
      if (!fed.has(key) && after.get(key).size) {
        rank.set(key, Math.min(...[...after.get(key)].map(t => rank.get(t))) - 1);
      }
    }
    const last = Math.max(0, ...rank.values()) + 1;
    const spots = new Map(boxes.map(box => [box.key, spotOf(rank.get(box.key), box.width, { box })]));
    const entries = new Map(), exits = new Map(), uses = new Map();
    for (const [source, a, b, target] of links) {
      if (!a && !entries.has(source)) entries.set(source, spotOf(0, 0, { entry: source }));
      if (!b && !exits.has(source)) exits.set(source, spotOf(last, 0, { exit: source }));
      const start = a ? spots.get(a.key) : entries.get(source), end = b ? spots.get(b.key) : exits.get(source);
      const key = `${a ? a.key : "in"} ${source}`;
      if (!uses.has(key)) uses.set(key, { start, source, ends: [] });
      uses.get(key).ends.push([end, target]);
    }
    const found = [...spots.values(), ...entries.values(), ...exits.values()], pieces = [];
    for (const { start, source, ends } of uses.values()) {
      let at = start;
      const deepest = Math.max(...ends.map(([end]) => end.rank));
      for (let level = at.rank + 1; level <= deepest; level++) {
        const here = new Map(), further = [];
        for (const [end, target] of ends) {
          if (end.rank === level) {
            if (!here.has(end)) here.set(end, { start: at, end, source, targets: [] });
            here.get(end).targets.push(target);
          } else if (end.rank > level) further.push(target);
        }
        pieces.push(...here.values());
        if (further.length) {
          const spot = spotOf(level, 0);
          found.push(spot);
          pieces.push({ start: at, end: spot, source, targets: further });
          at = spot;
        }
      }
    }
    const layers = Array.from({ length: Math.max(0, ...found.map(spot => spot.rank)) + 1 }, () => []);
    for (const spot of found) layers[spot.rank].push(spot);
    return [layers, pieces];
  }

  const number = layer => layer.forEach((spot, n) => { spot.order = n; });
  const share = (spot, x) => spot.width ? 0.9 * (x / spot.width - 0.5) : 0;

  function uncross(layers, pieces) {
    const up = new Map(), down = new Map();
    for (const p of pieces) { push(down, p.start, p); push(up, p.end, p); }
    layers.forEach(number);
    let best = layers.map(layer => layer.slice()), least = crossings(layers, down);
    for (let turn = 0; turn < ORDERINGS && least; turn++) {
      const falling = turn % 2 === 0;
      for (const layer of falling ? layers.slice(1) : layers.slice(0, -1).reverse()) {
        const near = new Map();
        for (const spot of layer) {
          const places = falling
            ? (up.get(spot) || []).map(p => p.start.order + share(p.start, startX(p)))
            : (down.get(spot) || []).map(p => p.end.order + share(p.end, endX(p)));
          near.set(spot, places.length ? median(places) : spot.order);
        }
        layer.sort((a, b) => near.get(a) - near.get(b));
        number(layer);
      }
      const now = crossings(layers, down);
      if (now < least) { best = layers.map(layer => layer.slice()); least = now; }
    }
    layers.forEach((layer, n) => { layer.splice(0, layer.length, ...best[n]); number(layer); });
  }

  function crossings(layers, down) {
    let total = 0;
    for (const layer of layers.slice(0, -1)) {
      const ends = [];
      for (const spot of layer) {
        const mine = (down.get(spot) || []).map(p => [startX(p), p.end.order + share(p.end, endX(p))]);
        mine.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
        for (const [, end] of mine) for (const other of ends) if (other > end) total++;
        for (const [, end] of mine) ends.push(end);
      }
    }
    return total;
  }

  function spread(layers, pieces) {
    const near = new Map(), fed = new Set(pieces.map(p => p.end));
    for (const p of pieces) {
      const aside = p.start.box && !fed.has(p.start) ? ASIDE : 1;
      const weight = aside * [1, 2, 8][(p.start.box ? 0 : 1) + (p.end.box ? 0 : 1)], shift = startX(p) - endX(p);
      push(near, p.end, [p.start, shift, weight]);
      push(near, p.start, [p.end, -shift, weight]);
    }
    for (const layer of layers) {
      let x = 0;
      for (const spot of layer) { spot.x = x; x += spot.width + room(spot); }
    }
    for (let sweep = 0; sweep < SWEEPS; sweep++) {
      const falling = sweep % 2 === 0;
      for (const layer of falling ? layers : layers.slice().reverse()) {
        const wanted = [], weights = [];
        for (const spot of layer) {
          let pulls = near.get(spot) || [];
          if (sweep < 2) {
            const side = spot.rank + (falling ? -1 : 1), one = pulls.filter(pull => pull[0].rank === side);
            if (one.length) pulls = one;
          }
          let weight = 0, total = 0;
          for (const [other, shift, w] of pulls) { weight += w; total += (other.x + shift) * w; }
          if (!pulls.length) wanted.push(spot.x);
          else if (sweep < Math.floor(SWEEPS * 3 / 4)) wanted.push(total / weight);
          else wanted.push(middle(pulls.map(([other, shift, w]) => [other.x + shift, w]), spot.x));
          weights.push(weight || 0.1);
        }
        fit(layer, wanted, weights);
      }
    }
    straighten(layers, pieces);
  }

  function middle(places, now) {
    places.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const half = places.reduce((sum, place) => sum + place[1], 0) / 2;
    let passed = 0;
    for (let n = 0; n < places.length; n++) {
      passed += places[n][1];
      if (passed > half) return places[n][0];
      if (passed === half) return Math.min(Math.max(now, places[n][0]), places[n + 1][0]);
    }
    return now;
  }

  function fit(layer, wanted, weights) {
    const offsets = [], pools = [];
    let offset = 0;
    layer.forEach((spot, n) => {
      offsets.push(offset);
      offset += spot.width + (n + 1 < layer.length ? Math.max(room(spot), room(layer[n + 1])) : 0);
    });
    layer.forEach((_, n) => {
      pools.push([(wanted[n] - offsets[n]) * weights[n], weights[n], 1]);
      while (pools.length > 1) {
        const top = pools[pools.length - 1], under = pools[pools.length - 2];
        if (under[0] / under[1] <= top[0] / top[1]) break;
        pools.pop();
        under[0] += top[0]; under[1] += top[1]; under[2] += top[2];
      }
    });
    let at = 0;
    for (const [total, weight, count] of pools) {
      for (let n = 0; n < count; n++, at++) layer[at].x = total / weight + offsets[at];
    }
  }

  function chains(pieces) {
    const fed = new Set(pieces.map(p => p.end)), main = pieces.filter(p => !p.start.box || fed.has(p.start));
    const outs = new Map(), ins = new Map(), after = new Map();
    for (const p of main) { push(outs, p.start, p); push(ins, p.end, p); }
    for (const p of main) {
      const line = !p.start.box && !p.end.box;
      if (line || (outs.get(p.start).length === 1 && ins.get(p.end).length === 1)) {
        after.set(p.start, [p.end, startX(p) - endX(p)]);
      }
    }
    return after;
  }

  function straighten(layers, pieces) {
    const after = chains(pieces), later = new Set([...after.values()].map(next => next[0]));
    const align = (run, low, high) => {
      const x = Math.min(Math.max(median(run.map(([spot, shift]) => spot.x - shift)), low), high);
      for (const [spot, shift] of run) spot.x = x + shift;
    };
    for (const head of layers.flat().filter(spot => after.has(spot) && !later.has(spot))) {
      let run = [], low = -Infinity, high = Infinity, shift = 0;
      for (let at = head; at;) {
        const layer = layers[at.rank], l = layer[at.order - 1], r = layer[at.order + 1];
        const left = l ? Math.min(at.x, l.x + l.width + Math.max(room(l), room(at))) : -Infinity;
        const right = r ? Math.max(at.x, r.x - at.width - Math.max(room(r), room(at))) : Infinity;
        if (Math.max(low, left - shift) > Math.min(high, right - shift)) {
          align(run, low, high);
          run = []; low = -Infinity; high = Infinity; shift = 0;
        }
        run.push([at, shift]);
        low = Math.max(low, left - shift); high = Math.min(high, right - shift);
        const [next, further] = after.get(at) || [null, 0];
        at = next; shift += further;
      }
      align(run, low, high);
    }
  }

  function draw(box, layers, pieces, frame) {
    const pad = frame ? PAD : 0, spots = layers.flat();
    let left = spots.length ? Math.min(...spots.map(spot => spot.x)) : 0;
    if (frame) {
      const ports = spots.filter(spot => spot.entry !== null).map(spot => spot.x - left + PAD).sort((a, b) => a - b);
      const at = title(ports, box.port);
      left -= Math.max(0, -at);
      box.titleX = Math.max(at, PAD);
    }
    for (const spot of spots) spot.x += pad - left;
    const widest = Math.max(0, ...spots.map(spot => spot.x + spot.width));
    box.width = frame ? Math.max(widest + pad, box.titleX + box.port + PAD) : widest;
    const tops = [], bottoms = [], far = layers.map(() => 0), portsOnly = layers.map(l => l.every(spot => !spot.box));
    for (const p of pieces) {
      far[p.end.rank] = Math.max(far[p.end.rank], Math.abs(p.start.x + startX(p) - p.end.x - endX(p)));
    }
    let y = frame ? HEAD : 0;
    layers.forEach((layer, rank) => {
      if (rank) y += (portsOnly[rank] || portsOnly[rank - 1] ? GAP * 0.6 : GAP) + Math.min(46, 0.06 * far[rank]);
      tops.push(y);
      y += Math.max(0, ...layer.map(spot => spot.box ? spot.box.height : 0));
      bottoms.push(y);
    });
    const foot = layers[layers.length - 1], ported = foot.length > 0 && foot.every(spot => spot.exit !== null);
    box.height = y + (ported || !frame ? 0 : pad);
    const fed = new Set(pieces.map(p => p.end));
    for (const spot of spots) {
      if (spot.box) {
        spot.box.x = spot.x;
        spot.box.y = fed.has(spot) ? tops[spot.rank] : bottoms[spot.rank] - spot.box.height;
      } else if (spot.entry !== null) box.entries.set(spot.entry, spot.x);
      else if (spot.exit !== null) box.exits.set(spot.exit, spot.x);
    }
    return pieces.map(p => ({
      x: p.start.x + startX(p),
      y: p.start.box ? p.start.box.y + p.start.box.height
        : p.start.entry !== null && frame ? 0 : tops[p.start.rank],
      bend: bottoms[p.start.rank],
      toX: p.end.x + endX(p),
      straight: tops[p.end.rank],
      toY: p.end.box ? p.end.box.y : tops[p.end.rank],
      leaves: !!p.start.box && !p.start.box.inside,
      arrives: !!p.end.box && !p.end.box.inside,
      source: p.source, targets: p.targets,
    }));
  }

  function title(ports, width) {
    let at = PAD;
    for (const port of ports) {
      if (port - 6 >= at + width) return at;
      at = Math.max(at, port + 8);
    }
    const inner = ports.length ? ports[ports.length - 1] + 8 : PAD;
    return ports.length <= 6 && inner < 420 ? inner : -(width + PAD);
  }

  window.weftGraphLayout = arrange;
})();
