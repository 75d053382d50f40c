// One stage, enlarged: description, formula with this model's values, pictures, source code, and cost.
import { button, field, h, select, soft } from "./dom.js";
import { cellOf, cellPicture, overTime } from "./cell.js";
import { choicePanel } from "./choice.js";
import { blockName, groupOf, isSummary, sourcePosition } from "./flow.js";
import { attentionOf, keysPicture, rows } from "./keys.js";
import { isOrder, ladder } from "./ladder.js";
import { chosenAxes, headAt, headsOf, isIds, labelOf, matrix, number } from "./matrix.js";
import { facts } from "./table.js";
import { abbreviate, visibleToken } from "./words.js";

const CHOOSES = /^output\.(temperature|cut|choice)$/;

const LADDER_HINT = "Full bars are from the counts of this order, pale ones from the shorter context.";

// a box that may be too high for its content scrolls, also by keyboard
const scrollBox = picture => h("div", { class: "step-keys-box", tabindex: "0" }, picture);

function numberList(values) {
  const entries = Object.entries(values ?? {});
  const text = value => (typeof value === "number" ? number(value) : String(value));
  return entries.length > 0 && facts(entries.map(([name, value]) => [name, text(value)]), "step-numbers");
}

function costText(cost) {
  const counts = [["operations", cost?.flops], ["parameters", cost?.parameters], ["bytes", cost?.bytes]]
    .filter(([, value]) => value);
  return counts.length > 0
    && h("p", { class: "step-cost" }, counts.map(([name, value]) => `${abbreviate(value)} ${name}`).join(" · "));
}

function sourceCode(code, hooks) {
  return code && h("details", { class: "step-source", open: hooks.sourceOpen?.() ?? false,
    ontoggle: event => hooks.toggledSource?.(event.target.open) },
  h("summary", {}, `${code.file}:${code.first}`, code.symbol && soft(` ${code.symbol}`)),
  h("pre", { class: "scroll", tabindex: "0" },
    code.lines.map((line, n) => `${String(code.first + n).padStart(4)}  ${line}`).join("\n")));
}

// the number of entries of its last axis that were sent
function lengthOf(tensor) {
  let values = tensor.values;
  for (let axis = 0; axis < tensor.axes.length - 1; axis++) values = values[0];
  return values.length;
}

function heading(tensor) {
  const each = tensor.axes.map(({ name }, n) => {
    const many = tensor.shape[n] === 1 ? "" : "s";
    return `${tensor.shape[n]} ${name === "source" ? "source token" : name}${many}`;
  });
  const truncated = tensor.cut ? `; the first ${lengthOf(tensor)} are shown` : "";
  return h("h3", {}, tensor.name, h("span", { class: "step-shape" }, ` ${each.join(" × ")}${truncated}`));
}

// tokens and their ids, which are names rather than quantities
function idTable(tensor, here) {
  return h("ol", { class: "step-ids" }, tensor.values.map((id, place) =>
    h("li", { class: place === here && "step-here" },
      h("b", {}, visibleToken(tensor.axes[0].labels[place])), h("span", {}, String(id)))));
}

function headChooser(stage, chosen, setHead) {
  const count = headsOf([stage]), choose = each => setHead(Math.ceil((each * chosen.heads) / count));
  return count > 1 && h("label", { class: "step-head" }, "Head ",
    select(Array.from({ length: count }, (_, each) => [each, String(each)]), headAt(count, chosen), choose));
}

// a matrix, with a <select> for every axis that is not drawn
function chart(tensor, { width, chosen, setHead }) {
  const byHead = tensor.axes.length === 2 && tensor.axes[0].name === "head", grows = / so far$/.test(tensor.name);
  const mark = byHead ? headAt(tensor.shape[0], chosen) : grows ? tensor.values.length - 1 : null;
  const holder = h("div");
  const pick = byHead ? y => setHead(Math.ceil((y * chosen.heads) / tensor.shape[0])) : null;
  const draw = () => holder.replaceChildren(matrix(tensor, { width, chosen, mark, pick }));
  draw();
  const others = chosenAxes(tensor).filter(axis => axis.name !== "head");
  const choosers = others.map(axis => {
    const places = Array.from({ length: tensor.shape[tensor.axes.indexOf(axis)] }, (_, n) => [n, labelOf(axis, n)]);
    return field(axis.name, select(places, chosen[axis.name] ?? 0, value => { chosen[axis.name] = value; draw(); }));
  });
  return h("div", { class: "step-tensor" }, heading(tensor), choosers, holder);
}

// The panel of a stage: { children, choosing }. `chosen` has the head and the other indices; `setHead` changes it.
export function stagePanel(step, stage, { width, chosen, setHead, data, hooks }) {
  const choosing = CHOOSES.test(stage.id) && step.choice ? choicePanel(step.choice, { settings: data.settings,
    picked: data.picked, append: hooks.append,
    change: hooks.settings && (settings => { data.settings = settings; hooks.settings(settings); }),
    pick: id => { data.picked = id; hooks.pick?.(id); } }) : null;
  const attention = attentionOf(step.stages, stage), cell = cellOf(step.stages, stage, step.place);
  const order = isOrder(stage);
  const folded = isSummary(stage) && step.stages.filter(each => groupOf(each) === stage.id).length === 1;
  const here = stage.id.startsWith("source") ? sourcePosition(step) : stage.id.endsWith(".tokens") ? step.place : null;

  const figure = tensor => {
    if (isIds(tensor)) return idTable(tensor, here);
    if (tensor.axes.length > 1 || !tensor.axes[0].labels) return chart(tensor, { width, chosen, setHead });
    return h("div", { class: "step-tensor" }, heading(tensor), scrollBox(rows(tensor, { width: width - 2 })));
  };
  // tensors that the custom picture already shows are left out
  const others = choosing ? [] : stage.tensors.filter(({ name, axes }) =>
    !name.includes("over time") && !(attention && axes.length === 1));
  const children = [
    h("p", { class: "step-crumb" }, blockName(groupOf(stage))), h("h2", {}, stage.title),
    stage.about && h("p", { class: "step-about" }, stage.about),
    stage.formula && h("p", { class: "step-formula" }, stage.formula), numberList(stage.numbers),
    folded && hooks.open
      && h("p", {}, button("Unfold this block", () => hooks.open(stage.id))),
    choosing?.element, headChooser(stage, chosen, setHead),
    attention && scrollBox(keysPicture(attention, { width: width - 2, head: chosen.head })),
    cell && cellPicture(cell.kind, cell.means, width),
    ...order ? [scrollBox(ladder(step.stages, stage, { width: width - 2 })), h("p", { class: "soft" }, LADDER_HINT),
      h("details", { class: "step-more" }, h("summary", {}, "All values"), others.map(figure))] : others.map(figure),
    overTime(stage, { width, place: step.place }), costText(stage.cost), sourceCode(stage.source, hooks)];
  return { children: children.flat().filter(Boolean), choosing };
}
