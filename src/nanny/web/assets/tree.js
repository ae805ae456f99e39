"use strict";
// The model as a tree in forward order: how near each part came to the end of the format, and where the first bad number was born.

const TREE_ROW = 26, TREE_MOST = 22, TREE_STRIP = 180, TREE_OPEN = 60;
let tree = null; // the parts of the chosen kind with what is known of them, and how they are shown

// One node per part of a name; a chain of single parts that have no numbers of their own is one node.
function treeOf(names) {
  const root = { path: "", label: "", row: -1, kids: [], parent: null }, byPath = new Map([["", root]]);
  const nodeAt = (path) => {
    if (byPath.has(path)) return byPath.get(path);
    const cut = path.lastIndexOf("."), parent = nodeAt(cut < 0 ? "" : path.slice(0, cut));
    const node = { path, label: path.slice(cut + 1), row: -1, kids: [], parent };
    parent.kids.push(node);
    byPath.set(path, node);
    return node;
  };
  names.forEach((name, row) => (nodeAt(name).row = row));
  const joined = (node) => {
    while (node.parent && node.row < 0 && node.kids.length === 1) {
      const only = node.kids[0];
      Object.assign(node, { path: only.path, label: `${node.label}.${only.label}`, row: only.row, kids: only.kids });
    }
    node.kids.forEach((kid) => ((kid.parent = node), joined(kid)));
    return node;
  };
  return joined(root);
}

// Worst of each row over the run: the largest finite code, and the first step at which it was not finite.
function rowFacts(matrix) {
  const columns = matrix.reach.length / 2, facts = [];
  for (let row = 0; row < matrix.names.length; row++) {
    let peak = 0, bad = null;
    for (let column = 0; column < columns; column++) {
      const code = matrix.codes[row * columns + column];
      if (code >= CODE.infinite) bad = bad ?? stepsOf(matrix, row, column).step;
      else if (code > peak) peak = code;
    }
    facts.push({ peak, bad });
  }
  return facts;
}

// Largest code of everything below each prefix, of another kind of site.
async function worstBelow(kind, quantity) {
  if (!page.kinds[kind]?.quantities[quantity]) return new Map();
  const matrix = await matrixOf(kind, quantity), facts = rowFacts(matrix), out = new Map();
  matrix.names.forEach((name, row) => {
    const code = facts[row].peak || (facts[row].bad === null ? 0 : CODE.nan); // what it was before it broke says more
    for (let path = name; ; path = path.slice(0, path.lastIndexOf("."))) {
      if (code > (out.get(path) ?? -1)) out.set(path, code);
      if (!path.includes(".")) break;
    }
  });
  return out;
}

async function makeTree() {
  const kind = state.kind, matrix = await matrixOf(kind, "headroom"), facts = rowFacts(matrix), root = treeOf(matrix.names);
  const [gradients, errors] = await Promise.all([worstBelow("grad", "absmax"), worstBelow("grad", "error")]);
  const all = [];
  const gather = (node, depth) => {
    if (node.parent) all.push(node);
    const own = node.row < 0 ? { peak: 0, bad: null } : facts[node.row];
    Object.assign(node, { depth, peak: own.peak, bad: own.bad, size: 1, at: all.length - 1 });
    for (const kid of node.kids) {
      gather(kid, depth + 1);
      node.peak = Math.max(node.peak, kid.peak);
      node.bad = node.bad === null ? kid.bad : kid.bad === null ? node.bad : Math.min(node.bad, kid.bad);
      node.size += kid.size;
    }
  };
  gather(root, 0);
  const culprit = page.focus.kind === kind && page.focus.own ? all.find((node) => node.path === page.focus.site) : null;
  const first = all.filter((node) => node.row >= 0 && facts[node.row].bad !== null).sort((a, b) => facts[a.row].bad - facts[b.row].bad || a.row - b.row)[0];
  const born = page.verdict.healthy === false && culprit ? culprit : first; // an optimizer or a batch has no row of its own
  const open = new Set((all.length <= TREE_OPEN ? all : root.kids.length <= 4 ? root.kids : []).filter((node) => node.kids.length));
  for (let node = born?.parent; node; node = node.parent) open.add(node);
  tree = { kind, matrix, facts, root, all, gradients, errors, born, culprit, open, active: null, rows: new Map(), shown: [] };
}

// Bits to the end of the chosen format at the closest approach; what is not finite has none.
function headroomOf(node) {
  if (node.bad !== null) return -Infinity;
  return node.peak > CODE.zero ? formatChosen().logMax - log2Of(node.peak) : Infinity;
}

function treeRows() {
  const wanted = state.filter.toLowerCase(), found = [];
  if (wanted || state.order === "risk") {
    found.push(...tree.all.filter((node) => node.row >= 0 && node.path.toLowerCase().includes(wanted)));
    if (state.order === "risk") found.sort((a, b) => (b === tree.born) - (a === tree.born) || headroomOf(a) - headroomOf(b) || a.row - b.row);
    return found;
  }
  const walk = (node) => node.kids.forEach((kid) => (found.push(kid), tree.open.has(kid) && walk(kid)));
  walk(tree.root);
  return found;
}

async function drawTree() {
  const place = document.getElementById("tree");
  place.hidden = !state.kind || !quantitiesOf(state.kind).includes("headroom");
  if (place.hidden) return;
  if (!tree || tree.kind !== state.kind || tree.page !== page) {
    await makeTree();
    tree.page = page;
  }
  const quantity = quantityShown(), drawn = `${quantity} ${state.format}`, own = tree;
  if (own.drawn !== drawn) {
    const strip = await matrixOf(own.kind, quantity);
    Object.assign(own, { drawn, strip, scale: scaleOf(quantity, strip) });
  }
  if (own !== tree) return; // another kind was chosen meanwhile
  tree.shown = treeRows();
  const chosen = tree.shown.findIndex((node) => node.path === state.site), listed = `${state.order} ${state.filter}`;
  const again = tree.listed === undefined || tree.listed === listed; // another list is read from its top
  const moved = tree.site !== state.site && chosen >= 0;
  tree.active = !again ? 0 : moved ? chosen : Math.min(tree.active ?? 0, Math.max(0, tree.shown.length - 1));
  const look = `${listed} ${drawn} ${rangeShown()} ${language}`;
  if (look !== tree.look) tree.rows.clear();
  Object.assign(tree, { listed, site: state.site, look });
  const bad = tree.all.filter((node) => node.row >= 0 && tree.facts[node.row].bad !== null).length;
  document.getElementById("tree-message").textContent = tree.shown.length
    ? [t("tree.count", tree.matrix.names.length), bad ? t("tree.bad", bad) : ""].filter(Boolean).join(" · ") : t("no match", state.filter);
  const grid = document.getElementById("tree-grid"); // who has the keys scrolls it, so it is what scrolls
  grid.style.maxHeight = `${TREE_ROW * (TREE_MOST + 1) + 2}px`;
  document.getElementById("tree-space").style.height = `${TREE_ROW * Math.max(1, tree.shown.length)}px`;
  grid.setAttribute("aria-rowcount", tree.shown.length + 1);
  keepInView();
  drawTreeRows();
}

// Only what is in view is made, and once: five thousand modules cost as much as twenty, and a click moves two marks.
function drawTreeRows() {
  if (!tree?.scale) return;
  const grid = document.getElementById("tree-grid"), from = Math.max(0, Math.floor(grid.scrollTop / TREE_ROW) - 2);
  const rows = tree.shown.slice(from, from + TREE_MOST + 5).map((node, i) => treeRow(node, from + i)), space = document.getElementById("tree-space");
  if (rows.length !== space.children.length || rows.some((row, i) => row !== space.children[i])) space.replaceChildren(...rows);
  const [first, last] = rangeShown();
  grid.style.setProperty("--step", state.step === null ? "-9px" : `${Math.round(((state.step - first) / (last - first)) * TREE_STRIP)}px`);
  const active = document.getElementById(`tree-row-${tree.active}`);
  if (active) grid.setAttribute("aria-activedescendant", active.id);
}

function treeRow(node, i) {
  if (!tree.rows.has(node)) tree.rows.set(node, newTreeRow(node));
  const row = tree.rows.get(node), chosen = node.path === state.site;
  row.id = `tree-row-${i}`;
  row.style.top = `${i * TREE_ROW}px`;
  row.setAttribute("aria-rowindex", i + 2);
  row.setAttribute("aria-selected", chosen);
  row.classList.toggle("active", i === tree.active);
  row.classList.toggle("chosen", chosen);
  return row;
}

function newTreeRow(node) {
  const flat = state.filter || state.order === "risk", kids = node.kids.length > 0 && !flat, open = tree.open.has(node);
  const own = node.row >= 0 ? tree.facts[node.row] : node, bits = headroomOf(kids && !open ? node : own);
  const look = bits < 1 ? "error" : bits < 4 ? "warning" : "";
  const room = bits === -Infinity ? t("bad") : bits === Infinity ? "-" : t("bits", bits.toFixed(1));
  const born = node === tree.born, inside = !born && !open && holds(node, tree.born), seen = kids && !open ? node.bad : own.bad;
  const from = seen !== null && tree.culprit?.bad != null && holds(node, tree.culprit) ? Math.min(seen, page.focus.step ?? seen) : seen; // it is inside
  const since = tree.culprit ? page.focus.step ?? own.bad : own.bad;
  const [sign, said, brief] = born ? ["◆", t(!tree.culprit ? "tree.seen" : node.bad === null ? "tree.culprit" : "tree.born", since), t("step", since)]
    : inside ? ["◆", t("tree.inside"), t("tree.inside.brief")] : from !== null ? ["✕", t("tree.from", from), t("step", from)] : ["", "", ""];
  const gradient = tree.gradients.get(node.path), error = tree.errors.get(node.path);
  const cell = (className, ...content) => make("span", { role: "gridcell", class: className }, ...content);
  const name = flat ? node.path : node.label;
  const strip = make("canvas", { width: TREE_STRIP, height: 12, "aria-hidden": "true" });
  paintStrip(strip, node);
  return make("div", {
    role: "row", class: `tree-row${born ? " born" : ""}`, "aria-level": flat ? 1 : node.depth, "aria-expanded": kids ? String(open) : null,
    on: { click: () => pickNode(node), dblclick: () => kids && fold(node) },
  },
  cell("name", make("span", { class: "twig", "aria-hidden": "true", style: `padding-left:${flat ? 0 : 14 * (node.depth - 1)}px`,
    on: { click: (event) => kids && (event.stopPropagation(), (tree.active = tree.shown.indexOf(node)), fold(node)) } }, kids ? (open ? "▾ " : "▸ ") : "· "),
  make("span", { class: "site tail", title: node.path }, make("bdi", {}, name)), kids && !open ? make("small", { class: "quiet" }, ` ${node.size - 1}`) : null),
  cell("strip", strip),
  cell(`number ${look}`, room), cell("quiet", node.row < 0 ? "" : shortType(tree.matrix.dtypes[node.row])),
  cell("number", gradient === undefined ? "" : valueText(gradient)),
  cell("number", error === undefined ? "" : isFiniteCode(error) ? (log2Of(error) > 0 ? "> 100 %" : percent(2 ** log2Of(error))) : valueText(error)),
  cell(`mark ${sign ? "error" : ""}`, `${sign} `, make("span", { class: "roomy" }, said), make("span", { class: "brief", "aria-hidden": "true" }, brief)));
}

const shortType = (name) => ({ float16: "fp16", bfloat16: "bf16", float32: "fp32", float64: "fp64" }[name] ?? name ?? "");

function holds(node, other) {
  for (let at = other?.parent; at; at = at.parent) if (at === node) return true;
  return false;
}

// The worst code of everything in a node at each pixel of the step axis; bad is taller: not by colour alone.
function paintStrip(canvas, node) {
  const rows = [], gather = (one) => (one.row >= 0 && rows.push(one.row), one.kids.forEach(gather));
  if (!state.filter && state.order !== "risk" && !tree.open.has(node)) gather(node);
  else if (node.row >= 0) rows.push(node.row);
  const { level } = tree.scale, { codes } = pooledTo(tree.strip, rows, rangeShown(), TREE_STRIP, 1);
  paint(canvas, (x, y) => (codes[x] >= CODE.infinite || (y >= 2 && y < 10) ? level(codes[x]) : NaN));
}

// Levels of colour as pixels; what is no number stays clear.
function paint(canvas, levelAt) {
  const { width, height } = canvas, context = canvas.getContext("2d"), image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer), table = levelColours();
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const level = levelAt(x, y);
      if (level === level) pixels[y * width + x] = table[Math.round(level)];
    }
  }
  context.putImageData(image, 0, 0);
}

// Red, green and blue from the low byte up, as a canvas has them.
let colours = null;
function levelColours() {
  if (colours) return colours;
  const stops = page.figures.heat.data[0].colorscale.map(([at, text]) => [at * LEVEL.bad, [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16))]);
  colours = Uint32Array.from({ length: LEVEL.bad + 1 }, (_, i) => {
    const next = stops.findIndex(([at]) => at >= i), right = stops[Math.max(next, 0)], left = stops[Math.max(next - 1, 0)];
    const share = right[0] > left[0] ? (i - left[0]) / (right[0] - left[0]) : 0;
    const [red, green, blue] = left[1].map((part, j) => Math.round(part + (right[1][j] - part) * share));
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
  return colours;
}

function pickNode(node) {
  tree.active = tree.shown.indexOf(node);
  document.getElementById("tree-grid").focus({ preventScroll: true });
  if (node.row < 0) return fold(node);
  return update({ site: node.path, finding: null, ...(state.step === null && node.bad !== null ? { step: node.bad } : {}) });
}

function fold(node, open = !tree.open.has(node)) {
  if (open) tree.open.add(node);
  else tree.open.delete(node);
  tree.rows.delete(node);
  drawTree();
}

function keepInView() {
  const grid = document.getElementById("tree-grid"), top = tree.active * TREE_ROW, tall = grid.clientHeight - TREE_ROW; // the head stays
  if (top < grid.scrollTop - TREE_ROW || top > grid.scrollTop + tall) grid.scrollTop = top - tall / 2; // far: to the middle
  else if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + TREE_ROW > grid.scrollTop + tall) grid.scrollTop = top + TREE_ROW - tall;
}

function keyInTree(event) {
  const node = tree?.shown[tree.active], last = tree ? tree.shown.length - 1 : 0;
  if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
  const to = { ArrowDown: tree.active + 1, ArrowUp: tree.active - 1, Home: 0, End: last, PageDown: tree.active + TREE_MOST, PageUp: tree.active - TREE_MOST }[event.key];
  const flat = state.filter || state.order === "risk";
  if (to !== undefined) tree.active = Math.min(last, Math.max(0, to));
  else if (event.key === "ArrowRight" && !flat && node.kids.length && !tree.open.has(node)) fold(node, true);
  else if (event.key === "ArrowLeft" && !flat && tree.open.has(node)) fold(node, false);
  else if (event.key === "ArrowLeft" && !flat && node.parent?.parent) tree.active = tree.shown.indexOf(node.parent);
  else if (event.key === "Enter" || event.key === " ") pickNode(node);
  else return;
  event.preventDefault();
  event.stopPropagation();
  keepInView();
  drawTreeRows();
}

function setUpTree() {
  const head = (key) => make("span", { role: "columnheader" }, t(key));
  fill("tree", make("h2", {}, t("tree")), make("div", { id: "controls", class: "bar" }), make("p", { class: "quiet" }, t("tree.hint")),
    make("p", { id: "tree-message", class: "quiet", role: "status" }),
    make("div", { id: "tree-grid", role: "treegrid", tabindex: "0", "aria-label": t("tree"), on: { keydown: keyInTree, scroll: () => requestAnimationFrame(drawTreeRows) } },
      make("div", { role: "row", class: "tree-row head", "aria-rowindex": "1" },
        ["layer", "over time", "tree.room", "tree.type", "tree.gradient", "tree.error", "tree.mark"].map(head)),
      make("div", { id: "tree-space", role: "rowgroup" })));
}
