// Small SVG charts. Widths are in units of the chart's view box.

import { h, s } from "./dom.js";
import { ms } from "./format.js";

export function spark(values, label) {
  const width = 90, height = 20, step = width / Math.max(1, values.length);
  const most = Math.max(1, ...values);
  return s("svg", { class: "spark", width, height, role: "img", "aria-label": label }, s("title", null, label),
    s("rect", { x: 0, y: height - 1, width, height: 1, opacity: 0.25 }),
    values.map((value, index) => {
      const tall = value ? Math.max(2, (value / most) * height) : 0;
      return s("rect", { x: index * step, y: height - tall, width: Math.max(1, step - 1), height: tall });
    }));
}

// One bar of parts [class, share of the whole, text].
export function meter(parts, label) {
  let at = 0;
  return s("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    parts.map(([kind, share, text]) => {
      const wide = Math.max(0, Math.min(100 - at, 100 * share));
      const part = s("rect", { class: `fill-${kind}`, x: at, y: 0, width: wide, height: 10 }, s("title", null, text));
      at += wide;
      return part;
    }));
}

export function key(entries) {
  return h("div", { class: "key" }, entries.map(([kind, text]) =>
    h("span", null, s("svg", { width: 10, height: 10 }, s("rect", { class: `fill-${kind}`, width: 10, height: 10, rx: 2 })), text)));
}

// Rows of [name, meaning, bars of {kind, from, to} in milliseconds], on one axis.
export function waterfall(rows, spanMs) {
  if (innerWidth < NARROW) return narrowWaterfall(rows, spanMs);
  const left = 250, right = 90, width = 1140, line = 28, top = 26;
  const scale = (width - left - right) / Math.max(spanMs, 0.001);
  const height = top + rows.length * line + 6;
  const ticks = axis(spanMs);
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `waterfall of ${ms(spanMs)}` },
    ticks.map((at) => [
      s("line", { class: "grid", x1: left + at * scale, x2: left + at * scale, y1: top - 4, y2: height - 4 }),
      s("text", { class: "dim", x: left + at * scale, y: 14, "text-anchor": at === 0 ? "start" : "middle" }, at === 0 ? "0" : ms(at)),
    ]),
    rows.map(([name, meaning, bars], index) => {
      const y = top + index * line;
      const total = bars.reduce((sum, bar) => sum + bar.to - bar.from, 0);
      const end = Math.max(...bars.map((bar) => bar.to));
      return [
        s("text", { x: 0, y: y + 17 }, name),
        s("text", { class: "dim", x: 72, y: y + 17 }, meaning),
        bars.map((bar) => s("rect", { class: `fill-${bar.kind}`, x: left + bar.from * scale, y: y + 4,
          width: Math.max(2, (bar.to - bar.from) * scale), height: line - 10, rx: 3 },
        s("title", null, `${name}: ${ms(bar.from)} to ${ms(bar.to)}`))),
        s("text", { x: left + end * scale + 8, y: y + 17 }, ms(total)),
      ];
    }));
}

const NARROW = 700;

// For small screens: each label above its bar, in units that are about a pixel there.
function narrowWaterfall(rows, spanMs) {
  const width = 340, line = 40;
  const scale = width / Math.max(spanMs, 0.001);
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${rows.length * line}`, role: "img", "aria-label": `waterfall of ${ms(spanMs)}` },
    rows.map(([name, meaning, bars], index) => {
      const y = index * line;
      const total = bars.reduce((sum, bar) => sum + bar.to - bar.from, 0);
      return [
        s("text", { x: 0, y: y + 14 }, name, s("tspan", { class: "dim", dx: 8 }, meaning)),
        s("text", { x: width, y: y + 14, "text-anchor": "end" }, ms(total)),
        bars.map((bar) => s("rect", { class: `fill-${bar.kind}`, x: Math.min(width - 2, bar.from * scale), y: y + 20,
          width: Math.max(2, (bar.to - bar.from) * scale), height: 12, rx: 3 }, s("title", null, `${name}: ${ms(bar.from)} to ${ms(bar.to)}`))),
      ];
    }));
}

// Five to ten round steps.
function axis(spanMs) {
  const rough = spanMs / 6;
  const decade = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-6)));
  const step = [1, 2, 5, 10].map((factor) => factor * decade).find((size) => size >= rough);
  const found = [];
  for (let at = 0; at <= spanMs * 1.0001; at += step) found.push(at);
  return found;
}
