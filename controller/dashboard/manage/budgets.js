// Budgets: their state, and forms that create, change and remove them.

import { name, send } from "../client.js";
import { meter } from "../chart.js";
import { functionLink, money } from "../components.js";
import { h, table, tag } from "../dom.js";
import { dollars, percent } from "../format.js";
import { button, choice, field, form, offer, sure } from "./actions.js";

const STATES = { ok: ["within", "good", "used"], alert: ["alert", "warn", "warn"], spent: ["spent: calls rejected", "bad", "bad"] };

export function budgetForm() {
  return form("set-budget", {}, "", field("function", { name: "function", required: true }), field("US dollars", { name: "usd", type: "number", min: 0, step: "any", required: true }),
    choice("per", "per", [["month"], ["day"]]), field("alert at, %", { name: "alert", type: "number", min: 1, max: 100, value: 80, required: true }), button("Set budget"));
}

export function budgetsTable(budgets) {
  return table([{ name: "function" }, { name: "period", tight: true }, { name: "state" }, { name: "" }, { name: "spent", num: true }, { name: "limit", num: true }, { name: "share", num: true },
    { name: "new limit, US dollars", tight: true }, { name: "", tight: true }],
  budgets.map((one) => {
    const [text, kind, fill] = STATES[one.stage];
    return [functionLink(one.function), one.period, tag(text, kind),
      meter([[fill, one.spent_nusd / one.limit_nusd, dollars(one.spent_nusd)]], "spent"),
      money(one.spent_nusd), money(one.limit_nusd), h("span", { title: `alert at ${one.alert_percent}%` }, percent(one.spent_nusd, one.limit_nusd)),
      form("change-budget", { function: one.function, per: one.per, alert: one.alert_percent }, one.limit_nusd,
        h("input", { name: "usd", type: "number", min: 0, step: "any", value: (one.limit_nusd / 1e9).toFixed(9).replace(/\.?0+$/, ""), required: true, "aria-label": `new limit of ${one.function}` }), button("Change")),
      sure(`Calls of ${one.function} may then cost any amount. Press again to remove it.`, form("remove-budget", { function: one.function }, "", button("Remove")))];
  }));
}

function set(which, usd, per, alert) {
  return send("PUT", `budgets/${name(which)}`, { limit_nusd: Math.round(1e9 * Number(usd)), per, alert_percent: Number(alert) });
}

offer("set-budget", async (args, form) => {
  const { function: which, usd, per, alert } = form.elements;
  await set(which.value.trim(), usd.value, per.value, alert.value);
  return "Set.";
});
offer("change-budget", async (args, form) => {
  await set(args.function, form.elements.usd.value, args.per, args.alert);
  return "Changed.";
});
offer("remove-budget", async (args) => {
  await send("DELETE", `budgets/${name(args.function)}`);
  return "Removed.";
});
