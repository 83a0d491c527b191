// At a glance: how much is reused, what it is worth, and who is being answered now.

import { scatter, shares } from "./charts.js";
import { el, number, percent } from "./dom.js";
import { NAMES, bar, legend, reused } from "./sources.js";

export function overview(main, state) {
  const live = el("div", { class: "scroll" });
  const body = el("div", { class: "stack" });
  main.append(el("div", { class: "stack" }, el("h1", {}, "Overview"), body,
    el("section", { class: "panel stack", "aria-labelledby": "live-title" },
      el("h2", { id: "live-title" }, "Being answered now"), live)));
  let drawn = "";

  function update() {
    const now = state.overview;
    live.replaceChildren(liveTable(now.live));
    const points = [...state.prompts.values()].filter((prompt) => prompt.first_token_ms !== null);
    const key = JSON.stringify([points.at(-1)?.number, now.timeline.at(-1), now.used_tokens, now.cached_tokens, now.running, now.waiting]);
    if (key === drawn) return; // what is under the pointer stays where it is
    drawn = key;
    body.replaceChildren(tiles(now), el("div", { class: "pair" },
      chart("First token against share reused",
        "Each point is a prompt: further right, more of it was reused; lower, a sooner first token. Larger prompts are larger points.",
        points.length ? scatter(points) : nothing()),
      chart("Share reused over time", "Of the prompt tokens that ended in each slice, by source.",
        now.timeline.length ? shares(now.timeline, now.now) : nothing())));
  }
  update();
  return { update };
}

const nothing = () => el("p", { class: "empty" }, "No prompt has been answered yet. The playground can ask one.");

const chart = (title, words, drawing) =>
  el("section", { class: "panel stack" }, el("div", { class: "title" }, el("h2", {}, title), el("p", { class: "muted small" }, words)), drawing);

function tiles(now) {
  const counts = Object.fromEntries(NAMES.map((name) => [name, 0]));
  let prompts = 0;
  for (const slice of now.timeline) {
    prompts += slice.prompts;
    for (const name of NAMES) counts[name] += slice.tokens[name] ?? 0;
  }
  const free = now.total_tokens - now.used_tokens - (now.cached_tokens - Math.min(now.cached_tokens, now.used_tokens));
  const share = (value) => percent(now.total_tokens ? value / now.total_tokens : 0);
  return el("div", { class: "tiles" },
    el("section", { class: "panel tile wide" },
      el("h2", {}, "Prompt tokens reused, last hour"),
      el("p", { class: "big" }, prompts ? percent(reused(counts)) : "–"),
      prompts ? bar(counts) : null, prompts ? legend(counts, true) : null),
    tile("Prompts, last hour", number(prompts), `${number(sum(counts))} prompt tokens`),
    tile("Running and waiting", `${now.running} · ${now.waiting}`, "answers that hold pages, answers that wait"),
    tile("KV cached", share(now.cached_tokens), `${number(now.cached_tokens)} of ${number(now.total_tokens)} slots; ${number(now.used_tokens)} in use, ${number(Math.max(0, free))} free`));
}

const sum = (counts) => NAMES.reduce((sum, name) => sum + counts[name], 0);

const tile = (title, big, small) =>
  el("section", { class: "panel tile" }, el("h2", {}, title), el("p", { class: "big" }, big), el("p", { class: "muted small" }, small));

function liveTable(live) {
  if (!live.length) return el("p", { class: "muted" }, "Nobody is waiting for an answer.");
  const heads = ["Request", "Endpoint", "Phase", "Since", "Prompt", "Reused exactly", "Moved", "Answered"];
  return el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, at) => el("th", { scope: "col", class: at > 2 ? "num" : null }, head)))),
    el("tbody", {}, live.map((entry) => el("tr", {},
      el("th", { scope: "row", class: "mono" }, entry.rid),
      el("td", {}, entry.endpoint),
      el("td", {}, entry.answering ? "answering" : "before the first token"),
      [`${entry.seconds.toFixed(1)} s`, ...["prompt_tokens", "cached_tokens", "moved_tokens", "completion_tokens"].map((name) => number(entry[name]))]
        .map((text) => el("td", { class: "num" }, text))))));
}
