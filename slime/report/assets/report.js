"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#1f9d61", "#3b7ddd", "#d9822b", "#a259c4", "#c8483c", "#1fa2a6", "#8a8f2a", "#d65b94", "#5b6ee1", "#7a6652", "#4c9f3a"];
const el = (tag, attrs = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) k === "text" ? (node.textContent = v) : node.setAttribute(k, v);
  node.append(...children);
  return node;
};
const svg = (tag, attrs = {}, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  return node;
};
const format = (v) => {
  if (v === null || v === undefined) return "-";
  const a = Math.abs(v);
  if (v !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(2);
  return String(+v.toPrecision(4));
};

// Round numbers around [low, high] for the axis: 1, 2 or 5 times a power of ten apart.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
  return found;
}

// Exponential moving average that starts at the first value and skips gaps.
function smoothed(values, weight) {
  if (!weight) return values;
  let last = null;
  return values.map((v) => (v === null ? null : (last = last === null ? v : weight * last + (1 - weight) * v)));
}

// A stacked chart needs every series at every step: a missing value counts as zero.
function stack(series) {
  const steps = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const base = steps.map(() => 0);
  return series.map((s) => {
    const at = new Map(s.x.map((x, i) => [x, s.y[i] ?? 0]));
    const low = [...base];
    steps.forEach((x, i) => (base[i] += at.get(x) ?? 0));
    return { ...s, x: steps, own: steps.map((x) => at.get(x) ?? null), low, y: [...base] };
  });
}

function draw(card, chart, weight) {
  const W = 400, H = 210, L = 54, R = 10, T = 14, B = 24;
  const series = chart.stacked ? stack(chart.series) : chart.series.map((s) => ({ ...s, y: smoothed(s.y, weight), raw: s.y }));
  const xs = series.flatMap((s) => s.x);
  const ys = series.flatMap((s) => [...s.y, ...(weight && !chart.stacked ? s.raw : [])]).filter((v) => v !== null);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
  if (chart.stacked) y0 = 0;
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 0.5; y0 -= pad; y1 += pad; }
  else { const pad = (y1 - y0) * 0.06; y1 += pad; if (!chart.stacked && (y0 < 0 || y0 > pad)) y0 -= pad; else if (y0 <= pad) y0 = Math.min(0, y0); }
  const X = (v) => L + ((v - x0) / (x1 - x0)) * (W - L - R);
  const Y = (v) => H - B - ((v - y0) / (y1 - y0)) * (H - T - B);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  for (const v of ticks(y0, y1, 4)) {
    root.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v) }));
    root.append(svg("text", { x: L - 6, y: Y(v) + 4, "text-anchor": "end" }, format(v)));
  }
  for (const v of ticks(x0, x1, 6).filter(Number.isInteger))
    root.append(svg("text", { x: X(v), y: H - 8, "text-anchor": "middle" }, v));
  const path = (s, y) => {
    let d = "", pen = false;
    s.x.forEach((x, i) => {
      if (y[i] === null) { pen = false; return; }
      d += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(y[i]).toFixed(1)}`;
      pen = true;
    });
    return d;
  };
  series.forEach((s, i) => {
    const color = COLORS[i % COLORS.length];
    if (chart.stacked) {
      const up = s.x.map((x, j) => `${X(x).toFixed(1)} ${Y(s.y[j]).toFixed(1)}`);
      const down = s.x.map((x, j) => `${X(x).toFixed(1)} ${Y(s.low[j]).toFixed(1)}`).reverse();
      root.append(svg("path", { d: `M${[...up, ...down].join("L")}Z`, fill: color, "fill-opacity": 0.75, stroke: color, "stroke-width": 0.5 }));
      return;
    }
    if (weight) root.append(svg("path", { d: path(s, s.raw), fill: "none", stroke: color, "stroke-width": 1, "stroke-opacity": 0.25 }));
    root.append(svg("path", { d: path(s, s.y), fill: "none", stroke: color, "stroke-width": 2, "stroke-linejoin": "round" }));
    if (s.x.length <= 24) s.x.forEach((x, j) => s.y[j] !== null && root.append(svg("circle", { cx: X(x), cy: Y(s.y[j]), r: 2.6, fill: color })));
  });
  const legend = el("div", { class: "legend" });
  const show = (step) => {
    legend.replaceChildren();
    if (step !== null) legend.append(el("span", { text: `step ${step}` }));
    series.forEach((s, i) => {
      const j = step === null ? s.x.length - 1 : s.x.indexOf(step);
      const value = j < 0 ? null : chart.stacked ? s.own[j] : s.raw[j];
      if (series.length === 1 && step === null && chart.title === s.name) { legend.append(el("span", {}, "last", el("b", { text: format(value) }))); return; }
      legend.append(el("span", {}, el("i", { style: `background:${COLORS[i % COLORS.length]}` }), s.name, el("b", { text: format(value) })));
    });
  };
  show(null);
  const cursor = svg("line", { class: "cursor", y1: T, y2: H - B, visibility: "hidden" });
  root.append(cursor);
  const all = [...new Set(xs)].sort((a, b) => a - b);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (x1 - x0);
    const step = all.reduce((best, v) => (Math.abs(v - at) < Math.abs(best - at) ? v : best), all[0]);
    cursor.setAttribute("x1", X(step)); cursor.setAttribute("x2", X(step)); cursor.setAttribute("visibility", "visible");
    show(step);
  });
  root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); show(null); });
  card.replaceChildren(el("h3", {}, chart.title, el("span", { class: "axis", text: chart.axis ? `over ${chart.axis}` : "" })), el("p", { text: chart.note }), root, legend);
}

// ---- headline numbers and charts
for (const t of data.tiles) document.getElementById("tiles").append(el("div", { class: "tile" }, el("b", { text: t.value }), el("span", { text: t.label })));
const smooth = document.getElementById("smooth");
const cards = [];
function add(parent, chart) {
  const card = el("div", { class: "chart" });
  parent.append(card);
  cards.push([card, chart]);
}
for (const chart of data.charts) add(document.getElementById("charts"), chart);
for (const s of data.others) add(document.getElementById("others"), { title: s.name, note: "", axis: s.axis, series: [s] });
const redraw = () => cards.forEach(([card, chart]) => draw(card, chart, +smooth.value));
if (!data.charts.length) document.getElementById("charts").append(el("p", { class: "empty", text: "No metrics were logged." }));
smooth.addEventListener("input", redraw);
redraw();

// ---- samples
const pick = (id) => document.getElementById(id);
const number = (reward) => (typeof reward === "number" ? reward : typeof reward === "boolean" ? +reward : null);
const source = (s) => `${s.eval ? "evaluation" : "rollout"} ${s.rollout}`;
const fill = (id, all, values) => {
  pick(id).append(el("option", { value: "", text: all }));
  for (const v of new Set(values)) pick(id).append(el("option", { value: v, text: v }));
};
fill("f-rollout", "all rollouts", data.samples.map(source));
fill("f-status", "any status", data.samples.map((s) => s.status).filter(Boolean));
if (data.samples.length) pick("f-rollout").value = source(data.samples[data.samples.length - 1]);
const rewards = data.samples.map((s) => number(s.reward)).filter((r) => r !== null);
const [worst, best] = [Math.min(...rewards), Math.max(...rewards)];
function badge(reward) {
  const value = number(reward);
  if (value === null) return el("span", { text: `reward ${JSON.stringify(reward ?? null)}` });
  const hue = best > worst ? 4 + (142 * (value - worst)) / (best - worst) : 142;
  return el("span", { class: "badge", style: `background:hsl(${hue} 55% 40%)`, text: `reward ${format(value)}` });
}
let shown = 20;
function list() {
  const text = pick("f-text").value.toLowerCase();
  const order = { up: 1, down: -1 }[pick("f-reward").value];
  const found = data.samples.filter((s) =>
    (!pick("f-rollout").value || source(s) === pick("f-rollout").value) &&
    (!pick("f-status").value || s.status === pick("f-status").value) &&
    (!text || `${s.prompt}\n${s.response}`.toLowerCase().includes(text)));
  if (order) found.sort((a, b) => order * ((number(a.reward) ?? 0) - (number(b.reward) ?? 0)));
  pick("sample-count").textContent = `${found.length} of ${data.samples.length} kept samples`;
  pick("sample-list").replaceChildren(...found.slice(0, shown).map((s) => {
    const facts = [source(s), s.dataset, s.group_index !== undefined ? `group ${s.group_index}` : null, s.status,
      s.response_length !== undefined ? `${s.response_length} tokens` : null].filter(Boolean);
    const card = el("div", { class: "sample" },
      el("div", { class: "head" }, badge(s.reward), ...facts.map((f) => el("span", { text: f }))),
      el("div", { class: "pair" },
        el("div", {}, el("h4", { text: "Prompt" }), el("div", { class: "text", text: s.prompt ?? "" })),
        el("div", {}, el("h4", { text: s.label !== undefined ? `Response (label: ${s.label})` : "Response" }), el("div", { class: "text", text: s.response ?? "" }))));
    if (s.metadata) card.append(el("details", {}, el("summary", { text: "metadata", style: "font-size:12px;margin:8px 0 0" }), el("div", { class: "text", text: s.metadata })));
    return card;
  }));
  if (!data.samples.length) pick("sample-list").append(el("p", { class: "empty", text: "No samples were kept." }));
  if (found.length > shown) {
    const more = el("button", { text: `show ${Math.min(20, found.length - shown)} more` });
    more.addEventListener("click", () => { shown += 20; list(); });
    pick("sample-list").append(more);
  }
}
for (const id of ["f-rollout", "f-status", "f-reward", "f-text"]) pick(id).addEventListener("input", () => { shown = 20; list(); });
list();

// ---- configuration
const lines = pick("config").textContent.split("\n");
pick("f-config").addEventListener("input", () => {
  const text = pick("f-config").value.toLowerCase();
  pick("config").textContent = lines.filter((line) => line.toLowerCase().includes(text)).join("\n");
});
