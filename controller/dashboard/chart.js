// Small SVG charts. Widths are in units of the chart's view box.

import { h, s } from "./dom.js";
import { at, day, ms } from "./format.js";

const NARROW = 700;

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

// Bars over time: [{point, parts: [[kind, value, meaning], ...]}], each a link. Parts are stacked; `layered` ones all
// stand on the axis, the highest first. `marks` are events above the bars.
export function columns(bars, { title, format, step, begin, href, layered = false, marks = [], focus = false }) {
  const width = innerWidth < NARROW ? 340 : 540, top = 24, high = 110, height = top + high + 20;
  const wide = width / Math.max(1, bars.length);
  const heightOf = ({ parts }) => parts.reduce((sum, [, value]) => (layered ? Math.max(sum, value) : sum + value), 0);
  const most = round(Math.max(0, ...bars.map(heightOf)));
  const first = bars[0]?.point.begin_unix_ms ?? 0;
  const y = (value) => top + high - (most ? (value / most) * high : 0);
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title },
    [0, 0.5, 1].map((share) => s("line", { class: "grid", x1: 0, x2: width, y1: y(share * most) || top + high, y2: y(share * most) || top + high })),
    s("text", { class: "dim", x: 0, y: 12 }, most ? format(most) : "none"),
    bars.map((bar, index) => column(bar, { x: index * wide, wide, top, high, y, layered, format, step, href, focus, chosen: bar.point.begin_unix_ms === begin })),
    marks.filter((mark) => mark.unix_ms >= first).map((mark) => {
      const x = Math.min(width - 4, ((mark.unix_ms - first) / step) * wide);
      return s("path", { class: `fill-${mark.kind}`, d: `M${(x - 4).toFixed(1)} ${top - 10}h8l-4 8z` }, s("title", null, mark.text));
    }),
    hours(bars, step, wide, width).map(([x, text]) => s("text", { class: "dim", x, y: height - 5, "text-anchor": x < 20 ? "start" : x > width - 20 ? "end" : "middle" }, text)));
}

function column({ point, parts }, { x, wide, top, high, y, layered, format, step, href, focus, chosen }) {
  let sum = 0;
  const shown = parts.filter(([, value]) => value > 0).map(([kind, value]) => {
    const from = layered ? 0 : sum;
    sum += value;
    const above = Math.min(y(from + value), top + high - 1.5);
    return s("rect", { class: `fill-${kind}`, x: x + 0.5, y: above, width: Math.max(1, wide - 1), height: y(from) - above });
  });
  const told = parts.map(([, value, meaning]) => `${meaning} ${value ? format(value) : "–"}`).join(", ");
  return s("a", { href: href(point), class: chosen ? "bar-link chosen" : "bar-link", tabindex: focus ? null : -1 },
    s("title", null, `${at(point.begin_unix_ms)} to ${at(point.begin_unix_ms + step)}: ${told}`),
    s("rect", { class: "hit", x, y: top - 12, width: wide, height: high + 12 }), shown);
}

// A round number that is at least as much.
function round(value) {
  if (value <= 0) return 0;
  const decade = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * decade).find((size) => size >= value * 0.9999);
}

// [x, text] where an hour, a few of them, or a day begins.
function hours(bars, step, wide, width) {
  const span = bars.length * step;
  const every = [10, 60, 240, 1440, 5 * 1440].map((minutes) => minutes * 60_000).find((size) => span / size <= 7) ?? 5 * 86_400_000;
  const local = (unixMs) => unixMs - new Date(unixMs).getTimezoneOffset() * 60_000;
  const begins = ({ point }) => Math.floor(local(point.begin_unix_ms) / every) !== Math.floor(local(point.begin_unix_ms - step) / every);
  return bars.map((bar, index) => [index * wide, bar]).filter(([, bar]) => begins(bar)).filter(([x]) => x < width - 12)
    .map(([x, { point }]) => [x, every >= 86_400_000 ? day(point.begin_unix_ms) : at(point.begin_unix_ms).slice(-5)]);
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
