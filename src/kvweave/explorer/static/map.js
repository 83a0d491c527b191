// The map of a prompt: its text, coloured by the source of each token's KV.

import { el, hideTip, number, showTip, tokens } from "./dom.js";
import { SOURCES, placeLink } from "./sources.js";

// Special tokens as most models write them: <|im_start|>, <s>, </s>.
const SPECIAL = /^<(\|.+\||\/?s|pad|bos|eos)>$/;

export function drawMap(prompt, hidden, query) {
  if (hidden) return el("p", { class: "muted" }, "Texts are withheld on this server; the runs are below.");
  const from = Number(query.get("from") ?? -1), to = Number(query.get("to") ?? -1);
  const lent = (position) => position >= from && position < to;
  const map = el("div", { class: "map", tabindex: 0, role: "group", "aria-label": "The prompt, coloured by source" },
    prompt.blocks.map((block) => drawBlock(block, lent)), drawAnswer(prompt, lent));
  const shown = prompt.blocks.reduce((sum, block) => sum + block.tokens.length, 0);

  map.addEventListener("mouseover", (event) => {
    const token = event.target.closest("[data-at]"), run = event.target.closest(".run");
    if (!run || !token) return hideTip();
    showTip(tokenWords(prompt.blocks[run.dataset.block], Number(token.dataset.at)), token.getBoundingClientRect());
  });
  map.addEventListener("mouseleave", hideTip);
  map.addEventListener("focusin", (event) => {
    const run = event.target.closest(".run");
    if (run) showTip(runWords(prompt.blocks[run.dataset.block]), run.getClientRects()[0]);
  });
  map.addEventListener("focusout", hideTip);
  [...map.querySelectorAll(".run")].forEach((run, at) => { run.dataset.block = at; });

  return el("div", { class: "stack" }, map,
    shown < prompt.prompt_tokens ? el("p", { class: "muted small" }, `The first ${number(shown)} of ${tokens(prompt.prompt_tokens)} are shown.`) : null);
}

function drawBlock(block, lent) {
  const pieces = block.tokens.map((text, offset) => {
    const kinds = [lent(block.start + offset) ? "lent" : "", SPECIAL.test(text) ? "special" : ""];
    return el("span", { "data-at": block.start + offset, class: kinds.join(" ").trim() || null }, text);
  });
  const kind = `run ${block.source}`;
  if (!block.donor) return el("span", { class: kind }, pieces);
  return el("a", {
    class: kind, "aria-describedby": "tip",
    href: placeLink(block.donor, block.donor_start, block.length),
  }, pieces);
}

// Generated text is reused too, so the marked range may lie in it.
function drawAnswer(prompt, lent) {
  if (!prompt.answer.tokens?.length) return null;
  return el("div", { class: "answer" }, el("h3", {}, "Answer"), prompt.answer.tokens.map((text, offset) =>
    el("span", { class: lent(prompt.prompt_tokens + offset) ? "lent" : null }, text)));
}

const donorWords = (block) => (block.donor ? `prompt #${block.donor}` : "a prompt that is no longer kept");

function tokenWords(block, at) {
  const own = `Token ${number(at)}: ${block.source}`;
  if (block.donor_start === undefined) return `${own}\n${SOURCES[block.source]}`;
  return `${own}\nfrom token ${number(block.donor_start + at - block.start)} of ${donorWords(block)}`;
}

function runWords(block) {
  const own = `${block.source}: ${tokens(block.length)}, ${number(block.start)} to ${number(block.start + block.length - 1)}`;
  if (block.donor_start === undefined) return own;
  return `${own}\nfrom ${donorWords(block)}, ${number(block.donor_start)} to ${number(block.donor_start + block.length - 1)}`;
}
