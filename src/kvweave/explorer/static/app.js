// The page's frame: routing between views, polling, and the dialog for the key.

import { Refused, forget, get, hasKey, keep } from "./api.js";
import { hideTip, number } from "./dom.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { prompts } from "./prompts.js";
import { setUpTheme } from "./theme.js";
import { tree } from "./tree.js";

const EVERY = 2000;
const VIEWS = { overview, prompts, tree, playground };
const $ = (id) => document.getElementById(id);

// State that all views read. `prompts` are summaries by number, oldest first.
const state = { overview: null, prompts: new Map(), refresh };
let view = null;
let asking = null;

async function poll() {
  const last = Math.max(0, ...state.prompts.keys());
  let news = await get(`overview?after=${last}`);
  // After a restart of the server, the same numbers mean other prompts.
  if (state.overview && news.started !== state.overview.started) location.reload();
  if (news.oldest > last + 1 && state.prompts.size) {
    state.prompts.clear(); // some in between are lost already
    news = await get("overview?after=0");
  }
  for (const prompt of news.prompts) state.prompts.set(prompt.number, prompt);
  for (const known of state.prompts.keys()) if (known < news.oldest) state.prompts.delete(known);
  state.overview = news;
  $("facts").textContent =
    `${news.model} · ${news.backend} · room for ${number(news.total_tokens)} tokens${news.text_hidden ? " · text hidden" : ""}`;
}

async function refresh() {
  try {
    await poll();
    notice("");
    view?.update?.();
  } catch (problem) {
    if (problem instanceof Refused) askForKey(hasKey() ? problem.message : "");
    else notice(problem instanceof TypeError ? "The server does not answer." : problem.message);
  }
}

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").hidden = !text;
}

function askForKey(problem) {
  forget();
  $("key-problem").textContent = problem;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function route() {
  const [path, query] = location.hash.replace(/^#\//, "").split("?");
  const [name, ...rest] = (path || "overview").split("/");
  return { name: Object.hasOwn(VIEWS, name) ? name : "overview", rest, query: new URLSearchParams(query) };
}

function show() {
  const { name, rest, query } = route();
  hideTip();
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#/${name}`;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  const stays = view?.name === name && view.go;
  if (stays) view.go(rest, query);
  else {
    view?.leave?.();
    $("main").replaceChildren();
    view = { name, ...VIEWS[name]($("main"), state, rest, query) };
    scrollTo(0, 0);
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · kvweave explorer`;
  $("forget").hidden = !hasKey();
}

async function tick() {
  // Do not ask again while the key is being typed.
  if (!document.hidden && !$("key-dialog").open) await refresh();
  if (state.overview && !view) show(); // the first request had failed
  asking = setTimeout(tick, EVERY);
}

async function start() {
  clearTimeout(asking);
  await refresh();
  if (state.overview) show();
  asking = setTimeout(tick, EVERY);
}

setUpTheme($("theme"));
addEventListener("hashchange", () => state.overview && show());
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  start();
});
$("forget").addEventListener("click", () => { forget(); location.reload(); });
start();
