// Inside a step: one token's way through a model, stage by stage. `mount(element, data, hooks)` draws an answer of
// /v1/explain/step: the flow, the player, and the current stage enlarged. Without hooks it stands alone on a page.
import { calm, h } from "./dom.js";
import { attentionOf, keysPicture, rows } from "./keys.js";
import { cellOf, cellPicture, overTime } from "./cell.js";
import { choicePanel } from "./choice.js";
import { adds, arranged, blockName, flow, groupOf, isSummary, sourcePlace } from "./flow.js";
import { isOrder, ladder } from "./ladder.js";
import { chosenAxes, isIds, labelOf, matrix, number, visible } from "./matrix.js";

const PACE = 1600, TRAVEL = 520;
const CHOOSES = /^output\.(temperature|cut|choice)$/;
const SPEEDS = [["slow", 0.5], ["normal", 1], ["fast", 2.5], ["faster", 8]];
const many = (count) => (count >= 1e9 ? `${(count / 1e9).toPrecision(3)} G` : count >= 1e6 ? `${(count / 1e6).toPrecision(3)} M`
  : count >= 1e4 ? `${(count / 1e3).toPrecision(3)} k` : count.toLocaleString("en"));

// how many entries of its last axis a tensor was sent with
function lengthOf(tensor) {
  let values = tensor.values;
  for (let axis = 0; axis < tensor.axes.length - 1; axis++) values = values[0];
  return values.length;
}

export function mount(element, data, hooks = {}) {
  let step = arranged(data.step), drawing = null, choosing = null, timer = 0, widths = [0, 0];
  const chosen = { head: Number(data.head ?? 0) };
  let at = Math.max(0, step.stages.findIndex((stage) => stage.id === data.stage));
  let speed = Number(data.speed ?? 1), playing = false;

  const back = button("Back", () => { pause(); to(at - 1); }), next = button("Next", () => { pause(); to(at + 1, true); });
  const play = button("Play", () => (playing ? pause() : start()));
  const scrub = h("input", { type: "range", min: 0, step: 1, class: "step-scrub", "aria-label": "Stage",
    oninput: () => { pause(); to(Number(scrub.value)); } });
  const where = h("span", { class: "step-where", "aria-live": "polite" });
  const pace = h("select", { "aria-label": "Speed", onchange: () => { speed = Number(pace.value); } },
    ...SPEEDS.map(([name, value]) => h("option", { value, selected: value === speed }, name)));
  const goOn = h("input", { type: "checkbox" });
  const player = h("div", { class: "step-player" }, h("div", { class: "step-buttons" }, back, play, next), scrub,
    h("label", { class: "step-pace" }, "Speed ", pace),
    hooks.append ? h("label", { class: "step-pace" }, goOn, " write on") : null, where);
  const way = h("div", { class: "step-way" }), panel = h("section", { class: "step-panel", "aria-label": "The current stage" });
  element.replaceChildren(player, h("div", { class: `step-two${step.source_pieces ? " step-sided" : ""}` },
    h("div", { class: "step-left" }, way, h("p", { class: "soft step-legend" },
      `Bars above the line are positive, below it negative.${step.stages.some(adds) ? " Hatched: masked. Green: the residual stream." : ""}`)), panel));

  function button(name, act) { return h("button", { type: "button", onclick: act }, name); }

  function start() {
    if (at >= step.stages.length - 1) to(0);
    playing = true;
    play.textContent = "Pause";
    tick();
  }
  function pause() {
    playing = false;
    clearTimeout(timer);
    play.textContent = "Play";
  }
  function tick() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!playing || !element.isConnected) return;
      if (at < step.stages.length - 1) { to(at + 1, true); tick(); }
      else if (goOn.checked && choosing) hooks.append(choosing.current()).then((written) => (written ? tick() : pause()));
      else pause();
    }, PACE / speed);
  }

  function to(place, moving = false) {
    at = Math.min(Math.max(place, 0), step.stages.length - 1);
    light(moving && !calm() ? TRAVEL / Math.sqrt(speed) : 0);
    showPanel();
    hooks.stage?.(step.stages[at].id);
  }

  function light(milliseconds = 0) {
    const stage = step.stages[at];
    drawing.at(stage.id, milliseconds);
    scrub.max = step.stages.length - 1;
    scrub.value = at;
    scrub.setAttribute("aria-valuetext", stage.title);
    where.textContent = `${at + 1} of ${step.stages.length}: ${stage.title}`;
    back.disabled = at === 0;
    next.disabled = at === step.stages.length - 1;
    const top = drawing.middle(stage.id) - way.clientHeight / 2;
    if (way.scrollHeight > way.clientHeight + 4) way.scrollTo({ top, behavior: milliseconds ? "smooth" : "instant" });
  }

  function showFlow() {
    drawing = flow(step, { width: widths[0], head: chosen.head, choose: (id) => {
      pause();
      to(step.stages.findIndex((stage) => stage.id === id));
    } });
    way.replaceChildren(drawing.svg);
    light();
  }

  // --- the current stage, enlarged
  function showPanel() {
    const stage = step.stages[at];
    choosing = CHOOSES.test(stage.id) && step.choice ? choicePanel(step.choice, { width: widths[1], settings: data.settings, picked: data.picked,
      change: hooks.settings && ((settings) => { data.settings = settings; hooks.settings(settings); }),
      pick: (id) => { data.picked = id; hooks.pick?.(id); }, append: hooks.append }) : null;
    const four = attentionOf(step.stages, stage), cell = cellOf(step.stages, stage, step.place);
    const multiples = overTime(stage, { width: widths[1], place: step.place });
    panel.replaceChildren(...[
      h("p", { class: "step-crumb" }, blockName(groupOf(stage))),
      h("h3", {}, stage.title),
      stage.about ? h("p", { class: "step-about" }, stage.about) : null,
      stage.formula ? h("p", { class: "step-formula" }, stage.formula) : null,
      numbers(stage.numbers),
      isSummary(stage) && hooks.open && step.stages.filter((each) => groupOf(each) === stage.id).length === 1 ? h("p", {}, button("Open this block", () => hooks.open(stage.id))) : null,
      choosing?.element, heads(stage),
      four ? h("div", { class: "step-keys-box" }, keysPicture(four, { width: widths[1], head: chosen.head })) : null,
      cell ? cellPicture(cell.kind, cell.means, widths[1]) : null,
      isOrder(stage) ? h("div", { class: "step-keys-box" }, ladder(step.stages, stage, { width: widths[1] - 2 })) : null,
      ...tensors(stage, { hidden: Boolean(choosing), folded: isOrder(stage), shown: Boolean(four) }), multiples,
      cost(stage.cost), source(stage.source)].filter(Boolean));
  }

  function tensors(stage, { hidden, folded, shown }) {
    const left = hidden ? [] : stage.tensors.filter(({ name, axes }) => !name.includes("over time") && !(shown && axes.length === 1));
    if (!folded) return left.map(tensorFigure);
    return [h("p", { class: "soft" }, "A full bar is what the order’s own counts say, a pale one what the shorter context adds."),
      h("details", { class: "step-more" }, h("summary", {}, "All numbers"), ...left.map(tensorFigure))];
  }

  function numbers(given) {
    const found = Object.entries(given ?? {});
    return found.length ? h("dl", { class: "step-numbers" }, ...found.map(([name, value]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, typeof value === "number" ? number(value) : String(value))))) : null;
  }

  function headCount(stage) {
    for (const tensor of stage.tensors) {
      const axis = tensor.axes.findIndex((each) => each.name === "head");
      if (axis >= 0) return tensor.shape[axis];
    }
    return 0;
  }

  function heads(stage) {
    const count = headCount(stage);
    if (count < 2) return null;
    return h("label", { class: "step-head" }, "Head ", h("select", { onchange: (event) => setHead(Number(event.target.value)) },
      ...Array.from({ length: count }, (_, head) => h("option", { value: head, selected: head === Math.min(chosen.head, count - 1) }, String(head)))));
  }

  function setHead(head) {
    chosen.head = head;
    hooks.head?.(head);
    drawing.head(head);
    showPanel();
    panel.querySelector(".step-head select")?.focus();
  }

  function tensorFigure(tensor) {
    if (isIds(tensor)) return idTable(tensor);
    const [axis] = tensor.axes;
    if (tensor.axes.length === 1 && axis.labels) return h("div", { class: "step-tensor" }, named(tensor),
      h("div", { class: "step-keys-box" }, rows(tensor, { width: widths[1] - 2 })));
    const byHead = tensor.axes.length === 2 && tensor.axes[0].name === "head";
    const holder = h("div", {});
    const draw = () => holder.replaceChildren(matrix(tensor, { width: widths[1], chosen, mark: byHead ? Math.min(chosen.head, tensor.shape[0] - 1) : / so far$/.test(tensor.name) ? tensor.values.length - 1 : null,
      pick: byHead ? (y) => setHead(y) : null }));
    draw();
    const others = chosenAxes(tensor).filter((axis) => axis.name !== "head");
    return h("div", { class: "step-tensor" }, named(tensor),
      ...others.map((axis) => h("label", {}, `${axis.name} `, h("select", { onchange: (event) => { chosen[axis.name] = event.target.value; draw(); } },
        ...Array.from({ length: tensor.shape[tensor.axes.indexOf(axis)] }, (_, n) => h("option", { value: n }, labelOf(axis, n)))))), holder);
  }

  const named = (tensor) => h("h4", {}, tensor.name, h("span", { class: "step-shape" }, ` ${shape(tensor)}`));

  // tokens and their ids: numbers that name, and measure nothing
  function idTable(tensor) {
    const labels = tensor.axes[0].labels ?? step.pieces;
    const source = step.stages[at].id.startsWith("source"), here = source ? sourcePlace(step) : tensor.name === "context" ? null : step.place;
    return h("ol", { class: "step-ids" }, ...tensor.values.map((id, place) => h("li", { class: place === here ? "step-here" : undefined },
      h("b", {}, visible(labels[place])), h("span", {}, String(id)))));
  }

  const shape = (tensor) => tensor.axes.map((axis, n) => `${tensor.shape[n]} ${axis.name === "source" ? "source token" : axis.name}${tensor.shape[n] === 1 ? "" : "s"}`).join(" × ")
    + (tensor.cut ? `; the first ${lengthOf(tensor)} are shown` : "");

  function cost(given) {
    if (!given) return null;
    const told = [["operations", given.flops], ["parameters", given.parameters], ["bytes", given.bytes]]
      .filter(([, value]) => value);
    return told.length === 0 ? null : h("p", { class: "step-cost" }, told.map(([name, value]) => `${many(value)} ${name}`).join(" · "));
  }

  function source(given) {
    if (!given) return null;
    return h("details", { class: "step-source", open: hooks.sourceOpen?.() ?? false, ontoggle: (event) => hooks.toggledSource?.(event.target.open) },
      h("summary", {}, `${given.file}:${given.first}`, given.symbol ? h("span", { class: "soft" }, ` ${given.symbol}`) : null),
      h("pre", { class: "scroll", tabindex: "0" }, given.lines.map((line, n) => `${String(given.first + n).padStart(4)}  ${line}`).join("\n")));
  }

  function measure() { // a page that has no width yet is drawn for a phone
    const now = [Math.max(280, Math.floor(way.clientWidth)), Math.max(280, Math.floor(panel.clientWidth))];
    if (now[0] === widths[0] && now[1] === widths[1]) return false;
    widths = now;
    return true;
  }
  const watch = new ResizeObserver(() => { if (measure()) { showFlow(); showPanel(); } });
  measure();
  showFlow();
  showPanel();
  watch.observe(element);

  return {
    // Another answer in the place of this one: at the same stage where it has it, or at the first of a block
    update(answer, { stage = step.stages[at].id, block = null } = {}) {
      if (answer.place !== step.place || answer.text !== step.text) data.picked = null;
      step = arranged(answer);
      at = Math.max(0, step.stages.findIndex((each) => (block ? groupOf(each) === block : each.id === stage)));
      hooks.stage?.(step.stages[at].id);
      showFlow();
      showPanel();
    },
    // the server's answer to settings that the panel shows already
    confirm(answer) {
      step = arranged(answer);
      showFlow();
      choosing?.confirm(step.choice);
    },
    key(event) {
      const act = { ArrowRight: () => { pause(); to(at + 1, true); }, ArrowLeft: () => { pause(); to(at - 1); }, " ": () => (playing ? pause() : start()),
        Home: () => to(0), End: () => to(step.stages.length - 1) }[event.key];
      act?.();
      return Boolean(act);
    },
    play: start, svg: () => drawing.svg, close() { pause(); watch.disconnect(); },
  };
}
