// The Explorer: the views of a model or a folder of runs. What is shown stands in the address, after its #.
import * as api from "./api.js";
import { field, h, select } from "./dom.js";

const VIEWS = ["write", "step", "attention", "surprise", "lens", "saliency", "search", "tokens", "runs", "compare",
  "anatomy"];
const RETRY_MS = 1500; // after which a server that is away is asked again
const main = document.getElementById("main"), chooser = document.getElementById("chooser");
const navigation = document.getElementById("views");
let views = [], models = [], current = null;

function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path, state: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function link(path, state) {
  const some = Object.entries(state).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${path}${some.length ? `?${new URLSearchParams(some)}` : ""}`;
}

function show(path, state, push) {
  history[push ? "pushState" : "replaceState"](null, "", link(path, state));
  document.dispatchEvent(new CustomEvent("weft-state"));
}

// ---- the frame around a view

function frame(info) {
  const { path, state } = address();
  navigation.replaceChildren(...views.filter(view => view.shows(info)).map(view =>
    h("a", { href: link(view.path, { model: state.model }), "aria-current": view.path === path && "page" }, view.title)));
  navigation.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  chooser.replaceChildren(...models.length > 1
    ? [field("Model", select(models.map(each => [each.id, each.id]), info?.id, id => open(path, { model: id }, true)))]
    : models.map(each => h("span", { class: "soft" }, each.id)));
}

function problem(message, again) {
  return h("div", { class: "problem", role: "alert" }, h("p", {}, message),
    again && h("p", {}, h("button", { type: "button", onclick: again }, "Try again")));
}

// What stays, whatever else is done.
const notice = message => h("p", { class: "notice" }, message);

function askForKey() {
  const key = h("input", { type: "password", autocomplete: "off", required: true });
  const form = h("form", { onsubmit: event => { event.preventDefault(); api.setKey(key.value); begin(); } },
    h("p", {}, "This server requires an API key."), field("Key", key), " ", h("button", { class: "primary" }, "Continue"));
  main.replaceChildren(form);
  key.focus();
}

// What went wrong, below what is shown already; a server that is away is asked until it is back.
function fail(error, view) {
  if (error.name === "AbortError" || (view && view !== current)) return;
  if (error.status === 401) return askForKey();
  main.querySelector(".problem")?.remove();
  if (error.status) return main.append(problem(error.message, render));
  if (error.status === undefined) { console.error(error); return main.append(problem(`Unexpected error: ${error.message}`, render)); }
  main.append(problem("The server is not responding. This page reconnects when it is back."));
  const wait = setInterval(async () => {
    try {
      await api.get("health");
      clearInterval(wait);
      await begin();
    } catch { /* not yet */ }
  }, RETRY_MS);
  current?.signal.addEventListener("abort", () => clearInterval(wait));
}

// ---- views

export function open(path, state, push = false) {
  show(path, state, push);
  return render();
}

function emptyFolder() {
  return h("div", {}, h("h1", {}, "No models yet"), h("p", {}, "Train one and it appears here:"),
    h("pre", {}, "weft train gpt-tiny --data book.txt"), h("p", { class: "soft" }, "weft quickstart needs no data."));
}

async function render() {
  current?.end.abort();
  current?.shown?.close?.();
  const { path, state } = address();
  const newest = models.reduce((best, each) => best && best.created >= each.created ? best : each, null);
  const info = models.find(each => each.id === state.model) ?? newest;
  const offered = views.filter(view => view.shows(info));
  const view = views.find(each => each.path === path) ?? offered[0];
  if (!view) { frame(info); return main.replaceChildren(emptyFolder()); }
  if (view.path !== path) return open(view.path, state);
  frame(info);
  document.title = `${view.title}${info ? ` · ${info.id}` : ""} · weft`;
  const end = new AbortController(), mine = { end, signal: end.signal, shown: null };
  current = mine;
  const place = h("div", { class: `view view-${view.path}` });
  main.replaceChildren(h("h1", {}, view.title), h("p", { class: "soft about" }, view.about), place);
  if (state.model && info?.id !== state.model) {
    main.append(notice(`No model '${state.model}' on this server${info ? `; showing '${info.id}'` : ""}.`));
  }
  if (!view.shows(info)) {
    return place.append(info ? h("p", {}, `This view is not available for a model of kind '${info.kind}'.`) : emptyFolder());
  }
  const context = {
    info, models, api, signal: end.signal, state: { ...state },
    set(changes, { push = false } = {}) {
      if (mine !== current) return;
      Object.assign(context.state, changes);
      show(view.path, context.state, push);
    },
    go: (to, changes = {}) => open(to, { model: context.state.model, ...changes }, true),
    fail: error => fail(error, mine),
    done: () => main.querySelector(".problem")?.remove(), // what failed has been done since
    refresh: async () => { await list(); frame(info); },
  };
  try {
    mine.shown = await view.mount(place, context);
    if (mine !== current) mine.shown?.close?.();
  } catch (error) {
    fail(error, mine);
  }
}

async function list() {
  const found = await api.get("v1/models");
  models = found.data.filter(each => each.weft).map(each => ({ id: each.id, created: each.created, ...each.weft }));
}

async function begin() {
  try {
    await list();
    await render();
  } catch (error) {
    fail(error);
  }
}

document.addEventListener("weft-busy", event => {
  clearTimeout(busyTimer);
  const told = document.getElementById("busy");
  if (!event.detail) told.textContent = "";
  else busyTimer = setTimeout(() => { told.textContent = "computing …"; }, 400);
});
let busyTimer;
addEventListener("popstate", render);
const loaded = await Promise.allSettled(VIEWS.map(name => import(`./view_${name}.js`)));
views = loaded.filter(each => each.status === "fulfilled").map(each => each.value);
for (const each of loaded) if (each.reason) console.error(each.reason);
await begin();
