// Changes of one function: rollback to an earlier version, and its scale.

import { name, send } from "../client.js";
import { card, h } from "../dom.js";
import { button, choice, field, form, offer } from "./actions.js";

export function change(info, versions, traffic) {
  const earlier = versions.map((one) => one.version).filter((version) => version !== traffic.live);
  const { scale } = info;
  return card("Change", h("div", { class: "columns" },
    h("div", null, h("h2", null, "Rollback"), earlier.length
      ? form("rollback", { function: info.name }, `${traffic.live} ${earlier}`, choice("version that gets the calls", "version", earlier.map((one) => [one, `version ${one}`])), button("Roll back"))
      : h("p", { class: "empty" }, "There is no other version.")),
    h("div", null, h("h2", null, "Scale, until the next deploy"),
      form("scale", { function: info.name }, `${info.version} ${scale.min} ${scale.max} ${scale.keep_alive_s}`,
        field("min", { name: "min", type: "number", min: 0, max: 1000, value: scale.min, required: true }),
        field("max", { name: "max", type: "number", min: 1, max: 1000, value: scale.max, required: true }),
        field("keep-alive, s", { name: "keep_alive_s", type: "number", min: 0, max: 86_400, step: "any", value: scale.keep_alive_s, required: true }),
        button("Scale")))));
}

offer("rollback", async (args, form) => {
  const traffic = await send("POST", `functions/${name(args.function)}/rollback`, { version: Number(form.elements.version.value) });
  return `Version ${traffic.live} gets the calls now.`;
});

offer("scale", async (args, form) => {
  const value = (key) => Number(form.elements[key].value);
  await send("PUT", `functions/${name(args.function)}/scale`, { min: value("min"), max: value("max"), keep_alive_s: value("keep_alive_s") });
  return "Changed.";
});
