// The radix tree as an icicle plot: positions of a prompt across, paths below one another.

import { get } from "./api.js";
import { ago, counted, el, line, number, percent, tokens } from "./dom.js";
import { placeLink } from "./sources.js";

const ROW = 28;

export function tree(main, state) {
  const again = el("button", { type: "button", class: "quiet", onclick: load }, "Reload");
  const words = el("p", { class: "muted" });
  const body = el("div", { class: "stack" });
  main.append(el("div", { class: "stack" },
    el("div", { class: "row between" }, el("div", { class: "title" }, el("h1", {}, "Tree"), words), again), body));

  async function load() {
    again.disabled = true;
    try {
      const { tree } = await get("tree");
      draw(tree);
    } catch (problem) {
      body.replaceChildren(el("p", { class: "panel problem" }, problem.message));
    }
    again.disabled = false;
  }

  function draw(tree) {
    if (tree === null) {
      words.textContent = "";
      body.replaceChildren(el("p", { class: "panel" }, "This cache keeps no tree. The backends radix and fuzzy_match keep one (--prefix-cache-backend)."));
      return;
    }
    const partly = tree.shown_tokens < tree.cached_tokens ? `; the ${number(tree.shown_tokens)} used last are shown` : "";
    words.textContent = `${tokens(tree.cached_tokens)} cached in pages of ${tree.page_size}${partly}. ` +
      `${percent(tree.evictable_tokens / Math.max(1, tree.cached_tokens))} could be evicted now.`;
    if (tree.nodes.length) body.replaceChildren(key(), ...icicle(tree, state));
    else body.replaceChildren(el("p", { class: "panel empty" }, "Nothing is cached yet."));
  }
  load();
  return {};
}

const key = () => el("ul", { class: "legend inline" },
  [["hit-0", "never hit"], ["hit-1", "hit once"], ["hit-2", "hit 2 to 7 times"], ["hit-3", "hit more often"], ["goes", "evicted next; the badge tells the order"], ["held", "in use now"]]
    .map(([kind, words]) => el("li", {}, el("i", { class: `swatch ${kind}` }), words)));

// Assigns rows: a node is as high as the leaves below it.
function laidOut(nodes) {
  const known = new Map(nodes.map((node) => [node.id, { ...node, below: [], depth: 1 }]));
  const roots = [];
  for (const node of known.values()) {
    const parent = known.get(node.parent);
    if (parent) parent.below.push(node);
    else roots.push(node);
  }
  let row = 0;
  const order = [];
  // What all siblings begin with tells none of them apart.
  const distinguish = (siblings) => {
    const shared = siblings.length > 1 ? sharedBeginning(siblings.map((node) => node.head ?? "")) : 0;
    for (const node of siblings) node.shared = shared;
  };
  const place = (node, depth) => {
    node.depth = depth;
    node.row = row;
    order.push(node);
    node.below.sort((one, other) => other.length - one.length);
    distinguish(node.below);
    for (const child of node.below) place(child, depth + 1);
    if (!node.below.length) row += 1;
    node.rows = row - node.row;
  };
  for (const root of roots) {
    row += 1; // for its heading
    place(root, 1);
  }
  return { order, rows: row, width: Math.max(1, ...nodes.map((node) => node.start + node.length)) };
}

function icicle(tree, state) {
  const { order, rows, width } = laidOut(tree.nodes);
  const detail = el("section", { class: "panel node-detail", "aria-live": "polite", "aria-label": "The chosen node" });
  const boxes = new Map();
  const choose = (node) => {
    for (const [other, box] of boxes) {
      box.tabIndex = other === node ? 0 : -1;
      box.setAttribute("aria-selected", other === node);
    }
    detail.replaceChildren(...describe(node, state));
  };
  for (const node of order) {
    const root = node.parent === null;
    const share = (value) => `${(100 * value) / width}%`;
    const siblings = root ? order.filter((other) => other.parent === null) : order.find((other) => other.id === node.parent).below;
    boxes.set(node, el("div", {
      role: "treeitem", "aria-level": node.depth, "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(node) + 1,
      "aria-label": label(node), "aria-selected": false, tabindex: -1,
      class: root ? "node root" : `node hit-${hits(node)}${node.goes <= 3 && node.goes ? " goes" : ""}${node.locks ? " held" : ""}`,
      style: root
        ? { left: 0, width: "100%", top: `${(node.row - 1) * ROW}px`, height: `${ROW}px` }
        : { left: share(node.start), width: `max(3px, ${share(node.length)})`, top: `${node.row * ROW}px`, height: `${node.rows * ROW}px` },
      onclick: () => { choose(node); boxes.get(node).focus(); },
    }, root ? el("span", {}, rootName(node)) : [node.goes ? el("b", { class: "badge" }, node.goes) : null, el("span", {}, name(node))]));
  }
  const box = el("div", { class: "icicle", role: "tree", "aria-label": "Cached paths", style: { height: `${rows * ROW}px` } }, [...boxes.values()]);
  box.addEventListener("keydown", (event) => {
    const at = order.find((node) => boxes.get(node) === event.target);
    const next = at && neighbour(order, at, event.key);
    if (!next) return;
    event.preventDefault();
    choose(next);
    boxes.get(next).focus();
  });
  choose(order.find((node) => node.parent !== null) ?? order[0]);
  return [el("div", { class: "panel" }, el("div", { class: "icicle-scroll" }, axis(width), box)), detail, next(order, choose)].filter(Boolean);
}

function neighbour(order, node, key) {
  const at = order.indexOf(node);
  if (key === "ArrowDown") return order[at + 1];
  if (key === "ArrowUp") return order[at - 1];
  if (key === "ArrowRight") return node.below[0];
  if (key === "ArrowLeft") return order.find((other) => other.id === node.parent);
  if (key === "Home") return order[0];
  return key === "End" ? order.at(-1) : null;
}

function axis(width) {
  const step = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536].find((size) => width / size <= 10) ?? width;
  const marks = [];
  for (let at = 0; at < 0.96 * width; at += step) marks.push(el("span", { style: { left: `${(100 * at) / width}%` } }, number(at)));
  return el("div", { class: "axis", "aria-hidden": true }, marks);
}

function sharedBeginning(texts) {
  let at = 0;
  while (at < texts[0].length && texts.every((text) => text[at] === texts[0][at])) at += 1;
  return at;
}

function name(node) {
  if (!node.head) return tokens(node.length);
  const own = line(node.head.slice(node.shared ?? 0));
  return own ? `${node.shared ? "…" : ""}${own}` : tokens(node.length);
}

// The nodes that eviction takes first, in order.
function next(order, choose) {
  const leaving = order.filter((node) => node.goes).sort((one, other) => one.goes - other.goes).slice(0, 5);
  if (!leaving.length) return null;
  return el("section", { class: "panel stack", "aria-labelledby": "next-title" },
    el("h2", { id: "next-title" }, "Evicted next"),
    el("ol", { class: "next" }, leaving.map((node) => el("li", {},
      el("button", { type: "button", class: "quiet", onclick: () => choose(node) }, name(node)), ` ${tokens(node.length)}, ${node.idle === 0 ? "used by the newest path" : `last used ${counted(node.idle, "use")} ago`}`))));
}

const hits = (node) => (node.hits === 0 ? 0 : node.hits === 1 ? 1 : node.hits < 8 ? 2 : 3);
const rootName = (node) => (node.namespace ? `Prompts with salt ${node.namespace}` : "Prompts without a salt");

const label = (node) => (node.parent === null ? rootName(node)
  : `${tokens(node.length)} from ${number(node.start)} on, hit ${node.hits} times${node.goes ? `, number ${node.goes} to be evicted` : ""}`);

function describe(node, state) {
  if (node.parent === null) return [el("h2", {}, rootName(node)), el("p", { class: "muted" }, `${number(node.children)} paths begin here, ${number(node.below.length)} of them shown.`)];
  const unseen = node.children - node.below.length;
  const facts = {
    Positions: `${number(node.start)} to ${number(node.start + node.length - 1)}`,
    Size: tokens(node.length),
    Hits: number(node.hits),
    "First prompt on it": since(node, state),
    "Last used": node.idle === 0 ? "by the newest path" : `${counted(node.idle, "use")} ago`,
    "Held by": node.locks ? `${number(node.locks)} running` : "nobody now",
    Eviction: node.goes ? `number ${node.goes} in the queue` : node.locks ? "not while it is held" : node.children ? "after what hangs below" : "not soon",
    "Goes on in": `${counted(node.children, "way")}${unseen > 0 ? `, ${number(unseen)} of them not shown` : ""}`,
  };
  return [
    el("h2", {}, `Node ${node.id}`),
    node.head ? el("blockquote", {}, node.head, node.length > 48 ? " …" : "") : null,
    el("dl", { class: "facts-list" }, Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("p", {}, el("b", {}, "Prompts on it: "), owners(node)),
  ];
}

function since(node, state) {
  const first = state.prompts.get(node.prompts[0]);
  return first ? ago(state.overview.now - first.arrived) : "longer ago than the history reaches";
}

function owners(node) {
  if (!node.prompts.length) return "none in the history";
  const shown = node.prompts.slice(0, 12).flatMap((prompt) => [el("a", { href: placeLink(prompt, node.start, node.length) }, `#${prompt}`), " "]);
  const more = node.prompts.length - 12;
  return [...shown, more > 0 ? `and ${number(more)} more` : ""];
}
