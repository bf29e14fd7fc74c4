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
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(`../api/v1/${path}`, { headers, signal, cache: "no-store" });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, body?.error);
  }
  return response;
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
