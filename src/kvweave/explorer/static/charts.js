// Two charts, drawn by hand.

import { hideTip, milliseconds, percent, showTip, svg, tokens } from "./dom.js";
import { LENT, leading, reused } from "./sources.js";

const WIDTH = 620, HEIGHT = 300;
const PLOT = { left: 58, right: 26, top: 12, bottom: 40 };
const across = (share) => PLOT.left + share * (WIDTH - PLOT.left - PLOT.right);
const upwards = (share) => HEIGHT - PLOT.bottom - share * (HEIGHT - PLOT.top - PLOT.bottom);

const frame = (label, ...inside) =>
  svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...inside);

const text = (x, y, words, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, words);

const level = (y, words) => [
  svg("line", { x1: PLOT.left, x2: WIDTH - PLOT.right, y1: y, y2: y }),
  text(PLOT.left - 8, y + 4, words, "end"),
];

function decades(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of [1, 3]) ticks.push(step * 10 ** power);
  return ticks.filter((tick) => tick >= low && tick <= high);
}

// First-token time, on a logarithmic scale, against the share reused.
export function scatter(points) {
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
    text(across(0.5), HEIGHT - 4, "share of the prompt reused"), dots);
}

// Stacked shares by source. A column is empty where nothing ended.
export function shares(slices, now) {
  const first = slices[0].start;
  const span = Math.max(600, now - first), columns = 60, wide = span / columns;
  const begin = now - span;
  const sums = Array.from({ length: columns }, () => ({ tokens: 0 }));
  for (const slice of slices) {
    const at = sums[Math.min(columns - 1, Math.max(0, Math.floor((slice.start - begin) / wide)))];
    for (const [name, count] of Object.entries(slice.tokens)) {
      at[name] = (at[name] ?? 0) + count;
      at.tokens += count;
    }
  }
  const width = (across(1) - across(0)) / columns;
  const bars = sums.flatMap((sum, column) => {
    let reached = 0;
    return (sum.tokens ? [...LENT, "refreshed", "fresh"] : []).map((name) => {
      const share = (sum[name] ?? 0) / sum.tokens, top = upwards(reached + share);
      const height = upwards(reached) - top;
      reached += share;
      return svg("rect", { class: `fill-${name}${name === "fresh" ? " faint" : ""}`, x: across(column / columns) + 1, y: top, width: width - 2, height });
    });
  });
  const marks = [0, 0.5, 1].map((share) =>
    text(across(share), HEIGHT - PLOT.bottom + 20, share === 1 ? "now" : `${Math.round((span * (1 - share)) / 60)} min ago`, share === 1 ? "end" : share ? "middle" : "start"));
  return frame(`Shares over the last ${Math.round(span / 60)} minutes`,
    [0, 0.25, 0.5, 0.75, 1].map((share) => level(upwards(share), percent(share))), bars, marks);
}

