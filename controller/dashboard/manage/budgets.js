// The form that sets a function's budget.

import { name, send } from "../client.js";
import { button, choice, field, form, offer } from "./actions.js";

export function budgetForm() {
  return form("set-budget", {}, "", field("function", { name: "function", required: true }), field("US dollars", { name: "usd", type: "number", min: 0, step: "any", required: true }),
    choice("per", "per", [["month"], ["day"]]), button("Set budget"));
}

offer("set-budget", async (args, form) => {
  const { function: which, usd, per } = form.elements;
  await send("PUT", `budgets/${name(which.value.trim())}`, { limit_nusd: Math.round(1e9 * Number(usd.value)), per: per.value });
  return "Set.";
});
