"use strict";
// Exponent histogram of the chosen layer over time, with the ends of the formats drawn in.

let shown = null; // what the histogram shows now: its matrix, the lowest and highest order, the bars, and what frame they stand in

// The same layer of the run that this one is compared with, or nothing.
async function otherMatrix(kind, site) {
  if (!page.comparison) return null;
  if (CONFIG.live) {
    const spec = await ask("api/histogram", { kind, site, of: "reference" }).catch(() => null);
    return spec && spec.shares ? layerMatrix({ spec, row: 0 }) : null;
  }
  const spec = page.comparison.histograms[kind], row = spec ? rowOf(spec.names, site) : -1;
  return row < 0 ? null : layerMatrix({ spec, row });
}

async function histogramSpec(kind, site) {
  const names = page.kinds[kind]?.names ?? [], row = rowOf(names, site), name = names[row];
  if (row < 0) return null;
  const spec = CONFIG.live ? await ask("api/histogram", { kind, site: name }) : page.histograms[kind];
  return spec?.shares ? { spec, row: CONFIG.live ? 0 : row, name } : null;
}

// One row of codes per binary order; the first row is for zeros, the last for what is not finite.
async function layerMatrix({ spec, row }) {
  const [steps, bounds, reach, shares] = await Promise.all([spec.steps, spec.bounds, spec.reach, spec.shares].map(decoded));
  const columns = reach.length / 2, bins = spec.highest - spec.lowest + 3;
  const codes = new Uint16Array(bins * columns);
  for (let column = 0; column < columns; column++) {
    for (let bin = 0; bin < bins; bin++) codes[bin * columns + column] = shares[(row * columns + column) * bins + bin];
  }
  return { steps, bounds, reach, codes, at: null, bins, lowest: spec.lowest, highest: spec.highest };
}

const shareOf = (code) => (code ? 2 ** ((code - 255) / 18) : 0);

async function drawHistogram() {
  const place = document.getElementById("histogram-figure"), message = document.getElementById("histogram-message");
  const wanted = state.site, kind = state.kind;
  const found = wanted ? await histogramSpec(kind, wanted) : null;
  if (state.site !== wanted || state.kind !== kind) return; // something else was chosen while this was on its way
  document.getElementById("histogram-title").textContent = found ? `${found.name} · ${t(`k.${kind}`)}` : "";
  place.hidden = !found;
  message.textContent = found ? "" : wanted ? t("no histogram", shortened(wanted, 200), t("never traced")) : t("choose");
  if (!found) return;
  const matrix = await layerMatrix(found), other = await otherMatrix(kind, found.name), bits = scaleBits(kind), form = formatChosen();
  const span = orderSpan(matrix, form, bits), range = rangeShown(), bars = barsAt(matrix, span);
  const layout = themed(page.figures.histogram.layout), inside = place.clientWidth - LEFT - 10, wide = place.clientWidth - LEFT - RIGHT;
  layout.margin.r = 10;
  layout.xaxis.domain = [0, wide / inside];
  layout.xaxis2.domain = [(wide + 8) / inside, 1];
  layout.yaxis = { ...layout.yaxis, ...orderTicks(span), range: [span.zero - 1, span.bad + 1] };
  const edges = borders(form, bits, span);
  layout.annotations = [...edges.annotations, ...whatFp32Has(found.name, kind, bits, span, wide)];
  const frame = JSON.stringify(layout), stands = place.dataset.ready && shown?.frame === frame, columns = Math.max(50, Math.floor(wide / CELL));
  const rows = span.bad - span.zero + 1, beside = other ? barsAt(other, span) : null;
  const picture = (tall) => histogramImage(matrix, range, columns, rows, span, tall);
  const over = { images: [picture(1)], shapes: [...edges.shapes, ...chosenStep(), ...barShapes(bars, beside)] };
  shown = { matrix, span, bars, beside, frame, picture };
  document.getElementById("histogram-note").textContent = [noteOn(form, bits, span), other ? t("compare.bars", page.comparison.other.id) : ""].filter(Boolean).join(" · ");
  // What the eye sees lies over the traces, which are for the mouse: it changes alone, and spares the axes.
  if (stands) return Plotly.relayout(place, over);
  const [heat, bar] = page.figures.histogram.data, heights = Array.from({ length: rows }, (_, i) => span.zero + i), pixel = (range[1] - range[0]) / columns;
  const data = [
    { ...heat, z: heights.map(() => new Uint8Array(columns)), x0: range[0] + pixel / 2, dx: pixel, y0: span.zero, dy: 1 },
    { ...bar, x: heights.map(() => 1), y: heights },
  ];
  await plot(place, data, { ...layout, ...over });
  if (place.dataset.ready) return;
  place.dataset.ready = "yes";
  place.on("plotly_hover", tipOverHistogram);
  place.on("plotly_click", (event) => event.points[0].data.meta === "heat" && update({ step: nearestStep(event.points[0].x) }));
}

// `tall` pixels per order, from the not finite at the top down to the zeros.
function histogramImage(matrix, range, columns, rows, span, tall) {
  const { bins, lowest } = matrix, { codes } = pooledTo(matrix, [...Array(bins).keys()], range, columns, bins);
  const stretch = (LEVEL.high - LEVEL.low) / 254, canvas = make("canvas", { width: columns, height: rows * tall });
  paint(canvas, (x, y) => {
    const row = Math.floor(y / tall), end = row === 0 ? bins - 1 : row === rows - 1 ? 0 : null, bin = end ?? span.bad - row - lowest + 0.5;
    if (end === null && (bin < 1 || bin > bins - 2)) return NaN;
    const code = codes[bin * columns + x];
    return !code ? NaN : end === null ? LEVEL.low + (code - 1) * stretch : end ? LEVEL.bad : LEVEL.zero;
  });
  const [left, right] = range;
  return { source: canvas.toDataURL(), xref: "x", yref: "y", x: left, sizex: right - left, y: span.bad + 0.5, sizey: rows, sizing: "stretch", layer: "above" };
}

// The chosen step's own distribution, that of the other run as an outline, and what the longest bar stands for.
function barShapes(bars, beside) {
  const longest = Math.max(...bars.x, ...(beside?.x ?? []), 0.01), shape = { type: "path", xref: "x2", yref: "y2" };
  const own = bars.y.map((y, i) => `M0,${y - 0.47}H${bars.x[i] / longest}V${y + 0.47}H0Z`).join("");
  const outline = beside && `M0,${beside.y[0] - 0.5}${beside.y.map((y, i) => `H${beside.x[i] / longest}V${y + 0.5}`).join("")}`;
  const label = { text: `${Math.round(100 * longest)} %`, textposition: "middle right", font: { size: 10 }, padding: 0 };
  return [{ ...shape, path: own, fillcolor: colour("--own"), line: { width: 0 } },
    ...(beside ? [{ ...shape, path: outline, line: { color: colour("--other"), width: 2, dash: "dot" } }] : []),
    { type: "rect", xref: "x2", yref: "paper", x0: 0, x1: 1, y0: -0.05, y1: 0, line: { width: 0 }, label }];
}

// From where to where the picture reaches: all values, and the ends of FP16 and the chosen format if they are not far away.
function orderSpan(matrix, form, bits) {
  let low = matrix.lowest, high = matrix.highest + 1;
  const { reach, codes } = matrix, columns = reach.length / 2;
  const filled = (bin) => codes.subarray(bin * columns, (bin + 1) * columns).some(Boolean);
  while (low < high - 2 && !filled(low - matrix.lowest + 1)) low++;
  while (high > low + 2 && !filled(high - matrix.lowest)) high--;
  const far = 40;
  for (const { top, flush } of [form, page.formats.find((other) => other.name === "fp16")]) {
    if (top - bits - high < far) high = Math.max(high, top - bits + 1);
    if (low - (flush - bits) < far) low = Math.min(low, flush - bits - 1);
  }
  return { low, high, zero: low - 1.5, bad: high + 1.5 };
}

function orderTicks(span) {
  const every = Math.max(2, Math.ceil((span.high - span.low) / 12 / 2) * 2), tickvals = [span.zero], ticktext = [plain(t("zero"))];
  for (let order = Math.ceil(span.low / every) * every; order <= span.high; order += every) {
    tickvals.push(order), ticktext.push(`2<sup>${order}</sup>`);
  }
  tickvals.push(span.bad), ticktext.push(plain(t("bad")));
  return { tickmode: "array", tickvals, ticktext };
}

// The number that the verdict is about: what the operation gives in FP32, where the format ends.
function whatFp32Has(site, kind, bits, span, wide) {
  const { expected, said: text, op, step } = page.focus, height = Math.log2(Math.abs(Number(expected)));
  if (site !== page.focus.site || kind !== page.focus.kind || !Number.isFinite(height) || height > span.high + 8) return [];
  const [from, until] = rangeShown(), early = wide * (step - from) < 120 * (until - from); // no room on the left
  return [{
    x: step, y: Math.min(height, span.high), text: plain(t("fp32 has", op, text)), showarrow: true, arrowhead: 2, ax: early ? 70 : -70, ay: 18,
    arrowcolor: colour("--error"), font: { size: 11, color: colour("--error") }, bgcolor: colour("--card"), opacity: 0.95,
  }];
}

// For gradients the ends of a format lie lower by the bits of the loss scale.
function scaleBits(kind) {
  return isBackward(kind) ? scaleBitsAt(state.step === null ? Infinity : state.step) : 0;
}

function borders(form, bits, span) {
  const places = new Map(), shapes = [], annotations = [];
  for (const other of page.formats) {
    for (const [what, key] of [["overflows", "top"], ["subnormal", "normal"], ["flushes", "flush"]]) {
      if (key === "normal" && other.name !== form.name) continue;
      const at = other[key] - bits;
      if (at < span.low || at > span.high) continue;
      if (!places.has(at)) places.set(at, { names: [], what, main: false });
      const entry = places.get(at);
      if (other.name === form.name) entry.main = true, entry.what = what, entry.names.unshift(other.title);
      else entry.names.push(other.title);
    }
  }
  for (const [at, entry] of places) {
    const line = { color: colour(entry.main ? "--error" : "--quiet"), width: entry.main ? 1.5 : 1, dash: entry.main ? "dash" : "dot" };
    shapes.push({ type: "line", xref: "x domain", yref: "y", x0: 0, x1: 1, y0: at, y1: at, line });
    annotations.push({
      xref: "x domain", yref: "y", x: entry.main ? 0.004 : 0.996, xanchor: entry.main ? "left" : "right", y: at, yanchor: "bottom",
      text: plain(t(entry.what, entry.names.join(", "))), showarrow: false,
      font: { size: 11, color: colour(entry.main ? "--error" : "--quiet") }, bgcolor: colour("--card"), opacity: 0.9, borderpad: 1,
    });
  }
  const zone = (from, until, opacity) => from < until && shapes.push({
    type: "rect", xref: "x domain", yref: "y", x0: 0, x1: 1, y0: from, y1: until, line: { width: 0 }, layer: "above",
    fillcolor: colour("--error"), opacity,
  });
  zone(Math.max(form.top - bits, span.low), span.high + 0.5, 0.1);
  zone(span.low - 0.5, Math.min(form.flush - bits, span.high), 0.1);
  return { shapes, annotations };
}

function noteOn(form, bits, span) {
  const out = [];
  if (bits) out.push(t("scaled", twoTo(bits)));
  if (form.top - bits > span.high && form.flush - bits < span.low) out.push(t("outside", form.title, twoTo(form.top), twoTo(form.flush)));
  return out.join(" · ");
}

function barsAt(matrix, span) {
  const columns = matrix.reach.length / 2;
  const column = columnAt(matrix, state.step === null ? Infinity : state.step), x = [], y = [];
  for (let bin = 0; bin < matrix.bins; bin++) {
    x.push(shareOf(matrix.codes[bin * columns + column]));
    y.push(bin === 0 ? span.zero : bin === matrix.bins - 1 ? span.bad : matrix.lowest + bin - 0.5);
  }
  return { x, y };
}

function tipOverHistogram(event) {
  const point = event.points[0];
  if (point.data.meta !== "heat") {
    return showTip(event.event, [orderText(point.y), t("share", percent(shown.bars.x[shown.bars.y.indexOf(point.y)] ?? 0))]);
  }
  const { matrix, span } = shown, columns = matrix.reach.length / 2, step = nearestStep(point.x), column = columnAt(matrix, step);
  const bin = point.y <= span.zero + 0.1 ? 0 : point.y >= span.bad - 0.1 ? matrix.bins - 1 : Math.round(point.y - 0.5) - matrix.lowest + 1;
  const code = bin >= 0 && bin < matrix.bins ? matrix.codes[bin * columns + column] : 0;
  return showTip(event.event, [orderText(point.y), stepText(stepsOf(matrix, 0, column)), t("share", percent(shareOf(code)))]);
}

function orderText(height) {
  if (height <= shown.span.zero + 0.1) return t("zero");
  if (height >= shown.span.bad - 0.1) return t("bad");
  const order = Math.round(height - 0.5);
  return `${twoTo(order)} … ${twoTo(order + 1)} (${short(2 ** order)} … ${short(2 ** (order + 1))})`;
}

function nearestStep(x) {
  const { steps } = shown.matrix;
  let best = steps[0];
  for (const step of steps) if (Math.abs(step - x) < Math.abs(best - x)) best = step;
  return best;
}
