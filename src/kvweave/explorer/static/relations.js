// From where to where KV was moved: each donor above, the prompt below, a band for each run.

import { el, hideTip, number, showTip, svg, tokens } from "./dom.js";
import { placeLink } from "./sources.js";

const WIDTH = 900, ROW = 64, BAR = 12;
const MOST_DONORS = 6, MOST_BANDS = 60;

export function relations(prompt, state) {
  const moved = prompt.blocks.filter((block) => block.donor && block.source !== "exact");
  const donors = [...new Set(moved.map((block) => block.donor))].slice(0, MOST_DONORS);
  if (!donors.length) return null;
  const left = moved.filter((block) => !donors.includes(block.donor)).length;
  return el("figure", { class: "relations" },
    donors.map((donor) => pair(prompt, donor, moved.filter((block) => block.donor === donor), state)),
    left ? el("figcaption", { class: "muted small" }, `and ${number(left)} runs from other prompts`) : null);
}

// One donor over the prompt; positions of both on the same scale.
function pair(prompt, donor, blocks, state) {
  const known = state.prompts.get(donor);
  const reach = Math.max(...blocks.map((block) => block.donor_start + block.length));
  const length = Math.max(reach, known ? known.prompt_tokens + known.completion_tokens : 0);
  const scale = WIDTH / Math.max(length, prompt.prompt_tokens);
  const bottom = ROW - BAR;
  const bands = blocks.slice(0, MOST_BANDS).map((block) => {
    const from = block.donor_start * scale, to = block.start * scale, wide = Math.max(1.5, block.length * scale);
    const words = `${tokens(block.length)} ${block.source}\n${number(block.donor_start)} of #${donor} to ${number(block.start)} here`;
    return svg("path", {
      class: `band fill-${block.source}`,
      d: `M${from} ${BAR}H${from + wide}L${to + wide} ${bottom}H${to}Z`,
      onmouseenter: (event) => showTip(words, event.target.getBoundingClientRect()), onmouseleave: hideTip,
      onclick: () => { location.hash = placeLink(donor, block.donor_start, block.length); },
    });
  });
  const label = `${number(blocks.length)} runs from prompt #${donor}; the table lists them.`;
  return el("div", {},
    el("p", { class: "muted small" }, el("a", { href: `#/prompts/${donor}` }, `Prompt #${donor}`), " above, this prompt below"),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("rect", { class: "fill-fresh", width: length * scale, height: BAR, rx: 3 }),
      svg("rect", { class: "fill-fresh", y: bottom, width: prompt.prompt_tokens * scale, height: BAR, rx: 3 }),
      bands));
}
