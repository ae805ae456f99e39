"use strict";
// The words around the plots: verdict, facts, diagnosis, findings, what-if, comparison.

function drawTop() {
  const { run } = page;
  document.title = `nanny: ${t(page.verdict.word)}, ${t("run", run.id)}`;
  const facts = [run.amp_dtype || t("no autocast"), run.torch && `torch ${run.torch}`, t(`status.${run.status}`)];
  const rank = run.world_size > 1 ? t("rank of", run.rank, run.world_size) : null;
  fill("top", make("b", {}, "nanny"), make("span", {}, [t("run", run.id), rank, ...facts].filter(Boolean).join(" · ")),
    make("span", { class: "path" }, [run.file, run.command].filter(Boolean).join(" : ")),
    make("button", { id: "language", class: "small", lang: language === "zh" ? "en" : "zh", on: { click: () => speak(language === "zh" ? "en" : "zh") } },
      language === "zh" ? "English" : "中文"),
    CONFIG.live ? make("span", { id: "live" }) : null,
    CONFIG.live ? make("a", { href: `runs${location.search}` }, t("all runs")) : null);
}

function culpritIndex() {
  const wanted = page.verdict.culprit;
  if (!wanted) return -1;
  const [step, code, site, rank] = wanted;
  return page.findings.findIndex((f) =>
    f.step === (step ?? null) && f.code === code && f.site === site && (f.rank ?? null) === (rank ?? null));
}

function verdictSentence() {
  const cause = page.diagnoses[0];
  return cause ? `${titleOf(cause)} · ${placeOf(cause)}` : said(page.verdict.reason);
}

const titleOf = (cause) => (cause.pages[language]?.title ?? cause.cause).replace(/[.。]$/, "");

function placeOf(cause) {
  const rank = page.verdict.rank === null ? "" : t("rank", page.verdict.rank);
  return [cause.culprit, cause.step === null ? "" : t("step", cause.step), rank, cause.where].filter(Boolean).join(" · ");
}

function drawVerdict() {
  const { verdict } = page, place = document.getElementById("verdict"), index = culpritIndex();
  const suspect = verdict.word === "SUSPECT";
  place.className = verdict.healthy === true ? "good" : verdict.healthy === false && !suspect ? "bad" : "warn";
  drawIcon(place.className);
  const sign = { good: "✓", bad: "✕", warn: verdict.healthy === null ? "?" : "▲" }[place.className];
  const cause = page.diagnoses[0];
  fill("verdict", make("h1", {}, `${sign} ${t(verdict.word)}`, make("small", {}, cause ? titleOf(cause) : said(verdict.reason))),
    cause ? make("p", { class: "strong" }, placeOf(cause)) : null,
    cause?.remedy ? make("p", { class: "said" }, make("span", { class: "fix" }, labelled("remedy")), rich(said(cause.remedy))) : null,
    index < 0 ? null : page.diagnoses.length ? make("p", { class: "quiet" }, labelled(`noticed.${page.findings[index].severity}`), findingLink(index)) : culpritCard(index),
    page.comparison?.parts ? make("p", { class: "warning strong" }, `${labelled("compare", page.comparison.other.id)}`, rich(said(page.comparison.lines[0]))) : null,
    drawWall(),
    drawFacts(),
    page.notes.map((note) => make("p", { class: "warning" }, said(note))), cause ? null : commands(page.next));
}

const asImage = (svg) => `data:image/svg+xml,${encodeURIComponent(svg)}`;

// The picture that `nanny card` writes, without its words: they stand beside it.
function drawWall() {
  const card = asImage(page.card[language] ?? page.card.en);
  return make("figure", { id: "wall" },
    make("img", { src: `${card}#svgView(viewBox(16,104,800,366))`, alt: `${labelled(page.verdict.word)}${verdictSentence()}`, width: 800, height: 366 }),
    make("figcaption", {}, page.outlook[language].map(([head, text]) => make("p", {}, make("b", {}, `${head}${colon()}`), whole(text))),
      make("a", { href: card, download: `nanny-run-${page.run.id}.svg` }, t("save picture"))));
}

// Seen in a row of tabs from afar.
function drawIcon(state) {
  const colour = { good: "#1f7a4d", bad: "#c8451b", warn: "#b8860b" }[state];
  document.getElementById("icon").href = asImage(
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="${colour}"/></svg>`);
}

function culpritCard(index) {
  const f = page.findings[index], isError = f.severity === "error";
  const when = [f.step === null ? "" : t("at step", f.step), f.rank === undefined ? "" : t("on rank", f.rank)].filter(Boolean).join(" ");
  const times = f.times > 1 && f.last_step !== undefined ? ` (${t("times", f.times, f.last_step)})` : "";
  const earlier = page.findings.findIndex((other) => other.severity === "warning" && other.step !== null && other.step < f.step);
  return make("div", { class: `culprit by-${f.severity}` },
    make("div", { class: "quiet" }, t(isError ? "first culprit" : "first warning")),
    make("div", { class: "what" }, make("span", { class: f.severity }, f.code), f.site ? ` ${t("in layer")} ` : "",
      f.site ? make("span", { class: "site", title: f.site }, shortened(f.site, 160)) : null, ` ${when}`,
      times ? make("span", { class: "quiet" }, times) : null),
    make("p", { class: "said" }, rich(said(f.message)), f.where ? ` (${f.where})` : ""),
    f.hint ? make("p", { class: "said" }, make("span", { class: "fix" }, labelled("fix")), rich(said(f.hint))) : null,
    f.passed_on ? make("p", { class: "quiet" }, `${labelled("passed on", f.passed_on_total)}${listed(f.passed_on, f.passed_on_total)}`) : null,
    isError && earlier >= 0 ? make("p", { class: "warning" }, labelled("warned before"), findingLink(earlier)) : null,
    make("div", { class: "bar" }, make("button", { id: "show-culprit", on: { click: showCulprit } }, t("show"))));
}

// Messages put names between backticks; a line may not end inside a number.
const rich = (text) => text.replace(/\b2\*\*(-?\d+)/g, (_, power) => twoTo(power)).split("`").flatMap((part, i) => (i % 2 ? make("code", {}, part) : whole(part)));
const whole = (text) => text.split(/(\d[\d.,]*e[-+]\d+|\d[\d.,]* %)/).map((part, i) => (i % 2 ? make("span", { class: "whole" }, part) : part));

const showDesk = () => document.getElementById("desk").scrollIntoView({ behavior: "smooth", block: "start" });

function findingLink(index) {
  const f = page.findings[index];
  return make("button", { class: "small", on: { click: () => (choose(index), showDesk()) } },
    `${f.code} ${f.step === null ? "" : t("at step", f.step)} ${shortened(f.site, 80)}`);
}

function listed(names, total) {
  const some = names.slice(0, 4).map((name) => shortened(name, 60)).join(", ");
  return total > 4 ? `${some} ${t("more", total - 4)}` : some;
}

function drawFacts() {
  const { run, curves, steps } = page, facts = [];
  if (run.exception) facts.push(["exception", run.exception]);
  if (run.failure) facts.push(["failure", run.failure]);
  if (steps) facts.push(["steps", `${steps.first} … ${steps.last}`]);
  for (const name of ["loss", "grad_norm"]) {
    const values = curves[name] && curves[name].values;
    if (values && values.length) facts.push([name, `${short(values[0])} → ${short(values.at(-1))}`]);
  }
  if (curves.scale && curves.scale.values.length) facts.push(["scale", powerOfTwo(curves.scale.values.at(-1))]);
  if (curves.skipped && curves.skipped.values.length) facts.push(["skipped", String(curves.skipped.values.length)]);
  if (run.cost.en) facts.push(["cost", run.cost[language]]);
  if (run.dropped) facts.push(["dropped", String(run.dropped)]);
  return make("dl", { class: "facts" }, facts.map(([key, text]) => make("div", {}, make("dt", {}, t(key)), make("dd", {}, whole(text)))));
}

// News must not take the filter from under the fingers of who types it, nor scroll the list back.
function refreshWords(verdictChanged) {
  if (!verdictChanged) return document.querySelector("#verdict .facts").replaceWith(drawFacts());
  drawVerdict();
  const list = document.getElementById("finding-list"), { scrollTop } = list;
  if (document.getElementById("findings").contains(document.activeElement)) drawFindings();
  else setUpFindings();
  document.getElementById("finding-list").scrollTop = scrollTop;
  return undefined;
}

function copyButton(text, label, attributes) {
  return make("button", { ...attributes, on: { click: (event) => {
    navigator.clipboard?.writeText(text);
    event.target.textContent = t("copied");
  } } }, t(label));
}

function commands(list) {
  if (!list.length) return null;
  return make("details", { open: true }, make("summary", { class: "quiet" }, t("type next")),
    make("ul", { class: "commands" }, list.map((text) => make("li", {}, make("code", {}, shortened(text, 400)), copyButton(text, "copy", { class: "small" })))));
}

function drawDiagnoses() {
  document.getElementById("diagnosis").hidden = !page.diagnoses.length;
  fill("diagnosis", make("h2", {}, t("diagnosis")), page.diagnoses.map((d) => {
    const show = page.focus.step === null ? null : showCulprit;
    const known = d.pages[language] || d.pages.en;
    return make("div", { class: "diagnosis" },
      make("p", { class: "quiet" }, make("b", {}, d.cause), whole(` · ${d.facts[language].join(" · ")}`)),
      d.source ? make("pre", { class: "source", tabindex: "0" }, d.source) : null,
      d.chain.length ? make("ul", { class: "chain", title: t("chain") }, d.chain.map((link) => make("li", {}, rich(said(link))))) : null,
      d.evidence.length ? make("ul", { title: t("evidence") }, d.evidence.map((fact) => make("li", {}, rich(said(fact))))) : null,
      d.tried[language].length ? make("ul", {}, d.tried[language].map((text) => make("li", {}, rich(text)))) : null,
      d.confirm ? make("p", {}, labelled("confirm"), rich(said(d.confirm))) : null,
      known ? make("details", {}, make("summary", { class: "quiet" }, t("mechanism")),
        known.mechanism.split(/\n\n+/).map((part) => make("p", {}, rich(part))),
        known.repaired ? make("pre", { tabindex: "0" }, make("code", {}, known.repaired)) : null) : null,
      make("div", { class: "bar" }, show ? make("button", { on: { click: show } }, t("show")) : null,
        copyButton(d.markdown[language], "as markdown", { id: "markdown" })));
  }), page.diagnoses.length ? commands(page.next) : null);
}

function showCulprit() {
  update(culpritPlace());
  showDesk();
}

function showPlace(step, site) {
  const kind = [state.kind, ...Object.keys(page.kinds)].find((name) => page.kinds[name] && rowOf(page.kinds[name].names, site) >= 0);
  update(kind ? { step, site, kind, finding: null } : { step, finding: null });
  showDesk();
}

// Findings

function findingsShown() {
  const wanted = state.search.toLowerCase();
  return [...page.findings.keys()].filter((i) => {
    const f = page.findings[i];
    return (!state.severity || f.severity === state.severity) && (!state.code || f.code === state.code)
      && (!wanted || `${f.site} ${f.message} ${f.code}`.toLowerCase().includes(wanted));
  });
}

function setUpFindings() {
  const codes = [...new Set(page.findings.map((f) => f.code))].sort();
  const { counts } = page.verdict;
  const severities = [["", t("all severities")], ...["error", "warning", "info"].map((name) => [name, `${t(name)} (${counts[name]})`])];
  const pick = (name, options) => make("select", { "aria-label": name, on: { change: (event) => update({ [name]: event.target.value }) } },
    options.map(([value, text]) => make("option", { value, selected: state[name] === value }, text)));
  const none = !page.findings.length; // nothing to choose from
  fill("findings", make("h2", {}, t("findings")), none ? null : make("div", { class: "bar" },
    pick("severity", severities), pick("code", [["", t("all codes")], ...codes.map((code) => [code, code])]),
    make("input", { type: "search", value: state.search, placeholder: t("filter findings"), size: 16, "aria-label": t("filter findings"),
      on: { input: (event) => update({ search: event.target.value }) } })),
    none ? null : make("div", { class: "quiet keys" }, t("keys")), make("ol", { id: "finding-list" }));
  drawFindings();
}

function drawFindings() {
  const shown = findingsShown();
  const items = shown.map((i) => {
    const f = page.findings[i];
    return make("li", { "data-index": i },
      make("button", { title: shortened(f.site, 500), on: { click: () => choose(i) } },
        make("span", { class: "head" }, make("span", { class: f.severity }, `${SIGNS[f.severity]} ${t(`one.${f.severity}`)}`),
          make("b", {}, f.code), make("span", { class: "at" }, f.step === null ? t("whole run") : t("step", f.step),
            page.ranks.length && f.rank !== undefined ? ` · ${t("rank", f.rank)}` : "",
            f.times > 1 ? ` ×${f.times}` : "")),
        f.site ? make("span", { class: "site" }, shortened(f.site, 90)) : null,
        make("span", { class: "said" }, rich(said(f.message)), f.hint ? make("span", { class: "fix" }, ` ${labelled("fix")}`, rich(said(f.hint))) : null)));
  });
  const none = t(`findings.${page.findings.length ? "nothing matches" : page.diagnoses.length ? "but the diagnosis" : "none"}`);
  const rest = page.findings_left_out ? make("li", { class: "quiet none" }, t("findings.left out", page.findings_left_out)) : null;
  fill("finding-list", items.length ? items : make("li", { class: "quiet none" }, none), rest);
  markFinding();
}

// Of the list a click changes two entries: the others stay, and so does the focus.
function markFinding() {
  for (const item of document.querySelectorAll("#finding-list li[data-index]")) {
    const chosen = Number(item.dataset.index) === state.finding;
    item.classList.toggle("chosen", chosen);
    item.firstChild.setAttribute("aria-current", chosen);
  }
}
const SIGNS = { error: "✕", warning: "▲", info: "●" };

function nextFinding(direction) {
  const shown = findingsShown();
  if (!shown.length) return;
  const at = shown.indexOf(state.finding);
  choose(shown[at < 0 ? (direction > 0 ? 0 : shown.length - 1) : (at + direction + shown.length) % shown.length]);
}

// Sections with plots

function setUpSections() {
  const layers = Object.keys(page.kinds).length > 0;
  setUpTree();
  document.getElementById("controls").hidden = !layers;
  document.getElementById("histogram").hidden = !layers;
  fill("curves", make("h2", {}, t("curves")), make("p", { class: "quiet" }, t(page.steps ? "curves.hint" : "empty")),
    page.comparison ? make("p", { class: "quiet" }, t("compare.legend", page.comparison.other.id)) : null,
    page.steps ? make("div", { class: "bar" }, pick("loss axis", "axis", [["", t("axis.auto")], ["log", t("axis.log")], ["linear", t("axis.linear")]], state.axis),
      pick("smoothing", "smooth", [["", t("smooth.none")], ["yes", t("smooth.some")]], state.smooth)) : null,
    figure("curves"));
  fill("heat", make("h2", {}, t("heat")), make("div", { id: "heat-bar", class: "bar" }), layers ? make("p", { class: "quiet" }, t("heat.hint"), page.focus.own ? ` ${t("heat.culprit")}` : "") : null,
    make("p", { id: "heat-message", class: "quiet" }), figure("heat", "hatched"));
  fill("histogram", make("h2", {}, t("histogram"), " ", make("span", { id: "histogram-title", class: "site" })),
    make("p", { class: "quiet" }, t("histogram.hint")), make("p", { id: "place" }), make("p", { id: "histogram-message", class: "quiet" }),
    figure("histogram"), make("p", { id: "histogram-note", class: "quiet" }));
}

function pick(label, name, options, current) {
  return make("label", {}, t(label), make("select", { "data-pick": name, on: { change: (event) => update({ [name]: event.target.value }) } },
    options.map(([value, text]) => make("option", { value, selected: value === current }, text))));
}

// A figure has a name, words for who does not see it, keys, and can be taken along.
function figure(name, look = "") {
  const save = (form) => make("button", { class: "small", "aria-label": `${labelled(name)}${form}`, on: { click: () => saveFigure(name, form) } }, form);
  return make("div", {}, make("div", { id: `${name}-figure`, class: `figure ${look}`, role: "group", tabindex: "0", "aria-label": t(name), "aria-describedby": `${name}-words` }),
    make("p", { id: `${name}-words`, class: "unseen" }, figureWords(name)),
    make("div", { class: "bar save" }, save("PNG"), save("SVG"), save("CSV")));
}

function figureWords(name) {
  if (name !== "curves") return `${t(`${name}.hint`)} ${verdictSentence()}`;
  return Object.entries(page.curves).filter(([, curve]) => curve.values.length)
    .map(([key, curve]) => `${labelled(key)}${short(curve.values[0])} → ${short(curve.values.at(-1))}`).join("; ");
}

function download(name, address) {
  make("a", { href: address, download: `nanny-run-${page.run.id}-${name}` }).click();
}

async function saveFigure(name, form) {
  const place = document.getElementById(`${name}-figure`);
  const drawn = name === "histogram" ? { data: place.data, layout: { ...place.layout, images: [shown.picture(8)] } } : place; // a file has no style sheet to keep its pixels sharp
  if (form !== "CSV") return download(`${name}.${form.toLowerCase()}`, await Plotly.toImage(drawn, { format: form.toLowerCase(), width: place.clientWidth, height: place.clientHeight, scale: 2 }));
  return download(`${name}.csv`, `data:text/csv;charset=utf-8,${encodeURIComponent((await figureRows(name)).map((row) => row.map(csvCell).join(",")).join("\n"))}`);
}

const csvCell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : value);

async function figureRows(name) {
  if (name === "curves") return [["curve", "step", "value"], ...Object.entries(page.curves).flatMap(([key, curve]) => curve.steps.map((step, i) => [key, step, curve.values[i]]))];
  if (name === "heat") {
    const quantity = quantityShown();
    const matrix = await matrixOf(state.kind, quantity), columns = matrix.reach.length / 2, value = quantity === "headroom" ? "absmax" : quantity;
    return [["layer", "step", value], ...matrix.names.flatMap((layer, row) => [...Array(columns).keys()]
      .filter((column) => matrix.codes[row * columns + column]).map((column) => [layer, stepsOf(matrix, row, column).step, valueText(matrix.codes[row * columns + column])]))];
  }
  const { matrix } = shown, columns = matrix.reach.length / 2, order = (bin) => (bin === 0 ? "zero" : bin === matrix.bins - 1 ? "not finite" : matrix.lowest + bin - 1);
  return [["step", "binary order", "share"], ...[...Array(columns).keys()].flatMap((column) => [...Array(matrix.bins).keys()]
    .filter((bin) => matrix.codes[bin * columns + column]).map((bin) => [stepsOf(matrix, 0, column).step, order(bin), shareOf(matrix.codes[bin * columns + column])]))];
}

function drawControls() {
  const kinds = Object.keys(page.kinds);
  fill("controls", pick("quantity", "quantity", quantitiesOf(state.kind).map((name) => [name, t(`q.${name}`)]), quantityShown()),
    pick("kind", "kind", kinds.map((name) => [name, t(`k.${name}`)]), state.kind),
    pick("order", "order", ["forward", "risk"].map((name) => [name, t(`order.${name}`)]), state.order),
    pick("format", "format", page.formats.map((form) => [form.name, form.title]), formatChosen().name),
    make("input", { type: "search", value: state.filter, placeholder: t("filter layers"), "aria-label": t("filter layers"),
      on: { input: (event) => update({ filter: event.target.value }) } }));
}

// What is known about the chosen layer at the chosen step, in numbers.
async function describePlace() {
  const place = document.getElementById("place"), { kind, site, step } = state;
  if (!site || step === null || !page.kinds[kind]) return void (place.textContent = "");
  const row = rowOf(page.kinds[kind].names, site);
  if (row < 0) return void (place.textContent = "");
  const parts = [];
  let when = null, empty = false;
  for (const quantity of quantitiesOf(kind).filter((name) => name !== "absmax" || (isBackward(kind) && page.curves.scale))) {
    const matrix = await matrixOf(kind, quantity), column = columnAt(matrix, step);
    const code = matrix.codes[row * (matrix.reach.length / 2) + column];
    when = when ?? stepsOf(matrix, row, column);
    if (quantity === "headroom") empty = code === CODE.zero;
    if (quantity.startsWith("flushed") && (empty || formatChosen().name !== "fp16")) continue; // of zeros nothing is left to lose
    if (quantity === "flushed") empty = code === CODE.zero;
    if (code) parts.push(describe(code, quantity, kind));
  }
  const there = when && step >= when.first && step <= when.last; // else the nearest sample is another step's
  place.textContent = when ? `${there ? stepText(when) : t("nearest", stepText(when))}${colon()}${parts.join(" · ")}` : "";
}

// The processes of one job, one row each: who had it first is seen at a glance.
function drawRanks() {
  const place = document.getElementById("ranks"), { first, last } = page.steps || { first: 0, last: 1 };
  place.hidden = !page.ranks.length;
  if (place.hidden) return;
  const span = Math.max(1, last - first), culprit = page.verdict.culprit?.[3] ?? null;
  const rows = page.ranks.map((one) => {
    const shown = one.rank === page.run.rank, name = t("rank", one.rank);
    const link = CONFIG.live && !shown ? make("a", { href: `../../${encodeURIComponent(one.file)}/${one.run}/${location.search}` }, name) : make("b", {}, name);
    const marks = one.marks.map(([step, severity]) => make("button", {
      class: `mark ${severity}`, style: `left:${((100 * (step - first)) / span).toFixed(2)}%`, title: `${name} ${t("at step", step)}`,
      "aria-label": `${name}: ${t(`one.${severity}`)} ${t("at step", step)}`, on: { click: () => update({ step }) },
    }, SIGNS[severity]));
    const early = one.rank === culprit;
    return make("div", { class: `rank${shown ? " chosen" : ""}` }, make("span", { class: early ? "error" : "" }, link, early ? ` ◆ ${t("was first")}` : ""),
      make("div", { class: "strip" }, marks));
  });
  fill("ranks", make("h2", {}, t("ranks")), make("p", { class: "quiet" }, t("ranks.hint", first, last)), rows);
}

// What if, and the other run

function drawWhatif() {
  const { whatif } = page;
  document.getElementById("whatif").hidden = !whatif.formats;
  if (!whatif.formats) return;
  const word = (f) => (f.unknown ? ["not known", "warning", "?"] : !f.survives ? [!f.own ? "dies" : f.broken ? "died" : "went wrong", "error", "✕"]
    : f.with_losses ? ["survives losses", "warning", "▲"] : [f.own ? "survived" : "survives", "good", "✓"]);
  const many = (text) => whatif.formats.filter((f) => f.remarks.includes(text)).length > 1;
  const common = [...new Set(whatif.formats.flatMap((f) => f.remarks.filter(many)))];
  const scaled = whatif.formats.some((f) => f.best_scale !== null), heads = ["format", "outcome", ...(scaled ? ["best scale"] : []), "why"];
  const rows = whatif.formats.map((f) => {
    const [key, look, sign] = word(f), title = page.formats.find((form) => form.name === f.dtype).title;
    const why = f.reasons.length ? f.reasons : [f.verdict];
    return make("tr", {}, make("td", { class: "strong", "data-head": t("format") }, title), make("td", { class: `${look} whole`, "data-head": t("outcome") }, `${sign} ${t(key)}`),
      scaled ? make("td", { "data-head": t("best scale") }, f.best_scale === null ? "-" : powerOfTwo(f.best_scale)) : null,
      make("td", {}, why.map((text) => make("div", {}, rich(said(text)))), f.remarks.filter((text) => !many(text)).map((text) => make("div", { class: "quiet" }, rich(said(text))))));
  });
  const note = whatif.note === "long" ? t("whatif.long") : said(whatif.note);
  fill("whatif", make("h2", {}, t("whatif")), note ? make("p", { class: "quiet" }, rich(note), " ", make("code", {}, whatif.command)) : null,
    rows.length ? make("div", { class: "scroll" }, make("table", { class: "cards" }, make("thead", {}, make("tr", {},
      heads.map((key) => make("th", { scope: "col" }, t(key))))), make("tbody", {}, rows))) : null,
    common.length ? make("p", { class: "quiet" }, `${t("for all")} ${common.map(said).join(" · ")}`) : null);
}

function drawComparison() {
  const c = page.comparison;
  document.getElementById("comparison").hidden = !c;
  if (!c) return;
  const heads = ["layer", "kind", "parts at", "reference", "this run", "ratio"];
  const rows = c.layers.slice(0, 20).map((p) => make("tr", { class: "pick", on: { click: () => showPlace(p.step, p.name) } },
    [make("button", {}, shortened(p.name, 80)), t(`k.${p.kind}`), p.step, short(p.a), short(p.b), short(p.ratio)] // for who has no mouse
      .map((text, i) => make("td", { class: i > 1 ? "number" : i ? "" : "site", "data-head": t(heads[i]) }, text))));
  const [first, ...rest] = c.lines;
  fill("comparison", make("h2", {}, t("compare", c.other.id)),
    make("p", { class: c.parts ? "error strong" : "good strong" }, rich(said(first))), rest.map((line) => make("p", { class: "quiet" }, rich(said(line)))),
    rows.length ? make("div", { class: "scroll" }, make("table", { class: "cards" }, make("thead", {}, make("tr", {},
      heads.map((key) => make("th", { scope: "col" }, t(key))))),
      make("tbody", {}, rows))) : null,
    c.layers_parted > 20 ? make("p", { class: "quiet" }, t("more", c.layers_parted - 20)) : null);
}
