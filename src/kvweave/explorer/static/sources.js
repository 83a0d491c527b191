// The sources of KV: names, meanings, bars and legends. Colours are in base.css.

import { el, number, percent } from "./dom.js";

export const SOURCES = {
  exact: "reused unchanged: the same prefix",
  moved: "the same text at another position, moved",
  paraphrase: "a paraphrase, verified",
  refreshed: "could have been reused, recomputed",
  fresh: "computed",
};
export const NAMES = Object.keys(SOURCES);
export const LENT = ["exact", "moved", "paraphrase"];

const total = (counts) => NAMES.reduce((sum, name) => sum + (counts[name] ?? 0), 0);

export const reused = (counts) =>
  LENT.reduce((sum, name) => sum + (counts[name] ?? 0), 0) / Math.max(1, total(counts));

// The source of most of its tokens.
export const leading = (counts) =>
  NAMES.filter((name) => counts[name]).sort((one, other) => counts[other] - counts[one])[0] ?? "fresh";

// A link to a range of another prompt.
export const placeLink = (prompt, start, length) => `#/prompts/${prompt}?from=${start}&to=${start + length}`;

const words = (counts) =>
  NAMES.filter((name) => counts[name]).map((name) => `${percent(counts[name] / total(counts))} ${name}`).join(", ");

// A prompt's tokens by source, as one bar.
export function bar(counts) {
  const parts = NAMES.filter((name) => counts[name]).map((name) =>
    el("i", { class: `bg-${name}`, style: { "flex-grow": counts[name] } }));
  return el("div", { class: "bar", role: "img", "aria-label": words(counts) || "nothing" }, parts);
}

// The same, in order of position.
export function strip(blocks, length) {
  const parts = blocks.map((block) =>
    el("i", { class: `bg-${block.source}`, style: { "flex-grow": block.length } }));
  return el("div", { class: "bar strip", role: "img", "aria-label": `${blocks.length} blocks over ${number(length)} tokens` }, parts);
}

export function legend(counts, brief = false) {
  const sum = Math.max(1, total(counts));
  return el("ul", { class: brief ? "legend inline" : "legend" }, NAMES.filter((name) => counts[name]).map((name) => {
    const share = percent(counts[name] / sum);
    return el("li", {}, el("i", { class: `swatch bg-${name}` }), el("b", {}, name), " ",
      el("span", { class: "muted" }, brief ? share : `${number(counts[name])} · ${share} · ${SOURCES[name]}`));
  }));
}
