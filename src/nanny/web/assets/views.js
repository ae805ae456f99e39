"use strict";
// The three linked plots. Each draws from `page` (decoded data) and `state` (what is chosen), and reports clicks and zooms.

const SMALL = matchMedia("(max-width: 640px)").matches;
const LEFT = SMALL ? 76 : 168, RIGHT = SMALL ? 58 : 100, CELL = 2, MAP_ROWS = 60; // a phone's width is for the plot
const SETTINGS = { displaylogo: false, responsive: false, displayModeBar: false, doubleClick: false };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let linking = false;

function themed(layout) {
  const out = structuredClone(layout);
  out.paper_bgcolor = "rgba(0,0,0,0)";
  out.plot_bgcolor = colour("--plot");
  out.font = { ...out.font, color: colour("--text") };
  out.margin = { ...out.margin, l: LEFT, r: RIGHT };
  for (const [name, axis] of Object.entries(out)) {
    if (!/^[xy]axis\d*$/.test(name)) continue;
    axis.gridcolor = colour("--grid");
    axis.linecolor = colour("--line");
    axis.spikecolor = colour("--quiet");
    if (name.startsWith("x") && axis.fixedrange !== true) axis.range = rangeShown();
  }
  return out;
}

function rangeShown() {
  if (state.range) return state.range;
  const { first, last } = page.steps || { first: 0, last: 1 };
  const margin = Math.max(0.5, (last - first) * 0.008);
  return [first - margin, last + margin];
}

const verticalLine = (step) => ({
  type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color: colour("--mark"), width: 1.5 },
});
const chosenStep = () => (state.step === null ? [] : [verticalLine(state.step)]);

async function plot(place, data, layout) {
  const fresh = !place.data, lowest = Object.keys(layout).filter((name) => /^xaxis\d*$/.test(name)).at(place.id === "curves-figure" ? -1 : 0);
  layout[lowest] = { ...layout[lowest], title: { text: t("step axis"), standoff: 2, font: { size: 11 } } };
  await Plotly.react(place, data, layout, SETTINGS);
  if (!fresh) return;
  place.on("plotly_relayout", (event) => followZoom(event));
  place.on("plotly_doubleclick", () => update({ range: null }));
  place.on("plotly_unhover", hideTip);
}

function followZoom(event) {
  const key = Object.keys(event).find((name) => /^xaxis\d*\.range\[0\]$/.test(name));
  if (linking || !key) return;
  update({ range: [event[key], event[key.replace("[0]", "[1]")]] });
}

// Curves

function drawCurves() {
  const place = document.getElementById("curves-figure"), figure = page.figures.curves;
  if (!page.steps) return Promise.resolve();
  const layout = themed(figure.layout);
  for (const label of layout.annotations) {
    label.text = plain(t(label.name));
    if (SMALL) Object.assign(label, { xanchor: "left", xshift: 4, y: 1, yanchor: "bottom", font: { size: 11 } }); // no room beside the axis
  }
  layout.annotations.push(...lastValues(layout));
  if (!page.findings.some((finding) => finding.step !== null)) withoutMarks(layout);
  const loss = figure.data.find((trace) => trace.meta === "loss");
  if (loss) layout[(loss.yaxis || "y").replace("y", "yaxis")].type = isLossOnLog() ? "log" : "linear";
  for (const axis of Object.values(layout)) if (axis && axis.type === "log") Object.assign(axis, logTicks(axis, figure.data));
  layout.shapes = curveShapes();
  const data = figure.data.flatMap((trace) => {
    const own = { ...trace, ...curvePoints(trace.meta), ...lineLook(trace) };
    return state.smooth && SMOOTHED.includes(trace.meta) ? [{ ...own, opacity: 0.3, hoverinfo: "skip", hovertemplate: null }, { ...own, y: averaged(own.y) }] : [own];
  });
  return plot(place, data, layout).then(() => {
    if (place.dataset.ready) return;
    place.dataset.ready = "yes";
    place.on("plotly_click", (event) => {
      const index = event.points[0].customdata;
      if (typeof index === "number" && page.findings[index]) choose(index);
      else update({ step: event.points[0].x });
    });
  });
}

// Nothing was found, so nothing is marked: the curves take the row above them.
function withoutMarks(layout) {
  const top = layout.yaxis2.domain[1];
  for (const [name, axis] of Object.entries(layout)) if (/^yaxis\d+$/.test(name)) axis.domain = axis.domain.map((edge) => Math.min(1, edge / top));
  layout.height *= top;
  layout.yaxis.domain = [0.999, 1];
  if (SMALL) layout.margin.t = 20; // for the name of the first curve
}

const SMOOTHED = ["loss", "grad_norm"], MEMORY = 0.9;

// A running average of what is finite; a gap stays a gap.
function averaged(values) {
  let mean = NaN;
  return values.map((value) => (Number.isFinite(value) ? (mean = Number.isFinite(mean) ? MEMORY * mean + (1 - MEMORY) * value : value) : value));
}

// A loss that spans two orders of magnitude is a cliff on a linear axis.
function isLossOnLog() {
  if (state.axis) return state.axis === "log";
  const finite = [page.curves.loss, page.otherCurves.loss].flatMap((curve) => curve?.values ?? []).filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity), high = finite.reduce((a, b) => Math.max(a, b), 0);
  return low > 0 && high / low > 100;
}

function lineLook(trace) {
  return trace.line ? { line: { ...trace.line, color: colour(trace.meta.startsWith("other:") ? "--other" : "--own") } } : {};
}

// Ticks of a logarithmic axis that its row has room for; a loss scale is a power of two and is labelled as one.
function logTicks(axis, traces) {
  const own = traces.filter((trace) => trace.xaxis === axis.anchor && !`${trace.meta}`.includes(":") && trace.meta !== "skipped");
  const others = traces.filter((trace) => trace.xaxis === axis.anchor && `${trace.meta}`.startsWith("other:"));
  const values = [...own.map((trace) => page.curves[trace.meta]), ...others.map((trace) => page.otherCurves[trace.meta.slice(6)])]
    .flatMap((curve) => (curve ? curve.values : [])).filter((value) => value > 0 && Number.isFinite(value));
  const base = own.some((trace) => trace.meta === "scale") ? 2 : 10;
  if (!values.length) return {};
  const ends = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))].map((value) => Math.log2(value));
  const room = Math.max(0.5, (ends[1] - ends[0]) * 0.06), low = ends[0] - room, high = ends[1] + room;
  const orders = (high - low) / Math.log2(base), tickvals = [], ticktext = [];
  const every = Math.max(1, Math.ceil(orders / 4)), range = [low / Math.log2(10), high / Math.log2(10)];
  if (orders >= 2 || base === 2) {
    for (let power = Math.ceil(low / Math.log2(base)); power <= high / Math.log2(base); power += every) {
      tickvals.push(base ** power), ticktext.push(`${base}<sup>${power}</sup>`);
    }
  } else {
    for (let i = 0.5; i < 4; i++) tickvals.push(Number((2 ** (low + ((high - low) * i) / 4)).toPrecision(2)));
    ticktext.push(...tickvals.map(short));
  }
  return { tickmode: "array", tickvals, ticktext, range };
}

// The latest value of each curve: in the right margin, or above where that has no room for it.
function lastValues(layout) {
  return layout.annotations.filter((label) => page.curves[label.name]?.values.length).map((label) => {
    const value = page.curves[label.name].values.at(-1), text = label.name === "scale" ? powerOfTwo(value) : short(value);
    const look = Number.isFinite(value) ? "--text" : "--error";
    return { ...label, text, x: 1, ...(SMALL ? { xanchor: "right", xshift: 0 } : { xanchor: "left", xshift: 8 }), font: { size: SMALL ? 11 : 13, color: colour(look) } };
  });
}

function curvePoints(meta) {
  const [kind, name] = meta.includes(":") ? meta.split(":") : ["own", meta];
  if (kind === "finding") return findingPoints(name);
  const curve = (kind === "other" ? page.otherCurves : page.curves)[name];
  if (!curve) return { x: [], y: [] };
  if (name === "skipped") return skippedPoints(curve);
  if (kind === "bad") return badPoints(curve);
  const label = kind === "other" ? t("reference") : t(name);
  return { x: curve.steps, y: curve.values, hovertemplate: `${plain(label)} %{y:.4g}<extra></extra>` };
}

// A value that is not finite has no height: it is marked where the curve last was.
function badPoints(curve) {
  const x = [], y = [], text = [];
  let height = curve.values.find(Number.isFinite) ?? 1;
  const all = curve.values.reduce((sum, value) => sum + !Number.isFinite(value), 0), every = Math.ceil(all / 400) || 1;
  let seen = 0;
  curve.values.forEach((value, i) => {
    if (Number.isFinite(value)) height = value;
    else if (seen++ % every === 0) x.push(curve.steps[i]), y.push(height), text.push(short(value));
  });
  return { x, y, text, hovertemplate: "%{text}<extra></extra>" };
}

function skippedPoints(curve) {
  const scale = page.curves.scale, y = [];
  for (const step of curve.steps) {
    let i = 0;
    if (scale) i = Math.max(0, scale.steps.findLastIndex((other) => other <= step));
    y.push(scale ? scale.values[i] : 1);
  }
  return { x: curve.steps, y, hovertemplate: `${plain(t("skipped"))}<extra></extra>` };
}

function findingPoints(severity) {
  const height = { error: 2, warning: 1, info: 0 }[severity], x = [], y = [], customdata = [], text = [], seen = new Set();
  page.findings.forEach((finding, index) => {
    if (finding.severity !== severity || finding.step === null || seen.has(finding.step)) return;
    seen.add(finding.step);
    x.push(finding.step), y.push(height), customdata.push(index);
    text.push(plain(`${finding.code} ${shortened(finding.site, 60)}`));
  });
  return { x, y, customdata, text, hovertemplate: "%{text}<extra></extra>" };
}

function curveShapes() {
  const shapes = chosenStep(), loss = page.curves.loss;
  for (const [from, until] of loss ? badStretches(loss) : []) {
    shapes.push({
      type: "rect", xref: "x", yref: "paper", x0: from, x1: until, y0: 0, y1: 1, line: { width: 0 }, fillcolor: colour("--error"), opacity: 0.08, layer: "below",
    });
  }
  const parted = page.comparison && page.comparison.first;
  if (parted) shapes.push({ ...verticalLine(parted.step), line: { color: colour("--warning"), width: 1.5, dash: "dash" } });
  return shapes;
}

// From where to where a curve is not finite, as often as that is; of very many stretches, neighbours become one.
function badStretches({ steps, values }) {
  const out = [];
  values.forEach((value, i) => {
    if (Number.isFinite(value)) return;
    const until = i + 1 < steps.length ? steps[i + 1] : steps[i] + 0.5;
    if (out.length && out.at(-1)[1] >= steps[i]) out.at(-1)[1] = until;
    else out.push([steps[i], until]);
  });
  while (out.length > MOST_STRETCHES) for (let i = out.length - 1; i > 0; i -= 2) out[i - 1][1] = out[i][1], out.splice(i, 1);
  return out;
}

// Heat map

const MOST_STRETCHES = 60;
const SHARES = ["flushed", "flushed_energy", "lost", "error"];

function quantitiesOf(kind) {
  const own = Object.keys((page.kinds[kind] || { quantities: {} }).quantities);
  const derived = own.includes("absmax") ? ["absmax", "headroom"] : [];
  return [...derived, ...own.filter((name) => name !== "absmax")];
}

function quantityShown() {
  const all = quantitiesOf(state.kind);
  return all.includes(state.quantity) ? state.quantity : all[0];
}

// Most quantities share the columns of their kind; some were taken at fewer steps and have their own.
async function matrixOf(kind, quantity) {
  const spec = page.kinds[kind], values = spec.quantities[quantity === "headroom" ? "absmax" : quantity];
  const { steps, bounds, reach } = values.steps ? values : spec;
  const parts = await Promise.all([steps, bounds, reach, values.codes, values.at].map((item) => item && decoded(item)));
  const matrix = { names: spec.names, dtypes: spec.dtypes, steps: parts[0], bounds: parts[1], reach: parts[2], codes: parts[3], at: parts[4] };
  return quantity === "headroom" && isBackward(kind) ? scaled(matrix) : matrix;
}

// Gradients are recorded without the loss scale, but it is with it that they must fit into a format.
const isBackward = (kind) => kind === "grad" || kind === "output_grad";

function scaleBitsAt(step) {
  const scale = page.curves.scale;
  if (!scale || !scale.steps.length) return 0;
  const bits = Math.floor(Math.log2(scale.values[Math.max(0, scale.steps.findLastIndex((other) => other <= step))]));
  return Number.isFinite(bits) ? bits : 0;
}

function scaled(matrix) {
  const columns = matrix.reach.length / 2, codes = matrix.codes.slice();
  for (let column = 0; column < columns; column++) {
    const shift = scaleBitsAt(matrix.steps[matrix.bounds[column]]) * CODE.perOctave;
    if (!shift) continue;
    for (let at = column; at < codes.length; at += columns) {
      if (isFiniteCode(codes[at])) codes[at] = Math.min(CODE.infinite - 1, Math.max(CODE.zero + 1, codes[at] + shift));
    }
  }
  return { ...matrix, codes };
}

// How codes become levels of colour, and the ticks that explain them.
function scaleOf(quantity, matrix) {
  let low, high, ticks;
  if (quantity === "headroom") {
    const top = formatChosen().logMax;
    low = codeOf(top - 24), high = codeOf(top);
    ticks = [24, 20, 16, 12, 8, 4, 0].map((bits) => [codeOf(top - bits), bits === 0 ? "≤ 0" : bits === 24 ? "≥ 24" : String(bits)]);
  } else if (quantity === "ratio") {
    low = codeOf(-6), high = codeOf(6);
    ticks = [-6, -4, -2, 0, 2, 4, 6].map((bits) => [codeOf(bits), bits === 0 ? "1" : bits < 0 ? `1/${2 ** -bits}` : String(2 ** bits)]);
  } else if (SHARES.includes(quantity)) {
    low = codeOf(Math.log2(1e-4)), high = codeOf(0);
    ticks = [1e-4, 1e-3, 0.01, 0.1, 1].map((share) => [codeOf(Math.log2(share)), percent(share)]);
  } else {
    [low, high] = finiteSpan(matrix.codes);
    ticks = decades(low, high);
  }
  const stretch = (LEVEL.high - LEVEL.low) / (high - low);
  const level = (code) => {
    if (code === 0) return NaN;
    if (code === CODE.zero) return LEVEL.zero;
    return code >= CODE.infinite ? LEVEL.bad : Math.min(LEVEL.high, Math.max(LEVEL.low, LEVEL.low + (code - low) * stretch));
  };
  return { level, ticks: ticks.map(([code, text]) => [level(code), text]) };
}

function finiteSpan(codes) {
  let low = Infinity, high = -Infinity;
  for (const code of codes) {
    if (!isFiniteCode(code)) continue;
    if (code < low) low = code;
    if (code > high) high = code;
  }
  if (low > high) return [codeOf(-1), codeOf(1)];
  const room = Math.max(0, 4 * CODE.perOctave - (high - low)) / 2;
  return [low - room, high + room];
}

function decades(low, high) {
  const ten = Math.log2(10), first = Math.ceil(log2Of(low) / ten), last = Math.floor(log2Of(high) / ten);
  const every = Math.max(1, Math.ceil((last - first + 1) / 8)), out = [];
  for (let power = first; power <= last; power += every) out.push([codeOf(power * ten), `10<sup>${power}</sup>`]);
  return out.length ? out : [low, high].map((code) => [code, short(2 ** log2Of(code))]);
}

let heat = null; // what the map shows now: matrix, rows, grid, range

async function drawHeat() {
  const place = document.getElementById("heat-figure"), message = document.getElementById("heat-message");
  const quantity = quantityShown();
  message.textContent = quantity ? "" : t("no layers");
  const wanted = state.filter.toLowerCase(), names = page.kinds[state.kind]?.names ?? [];
  const rows = [...names.keys()].filter((row) => names[row].toLowerCase().includes(wanted));
  offerMap(rows.length);
  place.hidden = !quantity || (rows.length > MAP_ROWS && !state.map);
  place.parentElement.querySelector(".save").hidden = place.hidden;
  if (place.hidden) return void (heat = null);
  const matrix = await matrixOf(state.kind, quantity);
  if (!rows.length) message.textContent = t("no match", state.filter);
  const layout = themed(page.figures.heat.layout);
  layout.height = Math.min(620, Math.max(230, 60 + 18 * rows.length));
  const range = rangeShown(), width = Math.max(50, Math.floor((place.clientWidth - LEFT - RIGHT) / CELL));
  const grid = pooledTo(matrix, rows, range, width, Math.floor((layout.height - 42) / CELL));
  const scale = scaleOf(quantity, matrix);
  heat = { matrix, rows, grid, range, quantity, kind: state.kind };
  const [trace, crosses] = page.figures.heat.data;
  const bar = { ...trace.colorbar, ...barTicks(scale.ticks, layout.height - 42), tickfont: { size: 11 } };
  const z = Array.from({ length: grid.lines }, (_, line) =>
    Float32Array.from(grid.codes.subarray(line * width, (line + 1) * width), scale.level));
  const data = [
    { ...trace, z, x0: range[0] + grid.pixel / 2, dx: grid.pixel, y0: (grid.perRow - 1) / 2, dy: grid.perRow, colorbar: bar },
    { ...crosses, ...crossPoints(grid, range, layout.height - 42) },
  ];
  layout.yaxis = { ...layout.yaxis, ...layerTicks(matrix, rows, layout.height - 42), range: [rows.length - 0.5, -0.5] };
  layout.shapes = heatShapes();
  layout.annotations = culpritOnHeat(matrix, rows);
  await plot(place, data, layout);
  if (!place.dataset.ready) {
    place.dataset.ready = "yes";
    place.on("plotly_hover", (event) => tipOverHeat(event));
    place.on("plotly_click", (event) => {
      const cell = cellUnder(event.points[0]);
      if (cell) update({ step: cell.step, site: heat.matrix.names[cell.row], finding: null });
    });
  }
}

// Of many layers a map is a barcode: the tree tells more, and the map is there for who asks.
function offerMap(count) {
  const text = t(state.map ? "map.hide" : "map.show", count);
  fill("heat-bar", count > MAP_ROWS ? make("button", { id: "map", on: { click: () => update({ map: state.map ? "" : "all" }) } }, text) : null);
}

// Ticks of the colour bar, without those that would stand on top of one another.
function barTicks(ticks, height) {
  const least = (13 * LEVEL.bad) / height, kept = [[3, plain(t("zero"))]];
  for (const tick of ticks) if (tick[0] - kept.at(-1)[0] >= least && 251 - tick[0] >= least) kept.push(tick);
  kept.push([251, plain(t("bad"))]);
  return { tickvals: kept.map(([at]) => at), ticktext: kept.map(([, text]) => text) };
}

// Crosses on what is not finite, some pixels apart.
function crossPoints(grid, range, height) {
  const x = [], y = [], across = Math.round(16 / CELL), down = Math.max(1, Math.round((14 * grid.lines) / height));
  const lastLine = new Int32Array(grid.width).fill(-down);
  for (let line = 0; line < grid.lines; line++) {
    for (let column = 0; column < grid.width; column++) {
      if (grid.codes[line * grid.width + column] < CODE.infinite || line - lastLine[column] < down) continue;
      x.push(range[0] + (column + 0.5) * grid.pixel), y.push(line * grid.perRow + (grid.perRow - 1) / 2);
      lastLine.fill(line, Math.max(0, column - across + 1), column + across);
    }
  }
  return { x, y };
}

function layerTicks(matrix, rows, height) {
  const every = Math.max(1, Math.ceil((rows.length * 14) / height)), tickvals = [], ticktext = [];
  for (let i = 0; i < rows.length; i += every) {
    tickvals.push(i), ticktext.push(plain(tailOf(matrix.names[rows[i]], SMALL ? 10 : 23)));
  }
  return { tickmode: "array", tickvals, ticktext, tickfont: { size: 11 } };
}

function heatShapes() {
  const shapes = chosenStep(), row = heat ? heat.rows.indexOf(rowOf(heat.matrix.names, state.site)) : -1;
  if (row >= 0) {
    const edge = { color: colour("--mark"), width: 1.5 };
    shapes.push({ type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line: edge });
  }
  return shapes;
}

// Where the verdict points, whether a sample was taken there or not: an examined step is none.
function culpritOnHeat(matrix, rows) {
  const { kind, site, step, own } = page.focus, row = rows.indexOf(matrix.names.indexOf(site));
  if (!own || kind !== state.kind || step === null || row < 0) return [];
  return [{ x: step, y: row, text: "◆", showarrow: false, font: { size: 15, color: colour("--error") }, bgcolor: colour("--card"), borderpad: 0, opacity: 0.95 }];
}

function cellUnder(point) {
  if (!heat) return null;
  const x = Math.floor((point.x - heat.range[0]) / heat.grid.pixel), line = Math.floor((point.y + 0.5) / heat.grid.perRow);
  return worstUnder(heat.matrix, heat.rows, heat.range, heat.grid, x, line);
}

function tipOverHeat(event) {
  const cell = cellUnder(event.points[0]);
  if (!cell) return hideTip();
  const lines = [heat.matrix.names[cell.row], stepText(cell), describe(cell.code, heat.quantity, heat.kind)];
  if (heat.matrix.dtypes[cell.row]) lines.push(heat.matrix.dtypes[cell.row]);
  showTip(event.event, lines);
}

function stepText(cell) {
  return cell.first === cell.last ? t("step", cell.step) : `${t("step", cell.step)} (${t("steps from to", cell.first, cell.last)})`;
}

function describe(code, quantity, kind) {
  const withScale = isBackward(kind) && page.curves.scale ? "q.scaled" : "q.absmax";
  const name = t(quantity === "headroom" ? withScale : `q.${quantity}`);
  const text = `${name}${colon()}${SHARES.includes(quantity) && isFiniteCode(code) ? percent(2 ** log2Of(code)) : valueText(code)}`;
  if (quantity !== "headroom" || !isFiniteCode(code)) return text;
  const form = formatChosen(), bits = form.logMax - log2Of(code);
  return `${text}${language === "zh" ? "，" : ", "}${t(bits < 0 ? "bits beyond" : "bits to overflow", Math.abs(bits).toFixed(1), form.title)}`;
}
