// The overview: totals, time to first token against share reused, and requests in progress.

import { counted, el, hideTip, milliseconds, number, percent, showTip, svg, tokens } from "./dom.js";
import { NAMES, SOURCES, bar, leading, legend, reused } from "./sources.js";

export function overview(main, state) {
  const live = el("div", { class: "scroll" });
  const body = el("div", { class: "stack" });
  main.append(el("div", { class: "stack" }, el("h1", {}, "Overview"), body,
    el("section", { class: "panel stack", "aria-labelledby": "live-title" },
      el("h2", { id: "live-title" }, "Requests in progress"), live)));
  let drawn = "";

  function update() {
    const now = state.overview;
    live.replaceChildren(liveTable(now.live));
    const traffic = [...state.prompts.values()].filter((prompt) => !prompt.playground);
    const points = traffic.filter((prompt) => prompt.first_token_ms !== null);
    const key = JSON.stringify([points.at(-1)?.number, now.used_tokens, now.cached_tokens, now.running, now.waiting, now.counters]);
    if (key === drawn) return; // unchanged: keep the points under the pointer
    drawn = key;
    body.replaceChildren(tiles(now, points, rate(now)), el("section", { class: "panel stack" },
      el("div", { class: "title" }, el("h2", {}, "First token against share reused"),
        el("p", { class: "muted small" }, "Each point is a prompt, without those of the playground. Larger prompts are larger points.")),
      points.length ? [scatter(points), colours(points)] : el("p", { class: "empty" }, "No prompt has been answered yet. The playground can ask one.")));
  }
  update();
  return { update };
}

// Answered tokens per second over the last polls.
const SAMPLES = 6;
let samples = [];

function rate(now) {
  samples = [...samples.filter((one) => one.started === now.started), { started: now.started, at: now.now, tokens: now.counters.generated_tokens }].slice(-SAMPLES);
  const [first, last] = [samples[0], samples.at(-1)];
  return last.at > first.at ? (last.tokens - first.tokens) / (last.at - first.at) : 0;
}

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

function tiles(now, prompts, perSecond) {
  const times = prompts.map((prompt) => prompt.first_token_ms).sort((one, other) => one - other);
  const { evicted_tokens, preemptions, healed, heals_waiting } = now.counters;
  const counts = Object.fromEntries(NAMES.map((name) => [name, 0]));
  for (const prompt of prompts) for (const name of NAMES) counts[name] += prompt.counts[name] ?? 0;
  const free = now.total_tokens - now.used_tokens - (now.cached_tokens - Math.min(now.cached_tokens, now.used_tokens));
  const share = (value) => percent(now.total_tokens ? value / now.total_tokens : 0);
  return el("div", { class: "tiles" },
    el("section", { class: "panel tile wide" },
      el("h2", {}, "Prompt tokens reused"),
      el("p", { class: "big" }, prompts.length ? percent(reused(counts)) : "–"),
      prompts.length ? bar(counts) : null, prompts.length ? legend(counts, true) : null),
    tile("Time to first token", times.length ? milliseconds(quantile(times, 0.5)) : "–",
      times.length ? `median; 95 % within ${milliseconds(quantile(times, 0.95))}` : "no prompt yet"),
    tile("Throughput", `${number(Math.round(10 * perSecond) / 10)} tokens/s`, "answered, in the last seconds"),
    tile("Evicted", tokens(evicted_tokens), `since the start; ${counted(preemptions, "preemption")}`),
    tile("Healed", number(healed), `prompts computed exactly afterwards; ${number(heals_waiting)} wait`),
    tile("Prompts kept", number(prompts.length), tokens(sum(counts))),
    tile("Running and waiting", `${now.running} · ${now.waiting}`, "answers with pages, answers in the queue"),
    tile("KV cached", share(now.cached_tokens), `${number(now.cached_tokens)} of ${number(now.total_tokens)} tokens; ${number(now.used_tokens)} in use, ${number(Math.max(0, free))} free`));
}

const sum = (counts) => NAMES.reduce((sum, name) => sum + counts[name], 0);

const tile = (title, big, small) =>
  el("section", { class: "panel tile" }, el("h2", {}, title), el("p", { class: "big" }, big), el("p", { class: "muted small" }, small));

// As wide as there is room, so that its text keeps its size.
let width = 620;
const HEIGHT = 300;
const PLOT = { left: 76, right: 26, top: 12, bottom: 40 };
const across = (share) => PLOT.left + share * (width - PLOT.left - PLOT.right);
const upwards = (share) => HEIGHT - PLOT.bottom - share * (HEIGHT - PLOT.top - PLOT.bottom);

const frame = (label, ...inside) =>
  svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label }, ...inside);

const text = (x, y, words, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, words);

const level = (y, words) => [
  svg("line", { x1: PLOT.left, x2: width - PLOT.right, y1: y, y2: y }),
  text(PLOT.left - 8, y + 4, words, "end"),
];

function decades(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of [1, 3]) ticks.push(step * 10 ** power);
  return ticks.filter((tick) => tick >= low && tick <= high);
}

// First-token time (log scale) against share reused.
function scatter(points) {
  width = Math.max(300, Math.min(620, innerWidth - 80));
  const times = points.map((point) => Math.max(0.1, point.first_token_ms));
  const low = Math.min(...times) / 1.6, high = Math.max(...times) * 1.6;
  const y = (time) => upwards(Math.log(Math.max(0.1, time) / low) / Math.log(high / low));
  const radius = (point) => Math.min(11, 2.5 + Math.sqrt(point.prompt_tokens) / 9);
  const dots = points.map((point) => {
    const words = () => `Prompt #${point.number}, ${tokens(point.prompt_tokens)}\n${percent(reused(point.counts))} reused, first token after ${milliseconds(point.first_token_ms)}`;
    return svg("circle", {
      class: `dot fill-${leading(point.counts)}`, cx: across(reused(point.counts)), cy: y(point.first_token_ms), r: radius(point),
      onmouseenter: (event) => showTip(words(), event.target.getBoundingClientRect()), onmouseleave: hideTip,
      onclick: () => { location.hash = `#/prompts/${point.number}`; },
    });
  });
  const label = `${points.length} prompts; first tokens after ${milliseconds(Math.min(...times))} to ${milliseconds(Math.max(...times))}. The list of prompts has the figures.`;
  return frame(label,
    decades(low, high).map((tick) => level(y(tick), milliseconds(tick))),
    [0, 0.25, 0.5, 0.75, 1].map((share) => text(across(share), HEIGHT - PLOT.bottom + 20, percent(share))),
    text(across(0.5), HEIGHT - 4, "share of the prompt reused"),
    svg("text", { transform: `translate(13 ${upwards(0.5)}) rotate(-90)`, "text-anchor": "middle" }, "time to first token"), dots);
}

// What the colours of the points mean: the source of most of a prompt's tokens.
function colours(points) {
  const present = new Set(points.map((point) => leading(point.counts)));
  return el("ul", { class: "legend inline" }, NAMES.filter((name) => present.has(name)).map((name) =>
    el("li", {}, el("i", { class: `swatch bg-${name}` }), `most of it ${name}: ${SOURCES[name]}`)));
}

function liveTable(live) {
  if (!live.length) return el("p", { class: "muted" }, "No request is in progress.");
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
