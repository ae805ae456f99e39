"use strict";
// What is chosen (state, kept in the URL's hash), the words around the plots, and the live updates.

const POLL_MS = 2000, REST = 10, RELOAD_MS = 60000, KEPT_COLUMNS = 600;
let chosenLanguage = new URLSearchParams(location.hash.slice(1)).get("lang");
let language = chosenLanguage || CONFIG.lang || ((navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en");
if (!CONFIG.strings[language]) language = "en";
let page = null;

const state = {
  step: null, site: null, kind: null, quantity: "headroom", format: null, filter: "", range: null, order: "forward", map: "",
  finding: null, severity: "", code: "", search: "", axis: "", smooth: "",
};
const IN_HASH = ["step", "site", "kind", "quantity", "format", "filter", "order", "map", "severity", "code", "search", "finding", "range", "axis", "smooth"];
const atStart = { ...state };

function t(key, ...values) {
  return (CONFIG.strings[language][key] ?? key).replace(/\{(\d)\}/g, (_, i) => String(values[i]));
}

const colon = () => (language === "zh" ? "：" : ": ");
const labelled = (key, ...values) => t(key, ...values) + colon();

// What is said as a sentence comes in English, with its Chinese beside it.
const said = (text) => (language === "zh" ? page.zh[text] ?? page.whatif?.zh?.[text] ?? text : text);

function speak(other) {
  language = chosenLanguage = other;
  writeHash();
  drawWords();
  if (globalThis.Plotly) drawPlots();
}

// Elements. Text is only ever set as text, so that no name of a layer can become markup.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}
const fill = (id, ...children) => document.getElementById(id).replaceChildren(...children.flat().filter(Boolean));

// State

// A click that leads elsewhere can be taken back with the browser's Back.
function update(change) {
  const moves = ["step", "site", "kind", "finding"].some((name) => name in change && change[name] !== state[name]);
  Object.assign(state, change);
  writeHash(moves);
  redraw(Object.keys(change));
}

function writeHash(moves = false) {
  const words = new URLSearchParams();
  for (const name of IN_HASH) if (state[name] !== null && state[name] !== "") words.set(name, state[name]);
  if (chosenLanguage) words.set("lang", language);
  if (`#${words}` !== location.hash) history[moves ? "pushState" : "replaceState"](null, "", `#${words}`);
}

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of IN_HASH) {
    const value = words.get(name), number = value === null || value === "" ? NaN : Number(value);
    if (name === "step" || name === "finding") state[name] = Number.isFinite(number) ? number : null;
    else if (name === "range") state.range = value && value.split(",").length === 2 && value.split(",").every((end) => Number.isFinite(Number(end))) ? value.split(",").map(Number) : null;
    else state[name] = value ?? atStart[name];
  }
}

function formatChosen() {
  return page.formats.find((form) => form.name === state.format) || page.formats[0];
}

// The row that stands for a place: itself, the first thing inside it, or the nearest module around it.
function rowOf(names, site) {
  if (!site) return -1;
  const exact = names.indexOf(site);
  if (exact >= 0) return exact;
  const inside = names.findIndex((name) => name.startsWith(`${site}.`));
  if (inside >= 0) return inside;
  for (let around = site; around.includes("."); ) {
    around = around.slice(0, around.lastIndexOf("."));
    const row = names.indexOf(around);
    if (row >= 0) return row;
  }
  return -1;
}

// Moves all views to a finding. The kind of site changes only where the layer would not be seen otherwise.
function choose(index) {
  const finding = page.findings[index], change = { finding: index };
  if (finding.step !== null) change.step = finding.step;
  if (finding.site) {
    const kinds = Object.keys(page.kinds);
    const exact = kinds.find((kind) => page.kinds[kind].names.includes(finding.site));
    const near = [state.kind, ...kinds].find((kind) => page.kinds[kind] && rowOf(page.kinds[kind].names, finding.site) >= 0);
    const here = page.kinds[state.kind] && page.kinds[state.kind].names.includes(finding.site);
    if (exact || near) change.site = finding.site;
    if (!here && (exact || near)) change.kind = exact || near;
  }
  if (state.range && change.step !== undefined && (change.step < state.range[0] || change.step > state.range[1])) change.range = null;
  update(change);
  const item = document.querySelector(`#findings li[data-index="${index}"]`);
  if (item) item.scrollIntoView({ block: "nearest" });
}

function redraw(changed) {
  const any = (...names) => names.some((name) => changed.includes(name));
  if (any("kind", "quantity", "order")) drawControls();
  if (any("kind", "quantity", "filter", "format", "order", "range", "site", "step")) drawTree(); // before what moves: it asks how far it is scrolled
  if (any("severity", "code", "search")) drawFindings();
  else if (any("finding")) markFinding();
  if (!globalThis.Plotly) return;
  linking = true;
  if (any("range", "axis", "smooth")) drawCurves();
  else if (any("step")) Plotly.relayout("curves-figure", { shapes: curveShapes() });
  const work = [];
  if (any("kind", "quantity", "format", "filter", "range", "map")) work.push(drawHeat());
  else if (any("step", "site") && heat) work.push(Plotly.relayout("heat-figure", { shapes: heatShapes() }));
  if (any("step", "site", "kind", "format", "range")) work.push(drawHistogram());
  if (any("step", "site", "kind", "format")) work.push(describePlace());
  Promise.all(work).finally(() => (linking = false));
}

// The tooltip

function showTip(event, lines) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.map((text, i) => make("div", { class: i ? "" : "strong" }, shortened(text, 300))));
  tip.hidden = false;
  const { innerWidth, innerHeight } = window;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// Data: embedded, or asked for

async function ask(path, parameters = {}) {
  const address = new URL(path, location.href);
  address.search = location.search;
  for (const [name, value] of Object.entries(parameters)) address.searchParams.set(name, value);
  const answer = await fetch(address);
  if (answer.ok) return answer.json();
  const { error } = await answer.json().catch(() => ({}));
  throw new Error(error || `HTTP ${answer.status}`);
}

async function decodedCurves(specs) {
  const out = {};
  for (const [name, spec] of Object.entries(specs)) {
    out[name] = { steps: [...(await decoded(spec.steps))], values: [...(await decoded(spec.values))] };
  }
  return out;
}

async function load(data) {
  const curves = await decodedCurves(data.curves);
  const otherCurves = data.comparison ? await decodedCurves(data.comparison.curves) : {};
  page = { ...data, curves, otherCurves, loaded: Date.now() };
  const kinds = Object.keys(page.kinds);
  if (!page.kinds[state.kind]) state.kind = kinds.find((kind) => kind === "output") || kinds[0] || null;
  state.format = [state.format, page.focus.format, "fp16"].find((name) => page.formats.some((form) => form.name === name));
  if (state.step === null && state.site === null && page.verdict.healthy === false) Object.assign(state, culpritPlace());
  const parted = page.comparison?.first, asked = new URLSearchParams(location.hash.slice(1)).has("quantity");
  if (page.comparison && !asked) state.quantity = "ratio"; // what two runs are compared for
  if (state.step === null && parted) startWhere(parted);
  if (state.site === null && state.kind) state.site = await worstLayer();
}

// Where nobody is to blame, the layer with the largest value is the one to look at.
async function worstLayer() {
  const quantity = quantitiesOf(state.kind)[0];
  if (!quantity) return null;
  const matrix = await matrixOf(state.kind, quantity), columns = matrix.reach.length / 2;
  let worst = 0;
  matrix.codes.forEach((code, i) => (worst = code > matrix.codes[worst] ? i : worst));
  return matrix.names[Math.floor(worst / columns)];
}

// The page opens on the culprit, unless the address says otherwise.
function culpritPlace() {
  const { step, site, kind } = page.focus, finding = culpritIndex();
  return { step, ...(site && page.kinds[kind] ? { site, kind } : {}), finding: finding < 0 ? null : finding };
}

function startWhere(parted) {
  const layer = page.comparison.layers[0];
  Object.assign(state, { step: parted.step }, layer && page.kinds[layer.kind] ? { site: layer.name, kind: layer.kind } : {});
}

function drawWords() {
  document.documentElement.lang = language;
  drawTop();
  drawVerdict();
  drawDiagnoses();
  drawComparison();
  drawRanks();
  fill("help", make("h2", {}, t("help")), t("help.text").split(/(?<=[.。]) ?/).filter(Boolean).map((text) => make("p", {}, text)),
    make("form", { method: "dialog" }, make("button", {}, t("close"))));
  setUpSections();
  setUpFindings();
  drawControls();
  drawWhatif();
}

async function drawPlots() {
  linking = true;
  await drawTree();
  await drawCurves();
  await drawHeat();
  await drawHistogram();
  await describePlace();
  linking = false;
  document.body.dataset.drawn = "yes";
}

// Live

function lastStep() {
  return page.steps ? page.steps.last : -1;
}

let answered = "-"; // when, last

// A verdict that turns bad is seen wherever the reader has scrolled to.
function toast(before) {
  const { verdict } = page;
  if (verdict.word === before || verdict.healthy !== false || scrollY < 300) return;
  const away = () => fill("toast");
  fill("toast", make("p", { class: "strong" }, `✕ ${t(verdict.word)}`), make("p", {}, verdictSentence()),
    make("div", { class: "bar" }, make("button", { on: { click: () => (away(), showCulprit()) } }, t("show")), make("button", { on: { click: away } }, t("close"))));
}

// A long run takes longer to ask about, and the machine that answers is training: rest ten times as long as the question took.
async function poll() {
  const started = performance.now();
  try {
    if (!document.hidden) await takeNews();
    const place = document.getElementById("live"); // the head may have been drawn anew
    place.replaceChildren(make("span", { class: "dot" }), page.run.status === "running" ? t("live") : t("live.ended"));
    answered = new Date().toLocaleTimeString();
  } catch (error) {
    document.getElementById("live").replaceChildren(make("span", { class: "dot lost" }), t("live.lost", answered), ` (${error.message})`);
  }
  setTimeout(poll, Math.max(POLL_MS, REST * (performance.now() - started)));
}

async function takeNews() {
  const news = await ask("api/changes", { since: lastStep() });
  const before = page.run.status, known = Object.entries(page.kinds).every(([kind, spec]) => spec.names.length === news.sites?.[kind]);
  const fresh = Object.keys(news.kinds || {}).every((kind) => page.kinds[kind]) && Object.keys(news.curves || {}).every((name) => page.curves[name]);
  const columns = Math.max(0, ...Object.values(page.kinds).map((spec) => spec.added || 0));
  const shownNow = page.kinds[state.kind]?.quantities[state.quantity];
  const old = shownNow?.steps && Date.now() - page.loaded > RELOAD_MS; // what has columns of its own does not come with the news
  const elsewhere = news.run && (news.run.file !== page.run.file || news.run.id !== page.run.id); // the culprit is on another rank
  const worse = news.verdict?.counts.error > page.verdict.counts.error; // a new error may have a diagnosis
  if (news.reload || elsewhere || !known || !fresh || old || worse || columns > KEPT_COLUMNS || news.run.status !== before) return reload();
  if (!Object.keys(news.curves).length && news.findings_total === page.findings.length + page.findings_left_out) return null;
  const verdictBefore = JSON.stringify(page.verdict), wordBefore = page.verdict.word;
  Object.assign(page, { run: news.run, verdict: news.verdict, steps: news.steps });
  Object.assign(page.zh, news.zh);
  for (const [name, curve] of Object.entries(await decodedCurves(news.curves))) {
    page.curves[name].steps.push(...curve.steps);
    page.curves[name].values.push(...curve.values);
  }
  for (const [kind, spec] of Object.entries(news.kinds)) await append(page.kinds[kind], spec);
  const key = (f) => JSON.stringify([f.step, f.code, f.site, f.rank]), seen = new Map(page.findings.map((f, i) => [key(f), i]));
  for (const finding of news.findings) {
    if (seen.has(key(finding))) page.findings[seen.get(key(finding))] = finding;
    else page.findings.push(finding);
  }
  drawTop();
  refreshWords(JSON.stringify(page.verdict) !== verdictBefore);
  toast(wordBefore);
  return drawPlots();
}

async function reload() {
  const { whatif } = page, { word } = page.verdict;
  await load(await ask("api/page"));
  page.whatif = whatif;
  drawWords();
  toast(word);
  for (const name of ["curves", "heat", "histogram"]) delete document.getElementById(`${name}-figure`).dataset.ready;
  return drawPlots();
}

// New columns to the right of the old ones.
async function append(kind, spec) {
  const join = async (name, shift = 0) => {
    const old = await decoded(kind[name]), more = await decoded(spec[name]);
    const out = new old.constructor(old.length + more.length - (name === "bounds" ? 1 : 0));
    out.set(old);
    more.forEach((value, i) => (out[(name === "bounds" ? old.length - 1 : old.length) + i] = value + shift));
    return out;
  };
  const columnsBefore = kind.reach.shape[0], columnsNew = spec.reach.shape[0], rows = kind.names.length;
  const parts = { bounds: await join("bounds", kind.steps.shape[0]), steps: await join("steps"), reach: await join("reach") };
  for (const [name, more] of Object.entries(spec.quantities)) {
    const own = kind.quantities[name];
    own.codes = ready(await widened(own.codes, more.codes, rows, columnsBefore, columnsNew), own.codes);
    if (own.at || more.at) own.at = ready(await widened(own.at, more.at, rows, columnsBefore, columnsNew), own.at || more.at);
  }
  for (const [name, array] of Object.entries(parts)) kind[name] = ready(array, kind[name], name === "reach" ? 2 : 1);
  kind.added = (kind.added || 0) + columnsNew;
}

async function widened(old, more, rows, before, added) {
  const left = old ? await decoded(old) : new Uint8Array(rows * before), right = more ? await decoded(more) : new Uint8Array(rows * added);
  const out = new Uint16Array(rows * (before + added));
  for (let row = 0; row < rows; row++) {
    out.set(left.subarray(row * before, (row + 1) * before), row * (before + added));
    out.set(right.subarray(row * added, (row + 1) * added), row * (before + added) + before);
  }
  return out;
}

// A spec that is already decoded.
function ready(array, like, width = 1) {
  const spec = { dtype: like.dtype, shape: [array.length / width] };
  decodedArrays.set(spec, Promise.resolve(array));
  return spec;
}

// Start

async function start() {
  readHash();
  const embedded = document.getElementById("data");
  try {
    await load(embedded ? JSON.parse(new TextDecoder().decode(await inflated(embedded.textContent))) : await ask("api/page"));
  } catch (error) {
    fill("verdict", make("h1", { class: "error" }, t("cannot read", error.message)));
    throw error;
  }
  drawWords();
  document.body.dataset.words = "yes";
  await loadPlotly();
  await drawPlots();
  if (!CONFIG.live) return;
  setTimeout(poll, POLL_MS);
  page.whatif = await ask("api/whatif").catch((error) => ({ note: error.message, command: "", formats: [] }));
  drawWhatif();
}

// The next step that has a loss or a sample, or the next layer.
function neighbour(what, direction) {
  const names = page.kinds[state.kind]?.names ?? [], steps = (page.curves.loss ?? Object.values(page.curves)[0])?.steps ?? [];
  const list = what === "step" ? steps : names;
  if (!list.length) return;
  const found = what === "step" ? list.findLastIndex((step) => step <= (state.step ?? -Infinity)) : rowOf(names, state.site);
  update({ [what]: list[Math.min(list.length - 1, Math.max(0, found + direction))], finding: null });
}

document.addEventListener("keydown", (event) => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || !page) return;
  if (event.key === "/") {
    event.preventDefault();
    document.querySelector("#controls input[type=search]")?.focus();
  }
  if (event.key === "?") {
    event.preventDefault();
    document.getElementById("help").showModal();
  }
  const inFigure = event.target.closest?.(".figure"), sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key], across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (sideways && (inFigure || event.target === document.body)) event.preventDefault(), neighbour("step", sideways);
  if (across && inFigure) event.preventDefault(), neighbour("site", across);
  const direction = { n: 1, j: 1, p: -1, k: -1 }[event.key];
  if (direction) nextFinding(direction);
});
window.addEventListener("hashchange", () => {
  readHash();
  if (page) redraw(Object.keys(state));
});
let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => page && globalThis.Plotly && drawPlots(), 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page && globalThis.Plotly && drawPlots());
start();
