// History: calls, errors, latency, starts and cost over hours or days. A bar leads to the invocations of its time.

import { get, name } from "./client.js";
import { columns, key } from "./chart.js";
import { card, choices, empty, figure, h, table, tag } from "./dom.js";
import { about, at, count, lasts, ms, percent, several } from "./format.js";
import { functionLink, invocations, money, more } from "./components.js";
import { button, field, form, offer } from "./manage/actions.js";

const RANGES = ["1h", "6h", "24h", "7d", "30d"];
const ROWS = 50;
const EVENTS = 200;
const EVENTS_PAGE = 20;
const MARKS = ["load", "warn", "bad"]; // the last are drawn above the others
const FUNCTIONS_PAGE = 10;
// What is costly to read and changes seldom is not read again for each drawing.
const KEPT_MS = 10_000;
const READ_MOST = 8;
const KINDS = { deploy: "good", change: "busy", failure: "bad", budget: "warn", node: "warn" };

const read = new Map();

export async function load(parts, query, signal) {
  const range = RANGES.includes(query.get("range")) ? query.get("range") : "24h";
  const which = query.get("function") ?? "";
  const history = await get(`history?function=${name(which)}&range=${range}`, signal);
  const begin = Number(query.get("at")) || 0;
  const failed = query.get("failed") === "1";
  const span = { since_unix_ms: begin, until_unix_ms: begin + 1000 * history.step_s };
  const [events, functions, rows] = await Promise.all([
    eventsOf(which, history, signal),
    begin && !which ? seldom(`history/functions?${new URLSearchParams(span)}`, signal) : [],
    begin ? get(`invocations?${new URLSearchParams({ function: which, limit: ROWS, failed: Number(failed), ...span })}`, signal) : []]);
  return { range, which, history, events, functions, begin, rows, failed, span, query };
}

function eventsOf(which, history, signal) {
  return seldom(`events?${new URLSearchParams({ function: which, since_unix_ms: history.since_unix_ms, limit: EVENTS })}`, signal);
}

async function seldom(address, signal) {
  const known = read.get(address);
  if (known && Date.now() - known.unixMs < KEPT_MS) return known.value;
  const value = await get(address, signal);
  if (read.size >= READ_MOST) read.clear();
  read.set(address, { unixMs: Date.now(), value });
  return value;
}

export function view(found, nowMs) {
  const { range, which, history, events, begin } = found;
  const chosen = history.points.find((point) => point.begin_unix_ms === begin);
  return [
    h("div", { class: "title" }, h("h1", null, "History"), h("span", { class: "sub" }, which ? ["of ", functionLink(which)] : "of all functions"),
      choices(RANGES.map((one) => [one, address({ function: which, range: one }), one === range]))),
    form("find-history", { range }, which, field("function; empty: all", { name: "function", type: "search", value: which }), button("Show")),
    figures(history.total),
    h("div", { class: "charts" }, charts(found)),
    h("p", { class: "empty" }, `A bar is ${lasts(history.step_s)}. Select one to see its invocations and events.`),
    begin ? moment(found, chosen, nowMs) : null,
    card(begin ? "Events of the whole range" : "Events", eventsTable(events, found.query)),
  ];
}

function figures(total) {
  return h("div", { class: "figures" },
    figure(count(total.calls), "calls"),
    figure(count(total.failed), `failed (${percent(total.failed, total.calls)}), ${count(total.refused)} refused`),
    figure(ms(total.p50_ms), `latency p50 (p95 ${ms(total.p95_ms)})`),
    figure(count(total.cold + total.warm), `waited for a start, ${count(total.cold)} cold`),
    figure(ms(total.wait_p50_ms), "wait for a start, p50"),
    figure(money(total.cost_nusd), "cost of calls"));
}

function address(query) {
  return `#/history?${new URLSearchParams(query)}`;
}

function charts({ range, which, history, begin, events }) {
  const frame = {
    step: 1000 * history.step_s, begin,
    href: (point) => address({ function: which, range, at: point.begin_unix_ms }),
  };
  const draw = (title, format, parts, legend, more) => card(title,
    columns(history.points.map((point) => ({ point, parts: parts(point) })), { ...frame, title, format, ...more }), key(legend));
  return [
    draw("Calls", count, (point) => [["used", point.calls - point.failed - point.refused, "succeeded"], ["warn", point.refused, "refused"], ["bad", point.failed, "failed"]],
      [["used", "succeeded"], ["warn", "refused (4xx)"], ["bad", "failed"]], { marks: events.map(mark).sort((one, other) => MARKS.indexOf(one.kind) - MARKS.indexOf(other.kind)), focus: true }),
    draw("Latency", ms, (point) => [["p95", point.p95_ms ?? 0, "p95"], ["used", point.p50_ms ?? 0, "p50"]], [["used", "p50"], ["p95", "p95"]], { layered: true }),
    draw("Calls that waited for a start", count, (point) => [["start", point.warm, "warm"], ["fetch", point.cold, "cold"]],
      [["start", "warm: weights in memory"], ["fetch", "cold: weights fetched"]]),
    draw("Cost of calls", about, (point) => [["execute", point.cost_nusd, "cost"]], [["execute", "US dollars"]]),
  ];
}

function mark(event) {
  return { unix_ms: event.unix_ms, kind: { failure: "bad", budget: "warn", node: "warn" }[event.kind] ?? "load",
    text: `${at(event.unix_ms)} ${event.function} ${event.text}` };
}

// The chosen bar: its events and invocations.
function moment({ which, range, begin, functions, rows, failed, span, events, query }, point, nowMs) {
  const title = `${at(begin)} to ${at(span.until_unix_ms)}`;
  const inside = events.filter((event) => event.unix_ms >= begin && event.unix_ms < span.until_unix_ms);
  const shown = (wanted) => address({ function: which, range, at: begin, failed: Number(wanted) });
  return card(null,
    h("div", { class: "title", id: "moment" }, h("h2", null, title),
      point ? h("span", { class: "sub" }, [several(point.calls, "call"), `${count(point.failed)} failed`, `p50 ${ms(point.p50_ms)}`, `p95 ${ms(point.p95_ms)}`, `${count(point.cold)} cold`].join(", ")) : null,
      choices([["all", shown(false), !failed], ["with an error", shown(true), failed], ["close", address({ function: which, range }), false]])),
    inside.length ? [h("h2", null, "Events"), eventsTable(inside)] : null,
    functions.length ? [h("h2", null, "Functions"), byFunction(functions, { range, begin, query })] : null,
    h("h2", null, "Invocations"),
    rows.length ? [invocations(rows, nowMs, { withFunction: !which, past: true }),
      h("p", null, h("a", { href: `#/calls?${new URLSearchParams({ function: which, failed: Number(failed), ...span })}` },
        rows.length === ROWS ? "More invocations of this time" : "On a page of their own"))]
      : empty(failed ? "No call with an error was recorded in this time." : "No invocation was recorded in this time."));
}

function byFunction(functions, { range, begin, query }) {
  const [shown, next] = more(functions, query, "functions", FUNCTIONS_PAGE);
  return [table([{ name: "function" }, { name: "calls", num: true }, { name: "failed", num: true }, { name: "refused", num: true }, { name: "p50", num: true },
    { name: "p95", num: true }, { name: "warm", num: true }, { name: "cold", num: true }, { name: "cost", num: true }],
  shown.map(({ function: name, total }) => [h("a", { href: address({ function: name, range, at: begin }) }, name), count(total.calls),
    h("span", { class: total.failed ? "bad" : "dim" }, count(total.failed)), count(total.refused), ms(total.p50_ms), ms(total.p95_ms),
    count(total.warm), count(total.cold), money(total.cost_nusd)])), next];
}

function eventsTable(events, query) {
  if (!events.length) return empty("No deploys, changes or failed starts.");
  const [shown, next] = query ? more(events, query, "events", EVENTS_PAGE) : [events, null];
  return [table([{ name: "when", tight: true }, { name: "event" }, { name: "function" }, { name: "what", wide: true }],
    shown.map((event) => [at(event.unix_ms), tag(event.kind, KINDS[event.kind]),
      event.function ? [functionLink(event.function), event.version ? h("span", { class: "dim" }, ` @${event.version}`) : null] : "",
      h("span", { class: "clamp", title: event.text }, event.text)])), next];
}

offer("find-history", ({ range }, form) => {
  location.hash = address({ function: form.elements.function.value.trim(), range });
  return "";
});
