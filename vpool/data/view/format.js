// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Three digits and a binary unit, as vpool.sizes.format_bytes writes them. */
function bytesText(nbytes) {
  let unit = 0;
  let size = nbytes;
  while (Math.abs(size) >= 1000 && unit < UNITS.length - 1) {
    size /= 1024;
    unit++;
  }
  if (unit === 0) return `${Math.trunc(size)} B`;
  return `${size.toFixed(Math.max(0, 3 - String(Math.trunc(Math.abs(size))).length))} ${UNITS[unit]}`;
}

const countText = (count) => Math.round(count).toLocaleString("en-US");
const percentText = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A call site without the folders of its files. */
const siteText = (site) => site.replace(/[^\s<>]*\/(?=[^\s/]+:\d)/g, "");

/** A duration of so many microseconds. */
function timeText(us) {
  const size = Math.abs(us);
  if (size < 1e3) return `${Math.round(us)} µs`;
  if (size < 1e6) return `${(us / 1e3).toPrecision(3)} ms`;
  if (size < 1e9) return `${Number((us / 1e6).toFixed(size < 1e8 ? 2 : 1))} s`;
  return `${(us / 6e7).toFixed(1)} min`;
}

/** Round values for an axis from low to high, at most so many and no closer than `least`. */
function ticks(low, high, most, least = 0, steps = [1, 2, 5, 10]) {
  const span = high - low;
  if (!(span > 0)) return { values: [low], step: 1 };
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = Math.max(least, power * steps.find((factor) => span / (factor * power) <= most));
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return { values, step };
}

/** Round numbers of bytes: powers of two. */
function byteTicks(low, high, most) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / most)));
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(value);
  return { values, step };
}

/** Bytes on an axis, all in the unit of its end, or in a smaller one where steps are smaller. */
function axisBytes(value, step, end) {
  let unit = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, end)) / 10));
  if (unit > 0 && step < 1024 ** unit / 8) unit--;
  const digits = Math.min(3, Math.max(0, Math.ceil(-Math.log2(step / 1024 ** unit))));
  return `${(value / 1024 ** unit).toFixed(digits)} ${UNITS[unit]}`;
}

/** A time on an axis, all in one unit. */
function axisTime(us, step) {
  const [scale, unit] = step < 1e3 ? [1, "µs"] : step < 1e6 ? [1e3, "ms"] : [1e6, "s"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return `${(us / scale).toFixed(Math.min(3, digits))} ${unit}`;
}

function axisCount(value, step) {
  if (value === 0) return "0";
  if (step >= 1e6) return `${Number((value / 1e6).toFixed(1))} M`;
  if (step >= 1e3) return `${Number((value / 1e3).toFixed(1))} k`;
  return countText(value);
}
