// In a page: every static picture that has a figure beside it is replaced by the figure, which can be asked.
for (const place of document.querySelectorAll("[data-plot]")) {
  const plot = JSON.parse(place.dataset.plot);
  const target = document.createElement("div");
  target.setAttribute("role", "group");
  target.setAttribute("aria-label", place.querySelector("svg").getAttribute("aria-label"));
  target.style.height = `${plot.layout.height}px`; // plotly.js asks its place how high it may be
  place.before(target);
  Plotly.newPlot(target, plot.data, plot.layout, plot.config).then(() => { place.hidden = true; }, () => target.remove());
}
