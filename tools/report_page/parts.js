"use strict";
// What all views are made of: elements, tables, curves, histograms over steps.

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const COLORS = ["#9aa39f", "#6d7fb3", "#b58a5a", "#1f9d8f", "#d98c1f", "#a05fb5", "#4f9ad1", "#7aa53a", "#c4534f", "#8d8d3a", "#5b6ee0", "#3a8a57", "#b0527a"];
// Of each four curves; the colours come again.
const LINES = [["solid", []], ["dashed", [10, 5]], ["dotted", [2, 4]]];
const lineOf = (i) => LINES[Math.floor(i / 4) % LINES.length];
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const paint = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const color = (cause) => COLORS[Math.max(0, data.time.causes.indexOf(cause)) % COLORS.length];

// Text of the run goes into the page as text alone: textContent, never HTML.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
const show = (value, digits = 3) => {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(digits));
};
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const visible = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function table(head, rows, name) {
  const cell = (value) => {
    if (value instanceof Node) return el("td", {}, value);
    return typeof value === "number" ? el("td", { class: "n", text: show(value) }) : el("td", { text: visible(value ?? "") });
  };
  const heads = head.map((text, i) => el("th", { text, scope: "col", class: rows.length && typeof rows[0][i] === "number" ? "n" : null }));
  const body = rows.map((row) => el("tr", {}, ...row.map(cell)));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name || head.join(", ") },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body)));
}

function more(summary, ...children) {
  return el("details", {}, el("summary", { text: summary }), ...children);
}

function alarmsOf(names) {
  return data.alarms.filter((alarm) => names.includes(alarm.name));
}
function alarmLine(alarm) {
  return el("p", { class: "alarm" }, el("strong", { text: `From step ${alarm.step}, ${alarm.name}: ` }), visible(alarm.text) + ".");
}

// Drawn when the view stands in the page and has its width.
const pending = [];

function plots(list) {
  const grid = el("div", { class: "plots" });
  for (const one of list) {
    const last = one.series.map((s) => `${s.label} ${show(s.y.filter((v) => v !== null).at(-1))}`).join(", ");
    const alarms = alarmsOf(one.alarms || []);
    const box = el("div", { class: "plot", role: "group", "aria-label": `${one.title}. At the end: ${last}.` },
      el("h3", { text: one.title }), one.about ? el("p", { class: "soft", text: one.about }) : null, ...alarms.map((alarm) => el("p", { class: "alarm", text: `From step ${alarm.step}: ${alarm.name}` })));
    grid.append(box);
    pending.push(() => curves(box, one, alarms));
  }
  return grid;
}

function curves(box, one, alarms) {
  const axis = { stroke: paint("--soft"), grid: { stroke: paint("--line"), width: 1 }, ticks: { stroke: paint("--line") } };
  const strokes = dark() ? ["#5cc8c0", "#f0b35a", "#b79bf0", "#8fb8f5"] : ["#0b6e69", "#b3640b", "#6b45c4", "#2c61a8"];
  const points = { show: one.x.length < 40, size: 4 };
  const series = one.series.map((s, i) => ({ label: s.label, stroke: strokes[i % 4], dash: lineOf(i)[1], width: 2, points, spanGaps: true, value: (_, v) => show(v) }));
  const columns = one.series.map((s) => s.y);
  const bands = [];
  if (one.band) {
    const edge = (label) => ({ label, stroke: strokes[0] + "55", width: 1, points: { show: false }, spanGaps: true, value: (_, v) => show(v) });
    bands.push({ series: [series.length + 2, series.length + 1], fill: strokes[0] + "28" });
    series.push(edge("band from"), edge("to"));
    columns.push(...one.band);
  }
  const range = (_, low, high) => (low === null ? [0, 1] : low === high ? [Math.min(0, 2 * low), Math.max(0, 2 * high) || 1] : uPlot.rangeNum(low, high, 0.1, true));
  const rest = (plot) => { if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: one.x.length - 1 }, false); };
  const mark = (plot) => {
    plot.ctx.strokeStyle = paint("--bad");
    plot.ctx.lineWidth = 2;
    for (const alarm of alarms) {
      const x = Math.round(plot.valToPos(alarm.step, "x", true));
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, plot.bbox.top);
      plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
      plot.ctx.stroke();
    }
  };
  const tick = (v) => (v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential() : Math.abs(v) >= 1e4 ? v / 1000 + "k" : String(+v.toPrecision(6)));
  const ticks = (_, values) => values.map((v) => (v === null ? "" : tick(v)));
  const whole = (_, values) => values.map((v) => (Number.isInteger(v) ? v : ""));
  new uPlot({
    width: Math.max(220, box.clientWidth - 18), height: 190, legend: { markers: { dash: (_, i) => lineOf(i - 1)[0] } }, scales: { x: { time: false }, y: { range } }, bands, hooks: { draw: [mark], ready: [rest], setCursor: [rest] },
    axes: [{ ...axis, values: whole }, { ...axis, size: 62, values: ticks }], series: [{ label: "step" }, ...series],
  }, [one.x, ...columns], box);
}

// A column for each step, a row for each bin: the darker, the larger the share.
function heat(one) {
  const last = one.rows.map((name, i) => `${name}: ${show(one.z.at(-1)[i])}`).join("; ");
  const canvas = el("canvas", { role: "img", class: "heat", "aria-label": `${one.title}. At step ${one.x.at(-1)}: ${last}` });
  const place = el("p", { class: "soft", text: `Steps ${one.x[0]} to ${one.x.at(-1)}; point at a cell for its number.` });
  const box = el("div", { class: "plot" }, el("h3", { text: one.title }), canvas, place, more("As a table", table(["step", ...one.rows], one.x.slice(-50).map((x, i, kept) => [x, ...one.z[one.x.length - kept.length + i]]), one.title)));
  pending.push(() => {
    const ratio = devicePixelRatio || 1, width = box.clientWidth - 18, left = 96, row = 18, height = one.rows.length * row;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const c = canvas.getContext("2d"), cell = (width - left) / one.x.length;
    c.scale(ratio, ratio); c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
    one.rows.forEach((name, j) => {
      const y = height - (j + 1) * row;
      c.fillStyle = paint("--soft"); c.fillText(name, 0, y + row / 2, left - 4);
      one.z.forEach((values, i) => {
        c.globalAlpha = Math.sqrt(values[j]); c.fillStyle = paint("--mark");
        if (values[j] > 0) c.fillRect(left + i * cell, y, Math.ceil(cell), row - 1);
      });
      c.globalAlpha = 1;
    });
    canvas.addEventListener("mousemove", (event) => {
      const i = Math.floor((event.offsetX - left) / cell), j = one.rows.length - 1 - Math.floor(event.offsetY / row);
      if (one.z[i] && one.rows[j] !== undefined) place.textContent = `Step ${one.x[i]}, ${one.rows[j]}: ${show(one.z[i][j])}`;
    });
  });
  return box;
}
