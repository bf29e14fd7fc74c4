// Nodes: memory, cached checkpoints, and the bandwidth of the sources of weights.

import { get, name, send } from "./client.js";
import { card, empty, facts, h, table, tag } from "./dom.js";
import { bytes, ms, percent } from "./format.js";
import { key, meter } from "./chart.js";
import { functionLink, workerState, workersOf } from "./components.js";
import { button, form, offer, sure } from "./manage/actions.js";

export async function load(parts, query, signal) {
  return get("status?functions=summary", signal);
}

export function view(status) {
  if (status.limited) return card("Nodes", empty("This key is limited to some functions; nodes are shared by all."));
  if (!status.nodes.length) return card("Nodes", empty("No node is registered: nothing can run.", "fs up"));
  const users = new Map();
  for (const info of status.functions) {
    for (const checkpoint of [info.weights, info.adapter].filter(Boolean)) {
      users.set(checkpoint, [...(users.get(checkpoint) ?? []), info.name]);
    }
  }
  const workers = status.functions.flatMap(workersOf);
  return status.nodes.map((node) => one(node, workers.filter((worker) => worker.node === node.node), users, status.draining.includes(node.node),
    new Set(status.copies.filter((copy) => copy.node === node.node).map((copy) => copy.checkpoint))));
}

function one(node, workers, users, draining, kept) {
  const memory = node.weights_memory;
  const weights = Math.min(memory.used_bytes, node.memory_used_bytes);
  const reserved = node.memory_used_bytes - weights;
  return card(null,
    h("div", { class: "title" }, h("h1", null, node.node), tag(`${node.cpus} cores`),
      draining ? tag("draining: gets no workers", "warn") : null, node.region ? tag(node.region) : null, h("span", { class: "sub" }, `${node.address}, process ${node.pid}`)),
    h("p", null, `Memory: ${bytes(node.memory_used_bytes)} of ${bytes(node.memory_bytes)} (${percent(node.memory_used_bytes, node.memory_bytes)})`),
    meter([["used", reserved / node.memory_bytes, `workers: ${bytes(reserved)}`],
      ["weights", weights / node.memory_bytes, `weights: ${bytes(weights)}`]], "memory in use"),
    key([["used", `reserved for workers ${bytes(reserved)}`], ["weights", `weights ${bytes(weights)}`],
      ["free", `free slabs for weights ${bytes(memory.free_bytes)}`]]),
    h("div", { class: "columns" },
      h("div", null, h("h2", null, "Storage tiers"), tiers(node)),
      h("div", null, h("h2", null, "Configuration"), facts([
        ["isolation", { none: "refused: it takes no functions but those in sandboxes", plain: "none: plain processes, as allowed" }[node.confines] || node.isolation || "not known yet"], ["memory limits", node.limits || "none"],
        ["preloaded profiles", node.profiles.join(", ") || "none yet"],
        ["weights memory", `${{ hugetlb: "reserved huge", thp: "transparent huge", small: "small" }[memory.pages]} pages, slabs of ${bytes(memory.slab_bytes)}`],
        ...(node.isolation_refused ? [["the kernel refused", node.isolation_refused]] : []),
        ...Object.entries(memory.refused).map(([pages, reason]) => [`${pages} pages unavailable`, reason]),
      ]))),
    node.devices.length ? [h("h2", null, "Devices"), devices(node.devices)] : null,
    h("h2", null, "Checkpoints"), checkpoints(node, users, kept),
    h("h2", null, "Workers"), workers.length ? table(
      [{ name: "worker" }, { name: "function" }, { name: "state" }, { name: "start" }],
      workers.map((worker) => [h("span", { class: "mono" }, worker.worker),
        [functionLink(worker.function), ` @${worker.version}`], workerState(worker.state), worker.start]))
      : empty("None."),
    Object.keys(node.speeds).length ? [h("h2", null, "Latency on this node"), speeds(Object.entries(node.speeds))] : null,
    draining ? form("undrain", { node: node.node }, "", button("Let it have workers again"))
      : sure(`Its workers finish their calls and leave, and it gets no others. Press again to drain ${node.node}.`, form("drain", { node: node.node }, "", button("Drain"))));
}

// Only language models have tokens: without any of them there is no column for these.
function speeds(found) {
  const tokens = found.some(([, speed]) => speed.decode_s !== null);
  return table(
    [{ name: "version" }, { name: "calls", num: true }, { name: "call", num: true }, { name: "first byte", num: true }, ...(tokens ? [{ name: "a token", num: true }] : [])],
    found.map(([version, speed]) => [version, speed.calls, ms(1000 * speed.call_s), ms(1000 * speed.prefill_s),
      ...(tokens ? [speed.decode_s === null ? "–" : ms(1000 * speed.decode_s)] : [])]));
}

function devices(found) {
  return table([{ name: "device" }, { name: "type" }, { name: "memory", num: true }, { name: "reserved", num: true }, { name: "" }, { name: "connected by" }, { name: "loads", num: true }],
    found.map((device) => [h("span", { class: "mono" }, device.id), device.type, bytes(device.memory_bytes), bytes(device.reserved_bytes),
      meter([["used", device.reserved_bytes / device.memory_bytes, bytes(device.reserved_bytes)]], "share reserved"),
      device.cores.length ? `cores ${device.cores.join(", ")}` : [device.pcie_bytes_per_s ? `PCIe ${bytes(device.pcie_bytes_per_s)}/s` : "", device.links.length ? ` NVLink to ${device.links.join(", ")}` : ""],
      device.load_bytes_per_s ? `${bytes(device.load_bytes_per_s)}/s` : "–"]));
}

function tiers(node) {
  const held = node.segments.reduce((sum, segment) => sum + segment.ready_bytes, 0);
  const line = (name, holds, source) => [name, holds, node.bytes_per_s[source] ? `${bytes(node.bytes_per_s[source])}/s` : "–",
    node.fetched_bytes[source] ? bytes(node.fetched_bytes[source]) : "–"];
  return table([{ name: "tier" }, { name: "stored", num: true }, { name: "latest bandwidth", num: true }, { name: "fetched", num: true }], [
    ["host memory", bytes(held), "–", "–"], line("disk", bytes(node.disk_bytes), "disk"), line("object store", "all", "store"),
    ...Object.keys({ ...node.bytes_per_s, ...node.fetched_bytes }).filter((source) => source !== "disk" && source !== "store")
      .map((source) => line(source, "–", source)),
  ]);
}

function checkpoints(node, users, kept) {
  const known = new Map(node.segments.map((segment) => [segment.checkpoint, segment]));
  const ids = [...new Set([...known.keys(), ...Object.keys(node.disk), ...kept])];
  if (!ids.length) return empty("None in memory or on disk: weights are fetched by the first call of a function that has some.");
  return table([{ name: "checkpoint" }, { name: "functions" }, { name: "in memory" }, { name: "loaded", num: true }, { name: "size", num: true }, { name: "" }, { name: "on disk" }, { name: "copy" }],
    ids.map((id) => {
      const segment = known.get(id);
      const of = users.get(id);
      return [h("span", { class: "mono", title: id }, id.slice(0, 12)), of ? of.map((name, index) => [index ? ", " : "", functionLink(name)]) : h("span", { class: "dim" }, "no live version"),
        segment ? tag(segment.state, { ready: "good", filling: "busy", partial: "busy", failed: "bad" }[segment.state]) : tag(kept.has(id) ? "ordered" : "no"),
        segment ? bytes(segment.ready_bytes) : "–", segment ? bytes(segment.size_bytes) : "–",
        segment ? meter([["weights", segment.size_bytes ? segment.ready_bytes / segment.size_bytes : 0, bytes(segment.ready_bytes)]], "share loaded") : null,
        node.disk[id] ? tag("yes", "good") : tag("no"), kept.has(id) ? tag("kept here", "good") : null];
    }));
}

offer("drain", async ({ node }) => {
  await send("PUT", `nodes/${name(node)}/drain`);
  return "It gets no workers.";
});
offer("undrain", async ({ node }) => {
  await send("DELETE", `nodes/${name(node)}/drain`);
  return "It gets workers again.";
});
