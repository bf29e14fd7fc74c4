// A form to call a function, made from its OpenAPI document. The answer is shown as text, as it comes.

import { call, name } from "../client.js";
import { card, empty, h } from "../dom.js";
import { bytes, ms } from "../format.js";
import { button, form, offer } from "./actions.js";

const SHOWN_CHARS = 65_536;
const TEXT = /^(text\/|application\/(.*\+)?(json|xml)|application\/x-ndjson)/;

export function tryout(info, document) {
  const operations = document ? operationsOf(document) : [];
  if (!operations.length) return card("Try it", empty("It describes no operation of its own. Call it by its URL:", `curl ${info.url}`));
  return card("Try it", operations.map((one, index) => h("details", { open: index === 0 },
    h("summary", { class: "mono" }, `${one.method.toUpperCase()} /fn/${info.name}${one.path === "/" ? "" : one.path}`),
    form("call", { function: info.name, path: one.path, method: one.method, type: one.type }, info.version,
      fields(one), button("Call it")))));
}

// What a shell types to call it. A form with files has no such line: curl sends it.
export function invokeLine(info, document) {
  if (info.spec.llm) return `fs invoke ${info.name} '{"prompt": "Hello!"}' --stream`;
  const { type, example } = (document ? operationsOf(document) : []).find((one) => one.path === "/") ?? {};
  if (type === "multipart/form-data") return `curl ${info.url} -F NAME=@FILE`;
  if (type === "application/octet-stream") return `fs invoke ${info.name} @FILE`;
  const body = JSON.stringify(example ?? {}).replaceAll("'", "'\\''");
  return `fs invoke ${info.name}${type && body !== "{}" ? ` '${body}'` : ""}`;
}

// Each path once, with its POST if it has one. Those with a POST come first: a GET of a language model lists its name.
function operationsOf(document) {
  return Object.entries(document.paths ?? {}).flatMap(([path, methods]) => {
    const method = methods.post ? "post" : methods.get ? "get" : null;
    if (!method || path.includes("{")) return [];
    const content = methods[method].requestBody?.content ?? {};
    const type = ["application/json", "application/octet-stream", "multipart/form-data"].find((kind) => content[kind]) ?? "";
    return [{ path, method, type, schema: content[type]?.schema ?? {}, example: content[type]?.example }];
  }).sort((one, other) => other.method.localeCompare(one.method));
}

function fields({ type, schema, example }) {
  if (!type) return [];
  if (type === "application/octet-stream") return [labelled("body", "file", h("input", { type: "file", "data-kind": "file", name: "" }))];
  const known = Object.entries(schema.properties ?? {});
  if (!known.length) {
    if (type === "application/json" && schema.properties && schema.type === "object") return [];
    return [labelled("body", "JSON", area("", example ?? {}))];
  }
  return known.map(([key, one]) => labelled(key, describe(one, (schema.required ?? []).includes(key)), control(key, one, example?.[key] ?? one.default)));
}

function describe(schema, required) {
  return [schema.format === "binary" ? "file" : schema.enum ? "one of" : schema.type ?? "JSON", required ? "required" : null].filter(Boolean).join(", ");
}

function labelled(key, kind, control) {
  return h("label", null, h("span", null, key, h("i", null, ` ${kind}`)), control);
}

function control(key, schema, value) {
  if (schema.format === "binary") return h("input", { type: "file", "data-kind": "file", name: key });
  if (schema.enum) {
    return h("select", { name: key, "data-kind": "json" }, schema.enum.map((one) =>
      h("option", { value: JSON.stringify(one), selected: one === value }, String(one))));
  }
  if (schema.type === "boolean") return h("input", { type: "checkbox", "data-kind": "flag", name: key, checked: value === true });
  if (schema.type === "integer" || schema.type === "number") {
    return h("input", { type: "number", step: schema.type === "integer" ? 1 : "any", "data-kind": "json", name: key, value });
  }
  if (schema.type === "string") return h("input", { type: "text", "data-kind": "text", name: key, value });
  return area(key, value);
}

function area(key, value) {
  return h("textarea", { name: key, "data-kind": "json", rows: 3, spellcheck: "false" }, value === undefined ? "" : JSON.stringify(value));
}

// The value of a control; undefined for one that was left empty.
function valueOf(control) {
  const { kind } = control.dataset;
  if (kind === "flag") return control.checked;
  if (kind === "file") return control.files[0];
  if (kind === "text") return control.value;
  if (!control.value.trim()) return undefined;
  try {
    return JSON.parse(control.value);
  } catch (error) {
    throw new SyntaxError(`${control.name || "body"} is no JSON: ${error.message}`);
  }
}

function requestOf(type, controls) {
  if (!type) return {};
  const pairs = controls.map((control) => [control.name, valueOf(control)]).filter(([, value]) => value !== undefined);
  if (type === "multipart/form-data") {
    const body = new FormData();
    for (const [key, value] of pairs) body.append(key, value instanceof Blob || typeof value === "string" ? value : JSON.stringify(value));
    return { body };
  }
  if (type === "application/octet-stream") return { body: pairs[0]?.[1] ?? "", headers: { "content-type": type } };
  const whole = pairs.length === 1 && pairs[0][0] === "" ? pairs[0][1] : Object.fromEntries(pairs);
  return { body: JSON.stringify(whole), headers: { "content-type": type } };
}

offer("call", async ({ function: which, path, method, type }, form, told) => {
  const request = requestOf(type, [...form.querySelectorAll("[data-kind]")]);
  const begun = performance.now();
  const response = await call(`fn/${name(which)}${path === "/" ? "" : path}`, { method: method.toUpperCase(), ...request });
  const text = h("pre", { tabindex: 0 });
  const kind = response.headers.get("content-type") ?? "";
  const id = response.headers.get("x-request-id");
  const facts = () => h("p", { class: response.ok ? "dim" : "bad" }, `HTTP ${response.status}, ${response.headers.get("fs-start") ?? "no"} start, ${ms(performance.now() - begun)}`,
    response.headers.get("fs-billed-ms") ? `, billed ${response.headers.get("fs-billed-ms")} ms` : "", id ? [", ", h("a", { href: `#/i/${name(id)}` }, "its timeline")] : "");
  if (!TEXT.test(kind)) {
    text.textContent = `${bytes((await response.blob()).size)} of ${kind || "no content type"}`;
  } else {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    told(text);
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      if (text.textContent.length < SHOWN_CHARS) text.append(piece.value);
    }
    if (text.textContent.length >= SHOWN_CHARS) text.append("\n… the rest is not shown");
  }
  return h("div", null, facts(), text);
});
