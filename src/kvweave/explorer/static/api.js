// Requests to this server. The key, if there is one, is kept in the tab's session storage.

const KEY = "kvweave-key";

export class Refused extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keep = (key) => sessionStorage.setItem(KEY, key);
export const forget = () => sessionStorage.removeItem(KEY);

// Headers carry bytes: each UTF-8 byte becomes the character that fetch sends as that byte.
const bytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function send(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (hasKey()) headers.Authorization = `Bearer ${bytes(sessionStorage.getItem(KEY))}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.status === 401) throw new Refused("the server does not take this key");
  const body = await reply.json().catch(() => null);
  if (reply.status === 403) throw new Refused(body?.error?.message ?? "this key is not the operators'");
  if (!reply.ok) throw new Error(body?.error?.message ?? `the server answered ${reply.status}`);
  return body;
}

export const get = (path) => send(`/explorer/api/${path}`);
export const post = (path, body) => send(path, { method: "POST", body: JSON.stringify(body) });
