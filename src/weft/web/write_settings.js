// Settings of the Write view: the form, the values for the server, and the equivalent command. Descriptions, bounds and
// options of the settings come from the server, which makes them from weft/decode/config.py.
import { button, field, h, select, slider } from "./dom.js";
import { shellQuote } from "./save.js";
import { capitalised, numberWithin } from "./words.js";

export const MAX_TOKENS = 400, MAX_BEAMS = 16;
const MODES = { draw: "sampling", greedy: "greedy", beam: "beam search" };
// sliders of the form: their range, which may be narrower than the server's bounds, and the value that means "off"
const SLIDERS = { temperature: { max: 2, step: 0.05 }, top_p: { min: 0.05, step: 0.05, off: 1 },
	min_p: { max: 0.5, step: 0.01, off: 0 } };
const LENGTH = 48; // tokens that are written at first, unless a default search decides

// The settings of generation by name, as the server describes them: { description, bounds, option, … }; and `usual`, the
// model's defaults as the command `usual.command` has them.
export async function fetchSettings({ api, info, signal }, chats) {
	const { data, decoding } = await api.get(`v1/settings?model=${encodeURIComponent(info.id)}`, signal);
	const command = info.writes ? "translate" : chats ? "chat" : "generate", from = decoding[command];
	const of = (name, off) => String(from[name] ?? off), draws = Boolean(from.temperature);
	const usual = { command, how: info.writes ? "beam" : draws ? "draw" : "greedy", seed: "0", beams: of("beams", 4),
		temperature: draws ? of("temperature", 1) : "1", top_k: of("top_k", ""), top_p: of("top_p", 1), min_p: of("min_p", 0),
		length: String(info.writes ? Math.min(MAX_TOKENS, from.max_tokens) : LENGTH) };
	return { ...Object.fromEntries(data.map(setting => [setting.name, setting])), usual };
}

// The model's defaults in words: beam 5, as weft translate.
function usualLabel({ command, how, beams, temperature, top_k, top_p, min_p }) {
	const filters = [top_k && `top-k ${top_k}`, top_p !== "1" && `top-p ${top_p}`, min_p !== "0" && `min-p ${min_p}`];
	const label = how === "beam" ? `beam ${beams}` : how === "greedy" ? "greedy"
		: [`temperature ${temperature}`, ...filters].filter(Boolean).join(", ");
	return [`${label}, as `, h("code", `weft ${command}`)];
}

// The values in the address, or the defaults; a value out of bounds is clamped, anything but a number is ignored.
export function settingsOf(state, { usual, ...known }) {
	const of = name => state[name] ?? usual[name], how = of("how") in MODES ? of("how") : usual.how;
	const draws = how === "draw", { ge = 0, le } = known.temperature.bounds;
	const top_p = numberWithin(of("top_p"), 0.01, known.top_p.bounds.le, 1);
	const min_p = numberWithin(of("min_p"), 0, known.min_p.bounds.le, 0);
	const whole = (name, ...ends) => Math.round(numberWithin(of(name), ...ends)), top_k = whole("top_k", 0, 1e6, 0);
	const temperature = numberWithin(of("temperature"), ge, Math.min(le, SLIDERS.temperature.max), 1);
	return {
		how, beams: whole("beams", 1, MAX_BEAMS, 4), length: whole("length", 1, MAX_TOKENS, LENGTH), limited: state.length !== undefined,
		seed: whole("seed", 0, 2 ** 53 - 1, 0), shown: { temperature, top_k, top_p, min_p },
		// for the server, without settings that have no effect
		drawing: { temperature: draws ? temperature : 0, ...(draws && temperature ? { ...(top_k && { top_k }),
			...(top_p < 1 && { top_p }), ...(min_p && { min_p }) } : {}) },
	};
}

const labelOf = name => capitalised(name.replaceAll("_", "-"));

// The form. `change({ temperature: "0.5" })` is called with the changed values, as in the address.
export function controls(state, known, change) {
	const { usual } = known, box = h("div.write-settings");
	const set = name => value => change({ [name]: value === usual[name] ? undefined : value });
	const number = (setting, value, props, { label = labelOf(setting), key = setting } = {}) => field(label, h("input",
		{ type: "number", value, step: 1, title: known[setting].description, ...props,
			oninput: event => set(key)(event.target.value) }));
	const slide = (name, value) => {
		const { off, ...range } = { min: 0, max: known[name].bounds.le, ...SLIDERS[name] };
		return slider(labelOf(name), { ...range, value, title: known[name].description, change: to => set(name)(String(to)),
			format: shown => (shown === off ? "off" : shown.toFixed(2)) });
	};
	const draw = () => {
		const { how, beams, length, seed, shown } = settingsOf(state, known);
		const others = how === "beam" ? ["beams"] : how === "draw" ? ["temperature", "top_k", "top_p", "min_p"] : [];
		const differs = ["how", ...others].filter(name => state[name] !== undefined);
		const seeds = number("seed", seed, { min: 0 });
		const another = button("New seed", () => {
			const input = seeds.querySelector("input");
			input.value = Number(input.value) + 1;
			set("seed")(input.value);
		});
		box.replaceChildren(
			field("Method", select(Object.entries(MODES), how, value => { set("how")(value); draw(); })),
			h("p.soft.write-usual", "Default: ", usualLabel(usual), differs.length > 0
				&& [" ", button("Use the default", () => { change(Object.fromEntries(differs.map(name => [name]))); draw(); })]),
			...how === "draw" ? [
				slide("temperature", shown.temperature),
				number("top_k", shown.top_k || "", { min: 0, placeholder: "off" }),
				slide("top_p", shown.top_p),
				slide("min_p", shown.min_p),
				h("div.write-seed", seeds, another)] : [],
			...how === "beam" ? [number("beams", beams, { min: 1, max: MAX_BEAMS })] : [],
			number("max_tokens", length, { min: 1, max: MAX_TOKENS }, { label: "Max. tokens", key: "length" }));
	};
	draw();
	return box;
}

export function command(info, settings, known, { prompt, chats }) {
	const run = shellQuote(`runs/${info.id}`), { how, drawing, beams, length, limited, seed } = settings;
	const option = (name, value) => `${known[name].option} ${value}`, limit = option("max_tokens", length);
	if (info.writes) {
		const search = option("beams", how === "beam" ? beams : 1);
		return `echo ${shellQuote(prompt)} | weft translate ${run} ${search}${limited ? ` ${limit}` : ""}`;
	}
	const options = how === "beam" ? [option("beams", beams)] : !drawing.temperature ? ["--greedy"]
		: [...Object.entries(drawing).map(([name, value]) => option(name, value)), option("seed", seed)];
	const ofChat = options.filter(each => !/^--(beam|top-k|min-p)/.test(each));
	return chats ? `weft chat ${run} ${ofChat.join(" ")} ${limit}`
		: `weft generate ${run} --prompt ${shellQuote(prompt)} ${options.join(" ")} ${limit}`;
}
