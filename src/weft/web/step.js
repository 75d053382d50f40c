// Inside a step: one token's way through a model, stage by stage. `mount(element, data, hooks)` draws an answer of
// /v1/explain/step: the flow, the player, and the current stage enlarged. Without hooks it stands alone on a page.
import { calm, h } from "./dom.js";
import { adds, arranged, flow, groupOf } from "./flow.js";
import { stagePanel } from "./stage.js";

const PACE = 1600, TRAVEL = 520, LEAST_WIDTH = 280, LEAST_HEIGHT = 260;
const SPEEDS = [["slow", 0.5], ["normal", 1], ["fast", 2.5], ["faster", 8]];
const LEGEND = "Bars above the line are positive, below it negative.";

function mostHeads(step) {
  const counts = step.stages.flatMap(stage => stage.tensors.flatMap(({ axes, shape }) =>
    axes.map((axis, n) => (axis.name === "head" ? shape[n] : 1))));
  return Math.max(1, ...counts);
}

export function mount(element, data, hooks = {}) {
  let step = arranged(data.step), drawing = null, choosing = null, timer = 0, widths = [0, 0], height = 0;
  let at = Math.max(0, step.stages.findIndex(stage => stage.id === data.stage)), playing = false, speed = 1;
  const heads = mostHeads(step), chosen = { heads, head: Math.min(Math.max(Number(data.head) || 0, 0), heads - 1) };

  const button = (name, act) => h("button", { type: "button", onclick: act }, name);
  const back = button("Back", () => go(-1)), next = button("Next", () => go(1));
  const play = button("Play", () => (playing ? pause() : start()));
  const scrub = h("input", { type: "range", min: 0, step: 1, class: "step-scrub", "aria-label": "Stage",
    oninput: () => { pause(); to(Number(scrub.value)); } });
  const where = h("span", { class: "step-where", "aria-live": "polite" });
  const pace = h("select", { onchange: () => { speed = Number(pace.value); } },
    SPEEDS.map(([name, value]) => h("option", { value, selected: value === speed }, name)));
  const goOn = h("input", { type: "checkbox" });
  const way = h("div", { class: "step-way" });
  const panel = h("section", { class: "step-panel", "aria-label": "The current stage" });
  const legend = step.stages.some(adds) ? `${LEGEND} Hatched: masked. Green: the residual stream.` : LEGEND;
  element.replaceChildren(
    h("div", { class: "step-player" }, h("div", { class: "step-buttons" }, back, play, next), scrub,
      h("label", { class: "step-pace" }, "Speed ", pace),
      hooks.append && h("label", { class: "step-pace", title: "At the end, append the token and begin again" },
        goOn, " write on"), where),
    h("div", { class: `step-two${step.source_pieces ? " step-sided" : ""}` },
      h("div", { class: "step-left" }, way, h("p", { class: "soft step-legend" }, legend)), panel));

  // --- the player
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
    timer = setTimeout(async () => {
      if (!playing || !element.isConnected) return;
      if (at < step.stages.length - 1) to(at + 1, true);
      else if (!goOn.checked || !choosing || !(await hooks.append(choosing.current()))) return pause();
      if (playing) tick();
    }, PACE / speed);
  }

  function go(by) {
    pause();
    to(at + by, by > 0);
  }

  function to(place, moving = false) {
    at = Math.min(Math.max(place, 0), step.stages.length - 1);
    light(moving && !calm() ? TRAVEL / Math.sqrt(speed) : 0);
    showPanel();
    hooks.stage?.(step.stages[at].id);
  }

  // --- what is drawn
  function light(milliseconds = 0) {
    const stage = step.stages[at];
    drawing.at(stage.id, milliseconds);
    scrub.max = step.stages.length - 1;
    scrub.value = at;
    scrub.setAttribute("aria-valuetext", stage.title);
    where.textContent = `${at + 1} of ${step.stages.length}: ${stage.title}`;
    back.disabled = at === 0;
    next.disabled = at === step.stages.length - 1;
    centre(milliseconds ? "smooth" : "instant");
  }

  function centre(behavior) {
    if (way.scrollHeight <= way.clientHeight + 4) return;
    way.scrollTo({ top: drawing.middle(step.stages[at].id) - way.clientHeight / 2, behavior });
  }

  function showFlow() {
    const choose = id => { pause(); to(step.stages.findIndex(stage => stage.id === id)); };
    drawing = flow(step, { width: widths[0], chosen, choose });
    way.replaceChildren(drawing.svg);
    light();
  }

  function showPanel() {
    const made = stagePanel(step, step.stages[at], { width: widths[1], chosen, setHead, data, hooks });
    choosing = made.choosing;
    panel.replaceChildren(...made.children);
  }

  function setHead(head) {
    chosen.head = head;
    hooks.head?.(head);
    drawing.head();
    showPanel();
    panel.querySelector(".step-head select")?.focus();
  }

  function measure() { // a page that has no width yet is drawn for a phone
    const top = way.getBoundingClientRect().top + scrollY; // the flow ends where the first screen does
    const high = Math.max(LEAST_HEIGHT, Math.floor(innerHeight - top - 64));
    way.style.setProperty("--step-way", `${high}px`);
    if (high !== height && drawing) centre("instant");
    height = high;
    const now = [way, panel].map(each => Math.max(LEAST_WIDTH, Math.floor(each.clientWidth)));
    if (now.every((width, n) => width === widths[n])) return false;
    widths = now;
    return true;
  }

  const watch = new ResizeObserver(() => {
    if (!measure()) return;
    showFlow();
    showPanel();
  });
  measure();
  showFlow();
  showPanel();
  watch.observe(element);

  return {
    // Another answer in the place of this one: at the same stage where it has it, or at the first of a block.
    update(answer, { stage = step.stages[at].id, block = null } = {}) {
      if (answer.place !== step.place || answer.text !== step.text) data.picked = null;
      step = arranged(answer);
      at = Math.max(0, step.stages.findIndex(each => (block ? groupOf(each) === block : each.id === stage)));
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
      const act = { ArrowRight: () => go(1), ArrowLeft: () => go(-1), " ": () => (playing ? pause() : start()),
        Home: () => to(0), End: () => to(step.stages.length - 1) }[event.key];
      act?.();
      return Boolean(act);
    },
    svg: () => drawing.svg,
    close() { pause(); watch.disconnect(); },
  };
}
