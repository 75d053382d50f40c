// Attention: what each head attends to in a text, and the loss of the text without some heads.
import { mount as drawAttention } from "./attention.js";
import { comparison, switchOffHint } from "./attention_off.js";
import { debounced, h } from "./dom.js";
import { latest, readingView } from "./reading.js";

export const title = "Attention";
export const about = "What each head attends to. Switch heads off to see how the loss changes.";
export const path = "attention";

const HEAD = /^(encoder|decoder|cross)\.\d+\.\d+$/;
const KINDS = ["bahdanau", "encoder", "encoder-decoder", "decoder"];

export const lacks = info => (KINDS.includes(info?.kind) ? ""
  : `has no attention: it ${info?.kind === "ngram" ? "counts n-grams" : "is recurrent"}`);

export async function mount(main, context) {
  const view = new AttentionView(context);
  /** @type {any} */
  const options = { view: "attention", route: "maps", draw: (place, maps) => view.draw(place, maps, options.sent),
    svg: () => view.pictures(), words: () => view.words() };
  await readingView(main, context, options);
  return view;
}

class AttentionView {
  constructor(context) {
    this.context = context;
    this.baselines = new Map(); // responses with all heads on
    this.read = { input: null, target: null }; // the texts that are shown
    /** @type {any} */
    this.shown = null;
    /** @type {string[] | null} */
    this.kinds = null;
    /** @type {any[] | null} */
    this.responses = null;
    this.panel = h("div", { class: "attention-off" }, switchOffHint());
    this.without = context.info.words && h("section", { class: "attention-without", "aria-label": "Without heads" },
      h("h3", {}, "Without heads"), this.panel);
    this.off = new Set((context.state.off ?? "").split(",").filter(each => HEAD.test(each)));
    this.measured = debounced(latest(context, this.panel, ending => this.measure(ending)), 120);
  }

  close() {
    this.shown?.close();
  }

  async draw(place, maps, { input = null, target = null }) {
    this.read = { input, target };
    this.forget(maps.parts);
    const before = this.shown;
    this.shown = await drawAttention(place, maps, {
      chosen: { ...this.context.state }, off: this.off, below: this.without,
      onchoose: changed => this.context.set(changed),
      onoff: this.without ? off => this.switchOff(off) : undefined,
    });
    before?.close();
    this.kinds = maps.parts.map(part => part.kind);
    if (this.without) this.measured.now();
  }

  // heads from the address that this model does not have
  forget(parts) {
    for (const each of this.off) {
      const [kind, layer, head] = each.split("."), part = parts.find(one => one.kind === kind);
      if (!part || Number(layer) >= part.layers || Number(head) >= part.heads) this.off.delete(each);
    }
  }

  switchOff(off) {
    this.off = off;
    this.shown.setOff(off);
    this.context.set({ off: [...off].join(",") || undefined });
    this.measured();
  }

  // ---- loss without heads

  async measure(ending) {
    this.responses = null;
    if (!this.off.size) return this.panel.replaceChildren(switchOffHint());
    const heads = [...this.off].map(each => {
      const [kind, layer, head] = each.split(".");
      return [kind, Number(layer), Number(head)];
    });
    this.responses = [await this.withoutHeads([], ending), await this.withoutHeads(heads, ending)];
    return this.panel.replaceChildren(comparison(this.off, this.responses[0], this.responses[1], on =>
      this.switchOff(new Set([...this.off].filter(each => !on.includes(each))))));
  }

  // with all heads on, requested once per text
  async withoutHeads(heads, ending) {
    const { info, api } = this.context;
    const body = { model: info.id, ...this.read, heads }, key = JSON.stringify(body);
    if (this.baselines.has(key)) return this.baselines.get(key);
    const response = (await api.post("v1/explain/without_heads", body, ending)).without_heads;
    if (!heads.length) this.baselines = new Map([[key, response]]);
    return response;
  }

  // ---- saving

  pictures() {
    return [...this.shown?.pictures() ?? [], this.responses && this.panel];
  }

  // of several kinds, the command shows cross-attention
  words() {
    const { kind, layer, head } = this.context.state, selected = layer !== undefined && head !== undefined;
    return selected && (!kind || !this.kinds || kind === this.kinds.at(-1)) ? [`--layer ${layer} --head ${head}`] : [];
  }
}
