// Keys, projects, secrets, schedules and the audit log. What the key may not read is left out with the reason.

import { get, name, Refused, send, useKey } from "../client.js";
import { card, empty, h, table, tag } from "../dom.js";
import { age, bytes, moment } from "../format.js";
import { functionLink, more } from "../components.js";
import { button, choice, field, form, offer, sure } from "./actions.js";

const PAGE = 50;
const AUDIT_ROWS = 100;
const AUDIT_MOST = 1000;

export async function load(parts, query, signal) {
  const rows = Math.min(AUDIT_MOST, Number(query.get("audit")) || AUDIT_ROWS);
  const paths = ["keys", "projects", "secrets", "schedules", `audit?limit=${rows}`];
  const [keys, projects, secrets, schedules, audit] = await Promise.all(paths.map((path) => permitted(path, signal)));
  return { keys, projects, secrets, schedules, audit, rows, query };
}

// As `get`; the refusal itself where the key has no right to it. Without any key it is thrown.
async function permitted(path, signal) {
  try {
    return await get(path, signal);
  } catch (error) {
    if (error instanceof Refused && error.status === 403) return error;
    throw error;
  }
}

export function view({ keys, projects, secrets, schedules, audit, rows, query }, nowMs) {
  const ago = (unixMs) => (unixMs ? `${age(unixMs, nowMs)} ago` : "never");
  return [
    section("API keys", keys, "No keys yet.", () => paged(keys, query, "keys", (shown) => keysTable(shown, ago)),
      form("make-key", {}, "", field("name", { name: "name", required: true, maxlength: 63 }),
        choice("right", "right", [["invoke"], ["read"], ["deploy"], ["admin"]]), field("functions, with commas; empty: all", { name: "functions" }), button("Create key")),
      rotation(keys)),
    section("Secrets", secrets, "No secrets yet.", () => paged(secrets, query, "secrets", (shown) => secretsTable(shown, ago)),
      form("set-secret", {}, "", field("project", { name: "project", value: "default", required: true }), field("name", { name: "name", required: true }),
        field("value", { name: "value", type: "password", autocomplete: "off", required: true }), button("Set secret"))),
    section("Projects", projects, "No projects yet.", () => paged(projects, query, "projects", projectsTable)),
    section("Schedules", schedules, "No function has a schedule.", () => paged(schedules, query, "schedules", schedulesTable)),
    section("Audit log", audit, "Nothing was changed yet.", () => auditTable(audit, nowMs)),
    Array.isArray(audit) && audit.length === rows && rows < AUDIT_MOST ? h("p", null, h("a", { href: `#/access?audit=${AUDIT_MOST}` }, `Show ${AUDIT_MOST} events`)) : null,
  ];
}

function section(title, found, none, rows, ...forms) {
  if (found instanceof Refused) return card(title, empty(`${found.message}.`));
  return card(title, found.length ? rows() : empty(none), forms);
}

function paged(rows, query, name, draw) {
  const [shown, next] = more(rows, query, name, PAGE);
  return [draw(shown), next];
}

// Its text is shown once, so the form stays while the list of keys is the same.
function rotation(keys) {
  const good = Array.isArray(keys) ? keys.filter((one) => one.state === "good").map((one) => one.name) : [];
  return good.length ? form("rotate-key", {}, good.join(), choice("key", "key", good.map((one) => [one])),
    field("hours that the old text still works", { name: "grace", type: "number", min: 0, max: 720, step: "any", value: 1, required: true }), button("Rotate key")) : null;
}

function keysTable(keys, ago) {
  return table([{ name: "name" }, { name: "rights" }, { name: "functions" }, { name: "project" }, { name: "state" }, { name: "used", num: true }, { name: "made by" }, { name: "" }],
    keys.map((one) => [one.name, one.rights.map((right) => tag(right)), one.functions.join(", ") || "all", one.project || "all",
      tag(one.state, { good: "good", expired: "warn", revoked: "bad" }[one.state]), ago(one.used_unix_ms), one.created_by,
      one.state === "good" ? sure(`Its callers are rejected at once. Press again to revoke ${one.name}.`, form("revoke-key", { name: one.name }, one.id, button("Revoke"))) : null]));
}

function secretsTable(secrets, ago) {
  return table([{ name: "name" }, { name: "project" }, { name: "size", num: true }, { name: "changed", num: true }, { name: "by" }, { name: "used by" }, { name: "" }],
    secrets.map((one) => [h("span", { class: "mono" }, one.name), one.project, bytes(one.size_bytes), ago(one.updated_unix_ms), one.updated_by,
      one.used_by.map((which, index) => [index ? ", " : "", functionLink(which)]),
      sure(`Its value is lost. Press again to remove ${one.name}.`, form("remove-secret", { project: one.project, name: one.name }, "", button("Remove")))]));
}

function projectsTable(projects) {
  const limit = (value, shown) => (value === null || value === undefined ? "no limit" : shown(value));
  return table([{ name: "project" }, { name: "functions", num: true }, { name: "workers at most", num: true }, { name: "memory at most", num: true }, { name: "in the store", num: true }, { name: "objects", num: true },
    { name: "quota: functions", num: true }, { name: "workers", num: true }, { name: "memory", num: true }, { name: "calls/s", num: true },
    { name: "store", num: true }, { name: "objects", num: true },
    { name: "network" }],
  projects.map(({ quotas, ...one }) => [one.name, one.functions.length, one.workers, bytes(one.memory_bytes), one.store_bytes === null ? "–" : bytes(one.store_bytes), one.objects ?? "–",
    limit(quotas.functions, String), limit(quotas.workers, String), limit(quotas.memory_bytes, bytes), limit(quotas.calls_per_s, String),
    limit(quotas.store_bytes, bytes), limit(quotas.objects, String), one.network]));
}

function schedulesTable(schedules) {
  return table([{ name: "function" }, { name: "version", num: true }, { name: "schedule" }, { name: "zone" }, { name: "next" }, { name: "last" }, { name: "status" }],
    schedules.map((one) => [functionLink(one.function), one.version, h("code", null, one.schedule), one.timezone || "UTC", new Date(one.next_unix_ms).toLocaleString(),
      one.last_unix_ms ? new Date(one.last_unix_ms).toLocaleString() : "–", one.status ? tag(one.status) : "–"]));
}

function auditTable(audit, nowMs) {
  return table([{ name: "when", tight: true }, { name: "by" }, { name: "from" }, { name: "action" }, { name: "object" }, { name: "status", num: true }, { name: "code" }, { name: "times", num: true }],
    audit.map((one) => [h("span", { title: moment(one.unix_ms) }, `${age(one.unix_ms, nowMs)} ago`), one.by || h("span", { class: "dim" }, "nobody"), one.address ?? "", one.verb,
      one.object ?? "", h("span", { class: one.status >= 400 ? "bad" : null }, one.status), one.code ?? "", one.times ?? 1]));
}

offer("make-key", async (args, form) => {
  const { name: named, right, functions } = form.elements;
  const made = await send("POST", "keys", { name: named.value, rights: [right.value], functions: functions.value.split(",").map((one) => one.trim()).filter(Boolean) });
  if (made.first) useKey(made.key); // from now on every request needs one
  return h("div", null, "Shown only once: ", h("code", null, made.key), made.warning ? `. Warning: ${made.warning}` : "");
});
offer("revoke-key", async (args) => {
  await send("DELETE", `keys/${name(args.name)}`);
  return "Revoked.";
});
offer("rotate-key", async (args, form) => {
  const { key, grace } = form.elements;
  const made = await send("POST", `keys/${name(key.value)}/rotate`, { grace_s: 3600 * Number(grace.value) });
  return h("div", null, `The new text of ${key.value}, shown only once: `, h("code", null, made.key));
});
offer("remove-secret", async (args) => {
  await send("DELETE", `secrets/${name(args.project)}/${name(args.name)}`);
  return "Removed.";
});
offer("set-secret", async (args, form) => {
  const { project, name: named, value } = form.elements;
  await send("PUT", `secrets/${name(project.value)}/${name(named.value)}`, { value: value.value });
  value.value = "";
  return "Set. Workers that run keep the value that they started with.";
});
