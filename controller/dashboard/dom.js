// Builds elements from text. Text is never parsed as markup, and links lead to this dashboard's pages or to http(s) only.

const SVG = "http://www.w3.org/2000/svg";
const SAFE_LINK = /^(#|https?:\/\/)/;

export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "href" && !SAFE_LINK.test(value)) continue;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Changes `old` into `wanted` where they differ, so that an update keeps focus, selection and scroll position.
// A part with the same `data-keep` stays as it is: a form with what was typed into it.
export function morph(old, wanted) {
  if (old.dataset?.keep !== undefined && old.dataset.keep === wanted.dataset.keep) return;
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes];
  const after = [...wanted.childNodes];
  after.forEach((node, index) => {
    const known = before[index];
    if (!known) old.append(node);
    else if (known.nodeType !== node.nodeType || known.nodeName !== node.nodeName || isOther(known, node)) known.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (known.data !== node.data) known.data = node.data;
    } else morph(known, node);
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function isOther(known, node) {
  return (known.dataset?.keep ?? node.dataset?.keep) !== undefined && known.dataset?.keep !== node.dataset?.keep;
}

export function table(headings, rows, foot) {
  const cell = (kind) => (value, index) => {
    const heading = headings[index];
    const sorted = kind === "th" && heading.sorted ? heading.sorted : null;
    return h(kind, { class: heading.num ? "num" : heading.wide ? "wide" : heading.tight ? "tight" : heading.grow ? "grow" : null, "aria-sort": sorted }, value);
  };
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": headings.map((heading) => heading.name).filter(Boolean).join(", ") }, h("table", null,
    h("thead", null, h("tr", null, headings.map((heading, index) => cell("th")(heading.href ? h("a", { href: heading.href }, heading.name) : heading.name, index)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map(cell("td"))))),
    foot && h("tfoot", null, h("tr", null, foot.map(cell("td"))))));
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", null, title), children);
}

export function empty(text, command) {
  return h("p", { class: "empty" }, text, command && [" ", h("code", null, command)]);
}

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

export function tag(text, kind) {
  return h("span", { class: kind ? `tag ${kind}` : "tag" }, text);
}

export function figure(value, label) {
  return h("div", { class: "figure" }, h("b", null, value), h("span", null, label));
}

export function choices(options) {
  return h("span", { class: "choices" }, options.map(([text, href, chosen]) =>
    h("a", { href, "aria-current": chosen ? "true" : null }, text)));
}
