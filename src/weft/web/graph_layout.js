// Where the boxes and lines of a computation graph stand: the same sums as in explain/graph/layout.py.
const PAD = 12, HEAD = 24, GAP = 30, SLOPE = 0.06, MAX_MORE = 46, NARROW = 12, OUTSIDE = -1;

/* Puts the levels of open boxes together. A box has width, height and port, where lines meet it; an open one has
   `inside`, `laid` and the width of its `title`, and gets its size. Gives the lines. */
export function arrange(box, frame) {
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

export const settle = (box, x, y) => {
  box.x = (box.x ?? 0) + x; box.y = (box.y ?? 0) + y;
  for (const child of box.inside || []) settle(child, box.x, box.y);
};
