// Variants of a model: "book@400" is a checkpoint of the run "book", "book@0" the model before training,
// "book~decoder.1.2" lacks a head. Controls that choose the model of a view, and the one beside it.
import { debounced, field, h, select, slider } from "./dom.js";

const VARIANT = /^(.+?)(?:@(\d+))?((?:~(?:encoder|decoder|cross)\.\d+\.\d+)*)$/s;

// The facts of a model or of a variant of one; undefined if the server does not have it.
export function infoOf(models, id) {
	const [, base, step, off] = VARIANT.exec(id ?? "") ?? [], of = name => models.find(model => model.id === name);
	if (of(id)) return { ...of(id), base: id, off: [] };
	return of(base) && { ...of(base), id, base, step: step && Number(step), off: off.split("~").slice(1) };
}

// What a variant is called: "book, step 400".
export const titleOf = ({ base, step, off }) => [base, step === 0 ? "before training" : step && `step ${step}`,
	off.length > 0 && `without ${off.length > 3 ? `${off.length} heads` : off.map(head => head.replace(/^(encoder|decoder)\./, "")).join(", ")}`].filter(Boolean).join(", ");

export const idOf = ({ base, step, off }) => [step === undefined ? base : `${base}@${step}`, ...off].join("~");

// A slider over a run's checkpoints; the last place is the best one.
function checkpointSlider(label, info, change) {
	const steps = info.checkpoints, last = steps.length;
	return slider(label, { min: 0, max: last, step: 1, value: info.step === undefined ? last : steps.indexOf(info.step),
		format: place => (place === last ? "best" : `step ${steps[place]}`),
		change: debounced(place => change(idOf({ ...info, step: steps[place] })), 60) });
}

/**
 * Controls of the header.
 * @param {any} sides  the model's `info`, the `other` beside it, all `models`, those that are `broken`, and `fits(model)`:
 *   whether one can be there
 * @param {any} on  `choose(id)` another model, `move(changes)` to another checkpoint or beside another model
 */
export function chooser({ info, other, models, broken, fits }, { choose, move }) {
	if (!info) return [];
	const why = ({ id, problem }) => (problem ? `${id}: ${problem}` : id);
	const list = select(models.map(model => [model.id, why(model)]), info.base, choose);
	list.append(...broken.map(model => h("option", { disabled: true }, why(model))));
	const chosen = list.length > 1 ? field("Model", list) : h("span.soft", info.base);
	if (!fits) return [h("div", chosen)];
	const several = info.checkpoints.length > 1, own = other?.base === info.base, isOff = other?.off.length > 0;
	const options = [["", "nothing"], ...several ? [["@", "another checkpoint"]] : [],
		...own && isOff ? [["~", "itself without heads"]] : [],
		...models.filter(model => model.id !== info.base && fits(model)).map(({ id }) => [id, id])];
	const start = { "": undefined, "@": idOf({ ...info, off: [], step: info.checkpoints[0] }) };
	return [h("div", chosen, several && checkpointSlider("Checkpoint", info, id => move({ model: id }, "slid"))),
		h("div", options.length > 1 && field("Compare with", select(options, own ? (isOff ? "~" : "@") : other?.base ?? "",
			value => move({ with: value in start ? start[value] : value }))),
		other && !isOff && other.checkpoints.length > 1 && checkpointSlider(own ? "at" : "Checkpoint", other,
			id => move({ with: id }, "slid")))];
}
