// The fields of the form of `compose()`. What is chosen goes to the kernel; what it comes to is displayed below.
const SURE_MS = 6000;
const LONG_HINT = 18; // letters that a narrow field shows whole
const INSERT = "deepspeed-workbench:insert-cell"; // our extension of JupyterLab listens

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function control(field, id, value) {
  if (field.kind === "choice") {
    const options = field.choices.map((choice) =>
      make("option", { value: choice, selected: choice === value }, choice || "chosen for you"));
    return make("select", { id }, ...options);
  }
  if (field.kind === "switch") return make("input", { id, type: "checkbox", checked: value });
  const hint = field.hint.length > LONG_HINT ? "" : field.hint;
  const input = make("input", { id, type: field.kind, value: value ?? "", placeholder: hint, step: "any" });
  if (field.proposals.length) {
    const options = field.proposals.map(([value, label]) => make("option", label ? { value, label } : { value }));
    const list = make("datalist", { id: `${id}-list` }, ...options);
    input.setAttribute("list", list.id);
    input.after(list);
    return make("span", {}, input, list);
  }
  return input;
}

function valueOf(input) {
  if (input.type === "checkbox") return input.checked;
  return input.type !== "number" ? input.value : input.value === "" ? null : Number(input.value);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that is not served securely has no clipboard
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function render({ model, el }) {
  const parts = {};
  const prefix = `wb-${Math.random().toString(36).slice(2)}`;
  const fields = make("div");

  function add(field, grid) {
    const id = `${prefix}-${field.name}`;
    const shown = control(field, id, model.get("values")[field.name]);
    const input = shown.querySelector("input") ?? shown;
    const why = make("div", { className: "wb-form-why", id: `${id}-why`, role: "alert" });
    const label = make("label", { htmlFor: id, id: `${id}-label`, title: field.meaning }, field.label);
    const cell = make("div", { title: field.meaning });
    // The button shows the meaning to people without a mouse, and keeps it in sight.
    const help = make("div", { className: "wb-form-help", id: `${id}-help`, hidden: true }, field.meaning);
    const asks = make("button", { type: "button", className: "wb-form-asks" }, "?");
    asks.setAttribute("aria-label", "Help");
    asks.setAttribute("aria-describedby", label.id);
    asks.setAttribute("aria-controls", help.id);
    asks.setAttribute("aria-expanded", "false");
    asks.addEventListener("click", () => {
      help.hidden = !help.hidden;
      asks.setAttribute("aria-expanded", String(!help.hidden));
    });
    const head = make("div", { className: "wb-form-head" });
    head.append(...(field.kind === "switch" ? [shown, label, asks] : [label, asks]));
    if (field.kind === "switch") cell.className = "wb-form-switch";
    cell.append(head, ...(field.kind === "switch" ? [] : [shown]));
    if (field.hint.length > LONG_HINT) cell.append(make("div", { className: "wb-form-hint" }, `Default: ${field.hint}`));
    cell.append(why, help);
    input.setAttribute("aria-describedby", `${why.id} ${help.id}`);
    input.addEventListener("change", () => {
      model.set("values", { ...model.get("values"), [field.name]: valueOf(input) });
      model.save_changes();
    });
    grid.append(cell);
    parts[field.name] = { field, cell, input, why };
  }

  for (const section of model.get("sections")) {
    const [main, more] = [make("div", { className: "wb-form-grid" }), make("div", { className: "wb-form-grid" })];
    for (const field of model.get("fields")) {
      if (field.section === section) add(field, field.is_main ? main : more);
    }
    fields.append(make("h4", {}, section), main, make("details", {}, make("summary", {}, "More options"), more));
  }

  const button = (text, act, className = "") => {
    const made = make("button", { type: "button", className }, text);
    made.addEventListener("click", act);
    return made;
  };
  const send = (action) => () => model.send({ action });
  const why = make("div", { className: "wb-form-why", role: "alert" });
  const status = make("span", { role: "status" });
  const start = button("Start", send("start"), "wb-form-go");
  const rows = button("Preview the data", send("rows"));
  const cancel = button("Cancel the preview", send("cancel"));
  const copied = button("Copy the cell", async () => {
    await copy(model.get("state").cell);
    status.textContent = "The cell is on the clipboard: paste it into the notebook.";
  });
  const insert = (source) =>
    !el.dispatchEvent(new CustomEvent(INSERT, { bubbles: true, composed: true, cancelable: true, detail: { source } }));
  const inserted = button("Insert as a cell", () => {
    if (insert(model.get("state").cell.trimEnd())) status.textContent = "The cell stands below this one.";
  });
  const edit = button("Show the form", send("edit"));
  let asked = 0;
  const calm = () => {
    asked = 0;
    stop.textContent = "Stop the pods";
    stop.className = "";
  };
  const stop = button("Stop the pods", () => {
    if (asked) {
      clearTimeout(asked);
      calm();
      model.send({ action: "stop" });
      return;
    }
    asked = setTimeout(calm, SURE_MS);
    stop.textContent = "Stop, really?";
    stop.className = "wb-form-sure";
  });

  function draw() {
    const [values, problems, state] = ["values", "problems", "state"].map((name) => model.get(name));
    const said = new Set(); // a problem of several fields is written at the first of them
    for (const { field, cell, input, why } of Object.values(parts)) {
      cell.hidden = Boolean(field.needs) && !field.values.includes(values[field.needs]);
      const problem = problems[field.name] ?? "";
      why.textContent = said.has(problem) ? "" : problem;
      said.add(problem);
      input.setAttribute("aria-invalid", String(field.name in problems));
      input.disabled = state.busy;
      const fold = cell.closest("details");
      if (fold && !cell.hidden && field.name in problems) fold.open = true;
    }
    for (const fold of fields.querySelectorAll("details")) {
      fold.hidden = [...fold.querySelectorAll(".wb-form-grid > div")].every((cell) => cell.hidden);
    }
    const columns = parts["dataset.columns"].cell.querySelector("datalist");
    if (state.columns) columns.replaceChildren(make("option", { value: state.columns }));
    why.textContent = problems[""] ?? "";
    fields.hidden = start.hidden = rows.hidden = state.folded;
    start.disabled = rows.disabled = state.busy || !state.cell;
    copied.hidden = !state.cell;
    inserted.hidden = !state.cell || !insert();
    edit.hidden = !state.folded;
    cancel.hidden = !state.can_cancel;
    stop.hidden = !state.has_pods;
    status.textContent = state.status;
    status.className = state.is_bad ? "wb-form-why" : "";
  }

  const buttons = make("div", { className: "wb-form-row" }, start, rows, cancel, inserted, copied, edit, stop, status);
  el.classList.add("wb-form");
  // The picture below is for readers without a kernel; here, the fields state the problems.
  const hiding = make("style", {}, `.${model.get("instead_of")} { display: none; }`);
  el.append(hiding, fields, why, buttons);
  for (const name of ["values", "problems", "state"]) model.on(`change:${name}`, draw);
  const seen = new IntersectionObserver(draw); // before it is in the page nobody can say whether cells can be inserted
  seen.observe(el);
  draw();
  return () => {
    seen.disconnect();
    ["values", "problems", "state"].forEach((name) => model.off(`change:${name}`, draw));
  };
}

export default { render };
