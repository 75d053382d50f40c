// The tokens at the left end of their threads. Of a long text some are left out; a count between two chips leads there.
import { s } from "./dom.js";
import { at, chip, part, quoted, rect, text, tokenName } from "./stage_marks.js";
import { withCommas } from "./words.js";

// Ranges of tokens that are not shown: before the first row, between rows, and after the last.
export function gaps(rows, size) {
  const edges = [-1, ...rows, size];
  return edges.slice(1).map((to, n) => ({ row: n, from: edges[n] + 1, to })).filter(({ from, to }) => to > from);
}

// `sheaf` 1: the source of a model that reads one text and writes another.
export function tokensPart(stage, sheaf = 0) {
  const { step, fs } = stage, source = sheaf === 1, names = source ? stage.sourceNames : stage.names;
  const rows = source ? stage.threads.source.rows : stage.threads.rows, here = source ? -1 : stage.here;
  const missing = gaps(rows, source ? step.source_pieces.length : step.pieces.length);
  return { id: source ? "source" : "tokens", at: source ? "source" : "tokens", title: source ? "Source"
    : stage.threads.source ? "Target" : "Tokens",
    width: fs * 6.4, sheaf, rowsNarrow: true, isTokens: true, draw(box) {
      const ys = box.rows(sheaf), rh = box.rh(sheaf), h = Math.min(rh - 4, fs * 2.3);
      const w = box.narrow ? 96 : box.w;
      const chips = names.map((name, n) => {
        const unseen = stage.threads.order && (rows[n] > step.place || rows[n] <= step.place - stage.threads.order
          + 1); // by an n-gram model
        const shown = s("g", { opacity: unseen ? 0.45 : 1 },
          chip(tokenName(name), { x: box.x, y: ys[n], w, h: Math.max(h, fs * 1.25), here: n === here, fs }));
        return stage.canFollow && !source && n !== here ? part(`follow=${rows[n]}`, `Follow ${quoted(name)}`, shown)
          : s("g", {}, shown);
      });
      const more = missing.map(({ row, from, to }) => {
        const y = row < ys.length ? ys[row] - rh * 0.78 : ys[ys.length - 1] + rh * 0.7,
          label = `⋮ ${withCommas(to - from)} more`;
        const shown = [rect(box.x + w * 0.12, y - fs * 0.62, w * 0.76, fs * 1.24, "paper-fill", 3),
          text(box.x + w / 2, y + fs * 0.35, label, "soft middle")];
        return stage.canFollow && !source ? part(`more=${from}-${to}`, `${label}: tokens ${from + 1} to ${to}`, ...shown)
          : s("g", {}, ...shown);
      });
      return [at(stage.indexOf(source ? "source" : "tokens"), chips, more)];
    } };
}
