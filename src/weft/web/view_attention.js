// Where each head looks while the model reads a text, and what the text costs without some of them.
import { debounced, field, h } from "./dom.js";
import { quoted, svgOfText, tools } from "./save.js";
import { mount as drawn } from "./attention.js";
import { changes, comparison, nothingOff, totals } from "./attention_off.js";

export const title = "Attention";
export const about = "Where each head looks. Switch heads off, and see what the text loses.";
export const path = "attention";

const MAX_CHARACTERS = 4000; // that the server looks at
const HEAD = /^(encoder|decoder|cross)\.\d+\.\d+$/;
const KINDS = ["bahdanau", "encoder", "encoder-decoder", "decoder"];

export function shows(info) { return info !== null && KINDS.includes(info.kind); }

export async function mount(main, context) {
  const view = new AttentionView(main, context);
  await view.begin();
  return view;
}

class AttentionView {
  constructor(main, context) {
    Object.assign(this, { context, info: context.info, own: "", wholes: new Map() });
    const { state, info } = context, later = debounced(() => this.typed());
    const box = (rows, value) =>
      h("textarea", { rows, maxlength: MAX_CHARACTERS, spellcheck: "false", oninput: later }, value);
    this.text = box(3, state.text ?? "");
    this.target = info.writes ? box(2, state.target ?? "") : null;
    this.origin = h("p", { class: "soft attention-origin" });
    this.drawing = h("div", { "aria-busy": "true" }, h("p", { class: "soft" }, "Reading …"));
    this.panel = info.words ? h("div", { class: "attention-off" }, nothingOff()) : null;
    this.without = this.panel && h("section", { class: "attention-without", "aria-label": "Without heads" },
      h("h3", {}, "Without heads"), this.panel);
    this.off = new Set((state.off ?? "").split(",").filter(each => HEAD.test(each)));
    this.measured = debounced(() => this.measure(), 120);
    this.target?.setAttribute("placeholder", "empty: what the model writes of its own");
    main.append(
      h("div", { class: "attention-inputs" }, field("Text", this.text), this.target && field("Target", this.target)),
      this.origin, h("h2", { class: "unseen" }, "Heads"), this.drawing,
      tools({ name: "attention", svg: () => this.pictures(), command: () => this.command() }));
  }

  async begin() {
    await Promise.all([this.read(), this.state().text ? null : this.takeOwn()]);
  }

  close() {
    this.shown?.close();
  }

  state() { return this.context.state; }

  // the model's own text, to begin with
  async takeOwn() {
    const { api, signal } = this.context;
    const { text, origin } = await api.post("v1/explain/text", { model: this.info.id }, signal);
    this.own = text;
    this.origin.textContent = origin ? `This text is ${origin}.` : "";
    if (!this.text.value) this.text.value = text;
  }

  typed() {
    const own = this.text.value === this.own;
    this.origin.hidden = !own;
    this.context.set({ text: own ? undefined : this.text.value || undefined, target: this.target?.value || undefined });
    this.read().catch(error => this.context.fail(error));
  }

  asked() {
    const { text, target } = this.state();
    return { model: this.info.id, input: text ?? null, target: target ?? null };
  }

  // One question at a time of a kind: the next one ends the one before.
  async ask(name, path, body) {
    this[name]?.abort();
    const mine = this[name] = new AbortController();
    const signal = AbortSignal.any([mine.signal, this.context.signal]);
    const answer = await this.context.api.post(path, body, signal);
    signal.throwIfAborted();
    return answer;
  }

  async read() {
    this.drawing.setAttribute("aria-busy", "true");
    const { kind, layer, head, token, lines } = this.state();
    let maps;
    try {
      ({ maps } = await this.ask("reading", "v1/explain/maps", this.asked()));
    } catch (error) {
      if (error.name !== "AbortError") this.drawing.removeAttribute("aria-busy"); // else the next one is at work
      throw error;
    }
    this.context.done();
    this.forget(maps.parts);
    const before = this.shown, words = this.panel !== null;
    this.shown = await drawn(this.drawing, maps, {
      chosen: { kind, layer, head, token, lines }, off: this.off, below: this.without,
      onchoose: changed => this.context.set(changed),
      onoff: words ? off => this.switchOff(off) : undefined,
    });
    before?.close();
    this.kinds = maps.parts.map(part => part.kind);
    this.drawing.removeAttribute("aria-busy");
    this.measured.now();
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

  async measure() {
    if (!this.panel) return;
    this.answers = null;
    if (!this.off.size) {
      this.measuring?.abort();
      this.panel.replaceChildren(nothingOff());
      return;
    }
    this.panel.setAttribute("aria-busy", "true");
    try {
      const before = await this.whole(), heads = [...this.off].map(each => {
        const [kind, layer, head] = each.split(".");
        return [kind, Number(layer), Number(head)];
      });
      const answer = await this.ask("measuring", "v1/explain/without_heads", { ...this.asked(), heads });
      this.answers = [before, answer.without_heads];
      this.panel.replaceChildren(comparison(this.off, ...this.answers, on =>
        this.switchOff(new Set([...this.off].filter(each => !on.includes(each))))));
      this.panel.removeAttribute("aria-busy");
    } catch (error) {
      if (error.name !== "AbortError") this.panel.removeAttribute("aria-busy");
      this.context.fail(error);
    }
  }

  // with all heads on, which is asked once for a text
  async whole() {
    const asked = this.asked(), key = JSON.stringify(asked);
    if (!this.wholes.has(key)) {
      const answer = await this.ask("measuring", "v1/explain/without_heads", { ...asked, heads: [] });
      this.wholes = new Map([[key, answer.without_heads]]);
    }
    return this.wholes.get(key);
  }

  // ---- keeping it

  pictures() {
    const found = this.shown?.pictures() ?? [], [before, after] = this.answers ?? [];
    if (!before?.surprise || !after?.surprise) return found;
    const { found: nats, top } = changes(before.surprise, after.surprise);
    const tokens = before.surprise.tokens.map(({ piece }, place) =>
      ({ text: `${piece} `, shade: Math.max(0, nats[place] ?? 0) / top }));
    const told = `Without ${[...this.off].join(", ")}: ${totals(before.surprise, after.surprise)}`;
    return [...found, svgOfText([told, tokens])];
  }

  command() {
    const { text, target, kind, layer, head } = this.state();
    const words = ["weft explain", quoted(`runs/${this.info.id}`), "--only attention"];
    if (text) words.push(`--text ${quoted(text)}`);
    if (target) words.push(`--target ${quoted(target)}`);
    // the command line shows the heads that read the source, where there are several kinds
    if (layer !== undefined && head !== undefined && (!kind || !this.kinds || kind === this.kinds.at(-1)))
      words.push(`--layer ${layer} --head ${head}`);
    return words.join(" ");
  }
}
