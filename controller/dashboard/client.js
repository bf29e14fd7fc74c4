// Client of the management API. The key is kept in this page's memory alone: functions are served from the same origin,
// and their pages could read any storage of this origin.

let key = "";

export function useKey(text) {
  key = text.trim();
}

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.hint = error?.hint ?? "";
  }
}

async function answer(path, signal) {
  const response = await fetch(`../api/v1/${path}`, { headers: authorization(), signal, cache: "no-store" });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, body?.error);
  }
  return response;
}

// Changes something; the answer's JSON, null if it has none.
export async function send(method, path, body) {
  const headers = { ...authorization(), ...(body === undefined ? {} : { "content-type": "application/json" }) };
  const response = await fetch(`../api/v1/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
  const told = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, told?.error);
  return told;
}

// A call of a function; its errors are its answers.
export function call(path, { headers, ...request }) {
  return fetch(`../${path}`, { ...request, headers: { ...headers, ...authorization() }, cache: "no-store" });
}

function authorization() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function get(path, signal) {
  return (await answer(path, signal)).json();
}

// As `get`; null for a 404.
export async function find(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if (error instanceof Refused && error.status === 404) return null;
    throw error;
  }
}

export async function lines(path, signal) {
  const text = await (await answer(path, signal)).text();
  return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

export const name = encodeURIComponent;

const EVERY_MS = 2000;
const PAUSES = 4;
const PAUSE_MAX_MS = 60_000;

// Time until a page is read again that took so long to read: an open page is a fifth of the work of a server, or of a
// line, for which what the page shows is much, such as the ledger of a month.
export function pauseMs(tookMs) {
  return Math.min(PAUSE_MAX_MS, Math.max(EVERY_MS, PAUSES * tookMs));
}
