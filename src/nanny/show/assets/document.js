"use strict";
// Draws the figures of a page of text and tables, again when light and dark change places.
{
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    for (const place of document.querySelectorAll("[data-figure]")) {
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
  loadPlotly().then(() => {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  });
}
