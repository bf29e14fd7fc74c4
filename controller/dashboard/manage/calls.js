// All recorded invocations, and the stored ones of async calls: filters, paging, dead letters, cancellation.

import { get, name, send } from "../client.js";
import { card, choices, empty, h, table, tag } from "../dom.js";
import { age, at, moment, several } from "../format.js";
import { functionLink, invocationLink, invocations } from "../components.js";
import { button, field, form, offer } from "./actions.js";

const PAGE = 50;
const MOST = 1000;
const KINDS = [["all", ""], ["with an error", "", true], ["async", "async"], ["dead letters", "dead"]];
const STATES = { succeeded: "good", running: "busy", queued: "warn", failed: "bad", expired: "bad", cancelled: null };

export async function load(parts, query, signal) {
  const kind = query.get("kind") ?? "";
  const which = query.get("function") ?? "";
  const limit = Math.min(MOST, Math.max(PAGE, Number(query.get("limit")) || PAGE));
  const failed = query.get("failed") === "1" && !kind;
  const [since, until] = [Number(query.get("since_unix_ms")) || 0, Number(query.get("until_unix_ms")) || 0];
  const rows = await get(kind ? `async?dead=${kind === "dead" ? 1 : 0}&function=${name(which)}&limit=${limit}`
    : `invocations?${new URLSearchParams({ function: which, limit, failed: Number(failed), since_unix_ms: since, until_unix_ms: until })}`, signal);
  return { kind, which, limit, failed, rows, ...(until && !kind ? { since_unix_ms: since, until_unix_ms: until } : {}) };
}

export function view({ rows, ...wanted }, nowMs) {
  const { kind, which, limit, failed, since_unix_ms: since, until_unix_ms: until } = wanted;
  return [
    h("div", { class: "title" }, h("h1", null, "Invocations"), which ? h("span", { class: "sub" }, `of ${which}`) : null,
      choices(KINDS.map(([text, known, error]) => [text, address({ ...wanted, kind: known, failed: error, limit: PAGE }), known === kind && Boolean(error) === failed]))),
    until ? h("p", { class: "sub" }, `From ${at(since)} to ${at(until)}. `, h("a", { href: address({ kind, which, failed, limit: PAGE }) }, "Of all time")) : null,
    form("find-calls", wanted, which, field("function", { name: "function", value: which, type: "search" }), button("Show")),
    card(null, rows.length ? kind ? stored(rows, nowMs) : invocations(rows, nowMs, { withFunction: true, past: Boolean(until) })
      : empty(kind === "dead" ? "No dead letters: every async call has ended, or will be tried again." : "None.")),
    rows.length === limit && limit < MOST ? h("p", null, h("a", { href: address({ ...wanted, limit: Math.min(MOST, 2 * limit) }) }, `Show ${Math.min(MOST, 2 * limit)}`),
      h("span", { class: "dim" }, `, now the newest ${several(limit, "invocation")}`)) : null,
  ];
}

function address({ kind, which, limit, failed, since_unix_ms: since, until_unix_ms: until }) {
  const span = until ? { since_unix_ms: since, until_unix_ms: until } : {};
  return `#/calls?${new URLSearchParams({ kind, function: which, limit, ...(failed ? { failed: 1 } : {}), ...span })}`;
}

function stored(rows, nowMs) {
  return table(
    [{ name: "when", tight: true }, { name: "state", tight: true }, { name: "function" }, { name: "invocation", tight: true }, { name: "origin" },
      { name: "runs", num: true }, { name: "status", num: true }, { name: "", tight: true }, { name: "error", wide: true }],
    rows.map((row) => [
      h("span", { title: moment(row.accepted_unix_ms) }, `${age(row.accepted_unix_ms, nowMs)} ago`),
      [tag(row.cancelling ? "cancelling" : row.status, STATES[row.status]), row.dead_letter ? tag("dead letter", "bad") : null],
      functionLink(row.function), invocationLink(row.id),
      row.origin, row.runs, row.http_status || "–", todo(row), row.error && h("span", { class: "clamp", title: row.error.message }, row.error.message)]));
}

function todo(row) {
  if (["failed", "expired", "cancelled"].includes(row.status)) return form("redrive", { id: row.id }, row.status, button("Run again"));
  return row.status === "queued" || row.status === "running" ? form("cancel", { id: row.id }, row.status, button("Cancel")) : null;
}

offer("find-calls", (wanted, form) => {
  location.hash = address({ ...wanted, which: form.elements.function.value.trim(), limit: PAGE });
  return "";
});
offer("redrive", async ({ id }) => {
  await send("POST", `invocations/${name(id)}/redrive`);
  return "Queued again.";
});
offer("cancel", async ({ id }) => {
  await send("POST", `invocations/${name(id)}/cancel`);
  return "Cancelled.";
});
