// Numbers as text, like whet.report.formatting. A missing value is a dash.

const DASH = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function number(value, digits = 3) {
  if (missing(value)) return DASH;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) {
    return value.toExponential(digits - 1).replace("e+", "e").replace(/\.0+e/, "e");
  }
  return String(Number(value.toPrecision(digits)));
}

export const loss = (value) => (missing(value) ? DASH : value.toFixed(4));

export function count(value) {
  if (missing(value)) return DASH;
  if (Math.abs(value) < 1e7) return Math.round(value).toLocaleString("en-US");
  const [size, unit] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([each]) => Math.abs(value) >= each);
  return `${Number((value / size).toPrecision(4))} ${unit}`;
}

export function share(value) {
  if (missing(value)) return DASH;
  const text = `${(100 * value).toFixed(1).replace(/\.0$/, "")}%`;
  if (text === "100%" && value < 1) return ">99.9%";
  return text === "0%" && value > 0 ? "<0.1%" : text;
}

export function seconds(value) {
  if (missing(value)) return DASH;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function hours(value) {
  if (missing(value)) return DASH;
  return value >= 1 ? `${number(value)} h` : seconds(value * 3600);
}

export function age(time) {
  if (missing(time)) return DASH;
  const past = Math.max(0, Date.now() / 1000 - time);
  if (past < 5) return "now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 129600) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} days ago`;
}

export const value = (each) =>
  each === null || each === undefined ? DASH : typeof each === "string" ? each : JSON.stringify(each);

const UNITS = { share, s: seconds, GiB: (each) => `${number(each)} GiB` };
export const withUnit = (each, unit) => (UNITS[unit] ?? ((any) => number(any, 4)))(each);
