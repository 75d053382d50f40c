// Attention: the weights of a page, unpacked, and the lines of a word. attention.js shows them.
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_ROWS = 44, FAINTEST = 0.02, ROW = 19;

  async function inflated(text) {
    const packed = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // One kind of attention: weights by (layer, head, row, column), rows and columns being blocks of tokens.
  class Maps {
    constructor(given, bytes, best) {
      Object.assign(this, given);
      this.bytes = bytes;
      this.best = best;
      this.perMap = this.past ? (this.rows * (this.rows + 1)) / 2 : this.rows * this.columns;
      this.square = Float32Array.from({ length: this.levels + 1 }, (_, n) => (n / this.levels) ** 2);
    }
    level(layer, head, row, column) {
      if (this.past && column > row) return 0;
      const inside = this.past ? (row * (row + 1)) / 2 + column : row * this.columns + column;
      return this.bytes[(layer * this.heads + head) * this.perMap + inside];
    }
    weight(layer, head, row, column) { return this.square[this.level(layer, head, row, column)]; }
    // [key, weight] of a token, the strongest first
    strongest(layer, head, query) {
      const found = [];
      if (this.best) {
        const each = this.layers * this.heads * this.queries.length, all = each * this.count;
        for (let rank = 0; rank < this.count; rank++) {
          const at = rank * each + (layer * this.heads + head) * this.queries.length + query;
          found.push([this.best[at] + 256 * this.best[all + at], this.square[this.best[2 * all + at]]]);
        }
      } else {
        for (let key = 0; key < this.keys.length; key++) found.push([key, this.weight(layer, head, query, key)]);
      }
      return found.filter(([, weight]) => weight > 0).sort((a, b) => b[1] - a[1]);
    }
    // the largest level of each row
    largest(layer, head) {
      return Uint8Array.from({ length: this.rows }, (_, row) => {
        let most = 0;
        for (let column = 0; column < this.columns; column++) most = Math.max(most, this.level(layer, head, row, column));
        return most;
      });
    }
  }

  function element(name, text, parent) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function drawn(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  const short = (label, most = 16) => {
    const signs = Array.from(label);
    return signs.length > most ? signs.slice(0, most - 1).join("") + "…" : label;
  };
  const number = (weight) => (weight === 0 ? "0" : weight < 0.001 ? "<0.001" : weight.toFixed(3));
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // a colour of the style sheet as [red, green, blue, opacity]
  function rgb(text) {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  }

  // From levels to colours: the page's own, which differ by day and by night.
  class Shades {
    constructor(root) {
      this.root = root;
      this.palette = new Uint32Array(256);
      this.take();
    }
    take() {
      const style = getComputedStyle(this.root), bytes = new Uint8Array(this.palette.buffer);
      const [card, deep] = ["--card", "--deep"].map((name) => rgb(style.getPropertyValue(name)));
      [this.ink, this.soft, this.mark] = ["--ink", "--soft", "--c1"].map((name) => style.getPropertyValue(name));
      for (let n = 0; n < 256; n++)
        for (let part = 0; part < 4; part++)
          bytes[4 * n + part] = Math.round(card[part] + ((deep[part] - card[part]) * n) / 255);
    }
    choose(how, maps) {
      [this.how, this.levels, this.square, this.tables] = [how, maps.levels, maps.square, []];
    }
    // what each level is drawn as, 0 … 255, in a row whose largest level is `largest`
    table(largest) {
      if (this.how !== "row") largest = this.levels;
      const top = this.square[largest] || 1;
      return this.tables[largest] ??= Uint8Array.from({ length: this.levels + 1 }, (_, n) =>
        255 * Math.min(1, this.how === "root" ? n / this.levels : this.square[n] / top));
    }
    // levels (rows × columns) onto a canvas of as many points; `largest` of each row
    paint(canvas, levels, columns, largest) {
      const rows = levels.length / columns;
      [canvas.width, canvas.height] = [columns, rows];
      const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
      const points = new Uint32Array(image.data.buffer);
      for (let row = 0, at = 0; row < rows; row++) {
        const table = this.table(largest[row]);
        for (let column = 0; column < columns; column++, at++) points[at] = this.palette[table[levels[at]]];
      }
      context.putImageData(image, 0, 0);
    }
  }

  const ruler = document.createElement("canvas").getContext("2d");
  function textWidth(text) {
    ruler.font = "bold 13px system-ui, sans-serif";
    return Math.ceil(ruler.measureText(text).width);
  }

  // The lecture's picture: tokens in two columns, and lines from a query to what it attends to, a colour a head. `asked`
  // is what is drawn: a layer, heads, a query. The squares beside a key tell how much each head gives it.
  function drawLines(svg, maps, { layer, heads, query }) {
    const room = svg.parentElement.clientWidth || 360, narrow = room < 560;
    const found = heads.map((head) => maps.strongest(layer, head, query));
    const most = new Map();
    for (const each of found) for (const [key, weight] of each) most.set(key, Math.max(most.get(key) ?? 0, weight));
    let left = [...maps.queries.keys()], right = [...maps.keys.keys()];
    if (left.length > MOST_ROWS) left = left.filter((place) => Math.abs(place - query) <= 12);
    if (right.length > MOST_ROWS)
      right = [...most].sort((a, b) => b[1] - a[1]).slice(0, MOST_ROWS - 8).map(([key]) => key).sort((a, b) => a - b);
    const named = (labels, place) => (labels.length > MOST_ROWS ? `${place}: ` : "") + short(labels[place], narrow ? 9 : 14);
    const wide = (labels, places) => 14 + Math.max(...places.map((place) => textWidth(named(labels, place))));
    const square = narrow ? 11 : 14, squares = square * heads.length + 4;
    const from = wide(maps.queries, left), beside = wide(maps.keys, right);
    const to = from + clamp(room - from - beside - squares, 56, 200), cells = to + beside;
    const height = ROW * (Math.max(left.length, right.length) + 1.5), width = cells + squares;
    svg.replaceChildren();
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) svg.setAttribute(name, value);
    const y = (row) => ROW * (row + 1.5), rows = new Map(right.map((key, row) => [key, row])), start = left.indexOf(query);
    const hue = (head) => `oklch(var(--att-lightness) 0.14 ${Math.round(250 + (360 * head) / maps.heads) % 360})`;
    left.forEach((place, row) => {
      const kind = place === query ? "att-chosen" : "att-quiet";
      drawn("text", { x: from - 6, y: y(row), class: kind, "text-anchor": "end" }, svg, named(maps.queries, place));
    });
    right.forEach((place, row) => drawn("text", { x: to + 6, y: y(row) }, svg, named(maps.keys, place)));
    drawn("text", { x: cells - 6, y: 10, "text-anchor": "end", class: "att-tiny" }, svg, "head");
    const said = [];
    heads.forEach((head, n) => {
      // the lines of the heads end beside each other, so that none hides the next
      const aside = 0.6 * ROW * ((n + 0.5) / heads.length - 0.5), x = cells + n * square, weights = new Map(found[n]);
      drawn("text", { x: x + square / 2 - 1, y: 10, "text-anchor": "middle", class: "att-tiny" }, svg, head);
      for (const [key, weight] of found[n])
        if (rows.has(key) && (weight >= FAINTEST || weight === found[n][0][1]))
          drawn("line", { x1: from, y1: y(start) + aside, x2: to, y2: y(rows.get(key)) + aside, stroke: hue(head),
            "stroke-width": 0.7 + 5 * weight, "stroke-opacity": 0.3 + 0.7 * weight }, svg);
      drawn("path", { d: right.map((_, row) => `M${x} ${y(row) - 8}h${square - 2}v16h${2 - square}z`).join(""),
        class: "att-cell" }, svg);
      right.forEach((key, row) => {
        const opacity = Math.sqrt(weights.get(key) ?? 0).toFixed(2);
        if (opacity > 0) drawn("rect", { x, y: y(row) - 8, width: square - 2, height: 16, fill: hue(head), opacity }, svg);
      });
      if (found[n].length) said.push(`head ${head}: ${maps.keys[found[n][0][0]]} ${number(found[n][0][1])}`);
    });
    const strongest = `strongest by head: ${said.join(", ")}`;
    svg.setAttribute("aria-label", `Lines from ${maps.queries[query]} in layer ${layer}; ${strongest}`);
  }

  globalThis.weftAttention = { Maps, inflated, element, short, number, clamp, Shades, drawLines };
})();
