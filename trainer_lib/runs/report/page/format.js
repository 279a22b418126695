"use strict";
// Numbers, times and axes as people read them.

const SIZES = [[2 ** 40, "TB"], [2 ** 30, "GB"], [2 ** 20, "MB"], [2 ** 10, "KB"]];

function tidy(text) {
  return text.includes("e") ? text.replace(/\.?0*e\+?/, "e") : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function numberText(value, form) {
  if (value === null || value === undefined) return "–";
  if (form === "percent") return tidy((100 * value).toFixed(value < 0.1 ? 2 : 1)) + " %";
  if (form === "bytes") {
    const [size, unit] = SIZES.find(([size]) => value >= size) || [1, "B"];
    return tidy((value / size).toPrecision(4)) + " " + unit;
  }
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return tidy(value.toExponential(3));
  if (size >= 1e9) return tidy(value.toExponential(3));
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return tidy(value.toPrecision(5));
}

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return tidy(seconds.toFixed(seconds < 10 ? 2 : 1)) + " s";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest} h` : `${minutes}:${rest} min`;
}

function momentText(seconds) {
  if (!seconds) return "–";
  const moment = new Date(1000 * seconds), two = (number) => String(number).padStart(2, "0");
  return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())} ` +
    `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
}

function placeText(axis, value) {
  if (axis === "seconds") return secondsText(value);
  const name = { step: "step", epoch: "epoch", samples: "samples" }[axis];
  const text = axis === "epoch" ? tidy(value.toFixed(3)) : Math.round(value).toLocaleString("en-US");
  return axis === "samples" ? `${text} ${name}` : `${name} ${text}`;
}

function shortNumber(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= 10 * unit || (size >= unit && value % (unit / 10) === 0 && unit > 1e3)) {
      return tidy((value / unit).toFixed(2)) + letter;
    }
  }
  if (size !== 0 && size < 1e-3) return tidy(value.toExponential(2));
  return tidy(value.toPrecision(6));
}

// Steps of 1, 2 or 5 times a power of ten; of time and of bytes, of what clocks and memories count in.
function ticks(low, high, count, kind) {
  if (!(high > low)) return [low];
  const wanted = (high - low) / Math.max(count, 1);
  let step;
  if (kind === "seconds" && wanted > 0.5) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    step = steps.find((one) => one >= wanted) || 86400 * Math.ceil(wanted / 86400);
  } else {
    const unit = kind === "bytes" ? (SIZES.find(([size]) => high >= size) || [1])[0] : 1;
    const power = 10 ** Math.floor(Math.log10(wanted / unit));
    step = unit * power * [1, 2, 5, 10].find((one) => one * power * unit >= wanted * 0.999);
    if (kind === "step" || kind === "samples") step = Math.max(step, 1);
  }
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

function logTicks(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6));
  for (let power = first; power <= last; power++) {
    for (const part of last - first > 3 ? [1] : [1, 2, 5]) {
      const value = part * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001 && (power - first) % every === 0) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

function tickText(value, kind, step) {
  if (kind === "seconds") {
    if (step >= 3600 && value % 3600 === 0) return value / 3600 + " h";
    if (value >= 3600) return `${Math.floor(value / 3600)}:${String(Math.round(value / 60) % 60).padStart(2, "0")} h`;
    if (step >= 60) return value / 60 + " min";
    return value >= 60 ? secondsText(value) : tidy(value.toFixed(2)) + " s";
  }
  if (kind === "percent") return tidy((100 * value).toFixed(2)) + " %";
  if (kind === "bytes") return numberText(value, "bytes");
  return shortNumber(value);
}
