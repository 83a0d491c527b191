// Builds DOM elements. Strings become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, css] of Object.entries(value)) node.style.setProperty(key, css);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, properties = {}, ...children) =>
  build(document.createElement(tag), properties, children);

export const svg = (tag, properties = {}, ...children) =>
  build(document.createElementNS(SVG, tag), properties, children);

export const number = (value) => value.toLocaleString("en");
export const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;
export const tokens = (count) => counted(count, "token");
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

// Text on one line, without the special tokens of chat templates.
export const line = (text) => text.replace(/<\|[^|>]*\|>/g, " ").replace(/\s+/g, " ").trim();

export function milliseconds(value) {
  if (value === null) return "–";
  if (value >= 999.5) return `${Number((value / 1000).toPrecision(3))} s`;
  return `${Number(value.toPrecision(3))} ms`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

const tip = () => document.getElementById("tip");

export function showTip(text, box) {
  const node = tip();
  node.textContent = text;
  node.hidden = false;
  const left = Math.min(box.left, innerWidth - node.offsetWidth - 12);
  const below = box.bottom + 8;
  const fits = below + node.offsetHeight < innerHeight;
  node.style.left = `${Math.max(8, left)}px`;
  node.style.top = `${fits ? below : Math.max(8, box.top - node.offsetHeight - 8)}px`;
}

export function hideTip() {
  tip().hidden = true;
}

addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
addEventListener("scroll", hideTip, { passive: true });
