// Forms that change something. One listener serves all of them: pages are redrawn every two seconds, and an element that
// stays must not keep a listener of an older drawing.

import { Refused } from "../client.js";
import { h } from "../dom.js";

const ASKED_MS = 8000;
const ACTIONS = new Map();

// `act(args, form, told)` gets the form's arguments and shows with `told`; what it returns is shown at the end.
export function offer(name, act) {
  ACTIONS.set(name, act);
}

// `version` changes when the form must be drawn anew; as long as it stays, what was typed and shown stays.
export function form(name, args, version, ...children) {
  return h("form", { class: "act", "data-act": name, "data-args": JSON.stringify(args), "data-keep": `${name} ${JSON.stringify(args)} ${version}` },
    children, h("output", null));
}

// A form that acts when it is submitted a second time, within some seconds: `text` says what is lost.
export function sure(text, form) {
  form.dataset.sure = text;
  return form;
}

export function button(text, kind) {
  return h("button", { type: "submit", class: kind }, text);
}

export function field(label, properties) {
  return h("label", null, h("span", null, label), h("input", properties));
}

export function choice(label, name, options) {
  return h("label", null, h("span", null, label), h("select", { name }, options.map(([value, text]) => h("option", { value }, text ?? value))));
}

export function listen(page, redraw) {
  page.addEventListener("submit", async (event) => {
    const form = event.target;
    const act = ACTIONS.get(form.dataset.act);
    if (!act) return;
    event.preventDefault();
    const shown = form.querySelector("output");
    const told = (...children) => shown.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
    if (form.dataset.sure && !form.dataset.asked) {
      form.dataset.asked = "yes";
      told(form.dataset.sure);
      setTimeout(() => {
        delete form.dataset.asked;
        if (shown.textContent === form.dataset.sure) told();
      }, ASKED_MS);
      return;
    }
    const buttons = [...form.querySelectorAll("button")];
    for (const one of buttons) one.disabled = true;
    told("…");
    try {
      told((await act(JSON.parse(form.dataset.args), form, told)) ?? "Done.");
      redraw();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof TypeError || error instanceof SyntaxError)) console.error(error);
      told(h("span", { class: "bad" }, error.message), error.hint ? h("span", { class: "dim" }, ` ${error.hint}`) : null);
    } finally {
      for (const one of buttons) one.disabled = false;
    }
  });
}
