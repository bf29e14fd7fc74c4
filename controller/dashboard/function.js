// One function: its versions, workers, settings, latest invocations, errors and log.

import { find, get, lines, name } from "./client.js";
import { card, choices, empty, facts, figure, h, table, tag } from "./dom.js";
import { age, bytes, count, ms, percent, rate, several } from "./format.js";
import { change } from "./manage/traffic.js";
import { invokeLine, tryout } from "./manage/tryout.js";
import { functionState, invocationLink, invocations, logLines, money, startTag, trouble, workerState, workersOf } from "./components.js";

const SHOWN = 20;

export async function load([which], query, signal) {
  const at = `functions/${name(which)}`;
  const [info, versions, traffic, activity, recent, log, document] = await Promise.all([
    get(at, signal), get(`${at}/versions`, signal), get(`${at}/traffic`, signal), get("activity", signal),
    find(`invocations?function=${name(which)}&limit=200`, signal), lines(`${at}/logs?tail=200`, signal), find(`${at}/openapi.json`, signal)]);
  return { info, document, versions, traffic, recent: recent ?? [], log, seen: activity.functions.find((one) => one.function === which) };
}

export function view({ info, document, versions, traffic, recent, log, seen }, nowMs) {
  return [
    h("div", { class: "title" }, h("h1", null, info.name), functionState(info),
      h("span", { class: "sub" }, `version ${info.version}, deployed ${age(info.deployed_unix_ms, nowMs)} ago`),
      choices([["history", `#/history?function=${name(info.name)}`, false], ["invocations", `#/calls?function=${name(info.name)}`, false]])),
    lastStart(info, nowMs),
    traffic.error && traffic.rejected !== info.version ? trouble({ message: `Version ${traffic.rejected} was rejected: ${traffic.error.message}` }) : null,
    h("div", { class: "figures" },
      figure(rate(seen?.calls_per_min ?? 0), "calls a minute"),
      figure(ms(seen?.p50_ms), `latency p50 (p99 ${ms(seen?.p99_ms)})`),
      figure(ms(seen?.first_byte_p50_ms), `first byte p50 (p99 ${ms(seen?.first_byte_p99_ms)})`),
      figure(percent(seen?.waited ?? 0, seen?.calls ?? 0), "waited for a start"),
      figure(count(seen?.failed ?? 0), "failed, last 5 min"),
      figure(money(seen?.cost_today_nusd ?? 0), "today (UTC)")),
    h("div", { class: "columns" },
      card("Endpoint", facts([
        ["URL", h("a", { href: info.url, class: "mono" }, info.url)],
        ["calls now", `${count(info.running)} running, ${count(info.queued)} queued`],
        [info.spec.llm ? "first token, predicted" : "first byte, predicted", prediction(info.prediction)],
      ]), h("p", { class: "empty" }, h("code", null, invokeLine(info, document)))),
      card("Settings", settings(info))),
    card("Versions", table(
      [{ name: "version" }, { name: "traffic" }, { name: "workers", num: true }, { name: "memory", num: true },
        { name: "deployed", num: true }, { name: "error", wide: true }],
      versions.map((one) => [one.version, one.roles.length ? one.roles.map((role) => tag(role, role === "live" ? "good" : null))
        : h("span", { class: "dim" }, "by number only"), one.workers, bytes(one.spec.memory_bytes),
      `${age(one.deployed_unix_ms, nowMs)} ago`, one.error && h("span", { class: "clamp", title: one.error }, one.error)]))),
    tryout(info, document),
    change(info, versions, traffic),
    card("Workers", workers(workersOf(info), nowMs)),
    errors(recent),
    card("Latest invocations", recent.length ? [invocations(recent.slice(0, SHOWN), nowMs),
      h("p", null, h("a", { href: `#/calls?function=${name(info.name)}` }, "All its invocations"))]
      : empty("No invocations yet. Make one:", invokeLine(info, document))),
    card("Log", log.length ? logLines(log) : empty("No log lines yet.", `fs logs ${info.name} -f`)),
  ];
}

// A failed start is retried with the next call.
function lastStart({ last_failure: failed }, nowMs) {
  return failed && trouble({ ...failed.error, message: `The last start failed ${age(failed.unix_ms, nowMs)} ago: ${failed.error.message}` });
}

function prediction(found) {
  if (!found) return "not compared with a start yet";
  const starts = several(found.starts, "start");
  return found.calibrated ? `mean error ${percent(found.error, 1)} over ${starts}` : `not calibrated yet (${starts})`;
}

function settings({ spec, scale }) {
  const slo = spec.slo && [spec.slo.ttft_s && `first ${spec.llm ? "token" : "byte"} in ${spec.slo.ttft_s} s`, spec.slo.tpot_s && `${spec.slo.tpot_s} s per token`];
  return facts([
    ["entry", h("span", { class: "mono" }, spec.entry)],
    ["memory", bytes(spec.memory_bytes)],
    ["concurrency", `${several(spec.concurrency, "call")} per worker`],
    ["scale", `${scale.min} to ${scale.max} workers, keep-alive ${scale.keep_alive_s} s${scale.standby_s ? `, then standby for ${scale.standby_s} s` : ""}`],
    ["timeouts", `call ${spec.timeout_s} s, start ${spec.start_timeout_s} s`],
    ["SLO", slo ? slo.filter(Boolean).join(", ") : "none: starts minimize cost"],
    ["weights", spec.weights && h("span", { class: "mono" }, spec.weights.slice(0, 12))],
    ["adapter", spec.adapter && h("span", { class: "mono" }, spec.adapter.slice(0, 12))],
    ["engine", spec.llm ? `language model, ${spec.llm.dtype}, batches of ${spec.llm.max_batch}` : spec.layered ? "layers" : null],
    ["network", spec.network ? "the node's" : "loopback only"],
    ["tags", Object.entries(spec.tags).map(([key, value]) => tag(`${key}=${value}`))],
  ].filter(([, value]) => !(Array.isArray(value) && value.length === 0)));
}

function workers(found, nowMs) {
  if (!found.length) return empty("None: scaled to zero, without cost until the next call.");
  return table(
    [{ name: "worker" }, { name: "version", num: true }, { name: "state" }, { name: "node" }, { name: "start" },
      { name: "start time", num: true }, { name: "in state for", num: true }, { name: "isolation", wide: true }],
    found.map((worker) => [h("span", { class: "mono" }, worker.worker), worker.version, workerState(worker.state), worker.node,
      [startTag(worker.start), worker.pooled ? tag("pooled") : null], started(worker),
      age(worker.changed_unix_ns / 1e6, nowMs), worker.isolation || "plain process"]));
}

function started({ timeline: { phases } }) {
  if (!phases.length) return "–";
  return ms((Math.max(...phases.map((one) => one.ended_ns)) - Math.min(...phases.map((one) => one.started_ns))) / 1e6);
}

function errors(recent) {
  const kinds = new Map();
  for (const row of recent.filter((one) => one.status >= 400)) {
    const code = row.error || `HTTP ${row.status} of the handler`;
    const known = kinds.get(code) ?? { code, status: row.status, times: 0, last: row };
    known.times += 1;
    kinds.set(code, known);
  }
  if (!kinds.size) return null;
  return card(`Errors of the last ${several(recent.length, "call")}`, table(
    [{ name: "error" }, { name: "status", num: true }, { name: "count", num: true }, { name: "latest invocation" }],
    [...kinds.values()].map((kind) => [kind.code, kind.status, kind.times, invocationLink(kind.last.id)])));
}
