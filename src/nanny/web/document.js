"use strict";
{
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = figures[place.dataset.figure];
      if (!figure) continue;
      const layout = {
        ...figure.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: colour("--plot"),
        font: { ...(figure.layout.font || {}), color: colour("--text") },
      };
      Plotly.react(place, figure.data, layout, { displaylogo: false, responsive: true });
    }
  };
  dark.addEventListener("change", draw);
  draw();
}
