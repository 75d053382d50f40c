// Attention: a heat map of one head, the tokens of the text, the lines of a word, and the grid of all heads.
(() => {
  "use strict";
  const { Maps, inflated, element, short, number, clamp, Shades, drawLines } = globalThis.weftAttention;

  class View {
    constructor(root, parts) {
      this.root = root;
      this.parts = parts;
      this.find = (name) => root.querySelector(`.att-${name}`);
      this.heat = this.find("heat");
      this.layer = this.head = 0;
      for (const name of ["two", "lines", "all"]) this.find(name).hidden = false;
      this.find("status").hidden = true;
      this.listen();
      this.shades = new Shades(root);
      this.choosePart(Number(this.find("kind").value));
    }

    // ---- what is chosen

    choosePart(index) {
      this.maps = this.parts[index];
      this.shades.choose(this.find("shade").value, this.maps);
      const { maps } = this;
      this.fill("layer", maps.layers);
      this.fill("head", maps.heads);
      this.layer = Math.min(this.layer, maps.layers - 1);
      this.head = Math.min(this.head, maps.heads - 1);
      this.query = Math.min(this.query ?? Math.floor(maps.queries.length * 0.7), maps.queries.length - 1);
      for (const build of ["ranges", "whole", "strips", "buildGrid"]) this[build]();
      this.chooseHead(this.layer, this.head);
    }

    fill(name, count) {
      this.find(name).replaceChildren(...Array.from({ length: count }, (_, n) => new Option(n, n)));
    }

    ranges() {
      const { queries, block } = this.maps, select = this.find("range"), size = 32 * block;
      select.replaceChildren(new Option(`all ${queries.length}`, "all"), new Option("a part", "part"));
      select.options[1].hidden = true;
      for (let start = 0; queries.length > size && start < queries.length; start += size) {
        const stop = Math.min(start + size, queries.length);
        select.add(new Option(`${start} to ${stop - 1}`, start / block));
      }
    }

    chooseHead(layer, head) {
      const before = this.buttons[this.layer * this.maps.heads + this.head];
      [this.layer, this.head] = [layer, head];
      this.find("layer").value = layer;
      this.find("head").value = head;
      for (const [button, on] of [[before, false], [this.buttons[layer * this.maps.heads + head], true]]) {
        button.setAttribute("aria-pressed", on);
        button.tabIndex = on ? 0 : -1;
      }
      this.largest = this.maps.largest(layer, head);
      this.drawHeat();
      this.showQuery();
    }

    chooseQuery(query, focus = false) {
      this.query = clamp(query, 0, this.maps.queries.length - 1);
      this.drawHeat();
      this.showQuery();
      if (focus) this.tokens[this.query].focus();
    }

    // ---- the heat map

    whole() {
      const { rows, columns } = this.maps;
      this.seen = { top: 0, bottom: rows, left: 0, right: columns };
      this.cell = null;
      this.find("range").value = "all";
    }

    zoom(factor) {
      const { rows, columns, block } = this.maps, { top, bottom, left, right } = this.seen;
      const [row, column] = this.cell ?? [Math.floor(this.query / block), Math.floor((left + right) / 2)];
      const span = (low, high, at, most) => {
        const size = clamp(Math.round((high - low) * factor), Math.min(4, most), most);
        const start = clamp(at - Math.floor(size / 2), 0, most - size);
        return [start, start + size];
      };
      const [newTop, newBottom] = span(top, bottom, row, rows);
      const [newLeft, newRight] = span(left, right, column, columns);
      this.seen = { top: newTop, bottom: newBottom, left: newLeft, right: newRight };
      this.find("range").value = newBottom - newTop === rows && newRight - newLeft === columns ? "all" : "part";
      this.drawHeat();
    }

    label(labels, at) {
      const { block } = this.maps, far = labels.length > 60 ? `${at * block}: ` : "";
      return far + short(labels[at * block], 13);
    }

    drawHeat() {
      const { maps, heat, seen } = this, rows = seen.bottom - seen.top, columns = seen.right - seen.left;
      const context = heat.getContext("2d"), ratio = window.devicePixelRatio || 1;
      const room = heat.parentElement.clientWidth || 320;
      context.font = "11px system-ui, sans-serif";
      const widest = (labels, from, to) => {
        let most = 20;
        for (let at = from; at < to; at++) most = Math.max(most, context.measureText(this.label(labels, at)).width);
        return Math.ceil(most) + 8;
      };
      const gutter = Math.min(widest(maps.queries, seen.top, seen.bottom), room * 0.3);
      const header = Math.min(widest(maps.keys, seen.left, seen.right), 110);
      const size = Math.min((room - gutter - 4) / columns, 44, Math.max(600 / rows, 3));
      this.frame = { gutter, header, size };
      const width = room, height = Math.ceil(header + size * rows + 4);
      [heat.width, heat.height] = [width * ratio, height * ratio];
      heat.style.height = `${height}px`;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = "11px system-ui, sans-serif";
      this.drawCells(context, rows, columns);
      Object.assign(context, { fillStyle: this.shades.ink, textBaseline: "middle" });
      const step = Math.ceil(13 / size);
      context.textAlign = "right";
      for (let row = 0; row < rows; row += step)
        context.fillText(this.label(maps.queries, row + seen.top), gutter - 5, header + (row + 0.5) * size, gutter - 6);
      context.textAlign = "left";
      for (let column = 0; column < columns; column += step) {
        context.save();
        context.translate(gutter + (column + 0.5) * size, header - 5);
        context.rotate(-Math.PI / 2);
        context.fillText(this.label(maps.keys, column + seen.left), 0, 0, header - 6);
        context.restore();
      }
      context.strokeStyle = this.shades.soft;
      context.strokeRect(gutter - 0.5, header - 0.5, size * columns + 1, size * rows + 1);
      context.strokeStyle = this.shades.mark;
      context.lineWidth = 1.5;
      const row = Math.floor(this.query / maps.block) - seen.top;
      if (row >= 0 && row < rows) context.strokeRect(gutter, header + row * size, size * columns, size);
      if (this.cell) {
        const [r, c] = [this.cell[0] - seen.top, this.cell[1] - seen.left];
        context.lineWidth = 2.5;
        if (r >= 0 && r < rows && c >= 0 && c < columns)
          context.strokeRect(gutter + c * size - 1, header + r * size - 1, size + 2, size + 2);
      }
      if (this.dragged) {
        const [x, y, w, h] = this.dragged;
        context.setLineDash([4, 3]);
        context.strokeRect(x, y, w, h);
      }
      heat.setAttribute("aria-label", `${maps.name}, layer ${this.layer}, head ${this.head}, queries down, keys across. ` +
        "Arrow keys read the cells, Enter chooses a query, plus and minus zoom, Escape shows all.");
    }

    drawCells(context, rows, columns) {
      const { maps, seen, frame } = this, levels = new Uint8Array(rows * columns);
      for (let row = 0, at = 0; row < rows; row++)
        for (let column = 0; column < columns; column++)
          levels[at++] = maps.level(this.layer, this.head, row + seen.top, column + seen.left);
      const small = document.createElement("canvas");
      this.shades.paint(small, levels, columns, this.largest.subarray(seen.top, seen.bottom));
      context.imageSmoothingEnabled = false;
      context.drawImage(small, frame.gutter, frame.header, frame.size * columns, frame.size * rows);
    }

    read(row, column) {
      const { maps, seen } = this;
      this.cell = [clamp(row, 0, maps.rows - 1), clamp(column, 0, maps.columns - 1)];
      [row, column] = this.cell;
      if (row < seen.top || row >= seen.bottom || column < seen.left || column >= seen.right) this.zoom(1);
      const named = (labels, at) => {
        const first = at * maps.block, last = Math.min(first + maps.block, labels.length) - 1;
        return first === last ? `${first} ${labels[first]}` : `${first}–${last} ${labels.slice(first, last + 1).join("")}`;
      };
      const weight = maps.past && column > row ? "masked: it comes later" :
        (maps.block > 1 ? "at most " : "") + number(maps.weight(this.layer, this.head, row, column));
      this.find("readout").textContent = `${named(maps.queries, row)} → ${named(maps.keys, column)}: ${weight}`;
      this.drawHeat();
    }

    // ---- the tokens, and what the chosen one attends to

    strips() {
      const { maps } = this, strip = this.find("queries"), other = this.find("keys"), cross = maps.kind === "cross";
      this.pressed = -1;
      strip.replaceChildren();
      other.replaceChildren();
      other.hidden = !cross;
      this.tokens = maps.queries.map((label, place) => {
        const button = element("button", label, strip);
        button.type = "button";
        button.dataset.place = place;
        button.tabIndex = -1;
        button.setAttribute("aria-pressed", false);
        return button;
      });
      this.targets = cross ? maps.keys.map((label) => {
        const item = element("span", label, other);
        item.setAttribute("role", "listitem");
        return item;
      }) : this.tokens;
    }

    showQuery() {
      const { maps } = this, found = maps.strongest(this.layer, this.head, this.query), label = maps.queries[this.query];
      const verb = maps.kind === "cross" ? "Writing" : "From";
      this.find("from").textContent = `${verb} “${short(label, 24)}” (${this.query}), layer ${this.layer}, head ${this.head}`;
      const weights = new Map(found);
      this.targets.forEach((target, key) => {
        const share = Math.round(100 * Math.sqrt(weights.get(key) ?? 0));
        target.style.background = share ? `color-mix(in srgb, var(--deep) ${share}%, var(--card))` : "";
        target.style.color = share > 50 ? "var(--card)" : "";
      });
      for (const [token, on] of [[this.tokens[this.pressed], false], [this.tokens[this.query], true]]) {
        token?.setAttribute("aria-pressed", on);
        if (token) token.tabIndex = on ? 0 : -1;
      }
      this.pressed = this.query;
      const strip = this.find("queries"), top = this.tokens[this.query].offsetTop;
      if (top < strip.scrollTop || top > strip.scrollTop + strip.clientHeight - 30) strip.scrollTop = top - strip.clientHeight / 2;
      const table = this.find("table");
      table.caption.textContent = `The strongest keys of ${label}`;
      table.tBodies[0].replaceChildren(...found.slice(0, 8).map(([key, weight]) => {
        const row = document.createElement("tr");
        element("td", short(maps.keys[key], 24), row);
        element("td", key, row);
        element("td", number(weight), row);
        return row;
      }));
      this.drawLines();
    }

    drawLines() {
      const heads = this.find("which").value === "one" ? [this.head] : [...Array(this.maps.heads).keys()];
      drawLines(this.find("svg"), this.maps, { layer: this.layer, heads, query: this.query });
    }

    // ---- the grid of all heads

    buildGrid() {
      const { maps } = this, grid = this.find("grid");
      grid.replaceChildren();
      grid.style.setProperty("--att-heads", maps.heads);
      element("span", "", grid);
      for (let head = 0; head < maps.heads; head++) element("span", head, grid).className = "att-tick";
      this.buttons = [];
      for (let layer = 0; layer < maps.layers; layer++) {
        element("span", layer, grid).className = "att-tick";
        for (let head = 0; head < maps.heads; head++) {
          const button = element("button", undefined, grid);
          button.type = "button";
          button.dataset.at = `${layer},${head}`;
          button.setAttribute("aria-label", `layer ${layer}, head ${head}`);
          button.setAttribute("aria-pressed", false);
          button.tabIndex = -1;
          button.append(document.createElement("canvas"));
          this.buttons.push(button);
        }
      }
      this.pool();
      this.drawGrid();
    }

    // every map with at most 40 points a side, each the largest of a block
    pool() {
      const { maps } = this, size = Math.ceil(Math.max(maps.rows, maps.columns) / 40);
      const rows = Math.ceil(maps.rows / size), columns = Math.ceil(maps.columns / size);
      this.small = { columns, levels: [] };
      let at = 0;
      for (let map = 0; map < maps.layers * maps.heads; map++) {
        const levels = new Uint8Array(rows * columns);
        for (let row = 0; row < maps.rows; row++)
          for (let column = 0, end = maps.past ? row + 1 : maps.columns; column < end; column++, at++) {
            const to = Math.floor(row / size) * columns + Math.floor(column / size);
            if (maps.bytes[at] > levels[to]) levels[to] = maps.bytes[at];
          }
        this.small.levels.push(levels);
      }
    }

    drawGrid() {
      const { columns, levels } = this.small;
      this.buttons.forEach((button, map) => {
        const of = levels[map], largest = new Uint8Array(of.length / columns);
        for (let at = 0; at < of.length; at++) {
          const row = Math.floor(at / columns);
          if (of[at] > largest[row]) largest[row] = of[at];
        }
        this.shades.paint(button.firstChild, of, columns, largest);
      });
    }

    // ---- what a person does

    listen() {
      const on = (name, kind, act) => this.find(name).addEventListener(kind, act);
      on("kind", "change", (event) => this.choosePart(Number(event.target.value)));
      on("layer", "change", (event) => this.chooseHead(Number(event.target.value), this.head));
      on("head", "change", (event) => this.chooseHead(this.layer, Number(event.target.value)));
      on("shade", "change", (event) => {
        this.shades.choose(event.target.value, this.maps);
        this.drawHeat();
        this.drawGrid();
      });
      on("which", "change", () => this.drawLines());
      on("in", "click", () => this.zoom(0.6));
      on("out", "click", () => this.zoom(1 / 0.6));
      on("range", "change", (event) => {
        if (event.target.value === "all") this.whole();
        else {
          const start = Number(event.target.value), { rows, columns, kind } = this.maps, stop = Math.min(start + 32, rows);
          const across = kind === "cross" ? { left: 0, right: columns } : { left: start, right: stop };
          this.seen = { top: start, bottom: stop, ...across };
          this.cell = null;
        }
        this.drawHeat();
      });
      on("grid", "click", (event) => {
        const button = event.target.closest("button");
        if (button) this.chooseHead(...button.dataset.at.split(",").map(Number));
      });
      on("grid", "keydown", (event) => {
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (!step) return;
        event.preventDefault();
        const { layers, heads } = this.maps;
        this.chooseHead(clamp(this.layer + step[0], 0, layers - 1), clamp(this.head + step[1], 0, heads - 1));
        this.buttons[this.layer * heads + this.head].focus();
      });
      on("queries", "click", (event) => {
        const token = event.target.closest("button");
        if (token) this.chooseQuery(Number(token.dataset.place));
      });
      on("queries", "keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
        if (!step) return;
        event.preventDefault();
        this.chooseQuery(this.query + step, true);
      });
      this.listenHeat();
      const again = () => { this.shades.take(); this.drawHeat(); this.drawGrid(); };
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
      addEventListener("beforeprint", again);
      addEventListener("resize", () => { this.drawHeat(); this.drawLines(); });
    }

    listenHeat() {
      const { heat } = this;
      let begun = null;
      const at = (event) => {
        const { gutter, header, size } = this.frame;
        return [Math.floor((event.offsetY - header) / size) + this.seen.top, Math.floor((event.offsetX - gutter) / size) + this.seen.left];
      };
      const inside = ([row, column]) =>
        row >= this.seen.top && row < this.seen.bottom && column >= this.seen.left && column < this.seen.right;
      heat.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "touch" && inside(at(event))) begun = [event.offsetX, event.offsetY, at(event)];
      });
      heat.addEventListener("pointermove", (event) => {
        if (begun && Math.hypot(event.offsetX - begun[0], event.offsetY - begun[1]) > 6)
          this.dragged = [begun[0], begun[1], event.offsetX - begun[0], event.offsetY - begun[1]];
        const place = at(event);
        if (inside(place) && (this.dragged || !this.cell || place[0] !== this.cell[0] || place[1] !== this.cell[1])) this.read(...place);
      });
      const end = (event) => {
        if (this.dragged) {
          const { rows, columns } = this.maps, [a, b] = [begun[2], at(event)];
          const span = (x, y, most) => [clamp(Math.min(x, y), 0, most - 1), clamp(Math.max(x, y) + 1, 1, most)];
          const [top, bottom] = span(a[0], b[0], rows), [left, right] = span(a[1], b[1], columns);
          this.seen = { top, bottom, left, right };
          this.find("range").value = "part";
        } else if (inside(at(event))) {
          this.read(...at(event));
          this.chooseQuery(at(event)[0] * this.maps.block);
        }
        begun = this.dragged = null;
        this.drawHeat();
      };
      heat.addEventListener("pointerup", end);
      heat.addEventListener("pointerleave", () => { begun = this.dragged = null; this.drawHeat(); });
      heat.addEventListener("keydown", (event) => {
        const [row, column] = this.cell ?? [Math.floor(this.query / this.maps.block), this.seen.left];
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (step) this.read(row + step[0], column + step[1]);
        else if (event.key === "Enter" || event.key === " ") this.chooseQuery(row * this.maps.block);
        else if (event.key === "+" || event.key === "=") this.zoom(0.6);
        else if (event.key === "-") this.zoom(1 / 0.6);
        else if (event.key === "Escape" || event.key === "0") { this.whole(); this.drawHeat(); }
        else return;
        event.preventDefault();
      });
    }
  }

  for (const root of document.querySelectorAll(".att")) {
    const given = JSON.parse(root.querySelector(".att-data").textContent);
    Promise.all(given.map(async (part) => new Maps(part, await inflated(part.weights), part.best && (await inflated(part.best)))))
      .then((parts) => new View(root, parts))
      .catch((error) => { root.querySelector(".att-status").textContent = `The probabilities cannot be unpacked here: ${error.message}`; });
  }
})();
