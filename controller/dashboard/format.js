// Formats numbers and times. Units are those of the API: milliseconds, bytes, nano-dollars.

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000 && Number.isInteger(value)) return `${value} ms`;
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 100_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return `${Math.round(value / 1000).toLocaleString("en")} s`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" || value >= 100 ? `${Math.round(value)} ${unit}` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function dollars(nusd) {
  const usd = nusd / 1e9;
  if (usd === 0) return "$0";
  return usd >= 1 ? `$${usd.toFixed(2)}` : `$${usd.toFixed(usd >= 0.001 ? 5 : 9)}`;
}

// Three significant digits, five decimals at most. The exact amount belongs into a title.
export function about(nusd) {
  const usd = nusd / 1e9;
  if (usd === 0 || usd >= 1) return dollars(nusd);
  return usd < 0.00001 ? "< $0.00001" : `$${usd.toFixed(Math.min(5, 2 - Math.floor(Math.log10(usd))))}`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function several(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function rate(perMinute) {
  return perMinute === 0 ? "0" : perMinute < 10 ? perMinute.toFixed(1) : count(perMinute);
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "–";
}

export function clock(unixMs) {
  const at = new Date(unixMs);
  const two = (number) => String(number).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

// Local day and minute: "23 Nov 03:00"; the day alone is left out for today.
export function at(unixMs) {
  return dated(unixMs, clock(unixMs).slice(0, 5));
}

// Local day and time to the millisecond: "23 Nov 03:00:00.123"; the day alone is left out for today.
export function moment(unixMs) {
  return dated(unixMs, clock(unixMs));
}

function dated(unixMs, time) {
  return new Date(unixMs).toDateString() === new Date().toDateString() ? time : `${day(unixMs)} ${time}`;
}

export function day(unixMs) {
  const when = new Date(unixMs);
  return `${when.getDate()} ${when.toLocaleDateString("en", { month: "short" })}`;
}

export function lasts(seconds) {
  const [unit, word] = [[86_400, "day"], [3600, "hour"], [60, "minute"]].find(([size]) => seconds % size === 0) ?? [1, "second"];
  return several(seconds / unit, word);
}

export function age(unixMs, nowMs) {
  const seconds = Math.max(0, (nowMs - unixMs) / 1000);
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} days`;
}
