// The samples: facts of all, of some the texts; filters, groups side by side, tokens by colour, prompts over the run.

const samples = (() => {
  const source = data.samples, count = source.rollouts.reduce((sum, one) => sum + one.n.length, 0);
  const facts = { r: new Float64Array(count), g: new Float64Array(count), i: new Float64Array(count), p: new Int32Array(count), n: new Float64Array(count), w: new Float64Array(count), s: new Int16Array(count), f: new Int32Array(count), t: new Int32Array(count).fill(-1) };
  let at = 0;
  for (const [f, one] of source.rollouts.entries()) {
    let g = 0, i = 0, p = 0;
    for (let k = 0; k < one.n.length; k++, at++) {
      facts.r[at] = one.r; facts.g[at] = g += one.g[k]; facts.i[at] = i += one.i[k]; facts.p[at] = p += one.p[k];
      facts.n[at] = one.n[k]; facts.w[at] = one.w[k] === null ? NaN : one.w[k]; facts.s[at] = one.s[k]; facts.f[at] = f;
    }
  }
  source.texts.forEach((text, place) => { facts.t[text.k] = place; });
  return { count, facts, all: source.all, statuses: source.statuses, prompts: source.prompts };
})();
const textOf = (k) => data.samples.texts[samples.facts.t[k]];
const tokenOf = (text, i) => data.samples.pieces[text.t[i]];
function responseOf(text) {
  text.all ??= text.x ?? text.t.map((piece) => data.samples.pieces[piece]).join("");
  return text.all;
}
const rewardOf = (k) => (Number.isNaN(samples.facts.w[k]) ? null : samples.facts.w[k]);
const short = (text, length = 160) => (text.length > length ? text.slice(0, length) + " …" : text);

const SHADES = {
  "log-prob": "Red: the engine found the token unlikely (full colour at -4 nats).",
  "advantage": "Green: made likelier; red: made less likely (full colour at 2).",
  "trainer - engine": "Difference of the two log-probs, green above 0 and red below (full colour at 0.05 nats): they should agree.",
  "clipped": "Orange: its ratio left the clip range, so that it was not trained further.",
  "weight version": "One colour for each version of the weights that drew a part of the response.",
  "mask": "Grey: not trained on, such as the text of a tool.",
  "nothing": "",
};
const filters = { rollout: "", group: "", status: "", "reward from": "", "reward to": "", "tokens from": "", "tokens to": "", "regular expression": "", prompt: null, order: "as recorded", shade: "log-prob" };

function matching() {
  const { facts, count } = samples, number = (name) => (filters[name] === "" ? null : +filters[name]);
  const [rollout, group, low, high, few, many] = ["rollout", "group", "reward from", "reward to", "tokens from", "tokens to"].map(number);
  const status = filters.status === "" ? -1 : samples.statuses.indexOf(filters.status);
  const pattern = filters["regular expression"] ? new RegExp(filters["regular expression"], "iu") : null;
  const found = [];
  for (let k = 0; k < count; k++) {
    if ((rollout !== null && facts.r[k] !== rollout) || (group !== null && facts.g[k] !== group) || (status >= 0 && facts.s[k] !== status)) continue;
    if ((low !== null && !(facts.w[k] >= low)) || (high !== null && !(facts.w[k] <= high))) continue;
    if ((few !== null && facts.n[k] < few) || (many !== null && facts.n[k] > many)) continue;
    if (filters.prompt !== null && facts.p[k] !== filters.prompt) continue;
    if (pattern && !(facts.t[k] >= 0 && (pattern.test(responseOf(textOf(k))) || pattern.test(samples.prompts[facts.p[k]])))) continue;
    found.push(k);
  }
  const by = { "longest first": (k) => -facts.n[k], "most reward first": (k) => -facts.w[k], "least reward first": (k) => facts.w[k], "latest first": (k) => -k }[filters.order];
  return by ? found.sort((a, b) => (by(a) - by(b)) || a - b) : found;
}

function samplesView() {
  if (!samples.count) return [el("p", { text: "The run has recorded no samples." })];
  const note = el("p", { class: "soft", role: "status" }), list = el("div", {}), legend = el("p", { class: "soft" });
  const select = (name, options) => {
    const control = el("select", {}, ...options.map((option) => el("option", { value: option, text: option === "" ? "all" : visible(option) })));
    control.value = filters[name];
    return control;
  };
  const changed = (name, value) => { filters[name] = value; render(); };
  const inputs = {};
  const field = (name) => {
    const control = { status: () => select(name, ["", ...samples.statuses]), order: () => select(name, ["as recorded", "latest first", "longest first", "most reward first", "least reward first"]), shade: () => select(name, Object.keys(SHADES)) }[name]?.()
      ?? el("input", { type: name === "regular expression" ? "search" : "number", step: "any", value: filters[name] });
    control.addEventListener("input", () => changed(name, control.value));
    inputs[name] = control;
    return el("label", { text: name === "shade" ? "colour tokens by" : name }, control);
  };
  const prompt = el("button", { onclick: () => { choosePrompt(null); inputs.rollout.focus(); } });
  function choosePrompt(p) {
    changed("prompt", p);
    if (p !== null) prompt.focus();
  }
  function chooseGroup(g, r) {
    for (const [name, value] of [["group", g], ["rollout", r]]) { filters[name] = String(value); inputs[name].value = value; }
    changed("order", filters.order);
    note.scrollIntoView({ block: "nearest" });
  }
  function render() {
    let found;
    try { found = matching(); } catch (error) { note.textContent = `No regular expression: ${error.message}`; return; }
    const texts = data.samples.texts.length;
    let said = `${show(found.length)} of ${show(samples.all)} samples.`;
    if (samples.count < samples.all) said += ` The page has an even selection of ${show(samples.count)}.`;
    if (texts < samples.all) said += ` It has the texts of ${show(texts)}, spread over the run${filters["regular expression"] ? ", and searches those" : ""}; all are in samples/ of the run.`;
    note.textContent = said;
    legend.textContent = SHADES[filters.shade];
    prompt.hidden = filters.prompt === null;
    prompt.textContent = prompt.hidden ? "" : `Prompt: ${visible(short(samples.prompts[filters.prompt], 40)) || "number " + filters.prompt} ✕`;
    list.replaceChildren();
    add(found, 50);
  }
  function add(found, count) {
    const boxes = found.splice(0, count).map((k) => sampleBox(k, choosePrompt));
    list.append(...boxes);
    if (found.length) list.append(el("button", { text: `More (${show(found.length)})`, onclick: (event) => { event.target.remove(); add(found, 100).querySelector("summary").focus(); } }));
    return boxes[0];
  }
  render();
  const names = Object.keys(filters).filter((name) => name !== "prompt");
  return [el("div", { class: "filters" }, ...names.map(field), prompt), note, legend, list, groupsTable(chooseGroup), promptsTable(choosePrompt), ...(data.dropped.length ? [plots(data.dropped)] : [])];
}

// Groups, those that differ most first: what each says about its prompt.
function groupsTable(choose) {
  const { facts, count } = samples, groups = new Map();
  for (let k = 0; k < count; k++) {
    if (Number.isNaN(facts.w[k])) continue;
    const key = `${facts.f[k]} ${facts.g[k]}`, w = facts.w[k];
    const one = groups.get(key) || { g: facts.g[k], r: facts.r[k], p: facts.p[k], n: 0, tokens: 0, sum: 0, low: w, high: w };
    one.n++; one.tokens += facts.n[k]; one.sum += w; one.low = Math.min(one.low, w); one.high = Math.max(one.high, w);
    groups.set(key, one);
  }
  const rows = [...groups.values()].filter((one) => one.n > 1), equal = rows.filter((one) => one.low === one.high).length;
  if (!rows.length) return "";
  rows.sort((a, b) => b.high - b.low - (a.high - a.low) || b.r - a.r);
  const body = rows.slice(0, 100).map((one) => [el("button", { text: visible(short(samples.prompts[one.p], 60)) || `group ${one.g}`, onclick: () => choose(one.g, one.r) }), one.r, one.n, one.sum / one.n, one.low, one.high, one.tokens / one.n]);
  return more(`Groups: ${show(rows.length)}, in ${show(equal)} all rewards are equal`, table(["prompt (largest spread first)", "rollout", "answers", "mean reward", "lowest", "highest", "mean tokens"], body, "Groups"));
}

// Prompts that came more than once: mean reward at the first and the last time.
function promptsTable(choose) {
  const { facts, count } = samples, seen = new Map();
  for (let k = 0; k < count; k++) {
    if (Number.isNaN(facts.w[k])) continue;
    let one = seen.get(facts.p[k]);
    if (!one) seen.set(facts.p[k], one = new Map());
    const sum = one.get(facts.r[k]) || [0, 0];
    one.set(facts.r[k], [sum[0] + facts.w[k], sum[1] + 1]);
  }
  const rows = [];
  for (const [p, rollouts] of seen) {
    if (rollouts.size < 2) continue;
    const means = [...rollouts.values()].map(([sum, n]) => sum / n);
    rows.push([p, rollouts.size, means[0], means.at(-1)]);
  }
  if (!rows.length) return "";
  rows.sort((a, b) => Math.abs(b[3] - b[2]) - Math.abs(a[3] - a[2]));
  const body = rows.slice(0, 100).map(([p, n, first, last]) => [el("button", { text: visible(short(samples.prompts[p], 80)) || `prompt ${p}`, onclick: () => choose(p) }), n, first, last]);
  return more(`How prompts changed: ${show(rows.length)} came more than once`, table(["prompt (those that changed most)", "times", "first mean reward", "last"], body, "Prompts over the run"));
}

function promptHistory(p) {
  const { facts, count } = samples, by = new Map();
  for (let k = 0; k < count; k++) if (facts.p[k] === p && !Number.isNaN(facts.w[k])) by.set(facts.r[k], [...(by.get(facts.r[k]) || []), k]);
  if (by.size < 2) return null;
  const x = [...by.keys()].sort((a, b) => a - b), mean = (of) => x.map((r) => by.get(r).reduce((sum, k) => sum + of[k], 0) / by.get(r).length);
  return plots([{ title: "This prompt: mean reward", x, series: [{ label: "reward", y: mean(facts.w) }] }, { title: "This prompt: tokens of the answers", x, series: [{ label: "tokens", y: mean(facts.n) }] }]);
}

const valueAt = (values, i) => (Array.isArray(values) ? values[i] : values);
function versionAt(text, i) {
  let end = 0;
  for (const [version, tokens] of text.v || []) { end += tokens; if (i < end) return version; }
  return text.v?.at(-1)?.[0];
}
function shadeOf(text, i, versions) {
  const mode = filters.shade, night = dark();
  if (mode === "nothing") return "";
  if (mode === "mask") return text.m && !text.m[i] ? (night ? "#4a5553" : "#cfd6d4") : "";
  if (mode === "clipped") return text.c?.[i] ? (night ? "#7a4a12" : "#f6c48a") : "";
  if (mode === "weight version") return `hsl(${(versions.indexOf(versionAt(text, i)) * 67 + 170) % 360} 60% ${night ? 28 : 86}%)`;
  const value = valueAt({ "log-prob": text.lp, advantage: text.a, "trainer - engine": text.d }[mode], i);
  if (value === null || value === undefined) return "";
  const strength = Math.min(1, Math.abs(value) / { "log-prob": 4, advantage: 2, "trainer - engine": 0.05 }[mode]);
  return strength < 0.02 ? "" : `hsl(${mode === "log-prob" || value < 0 ? 12 : 150} 75% ${night ? 14 + 24 * strength : 100 - 32 * strength}%)`;
}

function responsePart(text) {
  const facts = el("p", { class: "soft", role: "status", text: "Choose a token, by pointer or with the arrow keys, for its numbers." });
  const box = el("pre", { tabindex: "0", role: "group", "aria-label": "Response" });
  const versions = [...new Set((text.v || []).map(([version]) => version))];
  if (!text.t.length) { box.textContent = visible(text.x ?? ""); return [box]; }
  box.append(...text.t.map((_, i) => el("span", { text: visible(tokenOf(text, i)), class: text.m && !text.m[i] ? "masked" : null, style: { background: shadeOf(text, i, versions) } })));
  let current = -1;
  const choose = (i) => {
    if (i < 0 || i >= text.t.length) return;
    box.children[current]?.classList.remove("current");
    current = i;
    box.children[i].classList.add("current");
    const parts = [`token ${i + 1} of ${text.t.length}: ${JSON.stringify(visible(tokenOf(text, i)))}`];
    for (const [name, value] of [["log-prob", valueAt(text.lp, i)], ["trainer - engine", valueAt(text.d, i)], ["advantage", valueAt(text.a, i)], ["weight version", versionAt(text, i)]]) if (value !== undefined && value !== null) parts.push(`${name} ${show(value)}`);
    if (text.m && !text.m[i]) parts.push("not trained on");
    if (text.c?.[i]) parts.push("clipped");
    facts.textContent = parts.join(", ");
  };
  const pointed = (event) => { const i = [...box.children].indexOf(event.target); if (i >= 0) choose(i); };
  box.addEventListener("click", pointed);
  box.addEventListener("mouseover", pointed);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { choose(current + step); event.preventDefault(); }
  });
  return [...(text.x !== undefined ? [el("pre", { tabindex: "0", role: "group", "aria-label": "Text of the response", text: visible(text.x) })] : []), box, facts];
}

// A response of several turns: what the model wrote, and what tools or the environment put in, which is not trained on.
function turnsPart(text) {
  if (!text.m || !text.t.length || text.x !== undefined) return "";
  const turns = [];
  text.t.forEach((_, i) => {
    const trained = Boolean(text.m[i]);
    if (turns.at(-1)?.trained !== trained) turns.push({ trained, said: "" });
    turns.at(-1).said += tokenOf(text, i);
  });
  if (turns.length < 2) return "";
  return more(`Turns (${turns.length})`, ...turns.map(({ trained, said }, i) => el("div", { class: trained ? "turn" : "turn other" }, el("strong", { text: `${i + 1}. ${trained ? "model" : "environment"}` }), el("pre", { text: visible(said.trim()) }))));
}

function sampleBox(k, choosePrompt) {
  const { facts } = samples, text = textOf(k);
  const words = [`reward ${show(rewardOf(k)) || "none"}`, `${facts.n[k]} tokens`, samples.statuses[facts.s[k]], `rollout ${facts.r[k]}`, `group ${facts.g[k]}`, `sample ${facts.i[k]}`, text ? "" : "no text here"];
  const start = text ? short(responseOf(text).trim(), 90) : "";
  const box = el("details", { class: "sample" }, el("summary", {}, visible(words.filter(Boolean).join(" · ")), start ? el("span", { class: "start soft", text: " " + visible(start) }) : null));
  box.addEventListener("toggle", () => { if (box.open && box.childElementCount === 1) fill(); });
  function fill() {
    if (!text) {
      box.append(el("p", { text: `The page has no room for its text; it is in samples/${data.samples.rollouts[facts.f[k]].f}, index ${facts.i[k]}.` }));
      return;
    }
    const said = [text.l !== undefined ? `label: ${text.l}` : "", text.tr !== undefined ? `trained with ${show(text.tr)}` : "", text.j ? `reward in full: ${text.j}` : "", text.v ? `versions ${[...new Set(text.v.map(([v]) => v))].join(", ")}` : "", text.e ? `engine ${text.e}` : ""];
    const group = [];
    for (let other = Math.max(0, k - 500); other < Math.min(samples.count, k + 500); other++) if (facts.g[other] === facts.g[k] && facts.f[other] === facts.f[k] && facts.t[other] >= 0) group.push(other);
    const beside = el("div", { class: "beside", tabindex: "0", role: "region", "aria-label": "The group side by side" }, ...group.map((other) => el("div", {}, el("strong", { text: `${other === k ? "this one, " : ""}reward ${show(rewardOf(other))}, ${facts.n[other]} tokens, ${visible(samples.statuses[facts.s[other]])}` }), el("pre", { text: visible(short(responseOf(textOf(other)), 3000)) }))));
    const pictures = (text.im || []).map((place, i, all) => el("img", { src: data.samples.pictures[place], alt: `Picture ${i + 1} of ${all.length}` }));
    box.append(el("h3", { text: "Prompt" }), el("pre", { tabindex: "0", role: "group", "aria-label": "Prompt", text: visible(samples.prompts[facts.p[k]]) }),
      pictures.length ? el("div", { class: "pictures" }, ...pictures) : "",
      el("h3", { text: "Response" }), ...responsePart(text), turnsPart(text), el("p", { text: visible(said.filter(Boolean).join(" · ")) }));
    if (group.length > 1) box.append(more(`The group side by side (${group.length})`, beside));
    pending.length = 0;
    const history = promptHistory(facts.p[k]);
    box.append(el("button", { text: "All answers to this prompt", onclick: () => choosePrompt(facts.p[k]) }));
    if (history) { box.append(history); pending.forEach((draw) => draw()); }
  }
  return box;
}
