// The playground: one prompt answered cold, in a new namespace, and warm, after another prompt.

import { get, post } from "./api.js";
import { el, milliseconds, percent } from "./dom.js";
import { bar, reused } from "./sources.js";

export function playground(main, state) {
  const first = area("first", "First prompt: fills the cache", "Leave it empty to ask the second one twice.");
  const second = area("second", "Second prompt: asked cold, then warm", "Text that it shares with the first may be reused.");
  const length = el("input", { id: "length", type: "number", min: 1, max: 256, value: 48 });
  const status = el("p", { class: "muted", role: "status" });
  const result = el("div", { class: "stack" });
  const run = el("button", { type: "submit" }, "Ask cold and warm");
  const form = el("form", { class: "panel stack" },
    el("div", { class: "pair" }, first.field, second.field),
    el("div", { class: "row between" },
      el("div", { class: "row" }, el("label", { for: "length" }, "Longest answer, in tokens"), length),
      el("div", { class: "row" }, status, run)));
  main.append(el("div", { class: "stack" },
    el("div", { class: "title" }, el("h1", {}, "Playground"),
      el("p", { class: "muted" }, "The second prompt is answered twice: once with an empty cache, once after the first prompt. Answers are greedy."),
      state.overview.moves ? null : el("p", {}, `The backend ${state.overview.backend} reuses common beginnings only. Begin both prompts with the same text to see it; for text at other positions, serve with --prefix-cache-backend fuzzy_match.`)),
    form, result));
  fill(first.text, second.text, state.overview.moves);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run.disabled = true;
    result.replaceChildren();
    try {
      const asked = await compare(state, first.text.value, second.text.value, Number(length.value), (words) => { status.textContent = words; });
      result.replaceChildren(...verdict(asked));
      status.textContent = "";
    } catch (problem) {
      status.textContent = "";
      result.replaceChildren(el("p", { class: "panel problem", role: "alert" }, problem.message));
    }
    run.disabled = false;
  });
  return {};
}

function area(id, label, hint) {
  const text = el("textarea", { id, rows: 9, spellcheck: "false", "aria-describedby": `${id}-hint` });
  return { text, field: el("div", { class: "title" }, el("label", { for: id }, label), text, el("p", { id: `${id}-hint`, class: "muted small" }, hint)) };
}

// Where nothing moves, the two prompts share their beginning; elsewhere a text behind another one.
async function fill(first, second, moves) {
  const sample = await fetch("/explorer/static/sample.txt").then((reply) => reply.text());
  const question = "What did the keeper write down?";
  if (moves) {
    suggest(first, `Read this and say in one sentence what it is about.\n\n${sample}`);
    suggest(second, `You answer questions about a text. Be brief.\n\nText:\n${sample}\nQuestion: ${question}`);
  } else {
    suggest(first, `${sample}\n\nSay in one sentence what this is about.`);
    suggest(second, `${sample}\n\n${question}`);
  }
}

// Not while the field has the focus, or typed letters would follow the sample.
function suggest(field, text) {
  if (document.activeElement !== field) field.value ||= text;
}

async function compare(state, first, second, most, say) {
  if (!second.trim()) throw new Error("The second prompt is empty.");
  const salt = () => `playground-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const warm = salt();
  say("Cold …");
  const cold = await ask(state, second, most, salt());
  say("Filling the cache …");
  const filled = await ask(state, first.trim() ? first : second, first.trim() ? 1 : most, warm);
  say("Warm …");
  const again = await ask(state, second, most, warm);
  await state.refresh();
  const record = (rid) => [...state.prompts.values()].findLast((prompt) => prompt.rid === rid);
  return { cold, warm: again, records: [cold, filled, again].map((answer) => record(answer.rid)) };
}

async function ask(state, prompt, most, salt) {
  const rid = `${salt}-${Math.random().toString(36).slice(2, 8)}`;
  const common = { max_tokens: most, temperature: 0, cache_salt: salt, rid };
  if (state.overview.chat) {
    const reply = await post("/v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }], logprobs: true });
    return { rid, tokens: (reply.choices[0].logprobs?.content ?? []).map((entry) => entry.token) };
  }
  const reply = await post("/v1/completions", { ...common, prompt, logprobs: 0 });
  return { rid, tokens: reply.choices[0].logprobs.tokens };
}

function verdict({ cold, warm, records: [before, filled, after] }) {
  const [kept, keptWarm] = common(cold.tokens, warm.tokens);
  const same = kept.every(Boolean) && keptWarm.every(Boolean);
  const faster = before?.first_token_ms && after?.first_token_ms ? before.first_token_ms / after.first_token_ms : null;
  return [
    el("p", { class: "big", role: "status" },
      faster ? faster >= 1 ? `${faster.toFixed(1)} times sooner` : "Not sooner" : "", " ",
      el("span", { class: "muted small" }, same ? "The answers are the same, token by token." : `The answers differ in ${kept.filter((is) => !is).length} of ${kept.length} tokens.`)),
    el("div", { class: "pair" }, card("Cold", cold, before, kept), card("Warm", warm, after, keptWarm)),
    filled ? el("p", { class: "muted small" }, "The cache was filled by ", el("a", { href: `#/prompts/${filled.number}` }, `prompt #${filled.number}`), ".") : null,
  ];
}

function card(title, answer, record, kept) {
  return el("section", { class: "panel stack answer-card" },
    el("div", { class: "row between" }, el("h2", {}, title),
      record ? el("span", { class: "muted small" }, `first token ${milliseconds(record.first_token_ms)} · ${percent(reused(record.counts))} reused · `, el("a", { href: `#/prompts/${record.number}` }, `map of #${record.number}`)) : null),
    record ? bar(record.counts) : null,
    el("p", { class: "reading" }, answer.tokens.map((token, at) => (kept[at] ? token : el("mark", {}, token)))));
}

// Longest common subsequence: marks the tokens that both answers have.
function common(one, other) {
  const longest = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i--)
    for (let j = other.length - 1; j >= 0; j--)
      longest[i][j] = one[i] === other[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const kept = [one.map(() => false), other.map(() => false)];
  for (let i = 0, j = 0; i < one.length && j < other.length;) {
    if (one[i] === other[j]) { kept[0][i++] = kept[1][j++] = true; }
    else if (longest[i + 1][j] >= longest[i][j + 1]) i++;
    else j++;
  }
  return kept;
}
