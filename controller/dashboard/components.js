// Components that several pages share: links, state tags, the table of invocations, log lines, errors.

import { h, table, tag } from "./dom.js";
import { about, age, at, clock, dollars, moment, ms } from "./format.js";
import { name } from "./client.js";

const LIVE = ["ready", "starting", "standby", "draining"];

export function functionLink(function_) {
  return h("a", { href: `#/f/${name(function_)}` }, function_);
}

export function invocationLink(id, text = id) {
  return h("a", { href: `#/i/${name(id)}`, class: "mono" }, text);
}

export function workersOf(info) {
  return (info.workers ?? []).filter((worker) => LIVE.includes(worker.state));
}

export function functionState(info) {
  if (info.broken) return tag("broken", "bad");
  const workers = workersOf(info);
  if (workers.some((worker) => worker.state === "ready")) return tag(info.running ? "running" : "ready", "good");
  if (workers.some((worker) => worker.state === "starting")) return tag("starting", "busy");
  if (info.queued) return tag("queued", "warn");
  if (workers.some((worker) => worker.state === "standby")) return tag("standby");
  return info.last_failure ? tag("failed to start", "bad") : tag("scaled to zero");
}

export function workerState(state) {
  return tag(state, { ready: "good", starting: "busy", draining: "warn", failed: "bad" }[state]);
}

export function startTag(start) {
  return tag(start, { hot: "good", standby: "warn", warm: "warn", cold: "busy" }[start]);
}

export function statusTag(status) {
  return tag(status, status >= 500 || status === 499 ? "bad" : status >= 400 ? "warn" : "good");
}

export function invocations(rows, nowMs, { withFunction = false, past = false } = {}) {
  const headings = [
    { name: "when", tight: true }, { name: "status" }, ...(withFunction ? [{ name: "function" }] : []), { name: "invocation", tight: true },
    { name: "start" }, { name: "queued", num: true }, { name: "first byte", num: true },
    { name: "total", num: true }, { name: "billed", num: true }, { name: "cost", num: true }, { name: "error", wide: true },
  ];
  return table(headings, rows.map((row) => [
    past ? h("span", { title: moment(row.accepted_unix_ms) }, clock(row.accepted_unix_ms).slice(0, 8))
      : h("span", { title: moment(row.accepted_unix_ms) }, `${age(row.accepted_unix_ms, nowMs)} ago`),
    statusTag(row.status), ...(withFunction ? [functionLink(row.function)] : []),
    invocationLink(row.id, row.id.length > 26 ? `${row.id.slice(0, 25)}…` : row.id), row.worker ? startTag(row.start) : tag("none"), ms(row.queue_ms), ms(row.first_byte_ms),
    row.total_ms || row.error !== "gateway_lost" ? ms(row.total_ms) : "–", ms(row.billed_ms), money(row.cost_nusd),
    row.error && h("span", { class: "clamp", title: row.error }, row.error),
  ]));
}

// The first rows, and a link to more of them: the query's `name` says how many are shown.
export function more(rows, query, name, page) {
  const shown = Math.max(page, Number(query.get(name)) || page);
  if (rows.length <= shown) return [rows, null];
  const next = new URLSearchParams(query);
  next.set(name, Math.min(rows.length, 2 * shown));
  return [rows.slice(0, shown), h("p", null, h("a", { href: `${location.hash.split("?")[0] || "#/"}?${next}` }, `Show ${next.get(name)}`),
    h("span", { class: "dim" }, ` of ${rows.length}`))];
}

export function logLines(lines) {
  return h("div", { class: "lines", tabindex: 0 }, lines.map((line) =>
    h("div", { class: line.stream }, h("span", { class: "dim", title: moment(line.unix_ms) }, old(line) ? at(line.unix_ms) : clock(line.unix_ms)),
      h("span", { class: "from dim" }, line.invocation
        ? h("a", { href: `#/i/${name(line.invocation)}`, title: line.invocation }, line.worker) : line.worker),
      h("span", { class: "text" }, line.text))));
}

// Of another day: its date is more than its second.
function old(line) {
  return moment(line.unix_ms) !== clock(line.unix_ms);
}

// A rounded amount, with the exact one as its title.
export function money(nusd) {
  return h("span", { title: dollars(nusd) }, about(nusd));
}

export function trouble(error) {
  return h("p", { class: "trouble" }, error.message, error.hint ? h("span", { class: "dim" }, ` ${error.hint}`) : null);
}
