// All functions: state, load, latency and cost.

import { find, get } from "./client.js";
import { card, empty, figure, h, table } from "./dom.js";
import { about, count, dollars, ms, percent, rate, several } from "./format.js";
import { spark } from "./chart.js";
import { button, field, form, offer } from "./manage/actions.js";
import { functionLink, functionState, invocations, workersOf } from "./components.js";

const PAGE = 50;
const NOTHING = { calls: 0, calls_per_min: 0, failed: 0, refused: 0, waited: 0, cold: 0, cost_today_nusd: 0, by_bucket: [] };

export async function load(parts, query, signal) {
  const [status, activity, recent] = await Promise.all([
    get("status", signal), get("activity", signal), find("invocations?limit=12", signal)]);
  const shown = Math.max(PAGE, Number(query.get("shown")) || PAGE);
  return { status, activity, recent: recent ?? [], wanted: query.get("q") ?? "", shown };
}

export function view({ status, activity, recent, wanted, shown }, nowMs) {
  const fitting = status.functions.filter((one) => fits(one, wanted)).sort((one, other) => one.name.localeCompare(other.name));
  const by = new Map(activity.functions.map((one) => [one.function, one]));
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
      figure(about(sum("cost_today_nusd")), "today (UTC)")),
    status.redis === "ok" ? null : h("p", { class: "trouble" }, `Redis: ${status.redis}`),
    status.nodes.length || status.limited ? null : h("p", { class: "trouble" }, "No node is registered: nothing can run."),
    status.budgets.filter((budget) => budget.stage !== "ok").map((budget) => h("p", { class: "trouble" },
      `The budget of ${budget.function} for ${budget.period} is ${budget.stage === "spent" ? "spent: calls are rejected" :
        `${percent(budget.spent_nusd, budget.limit_nusd)} spent`}.`)),
    card("Functions", status.functions.length > 1 ? form("find", {}, wanted,
      field("name, project, tag or state", { name: "q", type: "search", value: wanted }), button("Search")) : null,
    fitting.length ? functionsTable(fitting.slice(0, shown), by, minutes) : status.functions.length ? empty("No function fits.")
      : empty("No functions are deployed yet. Deploy one:", "fs deploy examples/hello/handler.py")),
    fitting.length > shown ? h("p", null, h("a", { href: `#/?${new URLSearchParams({ q: wanted, shown: 2 * shown })}` }, `Show ${Math.min(fitting.length, 2 * shown)}`),
      h("span", { class: "dim" }, ` of ${several(fitting.length, "function")}`)) : null,
    card("Latest invocations", recent.length ? [invocations(recent, nowMs, { withFunction: true }), h("p", null, h("a", { href: "#/calls" }, "All invocations"))]
      : empty("No invocations yet. The page of each function has a form to make one.")),
  ];
}

// Every word is part of the name, project, a tag or the state.
function fits(info, wanted) {
  const text = [info.name, info.spec.project, functionState(info).textContent, ...Object.entries(info.spec.tags ?? {}).map((pair) => pair.join("="))].join(" ").toLowerCase();
  return wanted.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

offer("find", (args, form) => {
  location.hash = `#/?${new URLSearchParams({ q: form.elements.q.value.trim() })}`;
  return "";
});

function functionsTable(functions, by, minutes) {
  const headings = [
    { name: "function" }, { name: "version", num: true }, { name: "state" }, { name: "workers", num: true },
    { name: "running", num: true }, { name: "queued", num: true }, { name: "calls/min", num: true },
    { name: `last ${minutes} min`, num: true }, { name: "p50", num: true }, { name: "p99", num: true },
    { name: "waited for start", num: true }, { name: "failed", num: true }, { name: "cost today", num: true },
  ];
  return table(headings, functions.map((info) => {
    const seen = by.get(info.name) ?? NOTHING;
    return [
      functionLink(info.name), info.version, functionState(info), workersOf(info).length, info.running, info.queued,
      rate(seen.calls_per_min), spark(seen.by_bucket, `${seen.calls} calls`), ms(seen.p50_ms), ms(seen.p99_ms),
      h("span", { title: `${seen.cold} calls waited for a cold start, ${seen.waited - seen.cold} for a warm start` }, percent(seen.waited, seen.calls)),
      h("span", { class: seen.failed ? "bad" : "dim" }, seen.failed), h("span", { title: dollars(seen.cost_today_nusd) }, about(seen.cost_today_nusd)),
    ];
  }));
}
