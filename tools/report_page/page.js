// The views and the way between them.

const views = {
  Summary() {
    const bad = data.alarms.length > 0 || data.state === "failed";
    const words = data.verdict.map((text) => el("p", { text: visible(text) }));
    const alarms = data.alarms.length ? data.alarms.map(alarmLine) : [el("p", { text: "No alarm." })];
    return [
      el("div", { class: bad ? "verdict bad" : "verdict" }, ...alarms, ...words), plots(data.summary),
      el("h2", { text: "The run" }), table(["what", "value"], data.facts, "The run"),
      el("h2", { text: "Command" }), el("pre", { tabindex: "0", role: "group", "aria-label": "Command", text: visible(data.command) }),
      el("h2", { text: "Events, the latest first" }), table(["time", "process", "event", "what"], data.events.slice().reverse(), "Events"),
    ];
  },
  Metrics() {
    const place = el("div", {}), said = el("p", { class: "soft", role: "status" });
    function choose(text) {
      const words = text.toLowerCase().split(/\s+/), found = data.metrics.filter((one) => words.every((word) => one.title.toLowerCase().includes(word)));
      said.textContent = `${Math.min(found.length, 24)} of ${found.length} metrics${found.length > 24 ? "; write more letters" : ""}.`;
      place.replaceChildren(plots(found.slice(0, 24)));
    }
    const filter = el("input", { id: "filter", type: "search", value: history.state?.metrics, oninput: () => { keep({ metrics: filter.value }); pending.length = 0; choose(filter.value); pending.forEach((draw) => draw()); } });
    choose(filter.value);
    return [el("label", { for: "filter", text: "Metrics with: " }), filter, said, place];
  },
  "Where the time goes"() {
    const time = data.time, sum = Object.values(time.total).reduce((a, b) => a + b, 0);
    if (!sum) return [el("p", { text: "The run has recorded no spans." })];
    const causes = Object.entries(time.total).sort((a, b) => b[1] - a[1]);
    const rows = causes.map(([cause, s]) => [el("span", {}, el("span", { class: "swatch", style: { background: color(cause) } }), cause), s, `${(100 * s / sum).toFixed(1)} %`]);
    const perStep = { title: `Seconds times ${time.unit}s of each step`, about: "The largest causes.", x: time.steps.map((one) => one.step), series: causes.slice(0, 4).map(([cause]) => ({ label: cause, y: time.steps.map((one) => one.s[cause] || 0) })) };
    return [
      el("p", { text: `${show(time.gpus)} ${time.unit}${time.gpus === 1 ? "" : "s"} for ${show(time.wall, 5)} s are ${show(sum, 5)} ${time.unit}-seconds: every one has one cause.` }),
      bar(causes, sum), table(["cause", `${time.unit}-seconds`, "share"], rows, `${time.unit}-seconds by cause`), plots([perStep, ...time.plots]), ...timeline(),
      el("p", { class: "soft", text: "All spans are in spans.json of the run, for ui.perfetto.dev." }),
    ];
  },
  Samples: samplesView,
  Health() {
    const fine = "No alarm: no collapse, no explosion of lengths, no rewards of all zero, no growing mismatch, no dead experts, no slow engine.";
    return [...(data.alarms.length ? data.alarms.map(alarmLine) : [el("p", { text: fine })]), plots([...data.health, ...data.dropped]), el("div", { class: "plots" }, ...data.heat.map(heat))];
  },
  Config() {
    return [el("p", { class: "soft", text: "Values that differ from the default come first." }), table(["name", "value", "from"], data.config, "Settings")];
  },
};

function bar(causes, sum) {
  const canvas = el("canvas", { class: "bar", role: "img", width: 1000, height: 22, "aria-label": causes.map(([k, v]) => `${k} ${Math.round(100 * v / sum)} %`).join(", ") });
  const c = canvas.getContext("2d");
  let x = 0;
  for (const [cause, s] of causes) { c.fillStyle = color(cause); c.fillRect(x, 0, 1000 * s / sum, 22); x += 1000 * s / sum; }
  return canvas;
}

// One step: a lane for each process, and one for the answers that the engines gave, the slowest in red.
function timeline() {
  const steps = data.time.timelines, place = el("div", {});
  const picker = el("select", { id: "step", onchange: () => draw(+picker.value) }, ...steps.map((one, i) => el("option", { value: i, text: `step ${one.step} (${show(one.seconds)} s)` })));
  function draw(index) {
    const one = steps[index];
    if (!one) return;
    const lanes = lanesOf(one), slow = slowest(one);
    const canvas = el("canvas", { role: "img", "aria-label": `Step ${one.step} by process: ${one.spans.length} spans, ${one.answers.length} answers. ${slow}` });
    place.replaceChildren(el("p", { text: slow }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline" }, canvas),
      more("As a table", table(["process", "span", "begins, s", "seconds"], one.spans, "Spans"), table(["answer begins, s", "seconds", "tokens", "engine"], one.answers, "Answers")));
    paintLanes(canvas, lanes, one.seconds);
  }
  pending.push(() => { picker.value = steps.length - 1; draw(steps.length - 1); });
  return [el("h2", { text: "One step by process" }), el("label", { for: "step", text: "Step: " }), picker, place];
}

function slowest(one) {
  if (!one.answers.length) return "";
  const seconds = one.answers.map((a) => a[1]).sort((a, b) => a - b), last = one.answers.reduce((a, b) => (b[1] > a[1] ? b : a));
  return `The slowest answer took ${show(last[1])} s for ${last[2]} tokens${last[3] ? ` at engine ${visible(last[3])}` : ""}; the median of those shown ${show(seconds[seconds.length >> 1])} s.`;
}

function lanesOf(one) {
  const lanes = [...new Set(one.spans.map((s) => s[0]))].map((name) => {
    const ends = [], rows = [];
    for (const [, span, start, seconds] of one.spans.filter((s) => s[0] === name).sort((a, b) => a[2] - b[2] || b[3] - a[3])) {
      let depth = ends.findIndex((end) => end <= start + 1e-4);
      if (depth < 0) depth = ends.length;
      ends[depth] = start + seconds;
      rows.push({ depth, start, seconds, text: `${span} ${show(seconds)} s`, fill: color(data.time.cause_of[span]) });
    }
    return { name, rows, row: 22, deep: ends.length };
  });
  if (one.answers.length) {
    const limit = one.answers.map((a) => a[1]).sort((a, b) => b - a)[Math.floor(one.answers.length * 0.03)];
    const rows = [...one.answers].sort((a, b) => b[1] - a[1]).map(([start, seconds], depth) => ({ depth, start, seconds, text: "", fill: seconds >= limit ? paint("--bad") : color("generation") }));
    lanes.push({ name: "answers of the engines, the slowest first", rows, row: 4, deep: rows.length });
  }
  return lanes;
}

function paintLanes(canvas, lanes, seconds) {
  const width = Math.max(640, main.clientWidth - 40), ratio = devicePixelRatio || 1, height = lanes.reduce((sum, lane) => sum + lane.deep * lane.row + 26, 22);
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.width = width + "px"; canvas.style.height = height + "px";
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio); c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
  let top = 0;
  for (const lane of lanes) {
    c.fillStyle = paint("--text"); c.fillText(lane.name, 2, top + 11);
    for (const one of lane.rows) {
      const x = Math.max(0, one.start / seconds) * width, w = Math.max(1, Math.min(1, (one.start + one.seconds) / seconds) * width - x), y = top + 22 + one.depth * lane.row;
      c.fillStyle = one.fill; c.fillRect(x, y, w, lane.row - (lane.row > 5 ? 3 : 1));
      if (w > 60 && one.text) { c.fillStyle = "#fff"; c.fillText(one.text, x + 4, y + 10, w - 6); }
    }
    top += lane.deep * lane.row + 26;
  }
  c.fillStyle = paint("--soft");
  for (let i = 0; i <= 4; i++) { const text = `${show(seconds * i / 4)} s`; c.fillText(text, Math.min(width - c.measureText(text).width, i / 4 * width), height - 9); }
}

const tabs = document.getElementById("tabs");
const wanted = () => Object.keys(views).find((name) => "#" + encodeURIComponent(name) === location.hash) ?? "Summary";
// What a reader wrote outlives another view, another width and a reload.
const keep = (state) => history.replaceState({ ...history.state, ...state }, "", location.hash);
function open(chosen) {
  for (const tab of tabs.children) {
    tab.setAttribute("aria-selected", tab.textContent === chosen);
    tab.tabIndex = tab.textContent === chosen ? 0 : -1;
    if (tab.textContent !== chosen) continue;
    main.setAttribute("aria-labelledby", tab.id);
    // Chromium starts the next Tab key behind an element that was scrolled to.
    if (tabs.scrollWidth > tabs.clientWidth) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  pending.length = 0;
  main.replaceChildren(el("h2", { class: "unseen", text: chosen }), ...views[chosen]().filter((part) => part));
  pending.forEach((draw) => draw());
  history.replaceState(history.state, "", "#" + encodeURIComponent(chosen));
}
document.getElementById("name").textContent = visible(`${data.name}: ${data.state}`);
Object.keys(views).forEach((name, i) => tabs.append(el("button", { role: "tab", id: `tab${i}`, "aria-controls": "main", text: name, onclick: () => open(name) })));
tabs.addEventListener("keydown", (event) => {
  const all = [...tabs.children], step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = step ? all[(all.indexOf(document.activeElement) + step + all.length) % all.length] : { Home: all[0], End: all.at(-1) }[event.key];
  if (!next) return;
  event.preventDefault();
  open(next.textContent);
  next.focus();
});
open(wanted());
addEventListener("hashchange", () => open(wanted()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => open(wanted()));
let width = main.clientWidth;
addEventListener("resize", () => { if (main.clientWidth !== width) { width = main.clientWidth; if (wanted() !== "Samples") open(wanted()); } });
// A page that is read is not taken away, nor one in whose place the browser would show an error.
if (data.live) setInterval(async () => {
  if (wanted() === "Samples" || document.activeElement?.id === "filter" || document.hidden || scrollY >= 200) return;
  const answer = await fetch("/", { method: "HEAD" }).catch(() => null);
  if (answer?.ok) location.reload();
  else document.getElementById("name").textContent = visible(`${data.name}: slime watch gives no newer page than this`);
}, 20000);
