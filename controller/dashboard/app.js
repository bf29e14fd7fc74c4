// Routing of pages, and their refresh while the tab is visible: every two seconds, or less often if it takes long.

import { pauseMs, Refused, useKey } from "./client.js";
import { h, morph } from "./dom.js";
import * as functions from "./functions.js";
import * as one from "./function.js";
import * as invocation from "./invocation.js";
import * as past from "./history.js";
import * as nodes from "./nodes.js";
import * as usage from "./usage.js";
import * as access from "./manage/access.js";
import * as calls from "./manage/calls.js";
import { listen } from "./manage/actions.js";

const NAV = [["Functions", "#/", functions], ["Invocations", "#/calls", calls], ["History", "#/history", past], ["Nodes", "#/nodes", nodes],
  ["Usage", "#/usage", usage], ["Access", "#/access", access]];
const ROUTES = [
  [/^$/, functions],
  [/^f\/([^/]+)$/, one],
  [/^i\/([^/]+)$/, invocation],
  [/^history$/, past],
  [/^nodes$/, nodes],
  [/^usage$/, usage],
  [/^calls$/, calls],
  [/^access$/, access],
];

const page = document.getElementById("page");
const state = document.getElementById("state");
const notice = document.getElementById("notice");
let asking = new AbortController();
let timer = 0;
let shown = null;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  for (const [pattern, module] of ROUTES) {
    const found = pattern.exec(path);
    if (found) return { module, parts: found.slice(1).map(decoded), query: new URLSearchParams(query) };
  }
  return { module: unknown, parts: [path], query: new URLSearchParams() };
}

// A part that is typed or cut in the middle of an escape is no name, and stays as it is.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const unknown = {
  load: async ([path]) => path,
  view: (path) => h("p", { class: "trouble" }, `There is no page ${path}. `, h("a", { href: "#/" }, "All functions")),
};

function drawNav(shown) {
  const links = NAV.map(([text, href, module]) =>
    h("a", { href, "aria-current": module === shown || (module === functions && shown === one) || (module === calls && shown === invocation) ? "page" : null }, text));
  document.getElementById("nav").replaceChildren(...links);
}

// `fs dashboard` prints a link with the key in its fragment. The key is removed from the address bar and the history
// before the first request.
function takeKey() {
  const shown = /^#key=(.+)$/.exec(location.hash);
  if (!shown) return;
  history.replaceState(null, "", "#/");
  useKey(shown[1]);
  notice.hidden = true;
}

// `asked`: somebody waits for it, and is told what fails.
async function show(fresh, asked = fresh) {
  clearTimeout(timer);
  shown = pagePath();
  asking.abort();
  const mine = (asking = new AbortController());
  const { module, parts, query } = route();
  const begunMs = performance.now();
  let waitMs = pauseMs(0);
  drawNav(module);
  document.title = `${parts[0] ?? NAV.find((item) => item[2] === module)?.[0] ?? ""} · fleetstart`;
  try {
    const found = await module.load(parts, query, mine.signal);
    if (mine.signal.aborted) return;
    waitMs = pauseMs(performance.now() - begunMs);
    const wanted = h("main", { id: "page", tabindex: -1 }, module.view(found, Date.now(), query));
    const held = focused();
    const read = fresh ? [] : [...page.querySelectorAll(".lines")].filter((pane) => !atEnd(pane));
    if (fresh) page.replaceChildren(...wanted.childNodes);
    else morph(page, wanted);
    if (held && document.activeElement === document.body) (page.querySelector(held) ?? page).focus({ preventScroll: true });
    for (const pane of page.querySelectorAll(".lines")) if (!read.includes(pane)) pane.scrollTop = pane.scrollHeight;
    tell("live", "live");
    notice.hidden = true;
  } catch (error) {
    if (mine.signal.aborted) return;
    trouble(error, asked);
    if (!notice.hidden) return; // nothing is asked for until a key is given
  }
  timer = setTimeout(again, waitMs);
}

function pagePath() {
  return location.hash.split("?")[0] || "#/";
}

// How to find what has the focus on the page when that is drawn anew: the field itself, or the page, so that the next
// tab does not begin at the top of the window. Null if the focus is elsewhere.
function focused() {
  const active = document.activeElement;
  if (!page.contains(active)) return null;
  return active.form && active.name ? `form[data-act="${active.form.dataset.act}"] [name="${active.name}"]` : "#page";
}

// A log follows its end, unless it was scrolled up.
function atEnd(pane) {
  return pane.scrollTop + pane.clientHeight > pane.scrollHeight - 8;
}

function again() {
  if (document.hidden) timer = setTimeout(again, pauseMs(0));
  else show(false);
}

function tell(kind, text) {
  state.className = kind;
  if (state.textContent !== text) state.textContent = text;
}

function trouble(error, asked) {
  if (!(error instanceof Refused)) {
    tell("gone", "no response, retrying");
    if (!(error instanceof TypeError)) console.error(error);
    return;
  }
  if (error.status === 401 || error.status === 403) {
    askForKey(error);
    return;
  }
  tell("gone", `HTTP ${error.status}`);
  if (asked || error.status === 404) {
    page.replaceChildren(h("p", { class: "trouble" }, error.message), h("p", { class: "empty" }, error.hint || "It may have expired: traces are kept for a day.", " ",
      h("a", { href: "#/" }, "All functions")));
  }
}

function askForKey(error) {
  tell("gone", "API key needed");
  if (!notice.hidden) return;
  const field = h("input", { type: "password", autocomplete: "off", "aria-label": "API key", placeholder: "API key" });
  const taken = (event) => {
    event.preventDefault();
    useKey(field.value);
    notice.hidden = true;
    show(true);
  };
  notice.replaceChildren(`${sentence(error.message)} The key is kept in this page only, until it is closed or reloaded. `,
    h("code", null, "fs dashboard"), " prints a link that lets you in.",
    h("form", { onsubmit: taken }, field, h("button", { type: "submit" }, "Use key")));
  notice.hidden = false;
  field.focus();
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

// Another order, search or length of a page's list leaves focus and place as they are.
addEventListener("hashchange", () => {
  takeKey();
  const same = pagePath() === shown && page.querySelector("section") !== null;
  if (!same) scrollTo(0, 0);
  show(!same, true);
});
listen(page, () => show(false));
document.addEventListener("visibilitychange", () => document.hidden || show(false));
takeKey();
show(true);
