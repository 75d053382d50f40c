// Where each head looks while the model reads a text, and what the text costs without some of them.
import { mount as drawn } from "./attention.js";
import { comparison, nothingOff } from "./attention_off.js";
import { debounced, h } from "./dom.js";
import { latest, readingView } from "./reading.js";

export const title = "Attention";
export const about = "Where each head looks. Switch heads off, and see what the text loses.";
export const path = "attention";

const HEAD = /^(encoder|decoder|cross)\.\d+\.\d+$/;
const KINDS = ["bahdanau", "encoder", "encoder-decoder", "decoder"];

export function shows(info) { return info !== null && KINDS.includes(info.kind); }

export async function mount(main, context) {
  const view = new AttentionView(context);
  await readingView(main, context, { view: "attention", route: "maps", draw: (place, maps) => view.draw(place, maps),
    svg: () => view.pictures(), options: () => view.options() });
  return view;
}

class AttentionView {
  constructor(context) {
    Object.assign(this, { context, wholes: new Map() });
    this.panel = h("div", { class: "attention-off" }, nothingOff());
    this.without = context.info.words && h("section", { class: "attention-without", "aria-label": "Without heads" },
      h("h3", {}, "Without heads"), this.panel);
    this.off = new Set((context.state.off ?? "").split(",").filter(each => HEAD.test(each)));
    this.measured = debounced(latest(context, this.panel, ending => this.measure(ending)), 120);
  }

  close() {
    this.shown?.close();
  }

  async draw(place, maps) {
    this.forget(maps.parts);
    const before = this.shown;
    this.shown = await drawn(place, maps, {
      chosen: { ...this.context.state }, off: this.off, below: this.without,
      onchoose: changed => this.context.set(changed),
      onoff: this.without ? off => this.switchOff(off) : undefined,
    });
    before?.close();
    this.kinds = maps.parts.map(part => part.kind);
    if (this.without) this.measured.now();
  }

  // heads that this model has not, as an address may name them
  forget(parts) {
    for (const each of this.off) {
      const [kind, layer, head] = each.split("."), part = parts.find(other => other.kind === kind);
      if (!part || layer >= part.layers || head >= part.heads) this.off.delete(each);
    }
  }

  switchOff(off) {
    this.off = off;
    this.shown.setOff(off);
    this.context.set({ off: [...off].join(",") || undefined });
    this.measured();
  }

  // ---- what the text costs

  async measure(ending) {
    this.answers = null;
    if (!this.off.size) return this.panel.replaceChildren(nothingOff());
    const heads = [...this.off].map(each => {
      const [kind, layer, head] = each.split(".");
      return [kind, Number(layer), Number(head)];
    });
    this.answers = [await this.withoutHeads([], ending), await this.withoutHeads(heads, ending)];
    return this.panel.replaceChildren(comparison(this.off, ...this.answers, on =>
      this.switchOff(new Set([...this.off].filter(each => !on.includes(each))))));
  }

  // with all heads on, it is asked once for a text
  async withoutHeads(heads, ending) {
    const { info, api, state: { text = null, target = null } } = this.context;
    const asked = { model: info.id, input: text, target, heads }, key = JSON.stringify(asked);
    if (this.wholes.has(key)) return this.wholes.get(key);
    const answer = (await api.post("v1/explain/without_heads", asked, ending)).without_heads;
    if (!heads.length) this.wholes = new Map([[key, answer]]);
    return answer;
  }

  // ---- keeping it

  pictures() {
    return [...this.shown?.pictures() ?? [], this.answers && this.panel];
  }

  // the command line shows the heads that read the source, where there are several kinds
  options() {
    const { kind, layer, head } = this.context.state, told = layer !== undefined && head !== undefined;
    return told && (!kind || !this.kinds || kind === this.kinds.at(-1)) ? [`--layer ${layer} --head ${head}`] : [];
  }
}
