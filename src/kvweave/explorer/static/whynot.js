// "Why not more?": reasons why shared text was not reused, fetched on demand.

import { get } from "./api.js";
import { el, number, tokens } from "./dom.js";
import { placeLink } from "./sources.js";

export function whyNot(prompt) {
  const answer = el("div", { class: "stack", "aria-live": "polite" });
  const ask = el("button", { type: "button", class: "quiet", onclick: async () => {
    ask.disabled = true;
    try {
      answer.replaceChildren(...reasons(await get(`prompts/${prompt.number}/why-not`)));
    } catch (problem) {
      answer.replaceChildren(el("p", { class: "problem" }, problem.message));
    }
    ask.disabled = false;
  } }, "Why not more?");
  return el("section", { class: "panel stack", "aria-labelledby": "why-title" },
    el("div", { class: "row between nowrap" },
      el("div", { class: "title" },
        el("h2", { id: "why-title" }, "Shared text that was computed"),
        el("p", { class: "muted small" }, "Compares what this prompt computed with earlier prompts and names the gate that refused each shared run.")),
      ask),
    answer);
}

function reasons(found) {
  if (!found.compared) return [el("p", {}, "There was no earlier prompt to compare with.")];
  const words = otherWords(found.other_words);
  if (!found.runs.length) {
    return [...words, el("p", {}, found.computed
      ? `Of the ${tokens(found.computed)} that it computed, no run of 15 or more is in any of the ${number(found.compared)} earlier prompts in the history.`
      : "It computed nothing that could have been reused.")];
  }
  return [el("ol", { class: "reasons" }, found.runs.map((run, at) => el("li", {},
    el("p", {}, el("b", {}, at ? `${tokens(run.length)} ` : `Longest shared run: ${tokens(run.length)} `),
      `at ${number(run.start)}, which `,
      el("a", { href: placeLink(run.donor, run.donor_start, run.length) }, `prompt #${run.donor}`),
      ` has at ${number(run.donor_start)}.`),
    run.excerpt ? el("blockquote", {}, run.excerpt, run.length > 40 ? " …" : "") : null,
    el("p", {}, el("span", { class: "gate" }, run.gate), " ", `${run.reason}.`)))),
  ...words];
}

function otherWords(declined) {
  if (!declined.length) return [];
  return [el("p", {}, "Paraphrases that were proposed and refused:"),
    el("ol", { class: "reasons" }, declined.map((words) => el("li", {},
      el("p", {}, `${tokens(words.length)} at ${number(words.start)}.`),
      words.excerpt ? el("blockquote", {}, words.excerpt, words.length > 40 ? " …" : "") : null,
      el("p", {}, el("span", { class: "gate" }, words.gate), words.reason ? ` ${words.reason}.` : ""))))];
}
