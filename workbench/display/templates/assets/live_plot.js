// A figure that follows its run. plotly.js comes from the kernel, once a page, so that no saved notebook holds it.
function library(model) {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  return new Promise((done, failed) => {
    const take = (message, buffers) => {
      if (message.source !== "plotly.js") return;
      model.off("msg:custom", take);
      const url = URL.createObjectURL(new Blob([buffers[0]], { type: "text/javascript" }));
      const onload = () => { URL.revokeObjectURL(url); done(window.Plotly); };
      document.head.append(Object.assign(document.createElement("script"), { src: url, onload, onerror: failed }));
    };
    model.on("msg:custom", take);
    model.send({ ask: "plotly.js" });
  });
}

// What a pressed button asked of the figure before is done to the new one.
function press(figure, { method, args }) {
  const [traces, layout] = method === "relayout" ? [{}, args[0]] : [args[0], method === "update" ? args[1] : {}];
  const places = method === "restyle" ? args[1] : figure.data.map((_, place) => place);
  for (const [name, values] of Object.entries(traces)) {
    places.forEach((place, n) => { figure.data[place][name] = values[n]; });
  }
  for (const [path, value] of Object.entries(layout)) {
    const names = path.split("."), last = names.pop();
    if (last !== "autorange") names.reduce((within, name) => (within[name] ??= {}), figure.layout)[last] = value;
  }
}

async function render({ model, el }) {
  const hiding = document.createElement("style"), place = document.createElement("div");
  const Plotly = await library(model);
  el.append(hiding, place);
  const draw = () => {
    const figure = structuredClone(model.get("figure"));
    figure.layout.updatemenus.forEach((menu, n) => {
      menu.active = place.layout?.updatemenus?.[n]?.active ?? menu.active;
      press(figure, menu.buttons[menu.active]);
    });
    place.style.height = `${figure.layout.height}px`; // plotly.js asks its place how high it may be
    return Plotly.react(place, figure.data, figure.layout, figure.config);
  };
  await draw();
  place.className = "wb-live-plot";
  hiding.textContent = `.${model.get("instead_of")} { display: none; } /* the picture that is saved stands above */
    [data-jp-theme-light="false"] .wb-live-plot { filter: invert(.93) hue-rotate(180deg); }`;
  Plotly.Plots.resize(place);
  model.on("change:figure", draw);
  return () => { model.off("change:figure", draw); Plotly.purge(place); };
}
export default { render };
