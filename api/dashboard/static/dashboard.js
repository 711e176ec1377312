// The chart of bytes per second, drawn from the counters that each refresh brings.
"use strict";

const KEPT = 150;
const series = { at: [], cold: [], warm: [], read: [] };
let last = null;
let plot = null;

function sample() {
  const place = document.getElementById("tiers");
  if (!place) { last = null; return; }
  const now = {};
  for (const name of ["at", "cold", "warm", "read"]) now[name] = Number(place.dataset[name]);
  const seconds = last ? now.at - last.at : 0;
  if (seconds > 0) {
    series.at.push(now.at);
    for (const name of ["cold", "warm", "read"]) {
      // A counter that went back is a daemon that began anew.
      series[name].push(Math.max(0, now[name] - last[name]) / seconds);
    }
    for (const name in series) series[name].splice(0, Math.max(0, series[name].length - KEPT));
    draw();
  }
  if (!last || seconds > 0) last = now;
}

function rate(value) {
  const units = ["B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return value.toFixed(value < 10 && at ? 1 : 0) + " " + units[at];
}

function draw() {
  const place = document.getElementById("chart");
  const data = [series.at, series.cold, series.warm, series.read];
  const width = Math.max(280, place.clientWidth);
  if (plot) { plot.setSize({ width: width, height: 160 }); plot.setData(data); return; }
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const line = (label, name) => ({
    label: label, stroke: colour(name), width: 2, points: { show: false }, value: (u, v) => v == null ? "" : rate(v),
  });
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  plot = new uPlot({
    width: width, height: 160, cursor: { drag: { x: false, y: false } },
    series: [{}, line("cold → node", "--cold"), line("warm → hot", "--warm"), line("hot → ranks", "--good")],
    axes: [axis, { ...axis, size: 76, values: (u, values) => values.map(rate) }],
    // A page that has just opened shows its first points in a minute, not in fractions of a second.
    scales: { x: { range: (u, low, high) => [Math.min(low, high - 60), high] }, y: { range: (u, low, high) => [0, Math.max(high || 0, 1024)] } },
  }, data, place);
}

const lost = () => document.getElementById("lost");
document.addEventListener("DOMContentLoaded", sample);
document.addEventListener("htmx:afterSwap", () => { lost().hidden = true; sample(); });
for (const kind of ["htmx:sendError", "htmx:timeout"]) {
  document.addEventListener(kind, () => { lost().hidden = false; });
}
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status === 401) window.location.assign("/login");
  else lost().hidden = false;
});
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.requestConfig.verb === "delete") htmx.trigger("#live", "refresh");
});
window.addEventListener("resize", () => { if (plot) draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (plot) { plot.destroy(); plot = null; draw(); }
});
