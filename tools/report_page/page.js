"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const COLORS = ["#9aa39f", "#6d7fb3", "#b58a5a", "#1f9d8f", "#d98c1f", "#a05fb5", "#4f9ad1", "#7aa53a", "#c4534f", "#8d8d3a", "#5b6ee0", "#3a8a57"];
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  const color = (cause) => COLORS[data.time.causes.indexOf(cause) % COLORS.length];

  // Text of the run goes into the page as text alone: textContent, never HTML.
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else if (value !== null && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  const show = (value, digits = 3) => (value === null || value === undefined ? "" : typeof value === "number" ? String(+value.toPrecision(digits)) : String(value));
  const visible = (text) => String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
  function table(head, rows) {
    const body = rows.map((row) => el("tr", {}, ...row.map((cell) => (cell instanceof Node ? el("td", {}, cell) : el("td", { class: typeof cell === "number" ? "n" : "", text: typeof cell === "number" ? show(cell) : visible(cell) })))));
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.filter(Boolean).join(", ") }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { text: name, scope: "col" })))), el("tbody", {}, ...body)));
  }

  // Curves
  const pending = [];
  function plots(list) {
    const grid = el("div", { class: "plots" });
    for (const one of list) {
      const last = one.series.map((s) => `${s.label}: last ${show(s.y.filter((v) => v !== null).at(-1))}`).join("; ");
      const box = el("section", { class: "plot", "aria-label": `${one.title}. ${last}` }, el("h3", { text: one.title }));
      grid.append(box);
      pending.push(() => {
        const line = getComputedStyle(document.body).getPropertyValue("--line"), ink = getComputedStyle(document.body).getPropertyValue("--soft");
        const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
        const strokes = dark() ? ["#5cc8c0", "#f0b35a", "#b79bf0"] : ["#0b6e69", "#b3640b", "#6b45c4"];
        const points = { show: one.x.length < 40 };
        new uPlot({
          width: Math.max(240, box.clientWidth - 18), height: 190, scales: { x: { time: false } }, axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((v) => String(+v.toPrecision(3))) }],
          series: [{ label: "step" }, ...one.series.map((s, i) => ({ label: s.label, stroke: strokes[i % 3], width: 2, points, spanGaps: true }))],
        }, [one.x, ...one.series.map((s) => s.y)], box);
      });
    }
    return grid;
  }

  // Views
  const views = {
    Summary() {
      const bad = data.alarms.length > 0 || data.state === "failed";
      return [
        el("div", { class: bad ? "verdict bad" : "verdict" }, ...data.verdict.map((text) => el("p", { text: visible(text) }))),
        plots(data.summary),
        el("h2", { text: "The run" }), table(["what", "value"], data.facts),
        el("h2", { text: "Command" }), el("pre", { tabindex: "0", text: visible(data.command) }),
        el("h2", { text: "Events" }), table(["time", "process", "event", "what"], data.events.slice().reverse()),
      ];
    },
    "Where the time goes"() {
      const time = data.time, sum = Object.values(time.total).reduce((a, b) => a + b, 0);
      if (!sum) return [el("p", { text: "The run has recorded no spans." })];
      const rows = Object.entries(time.total).sort((a, b) => b[1] - a[1]).map(([cause, s]) => [
        el("span", {}, el("span", { class: "swatch", style: { background: color(cause) } }), cause), s, `${(100 * s / sum).toFixed(1)} %`,
      ]);
      const picker = el("select", { id: "step", onchange: () => draw(+picker.value) }, ...time.timelines.map((one, i) => el("option", { value: i, text: `step ${one.step} (${show(one.seconds)} s)` })));
      const line = el("div", { class: "scroll" });
      function draw(index) {
        const one = time.timelines[index];
        line.replaceChildren();
        if (!one) return;
        const lanes = [...new Set(one.spans.map((s) => s[0]))];
        const depths = lanes.map((lane) => {
          const ends = [];
          return one.spans.filter((s) => s[0] === lane).sort((a, b) => a[2] - b[2] || b[3] - a[3]).map((s) => {
            let depth = ends.findIndex((end) => end <= s[2] + 1e-4);
            if (depth < 0) depth = ends.length;
            ends[depth] = s[2] + s[3];
            return [depth, s];
          });
        });
        const heights = depths.map((d) => 22 * (1 + Math.max(...d.map((x) => x[0]))) + 24);
        const canvas = el("canvas", { role: "img", "aria-label": `Spans of step ${one.step}` });
        const width = Math.max(700, main.clientWidth - 40), ratio = devicePixelRatio || 1, height = heights.reduce((a, b) => a + b, 0);
        canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.width = width + "px";
        const c = canvas.getContext("2d"), ink = getComputedStyle(document.body).color;
        c.scale(ratio, ratio); c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
        let top = 0;
        lanes.forEach((lane, i) => {
          c.fillStyle = ink; c.fillText(lane, 2, top + 10);
          for (const [depth, [, name, start, seconds]] of depths[i]) {
            const x = Math.max(0, start / one.seconds) * width, w = Math.max(1, Math.min(1, (start + seconds) / one.seconds) * width - x);
            c.fillStyle = color(data.time.cause_of[name] || data.time.causes[0]);
            c.fillRect(x, top + 20 + depth * 22, w, 19);
            if (w > 60) { c.fillStyle = "#fff"; c.fillText(`${name} ${show(seconds)} s`, x + 4, top + 30 + depth * 22, w - 6); }
          }
          top += heights[i];
        });
        line.append(canvas, table(["process", "span", "begins, s", "seconds"], one.spans));
      }
      const stacked = { title: "GPU-seconds of each step", x: time.steps.map((one) => one.step), series: rows.slice(0, 3).map((row) => row[0].textContent).map((cause) => ({ label: cause, y: time.steps.map((one) => one.s[cause] || 0) })) };
      setTimeout(() => { picker.value = time.timelines.length - 1; draw(time.timelines.length - 1); });
      return [
        el("p", { text: `${show(time.gpus)} GPUs (logical ones on a CPU) for ${show(time.wall, 5)} s are ${show(sum, 5)} GPU-seconds: every one has one cause.` }),
        bar(time.total, sum), table(["cause", "GPU-seconds", "share"], rows), plots([stacked]),
        el("h2", { text: "One step by process" }), el("label", { for: "step", text: "Step: " }), picker, line,
        el("p", { class: "soft", text: "All spans are in spans.json of the run, for ui.perfetto.dev." }),
      ];
    },
    Samples() {
      const all = data.samples.rows;
      const fields = { rollout: "", group: "", status: "", "reward from": "", "reward to": "", "tokens from": "", "regular expression": "" };
      const note = el("p", { class: "soft", role: "status" }), list = el("div", {});
      const statuses = ["", ...new Set(all.map((one) => (one.drop ? "dropped" : one.s)))];
      const shade = el("select", { onchange: render }, ...["log-prob", "advantage", "trainer - engine", "weight version", "nothing"].map((name) => el("option", { text: name })));
      let limit = 50;
      const inputs = Object.keys(fields).map((name) => {
        const control = name === "status" ? el("select", {}, ...statuses.map((s) => el("option", { text: s }))) : el("input", { type: name === "regular expression" ? "search" : "number", step: "any" });
        control.addEventListener("input", () => { fields[name] = control.value; limit = 50; render(); });
        return el("label", { text: name }, control);
      });
      function render() {
        let pattern = null;
        try { pattern = fields["regular expression"] ? new RegExp(fields["regular expression"], "iu") : null; } catch (error) { note.textContent = `No regular expression: ${error.message}`; return; }
        const number = (name) => (fields[name] === "" ? null : +fields[name]);
        const [rollout, group, low, high, tokens] = ["rollout", "group", "reward from", "reward to", "tokens from"].map(number);
        const found = all.filter((one) => (rollout === null || one.r === rollout) && (group === null || one.g === group) && (!fields.status || (one.drop ? "dropped" : one.s) === fields.status)
          && (low === null || one.rw >= low) && (high === null || one.rw <= high) && (tokens === null || one.n >= tokens)
          && (!pattern || pattern.test(one.x ?? one.t.join("")) || pattern.test(data.samples.prompts[one.p])));
        const chosen = all.length < data.samples.all ? ` The page has ${all.length} of the ${data.samples.all} samples of these rollouts; all are in samples/.` : "";
        note.textContent = `${found.length} samples.${chosen}`;
        list.replaceChildren(...found.slice(0, limit).map((one) => sample(one, shade.value)));
        if (found.length > limit) list.append(el("button", { text: "More", onclick: () => { limit += 100; render(); } }));
      }
      render();
      return [el("div", { class: "filters" }, ...inputs, el("label", { text: "colour tokens by" }, shade)), note, groups(all), list];
    },
    Health() {
      const alarms = data.alarms.map((one) => el("p", { class: "alarm", text: `From step ${one.step}: ${visible(one.text)} (${one.name})` }));
      return [...(alarms.length ? alarms : [el("p", { text: "No alarm: no collapse, no explosion of lengths, no rewards of all zero, no growing mismatch, no dead experts." })]), plots(data.health)];
    },
    Config() {
      return [el("p", { class: "soft", text: "Values that differ from the default come first." }), table(["name", "value", "from"], data.config)];
    },
  };

  function bar(total, sum) {
    const canvas = el("canvas", { class: "bar", role: "img", width: 1000, height: 22, "aria-label": Object.entries(total).map(([k, v]) => `${k} ${Math.round(100 * v / sum)} %`).join(", ") });
    const c = canvas.getContext("2d");
    let x = 0;
    for (const [cause, s] of Object.entries(total).sort((a, b) => b[1] - a[1])) { c.fillStyle = color(cause); c.fillRect(x, 0, 1000 * s / sum, 22); x += 1000 * s / sum; }
    return canvas;
  }
  function groups(all) {
    const by = new Map();
    for (const one of all) if (!one.drop && one.rw !== null) { const key = `${one.r}/${one.g}`; by.set(key, [...(by.get(key) || []), one.rw]); }
    const equal = [...by.values()].filter((rewards) => rewards.length > 1 && rewards.every((r) => r === rewards[0])).length;
    const reasons = new Map();
    for (const one of all) if (one.drop) reasons.set(one.drop, (reasons.get(one.drop) || 0) + 1);
    const dropped = [...reasons].map(([reason, n]) => `${n} dropped: ${visible(reason)}`).join("; ");
    return el("p", { class: "soft", text: `${by.size} groups, ${equal} of them with equal rewards (they train nothing). ${dropped}` });
  }
  const at = (values, i) => (Array.isArray(values) ? values[i] : values);
  function shadeOf(one, i, mode, bounds) {
    if (mode === "nothing") return null;
    if (mode === "weight version") {
      const index = bounds.findIndex((end) => i < end);
      return `hsl(${(Math.max(0, index) * 67 + 170) % 360} 60% ${dark() ? 28 : 86}%)`;
    }
    const value = at(mode === "log-prob" ? one.lp : mode === "advantage" ? one.a : one.d, i);
    if (value === null || value === undefined) return null;
    const strength = mode === "log-prob" ? Math.min(1, -value / 4) : mode === "advantage" ? Math.min(1, Math.abs(value) / 2) : Math.min(1, Math.abs(value) * 20);
    const hue = mode === "log-prob" || value < 0 ? 12 : 150;
    return `hsl(${hue} 75% ${dark() ? 14 + 24 * strength : 100 - 32 * strength}% / ${strength < 0.02 ? 0 : 1})`;
  }
  function sample(one, mode) {
    const facts = [`rollout ${one.r}`, `group ${one.g}`, `sample ${one.i}`, one.drop ? `dropped: ${one.drop}` : one.s, `reward ${show(one.rw)}`, one.tr === null ? "" : `trained with ${show(one.tr)}`, `${one.n} tokens`];
    const box = el("details", {}, el("summary", { text: visible(facts.filter(Boolean).join(" · ")) }));
    box.addEventListener("toggle", () => {
      if (!box.open || box.childElementCount > 1) return;
      const response = el("pre", { tabindex: "0", "aria-label": "Response" });
      let end = 0;
      const bounds = one.v.map(([, n]) => (end += n));
      if (one.x !== null) response.textContent = visible(one.x);
      else response.append(...one.t.map((piece, i) => {
        const version = one.v[Math.max(0, bounds.findIndex((b) => i < b))];
        const title = `log-prob ${show(at(one.lp, i))}, trainer - engine ${show(at(one.d, i))}, advantage ${show(at(one.a, i))}, version ${version ? version[0] : "?"}`;
        return el("span", { text: visible(piece), title, class: one.m && !one.m[i] ? "masked" : null, style: { background: shadeOf(one, i, mode, bounds) || "" } });
      }));
      const same = data.samples.rows.filter((other) => other.p === one.p && other !== one).slice(0, 40);
      const others = same.map((other) => [`rollout ${other.r}`, show(other.rw), other.n, (other.x ?? other.t.join("")).slice(0, 300)]);
      box.append(el("h3", { text: "Prompt" }), el("pre", { tabindex: "0", text: visible(data.samples.prompts[one.p]) }), el("h3", { text: "Response" }), response,
        one.l === null ? "" : el("p", { text: `Label: ${visible(one.l)}` }), ...(others.length ? [el("h3", { text: "Other answers to this prompt" }), table(["rollout", "reward", "tokens", "response"], others)] : []));
    });
    return box;
  }

  function open(name) {
    const chosen = views[name] ? name : "Summary";
    for (const tab of document.getElementById("tabs").children) {
      tab.setAttribute("aria-selected", tab.textContent === chosen);
      tab.tabIndex = tab.textContent === chosen ? 0 : -1;
    }
    pending.length = 0;
    main.replaceChildren(...views[chosen]());
    pending.forEach((draw) => draw());
    history.replaceState(null, "", "#" + encodeURIComponent(chosen));
  }
  document.getElementById("name").textContent = `${data.name}: ${data.state}`;
  const tabs = document.getElementById("tabs");
  for (const name of Object.keys(views)) tabs.append(el("button", { role: "tab", text: name, onclick: () => open(name) }));
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children], next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    open(next.textContent);
    next.focus();
  });
  main.setAttribute("role", "tabpanel");
  open(decodeURIComponent(location.hash.slice(1)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => open(decodeURIComponent(location.hash.slice(1))));
  if (data.live) setTimeout(() => location.reload(), 20000);
})();
