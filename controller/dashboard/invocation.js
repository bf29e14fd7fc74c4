// One invocation: its timeline, the longest phase, its worker, cost, placement decision and log.

import { find, get, lines, name } from "./client.js";
import { card, empty, facts, figure, h, table, tag } from "./dom.js";
import { bytes, dollars, moment, ms, percent } from "./format.js";
import { waterfall } from "./chart.js";
import { functionLink, invocationLink, logLines, money, startTag, statusTag, trouble } from "./components.js";

const MEANING = {
  queue: "queued in the gateway", place: "placement", start: "process start", fetch: "fetching weights",
  device: "device init", import: "libraries and handler", load: "binding weights, load()", execute: "handler",
  call: "other functions, within execute", respond: "sending the response", move: "moving to another worker",
};
const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const PIPE_MS = 50;
const START = ["place", "start", "fetch", "device", "import", "load"];

export async function load([id], query, signal) {
  const trace = await get(`invocations/${name(id)}`, signal);
  if (!trace.row) return { trace };
  const [info, plan, log] = await Promise.all([
    find(`functions/${name(trace.row.function)}`, signal),
    find(`invocations/${name(id)}/plan`, signal),
    lines(`functions/${name(trace.row.function)}/logs?tail=2000`, signal).catch(() => [])]);
  return { trace, plan, tokens: Boolean(info?.spec.llm), log: log.filter((line) => isOf(line, trace)) };
}

export function view({ trace, plan, tokens, log }) {
  const { row, timeline } = trace;
  if (!row) return pending(trace);
  const rows = phases(timeline.phases);
  return [
    h("div", { class: "title" }, h("h1", { class: "mono" }, row.id), statusTag(row.status), row.worker ? startTag(row.start) : null,
      h("span", { class: "sub" }, functionLink(row.function), ` version ${row.version}, ${moment(row.accepted_unix_ms)}`)),
    row.error ? h("p", { class: "trouble" }, row.error) : null,
    h("div", { class: "figures" },
      figure(ms(row.total_ms), "total"), figure(ms(row.first_byte_ms), "first byte"),
      figure(ms(row.queue_ms), "queued, not billed"), figure(ms(row.billed_ms), "billed"), figure(money(row.cost_nusd), "cost")),
    card("Timeline", rows.length ? [h("p", { class: "why" }, longest(rows, trace)), chart(rows)]
      : empty("No phases were recorded: the gateway died before the call ended.")),
    h("div", { class: "columns" }, card("Worker", worker(trace)), card("Cost", cost(row))),
    trace.called?.length ? card("Calls of other functions", called(trace.called)) : null,
    plan ? placement(plan, tokens) : null,
    card("Log", log.length ? logLines(log) : empty("No log lines, or they have expired.")),
  ];
}

// An async invocation that has not run yet.
function pending(info) {
  return [
    h("div", { class: "title" }, h("h1", { class: "mono" }, info.id), tag(info.status, info.error ? "bad" : "busy"),
      h("span", { class: "sub" }, functionLink(info.function))),
    info.error ? trouble(info.error) : null,
    card("Not run yet", facts([["accepted", moment(info.accepted_unix_ms)], ["origin", info.origin],
      ["runs", info.runs], ["target", `${info.method} ${info.target}`]])),
  ];
}

// [name, meaning, bars], in order of their beginnings.
function phases(found) {
  if (!found.length) return [];
  const begin = Math.min(...found.map((phase) => phase.started_ns));
  const rows = new Map();
  for (const phase of [...found].sort((one, other) => one.started_ns - other.started_ns || other.ended_ns - one.ended_ns)) {
    const bars = rows.get(phase.name) ?? [];
    bars.push({ kind: phase.name, from: (phase.started_ns - begin) / 1e6, to: (phase.ended_ns - begin) / 1e6 });
    rows.set(phase.name, bars);
  }
  return [...rows].map(([phase, bars]) => [phase, MEANING[phase] ?? "", bars]);
}

function chart(rows) {
  return waterfall(rows, Math.max(...rows.flatMap(([, , bars]) => bars.map((bar) => bar.to))));
}

function total(bars) {
  return bars.reduce((sum, bar) => sum + bar.to - bar.from, 0);
}

function longest(rows, trace) {
  const spanMs = Math.max(...rows.flatMap(([, , bars]) => bars.map((bar) => bar.to)));
  const parts = rows.filter(([phase]) => phase !== "queue" || trace.row.start === "hot" || rows.length < 3);
  const [phase, , bars] = parts.reduce((most, one) => (total(one[2]) > total(most[2]) ? one : most), parts[0]);
  const share = percent(total(bars), spanMs);
  const came = Object.entries(trace.fetched ?? {}).map(([source, size]) => `${bytes(size)} from the ${source}`).join(", ");
  const meaning = {
    queue: trace.row.worker
      ? "the call waited for a free slot while all workers were busy. More workers (scale.max) or more concurrency help"
      : `the call waited for a worker and none took it: ${trace.row.error || "no reason was kept"}`,
    place: "placement, or waiting for capacity on a node",
    start: "process start",
    fetch: `fetching weights${came ? `: ${came}` : ""}`,
    device: "device initialisation",
    import: "import of libraries and the handler",
    load: `the handler's load()${came ? `, while weights were fetched: ${came}` : ""}`,
    execute: "execution of the handler",
    call: "other functions that the handler called, while it ran",
    respond: "sending the response, at the pace of the handler and the client",
    move: "another worker took over after the first one was lost",
  }[phase];
  return ["Longest phase: ", h("b", null, phase), ` (${share} of ${ms(spanMs)}), ${meaning}.`, begin(rows, trace, came)];
}

// The longest phase of the start that a call waited for.
function begin(rows, { row }, came) {
  const parts = rows.filter(([phase]) => START.includes(phase));
  if (row.start === "hot" || row.first_byte_ms === null || !parts.length) return null;
  const [phase, , bars] = parts.reduce((most, one) => (total(one[2]) > total(most[2]) ? one : most));
  return [` The call waited ${ms(row.queue_ms)} for a ${row.start} start, longest for `, h("b", null, phase),
    ` (${ms(total(bars))}${phase === "fetch" && came ? `, ${came}` : ""}).`];
}

function worker(trace) {
  const { row, context } = trace;
  return facts([
    ["worker", row.worker ? h("span", { class: "mono" }, row.worker) : "none"],
    ["node", trace.node],
    ["start", row.worker ? { hot: "hot: the worker was ready", warm: "warm: new worker, no weights to fetch",
      cold: "cold: new worker, weights fetched" }[row.start] : null],
    ["process", row.worker && row.start !== "hot" ? (trace.pooled ? "from the prefork pool" : "forked on demand") : null],
    ["weights", Object.entries(trace.fetched ?? {}).map(([source, size]) => `${bytes(size)} from the ${source}`).join(", ")],
    ["attempts", row.attempts],
    ["isolation", trace.isolation],
    ["events", trace.events || null],
    ["relayed", trace.relayed?.length ? `stages ${trace.relayed.join(", ")} through the object store` : null],
    ["key", row.key],
    ["called by", row.parent ? [functionLink(row.caller), ", ", invocationLink(row.parent)] : null],
    ["trace", context?.trace_id && h("span", { class: "mono" }, context.trace_id)],
  ]);
}

// What the handler called, each with a bill and a page of its own.
function called(calls) {
  return table([{ name: "function" }, { name: "status" }, { name: "took", num: true }, { name: "invocation", tight: true }, { name: "error", wide: true }],
    calls.map((one) => [functionLink(one.function), statusTag(one.status), ms(one.took_ms), invocationLink(one.id), one.error]));
}

function cost(row) {
  const perGib = row.rate_nusd_per_gib_s;
  return table([{ name: "" }, { name: "time", num: true }, { name: "memory", num: true }, { name: "rate, GiB·s", num: true }, { name: "cost", num: true }], [
    ["execution", ms(row.billed_ms), row.memory_bytes < GIB ? bytes(Math.round(row.memory_bytes / MIB) * MIB) : bytes(row.memory_bytes),
      dollars(perGib), dollars(row.cost_nusd)],
    ["queue and start", ms(row.queue_ms), "", "waived", "$0"],
  ], ["", "", "", `price sheet ${row.price}`, dollars(row.cost_nusd)]);
}

// `tokens`: whether its answers are tokens, as a language model's are.
function placement(plan, tokens) {
  const { plan: chosen, compared } = plan.explanation;
  const when = plan.row.start === "hot" ? "The worker was ready before this call; this is the decision for its own start. " : "";
  const shown = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
  return card("Placement decision",
    h("p", { class: "why" }, when, chosen.stages.length ? chosen.reason : `Nothing was started: ${chosen.reason}`),
    compared.length ? table(
      [{ name: "" }, { name: "predicted", num: true }, { name: "observed", num: true }, { name: "error", num: true }],
      compared.filter((one) => !one.what.startsWith("TPOT") || (tokens && one.observed !== null)).map((one) => [term(one.what, tokens), shown(one.predicted), shown(one.observed), one.error == null ? "–" : percent(one.error, 1)])) : null,
    chosen.considered.length ? [h("h2", null, "Candidates"), table(
      [{ name: "stages" }, { name: "nodes", wide: true }, { name: term("TTFT, s", tokens), num: true }, ...(tokens ? [{ name: term("TPOT, s", tokens), num: true }] : []),
        { name: "GiB·s", num: true }, { name: "weights from" }, { name: "rejected because", wide: true }],
      chosen.considered.filter(isNew()).map((one) => [one.kind === "multicast" ? one.kind : one.stages, one.nodes.join(" ") || "–", one.nodes.length ? one.ttft_s.toFixed(2) : "–",
        ...(tokens ? [one.nodes.length ? one.tpot_s.toFixed(3) : "–"] : []), one.nodes.length ? one.cost_gib_s.toFixed(1) : "–", weightsFrom(one),
        one.why_not || h("b", null, "selected")]))] : null);
}

function term(what, tokens) {
  return what.replace("TTFT", tokens ? "first token" : "first byte").replace("TPOT", "time per token");
}

// The sources of a candidate's weights, the largest first; empty if it fetches none.
function weightsFrom(one) {
  return Object.entries({ store: one.store_bytes, peers: one.peer_bytes, disk: one.missing_bytes - one.store_bytes - one.peer_bytes })
    .filter(([, size]) => size >= MIB).sort(([, most], [, least]) => least - most).map(([source]) => source).join(", ");
}

// Shows infeasible candidates once for each reason.
function isNew() {
  const known = new Set();
  return (one) => {
    const what = JSON.stringify([one.stages, one.why_not]);
    return one.nodes.length > 0 || (!known.has(what) && known.add(what));
  };
}

// Log lines of this invocation, and its worker's lines without an invocation while it ran.
function isOf(line, { row, timeline }) {
  if (line.invocation) return line.invocation === row.id;
  const ran = timeline.phases.filter((phase) => phase.name === "execute" || phase.name === "respond");
  if (!ran.length || line.worker !== row.worker) return false;
  const origin = timeline.origin_unix_ns / 1e6;
  const begun = origin + Math.min(...ran.map((phase) => phase.started_ns)) / 1e6;
  const ended = origin + Math.max(...ran.map((phase) => phase.ended_ns)) / 1e6;
  return line.unix_ms >= Math.floor(begun) && line.unix_ms <= ended + PIPE_MS;
}
