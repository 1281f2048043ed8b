// In a page: every static picture that has a figure beside it is replaced by the figure, which can be asked.
async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function replace(place) {
  const plot = JSON.parse(place.dataset.plot);
  const target = document.createElement("div");
  target.setAttribute("role", "group");
  target.setAttribute("aria-label", place.querySelector("svg").getAttribute("aria-label"));
  target.style.height = `${plot.layout.height}px`; // plotly.js asks its place how high it may be
  place.before(target);
  Plotly.newPlot(target, plot.data, plot.layout, plot.config).then(() => { place.hidden = true; }, () => target.remove());
}

// A browser that cannot unpack the program, or does not allow it, keeps the pictures.
unpack(document.getElementById("plotly").textContent).then((source) => {
  const program = document.createElement("script");
  program.textContent = source; // allowed by its checksum
  document.head.append(program);
  document.querySelectorAll("[data-plot]").forEach(replace);
});
