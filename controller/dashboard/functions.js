// All functions: state, load, latency and cost.

import { find, get } from "./client.js";
import { card, empty, figure, h, table } from "./dom.js";
import { count, ms, percent, rate } from "./format.js";
import { spark } from "./chart.js";
import { button, field, form, offer } from "./manage/actions.js";
import { functionLink, functionState, invocations, money, more, workersOf } from "./components.js";

const PAGE = 50;
// Columns by which the functions may be sorted: [heading, value, number]. Numbers begin with the largest.
const COLUMNS = {
  name: ["function", (row) => row.info.name], state: ["state", (row) => row.state.textContent],
  workers: ["workers", (row) => row.workers, true], running: ["running", (row) => row.info.running ?? 0, true],
  queued: ["queued", (row) => row.info.queued ?? 0, true], calls: ["calls/min", (row) => row.seen.calls_per_min, true],
  p50: ["p50", (row) => row.seen.p50_ms ?? -1, true], p99: ["p99", (row) => row.seen.p99_ms ?? -1, true],
  waited: ["waited for start", (row) => row.seen.waited, true], failed: ["failed", (row) => row.seen.failed, true],
  cost: ["cost today", (row) => row.seen.cost_today_nusd, true],
};
const NOTHING = { calls: 0, calls_per_min: 0, failed: 0, refused: 0, waited: 0, cold: 0, cost_today_nusd: 0, by_bucket: [] };

export async function load(parts, query, signal) {
  const [status, activity, recent] = await Promise.all([
    get("status?functions=summary", signal), get("activity", signal), find("invocations?limit=12", signal)]);
  const sort = COLUMNS[query.get("sort")] ? query.get("sort") : "name";
  return { status, activity, recent: recent ?? [], wanted: query.get("q") ?? "", sort, turned: query.get("turned") === "1", query };
}

export function view({ status, activity, recent, wanted, sort, turned, query }, nowMs) {
  const by = new Map(activity.functions.map((one) => [one.function, one]));
  const fitting = ordered(status.functions.map((info) => rowOf(info, by.get(info.name) ?? NOTHING)).filter((row) => fits(row, wanted)), sort, turned);
  const [shown, next] = more(fitting, query, "shown", PAGE);
  const minutes = activity.window_s / 60;
  const sum = (field) => activity.functions.reduce((total, one) => total + one[field], 0);
  const live = status.functions.flatMap(workersOf);
  return [
    h("div", { class: "figures" },
      figure(count(status.functions.length), "functions"),
      figure(count(live.filter((worker) => worker.state === "ready").length),
        `workers ready, ${count(live.filter((worker) => worker.state === "starting").length)} starting`),
      figure(rate(sum("calls_per_min")), `calls a minute, last ${minutes} min`),
      figure(percent(sum("waited"), sum("calls")), "waited for a start"),
      figure(count(sum("failed")), `failed, last ${minutes} min`),
      figure(money(sum("cost_today_nusd")), "today (UTC)")),
    status.redis === "ok" ? null : h("p", { class: "trouble" }, `Redis: ${status.redis}`),
    ...status.redis_problems.map((problem) => h("p", { class: "trouble" }, `Redis: ${problem}`)),
    status.nodes.length || status.limited ? null : h("p", { class: "trouble" }, "No node is registered: nothing can run."),
    status.budgets.filter((budget) => budget.stage !== "ok").map((budget) => h("p", { class: "trouble" },
      `The budget of ${budget.function} for ${budget.period} is ${budget.stage === "spent" ? "spent: calls are rejected" :
        `${percent(budget.spent_nusd, budget.limit_nusd)} spent`}.`)),
    card("Functions", status.functions.length > 1 ? form("find", { sort, turned: Number(turned) }, wanted,
      field("name, project, tag or state", { name: "q", type: "search", value: wanted }), button("Search")) : null,
    fitting.length ? functionsTable(shown, minutes, { sort, turned, wanted }) : status.functions.length ? empty("No function fits.")
      : empty("No functions are deployed yet. Deploy one:", "fs deploy examples/hello/handler.py")),
    next,
    card("Latest invocations", recent.length ? [invocations(recent, nowMs, { withFunction: true }), h("p", null, h("a", { href: "#/calls" }, "All invocations"))]
      : empty("No invocations yet. The page of each function has a form to make one.")),
  ];
}

// Every word is part of the name, project, a tag or the state.
function fits({ info, state }, wanted) {
  const text = [info.name, info.project ?? "", state.textContent, ...Object.entries(info.tags ?? {}).map((pair) => pair.join("="))].join(" ").toLowerCase();
  return wanted.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function rowOf(info, seen) {
  return { info, seen, state: functionState(info), workers: workersOf(info).length };
}

// Equal ones by name, whatever the order of the others.
function ordered(rows, sort, turned) {
  const [, value, isNumber] = COLUMNS[sort];
  const compare = isNumber ? (one, other) => value(other) - value(one) : (one, other) => value(one).localeCompare(value(other));
  return rows.sort((one, other) => (turned ? -1 : 1) * compare(one, other) || one.info.name.localeCompare(other.info.name));
}

offer("find", (args, form) => {
  location.hash = `#/?${new URLSearchParams({ ...args, q: form.elements.q.value.trim() })}`;
  return "";
});

function functionsTable(rows, minutes, { sort, turned, wanted }) {
  const by = (key) => {
    const [text, , isNumber] = COLUMNS[key];
    const direction = Boolean(isNumber) === !turned ? "descending" : "ascending";
    return { name: text, num: isNumber, sorted: key === sort ? direction : null,
      href: `#/?${new URLSearchParams({ q: wanted, sort: key, turned: Number(key === sort && !turned) })}` };
  };
  const headings = [
    by("name"), { name: "version", num: true }, by("state"), by("workers"), by("running"), by("queued"), by("calls"),
    { name: `last ${minutes} min`, num: true }, by("p50"), by("p99"), by("waited"), by("failed"), by("cost"),
  ];
  return table(headings, rows.map(({ info, seen, state, workers }) => [
    functionLink(info.name), info.version, state, workers, info.running ?? 0, info.queued ?? 0,
    rate(seen.calls_per_min), spark(seen.by_bucket, `${seen.calls} calls`), ms(seen.p50_ms), ms(seen.p99_ms),
    h("span", { title: `${seen.cold} calls waited for a cold start, ${seen.waited - seen.cold} for a warm start` }, percent(seen.waited, seen.calls)),
    h("span", { class: seen.failed ? "bad" : "dim" }, seen.failed), money(seen.cost_today_nusd),
  ]));
}
