// How the Write view chooses tokens: the controls, what they mean to the server, and the command that gives the same.
import { button, field, h, select, slider } from "./dom.js";
import { quoted } from "./save.js";
import { between } from "./words.js";

export const MAX_TOKENS = 400;
const WAYS = { draw: "at random", greedy: "the likeliest", beam: "beam search" };
const defaults = info => ({ how: info.writes ? "greedy" : "draw", temperature: "0.8", top_k: "", top_p: "1", min_p: "0",
  seed: "0", length: "48", beams: "4" });

// What stands in the address, or else the defaults; a number that makes no sense there counts as none.
export function settingsOf(state, info) {
  const usual = defaults(info), of = name => state[name] ?? usual[name];
  const how = of("how") in WAYS ? of("how") : usual.how;
  const draws = how === "draw";
  const top_p = between(of("top_p"), 0.01, 1, 1), min_p = between(of("min_p"), 0, 1, 0);
  const whole = (name, ...ends) => Math.round(between(of(name), ...ends)), top_k = whole("top_k", 0, 1e6, 0);
  const temperature = between(of("temperature"), 0, 2, 0.8);
  return {
    how, beams: whole("beams", 1, 16, 4), length: whole("length", 1, MAX_TOKENS, 48),
    seed: whole("seed", 0, 2 ** 53 - 1, 0), shown: { temperature, top_k, top_p, min_p },
    // as the server takes them: none where one does nothing
    drawing: { temperature: draws ? temperature : 0, ...(draws && temperature ? { ...(top_k && { top_k }),
      ...(top_p < 1 && { top_p }), ...(min_p && { min_p }) } : {}) },
  };
}

const number = (label, value, props, set) =>
  field(label, h("input", { type: "number", value, ...props, oninput: event => set(event.target.value) }));

// `change({ temperature: "0.5" })` is called with what was changed, as it stands in the address.
export function controls(state, info, change) {
  const usual = defaults(info), box = h("div", { class: "write-settings" });
  const set = name => value => change({ [name]: value === usual[name] ? undefined : value });
  const draw = () => {
    const { how, beams, length, seed, shown } = settingsOf(state, info);
    const seeds = number("Seed", seed, { min: 0, step: 1 }, set("seed"));
    const another = button("Another", () => {
      const input = seeds.querySelector("input");
      input.value = Number(input.value) + 1;
      set("seed")(input.value);
    });
    const slide = (label, name, range, off) => slider(label, { ...range, value: shown[name],
      told: value => (value === off ? "off" : value.toFixed(2)), change: value => set(name)(String(value)) });
    box.replaceChildren(
      field("Choose", select(Object.entries(WAYS), how, value => { set("how")(value); draw(); })),
      ...how === "draw" ? [
        slide("Temperature", "temperature", { min: 0, max: 2, step: 0.05 }),
        number("Top-k", shown.top_k || "", { min: 0, step: 1, placeholder: "off" }, set("top_k")),
        slide("Top-p", "top_p", { min: 0.05, max: 1, step: 0.05 }, 1),
        slide("Min-p", "min_p", { min: 0, max: 0.5, step: 0.01 }, 0),
        h("div", { class: "write-seed" }, seeds, another)] : [],
      ...how === "beam" ? [number("Beams", beams, { min: 1, max: 16, step: 1 }, set("beams"))] : [],
      number("Tokens", length, { min: 1, max: MAX_TOKENS, step: 1 }, set("length")));
  };
  draw();
  return box;
}

// A line for a shell that writes the same text.
export function command(info, settings, prompt, chats) {
  const run = quoted(`runs/${info.id}`), { how, drawing, beams, length, seed } = settings;
  const most = `--max-tokens ${length}`;
  if (info.writes) return `echo ${quoted(prompt)} | weft translate ${run} --beam ${how === "beam" ? beams : 1} ${most}`;
  const options = how === "beam" ? [`--beam ${beams}`] : !drawing.temperature ? ["--greedy"]
    : [...Object.entries(drawing).map(([name, value]) => `--${name.replace("_", "-")} ${value}`), `--seed ${seed}`];
  const ofChat = options.filter(each => !/^--(beam|top-k|min-p)/.test(each));
  return chats ? `weft chat ${run} ${ofChat.join(" ")} ${most}`
    : `weft generate ${run} --prompt ${quoted(prompt)} ${options.join(" ")} ${most}`;
}
