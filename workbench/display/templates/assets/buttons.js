// The buttons beside a picture. The picture is an output of its own: here is only what needs a kernel.
const SURE_MS = 6000;
const PATIENCE_MS = 5000;
const GREET_MS = 1000;
const ARRIVES_MS = 2000; // a picture comes after its number
const MOST_GREETINGS = 20;
const INSERT = "deepspeed-workbench:insert-cell"; // our extension of JupyterLab listens
const INSERTED = "The code is in a cell below. Run the cell.";
const NO_ANSWER = "The kernel does not answer. Is it another one by now? Run the cell again.";

function element(tag, className, attributes = {}) {
  const made = Object.assign(document.createElement(tag), { className });
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function render({ model, el }) {
  const row = element("div", "wb-row", { role: "toolbar", "aria-label": model.get("label") });
  const note = element("span", "", { role: "status" });
  const extra = element("div", "wb wb-buttons wb-extra");
  const bar = element("div", "wb wb-buttons");
  bar.append(row);
  const hiding = element("style", "");
  el.append(hiding, bar);
  const made = new Map();
  const asked = new Map();

  function calm(name) {
    clearTimeout(asked.get(name));
    asked.delete(name);
    draw();
  }

  let answer;
  function ask(message) {
    clearTimeout(answer);
    answer = setTimeout(() => Object.assign(note, { textContent: NO_ANSWER, className: "wb-hint" }), PATIENCE_MS);
    model.send(message); // it raises where the kernel was started anew
  }

  function click(name) {
    const { sure, cell } = model.get("buttons").find((each) => each.name === name);
    if (cell && insert(cell)) {
      Object.assign(note, { textContent: INSERTED, className: "wb-quiet" });
    } else if (sure && !asked.has(name)) {
      asked.set(name, setTimeout(() => calm(name), SURE_MS));
      draw();
    } else {
      calm(name);
      ask({ click: name, ticked: [...ticked] });
    }
  }

  // A front end without our extension shows the code instead.
  const insert = (source) =>
    !el.dispatchEvent(new CustomEvent(INSERT, { bubbles: true, composed: true, cancelable: true, detail: { source } }));

  function draw() {
    const names = model.get("buttons").map((each) => each.name);
    for (const [name, button] of made) {
      if (names.includes(name)) continue;
      button.remove();
      made.delete(name);
    }
    // Buttons take the place of the lines of code in the picture.
    const hides = model.get("buttons").some((each) => each.cell);
    hiding.textContent = hides ? `[data-wb="${model.get("picture")}"] .wb-instead { display: none; }` : "";
    for (const look of model.get("buttons")) {
      if (!made.has(look.name)) {
        const button = element("button", "", { type: "button" });
        button.onclick = () => click(look.name);
        made.set(look.name, button);
        row.append(button);
      }
      const button = made.get(look.name);
      button.textContent = asked.has(look.name) ? look.sure : look.text;
      button.className = asked.has(look.name) ? "wb-sure" : look.urgent ? "wb-urgent" : "";
      button.title = look.tip;
      button.disabled = look.disabled;
    }
    row.append(note);
    const { text = "", kind = "" } = model.get("note");
    Object.assign(note, { textContent: text, className: kind });
  }

  function bringUp() {
    extra.innerHTML = model.get("extra");
    if (!extra.innerHTML) return extra.remove();
    const close = element("button", "", { type: "button" });
    close.textContent = "Close";
    close.onclick = () => ask({ close: true });
    extra.prepend(close);
    // Below all outputs of the cell, so that the picture stays in sight.
    (el.closest(".jp-OutputArea") ?? bar).append(extra);
    extra.scrollIntoView({ block: "nearest" });
  }

  // A page that was loaded anew has the picture as it was saved: the kernel's updates go to the page before.
  const pictures = () => document.querySelectorAll(`[data-wb="${model.get("picture")}"]`);
  const lacks = (beats) => [...pictures()].some((each) => model.get("beat") > Number(each.dataset.beat) + beats);
  let later;
  function compare() {
    clearTimeout(later);
    if (lacks(2)) model.send({ redraw: true });
    else if (lacks(0)) later = setTimeout(() => lacks(0) && model.send({ redraw: true }), ARRIVES_MS);
  }

  // A table beside it gets a box a row, which is not saved with it.
  const ticked = new Set();
  function addBoxes() {
    for (const row of document.querySelectorAll(`[data-wb="${model.get("picture")}"] tbody tr:not(:has(.wb-tick))`)) {
      const number = Number(row.cells[0].dataset.v);
      const label = `${model.get("ticks")} ${number}`;
      const box = element("input", "wb-tick", { type: "checkbox", "aria-label": label, title: label });
      box.checked = ticked.has(number);
      box.onchange = () => box.checked ? ticked.add(number) : ticked.delete(number);
      row.cells[0].prepend(box);
    }
  }
  const adding = model.get("ticks") && setInterval(addBoxes, 300); // whenever the table is drawn

  function hear({ html }) {
    clearTimeout(answer);
    clearInterval(greeting);
    if (html) for (const each of pictures()) each.outerHTML = html;
  }

  function inPicture({ target }) {
    const summary = target.closest?.("summary");
    const within = target.closest?.("[data-wb]")?.dataset.wb === model.get("picture");
    if (within && summary) model.send({ fold: summary.textContent, open: !summary.parentElement.open });
  }

  // What the kernel sends while a slow page still loads this script is lost, and an unchanged value is not sent again:
  // the page says hello until it is heard, and the kernel answers with all values.
  let greetings = 0;
  function greet() {
    if (greetings === MOST_GREETINGS) return clearInterval(greeting);
    greetings += 1;
    try {
      model.send({ hello: true });
    } catch {
      clearInterval(greeting); // no kernel
    }
  }
  const greeting = setInterval(greet, GREET_MS);

  model.on("change:buttons change:note", draw);
  model.on("change:extra", bringUp);
  model.on("change:beat", compare);
  model.on("msg:custom", hear);
  document.addEventListener("click", inPicture);
  draw();
  bringUp();
  greet();
  const first = setTimeout(compare, 1000);
  return () => {
    clearTimeout(first);
    clearTimeout(later);
    clearInterval(adding);
    clearInterval(greeting);
    extra.remove();
    document.removeEventListener("click", inPicture);
  };
}

export default { render };
