// Usage and cost by function, phase and day, and the state of budgets.

import { get } from "./client.js";
import { card, choices, empty, h, table } from "./dom.js";
import { count, dollars, ms } from "./format.js";
import { meter } from "./chart.js";
import { functionLink, money, more } from "./components.js";
import { budgetForm, budgetsTable } from "./manage/budgets.js";

const PAGE = 50;
const DAY_MS = 86_400_000;
const RANGES = [["today", 1], ["7 days", 7], ["30 days", 30]];

function range(query) {
  const days = Number(query.get("days"));
  return RANGES.some(([, known]) => known === days) ? days : 1;
}

export async function load(parts, query, signal) {
  const days = range(query);
  const since = (Math.floor(Date.now() / DAY_MS) - days + 1) * DAY_MS;
  const [byPhase, byDay, budgets] = await Promise.all([
    get(`usage?by=function,phase&since_unix_ms=${since}`, signal),
    days > 1 ? get(`usage?by=day&since_unix_ms=${since}`, signal) : { lines: [] }, get("budgets", signal)]);
  return { days, byPhase, byDay, budgets, query };
}

export function view({ days, byPhase, byDay, budgets, query }) {
  return [
    h("div", { class: "title" }, h("h1", null, money(byPhase.total_nusd)), h("span", { class: "sub" }, "sum of the ledger's rows (days are UTC)"),
      choices(RANGES.map(([text, known]) => [text, `#/usage?days=${known}`, known === days]))),
    card("By function", byPhase.lines.length ? byFunction(byPhase, query) : empty("No usage in this period.")),
    card("By function and phase", byPhase.lines.length ? phases(byPhase, query) : empty("No usage in this period.")),
    days > 1 && byDay.lines.length ? card("By day", bars(byDay.lines.map((line) => [line.day, line.cost_nusd]))) : null,
    card("Budgets", budgets.length ? budgetsTable(budgets) : empty("No budgets are set.", "fs budget set hello --usd 5 --per month"), budgetForm()),
    h("p", { class: "empty" }, "Amounts are rounded; their titles have them to the nano-dollar. Rows, invoices and other groupings: ", h("code", null, "fs usage --by function,day,key --csv"), " ", h("code", null, "fs invoice 2026-11")),
  ];
}

function bars(pairs) {
  const most = Math.max(1, ...pairs.map(([, cost]) => cost));
  return table([{ name: "", tight: true }, { name: "", grow: true }, { name: "cost", num: true }],
    pairs.map(([label, cost]) => [label, meter([["used", cost / most, dollars(cost)]], dollars(cost)), money(cost)]));
}

function byFunction(usage, query) {
  const sums = new Map();
  for (const line of usage.lines) sums.set(line.function, (sums.get(line.function) ?? 0) + line.cost_nusd);
  const [shown, next] = more([...sums].sort((one, other) => other[1] - one[1] || one[0].localeCompare(other[0])), query, "functions", PAGE);
  return [bars(shown.map(([name, cost]) => [functionLink(name), cost])), next];
}

function phases(usage, query) {
  const [shown, next] = more(usage.lines, query, "phases", PAGE);
  const rows = shown.map((line) => [functionLink(line.function), line.kind, count(line.rows), ms(line.duration_ms),
    line.waived_ms ? ms(line.waived_ms) : "–", line.kind === "execute" ? h("span", { class: "dim" }, "by invocation") : money(line.cost_nusd)]);
  return [table([{ name: "function" }, { name: "phase" }, { name: "rows", num: true }, { name: "time", num: true }, { name: "waived", num: true }, { name: "cost", num: true }],
    rows, ["total", "", count(usage.lines.reduce((sum, line) => sum + line.rows, 0)), "", ms(usage.lines.reduce((sum, line) => sum + line.waived_ms, 0)), money(usage.total_nusd)]), next];
}
