// The list of recent prompts, and the map of the chosen one.

import { get } from "./api.js";
import { ago, el, line, milliseconds, number, percent, tokens } from "./dom.js";
import { drawMap } from "./map.js";
import { relations } from "./relations.js";
import { bar, legend, placeLink, reused, strip } from "./sources.js";
import { whyNot } from "./whynot.js";

export function prompts(main, state, rest, query) {
  const list = el("ol", { class: "prompts" });
  const filter = el("input", { id: "filter", type: "search", placeholder: "Number, endpoint, id or words", oninput: sift, spellcheck: "false" });
  const detail = el("div", { class: "stack" });
  main.append(el("div", { class: "split" },
    el("section", { class: "stack", "aria-labelledby": "list-title" },
      el("h1", { id: "list-title" }, "Prompts"),
      el("div", { class: "title" }, el("label", { for: "filter" }, "Show only"), filter), list),
    detail));
  const lines = new Map();
  let chosen = null;

  function update() {
    for (const [known, line] of lines) if (!state.prompts.has(known)) { line.remove(); lines.delete(known); }
    for (const prompt of state.prompts.values()) {
      if (!lines.has(prompt.number)) {
        const line = entry(prompt, state);
        lines.set(prompt.number, line);
        list.prepend(line);
      }
    }
    for (const [known, line] of lines) {
      line.querySelector("time").textContent = ago(state.overview.now - state.prompts.get(known).arrived);
    }
    sift();
    if (chosen === null && state.prompts.size) go([], query);
  }

  function sift() {
    const wanted = filter.value.trim().toLowerCase();
    for (const [known, line] of lines) {
      const prompt = state.prompts.get(known);
      const words = `#${known} ${prompt.endpoint} ${prompt.rid} ${prompt.beginning ?? ""}`.toLowerCase();
      line.hidden = !words.includes(wanted);
    }
  }

  function mark() {
    for (const [known, line] of lines) {
      const link = line.querySelector("a");
      known === chosen ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
      if (known === chosen) line.scrollIntoView({ block: "nearest" });
    }
  }

  async function go(rest, query) {
    chosen = Number(rest[0]) || Math.max(0, ...state.prompts.keys()) || null;
    mark();
    if (chosen === null) {
      detail.replaceChildren(el("p", { class: "empty panel" }, "No prompt has been answered yet. The playground can ask one."));
      return;
    }
    const asked = chosen;
    try {
      const prompt = await get(`prompts/${asked}`);
      if (asked === chosen) detail.replaceChildren(...page(prompt, state, query));
      detail.querySelector(".lent")?.scrollIntoView({ block: "center" });
      if (rest[0]) detail.querySelector("h2")?.focus({ preventScroll: true });
    } catch (problem) {
      if (asked === chosen) detail.replaceChildren(el("p", { class: "panel problem" }, problem.message));
    }
  }

  update();
  if (rest[0] || chosen === null) go(rest, query);
  return { update, go };
}

function entry(prompt, state) {
  return el("li", { value: prompt.number },
    el("a", { href: `#/prompts/${prompt.number}` },
      el("span", { class: "row between" },
        el("span", {}, el("b", {}, `#${prompt.number}`), ` ${prompt.playground ? "playground" : prompt.endpoint}`),
        el("span", { class: "muted small" }, el("time", {}, ago(state.overview.now - prompt.arrived)))),
      prompt.beginning ? el("span", { class: "beginning" }, line(prompt.beginning)) : null,
      bar(prompt.counts),
      el("span", { class: "row between small muted" },
        el("span", {}, tokens(prompt.prompt_tokens)),
        el("span", {}, `${percent(reused(prompt.counts))} reused`),
        el("span", {}, milliseconds(prompt.first_token_ms)))));
}

function page(prompt, state, query) {
  const hidden = state.overview.text_hidden;
  const facts = {
    "First token": milliseconds(prompt.first_token_ms),
    "In all": milliseconds(prompt.total_ms),
    Prompt: tokens(prompt.prompt_tokens),
    Answer: `${tokens(prompt.completion_tokens)}, ${prompt.outcome}`,
    Shared: prompt.namespace ? `within salt ${prompt.namespace}` : "with all unsalted prompts",
  };
  return [
    el("section", { class: "panel stack", "aria-labelledby": "map-title" },
      el("div", { class: "title" },
        el("h2", { id: "map-title", class: "h1", tabindex: -1 }, `Prompt #${prompt.number}`),
        el("p", { class: "muted small" }, el("span", { class: "mono" }, prompt.rid), ` · ${prompt.endpoint}`, prompt.fuzzy ? "" : " · exact KV only")),
      el("dl", { class: "facts-list" }, Object.entries(facts).map(([name, value]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      strip(prompt.blocks, prompt.prompt_tokens),
      legend(prompt.counts),
      relations(prompt, state),
      drawMap(prompt, hidden, query),
      sourcesTable(prompt, hidden)),
    whyNot(prompt),
  ];
}

const SHORT_TABLE = 24;

function sourcesTable(prompt, hidden) {
  const open = hidden && prompt.blocks.length <= SHORT_TABLE;
  const rows = prompt.blocks.slice(0, 400).map((block) => el("tr", {},
    el("td", {}, el("i", { class: `swatch bg-${block.source}` }), block.source, block.generation ? `, of its session (generation ${block.generation})` : "", block.shared ? `, ${tokens(block.shared)} read in place` : ""),
    el("td", { class: "num" }, `${number(block.start)} to ${number(block.start + block.length - 1)}`),
    el("td", { class: "num" }, number(block.length)),
    el("td", {}, donorCell(block))));
  const more = prompt.blocks.length - rows.length;
  return el("details", { open },
    el("summary", {}, prompt.blocks.length === 1 ? "Its only run as a table" : `Its ${number(prompt.blocks.length)} runs as a table`),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["Source", "Positions", "Tokens", "From"].map((head, at) => el("th", { scope: "col", class: at === 1 || at === 2 ? "num" : null }, head)))),
      el("tbody", {}, rows))),
    more > 0 ? el("p", { class: "muted small" }, `and ${number(more)} more`) : null);
}

function donorCell(block) {
  if (block.donor_start === undefined) return "";
  const where = `position ${number(block.donor_start)}`;
  return block.donor ? el("a", { href: placeLink(block.donor, block.donor_start, block.length) }, `prompt #${block.donor}, ${where}`) : `${where} of a prompt that is no longer kept`;
}
