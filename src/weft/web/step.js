// Inside a step: the path of one token through a model, stage by stage. `mount(element, data, hooks)` draws a response
// of /v1/explain/step: the flow, the player, and the current stage enlarged. A standalone page has no hooks.
import { h, prefersReducedMotion, select } from "./dom.js";
import { adds, flow, groupOf, withDrawnInputs } from "./flow.js";
import { headsOf } from "./matrix.js";
import { player } from "./player.js";
import { stagePanel } from "./stage.js";
import { clamp, numberWithin } from "./words.js";

const PACE = 1600, TRAVEL = 520; // milliseconds per stage, and of the dots between stages
const MIN_WIDTH = 280, MIN_HEIGHT = 260; // pixels
const SPEEDS = [[0.5, "slow"], [1, "normal"], [2.5, "fast"], [8, "faster"]];
const LEGEND = "Bars above the line are positive, below it negative.";

export function mount(element, data, hooks = {}) {
  let step = withDrawnInputs(data.step), widths = [0, 0], height = 0;
  /** @type {any} */
  let drawing = null;
  /** @type {any} */
  let choosing = null;
  let at = Math.max(0, step.stages.findIndex(stage => stage.id === data.stage)), speed = 1;
  const heads = headsOf(step.stages), chosen = { heads, head: numberWithin(data.head, 0, heads - 1, 0) };

  const playing = player({ pace: () => PACE / speed, move: by => to(at + by, by > 0), restart: () => to(0), tick });
  const scrub = h("input", { type: "range", min: 0, step: 1, class: "step-scrub", "aria-label": "Stage",
    oninput: () => { playing.pause(); to(Number(scrub.value)); } });
  const position = h("span", { class: "step-where", "aria-live": "polite" });
  const pace = select(SPEEDS, speed, value => { speed = Number(value); });
  const continues = h("input", { type: "checkbox" });
  const path = h("div", { class: "step-path" });
  const panel = h("section", { class: "step-panel", "aria-label": "The current stage" });
  const legend = step.stages.some(adds) ? `${LEGEND} Hatched: masked. Green: the residual stream.` : LEGEND;
  element.replaceChildren(
    h("div", { class: "step-player" }, h("div", { class: "step-buttons" }, playing.buttons), scrub,
      h("label", { class: "step-pace" }, "Speed ", pace),
      hooks.append && h("label", { class: "step-pace", title: "At the end, append the token and restart" },
        continues, " continue generating"), position),
    h("div", { class: `step-two${step.source_pieces ? " step-sided" : ""}` },
      h("div", { class: "step-left" }, path, h("p", { class: "soft step-legend" }, legend)), panel));

  // Playing: go to the next stage, and at the last one, if the reader chose so, to the next token.
  async function tick() {
    if (!element.isConnected) return false;
    if (at < step.stages.length - 1) return to(at + 1, true);
    return continues.checked && choosing && hooks.append(choosing.current());
  }

  function to(place, moving = false) {
    at = clamp(place, 0, step.stages.length - 1);
    light(moving && !prefersReducedMotion() ? TRAVEL / Math.sqrt(speed) : 0);
    showPanel();
    hooks.stage?.(step.stages[at].id);
    return true;
  }

  // ---- drawing
  function light(milliseconds = 0) {
    const stage = step.stages[at];
    drawing.at(stage.id, milliseconds);
    scrub.max = step.stages.length - 1;
    scrub.value = at;
    scrub.setAttribute("aria-valuetext", stage.title);
    position.textContent = `${at + 1} of ${step.stages.length}: ${stage.title}`;
    playing.setEnds(at === 0, at === step.stages.length - 1);
    centre(milliseconds ? "smooth" : "instant");
  }

  function centre(behavior) {
    if (path.scrollHeight <= path.clientHeight + 4) return;
    path.scrollTo({ top: drawing.middle(step.stages[at].id) - path.clientHeight / 2, behavior });
  }

  function showFlow() {
    const choose = id => { playing.pause(); to(step.stages.findIndex(stage => stage.id === id)); };
    drawing = flow(step, { width: widths[0], chosen, choose });
    path.replaceChildren(drawing.svg);
    light();
  }

  function showPanel() {
    const content = stagePanel(step, step.stages[at], { width: widths[1], chosen, setHead, data, hooks });
    choosing = content.choosing;
    panel.replaceChildren(...content.children);
  }

  function setHead(head) {
    chosen.head = head;
    hooks.head?.(head);
    drawing.head();
    showPanel();
    panel.querySelector(".step-head select")?.focus();
  }

  function measure() { // before the page has a width, draw for a phone
    const top = path.getBoundingClientRect().top + scrollY; // the flow ends at the bottom of the window
    const available = Math.max(MIN_HEIGHT, Math.floor(innerHeight - top - 64));
    path.style.setProperty("--step-path", `${available}px`);
    if (available !== height && drawing) centre("instant");
    height = available;
    const now = [path, panel].map(each => Math.max(MIN_WIDTH, Math.floor(each.clientWidth)));
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
    // Show another response, at the same stage if it has it, or else at the first stage of a block.
    update(response, { stage = step.stages[at].id, block = null } = {}) {
      if (response.place !== step.place || response.text !== step.text) data.picked = data.nextOf?.(response);
      step = withDrawnInputs(response);
      at = Math.max(0, step.stages.findIndex(each => (block ? groupOf(each) === block : each.id === stage)));
      hooks.stage?.(step.stages[at].id);
      showFlow();
      showPanel();
    },
    // the server's response to settings that the panel already shows
    confirm(response) {
      step = withDrawnInputs(response);
      showFlow();
      choosing?.confirm(step.choice);
    },
    key(event) {
      const act = { ArrowRight: () => playing.go(1), ArrowLeft: () => playing.go(-1), " ": playing.toggle,
        Home: () => to(0), End: () => to(step.stages.length - 1) }[event.key];
      act?.();
      return Boolean(act);
    },
    svg: () => drawing.svg,
    close() { playing.stop(); watch.disconnect(); },
  };
}
