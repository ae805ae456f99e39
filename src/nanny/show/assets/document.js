"use strict";
// Draws the figures of a page of text and tables, again when light and dark change places; sorts tables by a click on a column.
{
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    for (const place of document.querySelectorAll("details[open] [data-figure]")) {
      const figure = figures[place.dataset.figure];
      if (!figure) continue;
      const font = { ...(figure.layout.font || {}), color: colour("--text") };
      const layout = { ...figure.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: colour("--plot"), font };
      for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
        layout[name] = { gridcolor: colour("--grid"), linecolor: colour("--line"), ...layout[name] };
      }
      Plotly.react(place, figure.data, layout, { displaylogo: false, responsive: true, displayModeBar: false });
    }
    document.body.dataset.drawn = "yes";
  };

  // Largest first, then smallest first; names from A to Z first. What has no value stays last.
  const valueOf = (row, column) => {
    const cell = row.cells[column], { value } = cell.dataset;
    if (value === undefined) return cell.textContent;
    const number = Number(value.replace("inf", "Infinity"));
    return value === "" || Number.isNaN(number) ? null : number;
  };
  const sort = (head) => {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex, rows = [...body.rows];
    const values = new Map(rows.map((row) => [row, valueOf(row, column)]));
    const numeric = [...values.values()].some((value) => typeof value === "number");
    const before = head.getAttribute("aria-sort"), rising = before === null ? !numeric : before === "descending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    rows.sort((a, b) => {
      const [x, y] = [values.get(a), values.get(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return rising ? order(x, y) : order(y, x);
    });
    body.append(...rows);
  };
  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button.parentElement));

  if (!Object.keys(figures).length) document.body.dataset.drawn = "yes";
  else loadPlotly().then(() => {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => part.open && draw());
  });
}
