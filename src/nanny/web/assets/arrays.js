"use strict";
// Reading packed arrays, naming numbers, and worst-wins pooling to the pixels at hand. See web/arrays.py for the codes.

const CONFIG = JSON.parse(document.getElementById("config").textContent);
const CODE = CONFIG.codes, LEVEL = CONFIG.levels;
const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const decodedArrays = new WeakMap();

function decoded(spec) {
  if (!decodedArrays.has(spec)) decodedArrays.set(spec, decode(spec));
  return decodedArrays.get(spec);
}

async function decode(spec) {
  const planes = new Uint8Array(await inflated(spec.deflate));
  const size = TYPES[spec.dtype].BYTES_PER_ELEMENT, count = planes.length / size;
  if (size === 1) return planes;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    for (let i = 0; i < count; i++) bytes[i * size + plane] = planes[plane * count + i];
  }
  return new TYPES[spec.dtype](bytes.buffer);
}

const log2Of = (code) => code / CODE.perOctave - CODE.offset;
const codeOf = (log2) => (log2 + CODE.offset) * CODE.perOctave;
const isFiniteCode = (code) => code > CODE.zero && code < CODE.infinite;

function valueText(code) {
  if (code === 0) return t("not sampled");
  if (code === CODE.zero) return "0";
  if (code === CODE.nan) return "NaN";
  return code === CODE.infinite ? "Inf" : short(2 ** log2Of(code));
}

function short(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "string") return value.replace("Infinity", "Inf");
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const text = Number(value.toPrecision(3));
  return Math.abs(text) >= 1e5 || Math.abs(text) < 1e-3 ? text.toExponential().replace("e+", "e") : String(text);
}

function percent(share) {
  if (share === 0) return "0 %";
  return share < 1e-4 ? "<0.01 %" : `${Number((100 * share).toPrecision(3))} %`;
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const twoTo = (power) => `2${[...String(power)].map((letter) => SUPERSCRIPTS[letter]).join("")}`;
const powerOfTwo = (value) => (value > 0 && Number.isInteger(Math.log2(value)) ? twoTo(Math.log2(value)) : short(value));

function shortened(text, width) {
  if (text.length <= width) return text;
  const head = Math.floor((width - 1) / 3);
  return `${text.slice(0, head)}…${text.slice(text.length - (width - 1 - head))}`;
}

// Of a layer's name the end tells it apart; it begins with a whole part where one begins nearby.
function tailOf(text, width) {
  const from = text.length - width + 1, dot = text.indexOf(".", from - 1);
  return text.length <= width ? text : `…${text.slice(dot >= 0 && dot < from + width / 2 ? dot + 1 : from)}`;
}

// Plotly reads a little HTML in texts; names of layers are not meant as any.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\s+/g, " ");

// From which cell to which a column is drawn: over its own steps, as wide as an eye needs, and never over steps nobody looked at.
const MARK = 3; // cells
function cellsOf(matrix, column, range, width) {
  const { reach, steps, bounds } = matrix, pixel = (range[1] - range[0]) / width;
  const start = reach[2 * column], next = 2 * column + 2 < reach.length ? reach[2 * column + 2] : Infinity;
  const own = steps[bounds[column + 1] - 1] + 0.5, end = Math.min(reach[2 * column + 1], next, Math.max(own, start + MARK * pixel));
  const from = Math.max(0, Math.floor((start - range[0]) / pixel + 1e-6));
  return end <= range[0] ? [0, 0] : [from, Math.min(width, Math.max(from + 1, Math.ceil((end - range[0]) / pixel - 1e-6)))];
}

// The worst code of each pixel: `matrix` has codes [rows, columns] and where its columns reach on the step axis.
function pooledTo(matrix, rows, range, width, height) {
  const columns = matrix.reach.length / 2, perRow = Math.max(1, Math.ceil(rows.length / height));
  const lines = Math.ceil(rows.length / perRow), pixel = (range[1] - range[0]) / width;
  const out = new Uint16Array(lines * width);
  for (let column = 0; column < columns; column++) {
    const [from, until] = cellsOf(matrix, column, range, width);
    if (until <= from) continue;
    for (let i = 0; i < rows.length; i++) {
      const code = matrix.codes[rows[i] * columns + column], start = Math.floor(i / perRow) * width;
      if (code === 0) continue;
      for (let x = start + from; x < start + until; x++) if (code > out[x]) out[x] = code;
    }
  }
  return { codes: out, width, lines, perRow, pixel };
}

// The true worst cell under a pixel: row, column, step and code.
function worstUnder(matrix, rows, range, grid, x, line) {
  const columns = matrix.reach.length / 2;
  let best = null;
  for (let column = 0; column < columns; column++) {
    const [from, until] = cellsOf(matrix, column, range, grid.width);
    if (x < from || x >= until) continue;
    for (let i = line * grid.perRow; i < Math.min((line + 1) * grid.perRow, rows.length); i++) {
      const code = matrix.codes[rows[i] * columns + column];
      if (best === null || code > best.code) best = { row: rows[i], column, code };
    }
  }
  return best && { ...best, ...stepsOf(matrix, best.row, best.column) };
}

function stepsOf(matrix, row, column) {
  const columns = matrix.reach.length / 2, first = matrix.bounds[column], end = matrix.bounds[column + 1];
  const at = matrix.at ? matrix.at[row * columns + column] : 0;
  return { step: matrix.steps[Math.min(first + at, end - 1)], first: matrix.steps[first], last: matrix.steps[end - 1] };
}

// The column that holds a step, or else the nearest one.
function columnAt(matrix, step) {
  let found = 0;
  const columns = matrix.reach.length / 2;
  for (let column = 0; column < columns; column++) if (matrix.steps[matrix.bounds[column]] <= step) found = column;
  const last = matrix.steps[matrix.bounds[found + 1] - 1], next = found + 1 < columns ? matrix.steps[matrix.bounds[found + 1]] : Infinity;
  return next - step < step - last ? found + 1 : found;
}
