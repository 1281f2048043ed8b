// The sidebar of runs, as JupyterLab loads it: a module federation container, written by hand. It takes every library
// from JupyterLab itself, so there is nothing to build. Text out of a run directory is only ever set as text, and a
// run's page is in a frame that runs no script.
"use strict";
(() => {
  const NAME = "deepspeed-workbench";
  const STYLE = new URL("style.css", document.currentScript.src).href;
  const ICON = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3"
    fill="#616161" d="M3 3h2v16h16v2H3zm4 10 4-4 3 3 5-6 1.500 1.300-6.400 7.700-3.100-3.100L8.400 14.400z"/></svg>`;
  const LEAST_MS = 2500;
  const MOST_MS = 30000;
  const SHARE = 10; // the server is asked again after so many times what an answer cost it
  const SURE_MS = 6000;
  const SAID_MS = 15000;
  const MORE = 50;
  const SHOWN = 10; // rows of a group
  const TYPING_MS = 250;
  const DAY_MS = 86400000;
  const NOTIFY = `${NAME}:notify`;
  let scope;

  async function shared(name) {
    const versions = Object.values(scope[name] ?? {});
    const own = versions.find(version => `${version.from}`.includes("application-top")) ?? versions[0];
    return (await own.get())();
  }

  function make(tag, className, text = "", attributes = {}) {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
    element.hidden = !text;
  }

  // What came of a click stays for a while; otherwise there is what the last look came to.
  function notes(element) {
    let until = 0;
    const put = (text, bad) => { write(element, text); element.classList.toggle("dw-bad", bad); };
    return {
      say(text, bad = false) { until = text ? Date.now() + SAID_MS : 0; put(text, bad); },
      rest(text, bad = false) { if (Date.now() > until) put(text, bad); },
    };
  }

  // What is there stays the same element, so that the focus and what a reader has open stay where they are.
  function fit(parent, items, create, update) {
    const old = new Map([...parent.children].map(child => [child.dataset.key, child]));
    const wanted = new Set(items.map(item => item.path));
    for (const [key, child] of old) if (!wanted.has(key)) child.remove();
    items.forEach((item, place) => {
      const child = old.get(item.path) ?? create(item);
      child.dataset.key = item.path;
      if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
      update(child, item);
    });
  }

  // Do the work again and again while it is wanted; it returns the seconds that it cost the server.
  function repeat(wanted, work) {
    let timer, busy = false, again = false, over = false;
    async function round() {
      clearTimeout(timer);
      if (busy) return void (again = true);
      busy = true;
      let pause = LEAST_MS;
      do {
        again = false;
        if (!over && wanted()) pause = Math.min(MOST_MS, Math.max(LEAST_MS, SHARE * 1000 * ((await work()) || 0)));
      } while (again);
      busy = false;
      if (!over) timer = setTimeout(round, pause);
    }
    round();
    return {now: round, stop() { over = true; clearTimeout(timer); }};
  }

  function connect(app, {URLExt}, {ServerConnection}) {
    const settings = app.serviceManager.serverSettings;
    return {
      url: path => URLExt.join(settings.baseUrl, path),
      async ask(path, query = {}, init = {}) {
        const words = new URLSearchParams(query).toString();
        const url = URLExt.join(settings.baseUrl, "workbench/api", path) + (words && `?${words}`);
        const response = await ServerConnection.makeRequest(url, init, settings);
        const answer = await response.json().catch(() => ({}));
        if (response.ok) return answer;
        if (response.status === 404)
          throw new Error("This Jupyter server does not list runs: jupyter server extension enable workbench.lab");
        throw new Error(answer.message || response.statusText);
      },
      tell(path, body) { return this.ask(path, {}, {method: "POST", body: JSON.stringify(body)}); },
    };
  }

  // The first click on a button asks, and the second within some seconds counts.
  function sureButton(text, question, act) {
    const button = make("button", "dw-button", text, {type: "button"});
    let calm;
    button.onclick = () => {
      clearTimeout(calm);
      const sure = button.textContent !== text;
      button.textContent = sure ? text : question();
      if (sure) act();
      else calm = setTimeout(() => { button.textContent = text; }, SURE_MS);
    };
    return button;
  }

  function plainButton(text, label, act) {
    const button = make("button", "dw-button", text, {type: "button", "aria-label": label});
    button.onclick = act;
    return button;
  }

  // The buttons of a run.
  function actions(row, {stop, board, again, remove}) {
    const box = make("div", "dw-actions");
    const ends = sureButton("Stop", () => "Really stop?", () => stop(row));
    ends.title = "Ends training within two steps; the model is saved and copied back";
    ends.setAttribute("aria-label", `Stop run ${row.id}`);
    const shows = plainButton("TensorBoard", `TensorBoard of run ${row.id}`, () => board(row));
    const repeats = plainButton("Again with …", `Again with changes: run ${row.id}`, () => again(row));
    repeats.title = "Writes the code of this run into a notebook cell, to be changed and run";
    let disk = row.disk ?? "";
    const frees = () => `Really delete${disk && ` ${disk}`}?`;
    const deletes = sureButton("Delete", frees, () => remove(row));
    deletes.title = "Removes the run directory with logs, checkpoints and model; exported copies stay";
    deletes.setAttribute("aria-label", `Delete run ${row.id}`);
    box.append(ends, shows, repeats, deletes);
    return {box, update: now => {
      ends.hidden = !now.live;
      shows.hidden = !now.board;
      deletes.hidden = now.live;
      disk = now.disk || disk;
    }};
  }

  // The fields for a run's name and tags.
  function labelForm(row, tools, close) {
    const form = make("form", "dw-label");
    const field = (title, value) => {
      const label = form.appendChild(make("label", "", title));
      const input = label.appendChild(make("input", "dw-input", "", {type: "text"}));
      input.value = value;
      return input;
    };
    const name = field("Name", row.name), tags = field("Tags, separated by commas", row.tags.join(", "));
    name.maxLength = 80;
    const save = make("button", "dw-button", "Save", {type: "submit"});
    const buttons = form.appendChild(make("div", "dw-actions"));
    buttons.append(save, plainButton("Cancel", "Cancel", close));
    form.onsubmit = event => {
      event.preventDefault();
      tools.label(row, {name: name.value, tags: tags.value.split(",").map(tag => tag.trim()).filter(Boolean)}, close);
    };
    form.onkeydown = event => { if (event.key === "Escape") close(); };
    return {form, focus: () => name.focus()};
  }

  function runElement(row, tools) {
    const item = make("li", "dw-run"), line = make("div", "dw-line");
    const tick = make("input", "dw-tick", "", {type: "checkbox", "aria-label": `Compare run ${row.id}`});
    const open = make("button", "dw-open", "", {type: "button"});
    const [colour, what] = ["colour", "what"].map(name => open.appendChild(make("span", `dw-${name}`)));
    const more = make("button", "dw-more", "⋯", {type: "button", "aria-label": `More of run ${row.id}`});
    const tags = make("div", "dw-tags"), facts = make("div", "dw-facts"), message = make("div", "dw-message");
    const state = facts.appendChild(make("span", "dw-state")), figures = facts.appendChild(make("span", ""));
    const id = make("div", "dw-id");
    const bar = make("div", "dw-bar", "", {role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100});
    const fill = bar.appendChild(make("div", ""));
    let buttons, form, opened = row.live;
    tick.onchange = () => tools.tick(item.row, tick.checked);
    open.onclick = () => tools.open(item.row);
    more.onclick = () => { opened = !opened; item.update(item.row); };
    line.append(tick, open, more);
    item.append(line, tags, bar, facts, id, message);

    function closeForm() {
      form?.remove();
      form = undefined;
      more.focus();
    }

    // What only an opened row shows is made when the row is opened: most of two hundred rows never are.
    function fold(now) {
      more.setAttribute("aria-expanded", opened);
      item.classList.toggle("dw-opened", opened);
      if (opened && !buttons) {
        buttons = actions(now, tools);
        buttons.box.append(plainButton("Name, tags …", `Name and tags of run ${now.id}`, () => {
          if (form) return closeForm();
          const made = labelForm(item.row, tools, closeForm);
          form = made.form;
          item.append(form);
          made.focus();
        }));
        item.append(buttons.box);
      }
      if (buttons) buttons.box.hidden = !opened;
      if (!opened) { form?.remove(); form = undefined; }
      buttons?.update(now);
    }

    item.update = now => {
      if (item.row?.live && !now.live) opened = false;
      item.row = now;
      item.dataset.state = now.state;
      tick.checked = tools.ticked.has(now.path);
      colour.style.background = now.colour;
      write(what, now.what || now.id);
      write(state, now.state);
      open.title = now.id;
      if (tags.title !== now.tags.join(", ")) {
        tags.title = now.tags.join(", ");
        tags.replaceChildren(...now.tags.map(tag => make("span", "dw-tag", tag)));
      }
      tags.hidden = !now.tags.length;
      fold(now);
      // The time tells two runs of one name apart.
      const second = [now.what && now.detail, now.when, now.memory, now.disk];
      write(id, (opened ? second : second.slice(1)).filter(Boolean).join(" · "));
      bar.hidden = now.share === null;
      fill.style.width = `${100 * (now.share ?? 0)}%`;
      bar.setAttribute("aria-valuenow", Math.round(100 * (now.share ?? 0)));
      bar.setAttribute("aria-label", `Progress of run ${now.id}`);
      const known = [now.bar === now.state ? "" : now.bar].filter(Boolean);
      write(figures, known.map(part => ` · ${part}`).join(""));
      write(message, now.state === "succeeded" || now.message === now.bar ? "" : now.message);
      message.title = now.message;
    };
    return item;
  }

  // A cluster with its runs, or the runs of closed clusters of a time, which can be folded.
  function groupElement(tools) {
    const item = make("li", "dw-group");
    const head = item.appendChild(make("h3", "dw-name")), list = make("ul", "dw-list");
    const name = head.appendChild(make("button", "dw-fold", "", {type: "button"}));
    const phase = make("div", "dw-phase");
    const ends = sureButton(
      "Stop the pods", () => `Really stop ${item.group.pods}?`, () => tools.stopCluster(item.group));
    const more = make("button", "dw-button", "", {type: "button"});
    let shown = SHOWN;
    name.onclick = () => { tools.folds.set(item.group.path, !item.open); item.update(item.group); };
    more.onclick = () => { shown += MORE; item.update(item.group); };
    item.append(phase, ends, list, more);
    item.update = group => {
      item.group = group;
      item.open = tools.folds.get(group.path) ?? group.opened;
      name.setAttribute("aria-expanded", item.open);
      write(name, group.live ? group.title : `${group.title} (${group.runs.length}${group.cut ? "+" : ""})`);
      name.title = group.live ? group.path : "";
      const idle = group.idle_end ? `stop at ${group.idle_end} if idle` : "";
      write(phase, [group.phase, group.pods, idle].filter(Boolean).join(", "));
      ends.hidden = !group.own || group.phase === "closing" || group.runs.some(row => row.live);
      ends.setAttribute("aria-label", `Stop the pods of ${group.title}`);
      const rows = item.open ? group.runs.slice(0, shown) : [];
      fit(list, rows, row => runElement(row, tools), (child, row) => child.update(row));
      const left = group.runs.length - rows.length;
      write(more, item.open && left ? `Show ${Math.min(left, MORE)} more of ${group.title}` : "");
    };
    return item;
  }

  function age(row, now) {
    const when = new Date(1000 * row.submitted_s), days = Math.floor((now.setHours(24, 0, 0, 0) - when) / DAY_MS);
    if (!row.submitted_s) return "Undated";
    if (days < 1) return "Today";
    if (days < 2) return "Yesterday";
    return days < 7 ? "Last 7 days" : when.toLocaleDateString("en", {month: "long", year: "numeric"});
  }

  // Clusters with pods come first. The runs of the others are grouped by time, and only the newest are open.
  function grouped({runs, clusters, found}, find) {
    const groups = new Map();
    for (const cluster of clusters)
      if (cluster.live) groups.set(cluster.path, {...cluster, opened: true, runs: []});
    for (const row of runs) {
      let group = groups.get(row.cluster);
      if (!group) {
        const title = age(row, new Date());
        group = groups.get(`age:${title}`) ?? {path: `age:${title}`, title, runs: []};
        groups.set(group.path, group);
      }
      group.runs.push(row);
    }
    const all = [...groups.values()].filter(group => group.runs.length || !find);
    const ages = all.filter(group => !group.live);
    for (const group of ages) group.opened = Boolean(find) || group === ages[0];
    if (ages.length) ages.at(-1).cut = runs.length < found;
    return all;
  }

  function sidebar(Widget, server, where, tools) {
    const widget = new Widget();
    const head = make("div", "dw-head");
    const list = make("ul", "dw-list dw-clusters", "", {"aria-label": "Clusters and runs"});
    const filter = make("input", "dw-input dw-filter", "", {type: "search", "aria-label": "Filter runs",
      placeholder: "Filter by name, tag, state …", title: "Words of the id, name, tags, state, kind or place"});
    const bar = make("div", "dw-ticks"), ticks = make("span", "");
    const compares = plainButton("Compare", "Compare the ticked runs", () => tools.compare([...tools.ticked.values()]));
    const place = make("div", "dw-place"), note = make("div", "dw-note", "", {role: "status", "aria-live": "polite"});
    const bell = make("button", "dw-button", "Notify me", {type: "button", "aria-pressed": "false"});
    const more = make("button", "dw-button", "Show more", {type: "button"});
    const notice = notes(note);
    let limit = MORE, live = new Map(), folder;
    const wants = () => localStorage.getItem(NOTIFY) === "yes" && window.Notification?.permission === "granted";
    const ring = () => bell.setAttribute("aria-pressed", wants());

    function notify(row) {
      if (!wants() || (!document.hidden && document.hasFocus())) return;
      const shown = new Notification(`Run ${row.state}: ${row.what || row.id}`, {body: row.bar, tag: row.path});
      shown.onclick = () => { window.focus(); tools.open(row); shown.close(); };
    }

    async function look() {
      try {
        const asked = where(), find = filter.value.trim();
        const answer = await server.ask("runs", {folder: asked, limit, find});
        if (find !== filter.value.trim()) return 0; // typing goes on
        if (asked !== folder) live = new Map();
        for (const row of answer.runs) if (live.get(row.path) && !row.live) notify(row);
        live = new Map(answer.runs.map(row => [row.path, row.live]));
        folder = asked;
        const runs = `${answer.total} ${answer.total === 1 ? "run" : "runs"}`;
        write(place, `${find && `${answer.found} of `}${runs}${folder && ` below ${folder}`}, ${answer.live} live`);
        fit(list, grouped(answer, find), () => groupElement(tools), (child, group) => child.update(group));
        const far = "Too many folders to look through: in the file browser, open one that is nearer to the runs.";
        const rest = `And ${answer.unread} more ${answer.unread === 1 ? "run" : "runs"}, read in a moment.`;
        const none = answer.unread ? rest : !answer.total ? "No runs yet. Those that a notebook starts appear here."
          : answer.found ? "" : "No run has all these words.";
        notice.rest(answer.cut ? far : none);
        more.hidden = answer.runs.length >= answer.found;
        return answer.took_s;
      } catch (error) {
        notice.rest(error.message, true);
      }
    }

    widget.say = notice.say;
    widget.id = `${NAME}-runs`;
    widget.addClass("dw-side");
    widget.title.caption = "Runs";
    widget.node.setAttribute("role", "region");
    widget.node.setAttribute("aria-label", "Runs");
    bell.title = "Tell me when a run ends while I look at something else";
    bell.onclick = async () => {
      const on = !wants() && (await window.Notification?.requestPermission()) === "granted";
      localStorage.setItem(NOTIFY, on ? "yes" : "no");
      ring();
    };
    more.onclick = () => { limit += MORE; widget.polling.now(); };
    more.hidden = true;
    write(place, "Looking for runs …");
    note.hidden = true;
    ring();
    let typed;
    filter.oninput = () => { clearTimeout(typed); typed = setTimeout(() => widget.polling.now(), TYPING_MS); };
    widget.drawTicks = () => {
      const count = tools.ticked.size;
      write(ticks, `${count} ticked`);
      bar.hidden = !count;
      compares.disabled = count < 2;
      compares.title = count < 2 ? "Tick two runs or more" : "Opens curves, options and results of the runs in a tab";
      for (const tick of list.querySelectorAll(".dw-tick")) {
        const {row} = tick.closest(".dw-run");
        tick.checked = tools.ticked.has(row.path);
      }
    };
    const clear = () => { tools.ticked.clear(); widget.drawTicks(); };
    bar.append(ticks, compares, plainButton("Clear", "Clear the ticks", clear));
    bar.hidden = true;
    head.append(make("h2", "dw-title", "Runs"), bell);
    widget.node.append(head, filter, place, note, bar, list, more);
    widget.polling = repeat(() => (widget.isVisible && !document.hidden) || wants(), look);
    widget.onAfterShow = widget.onAfterAttach = () => widget.polling.now();
    return widget;
  }

  // The frame's page has JupyterLab's colours; its scripts do not run, and only this side reaches into it.
  function dress(frame, html) {
    const root = frame.contentDocument?.documentElement, from = getComputedStyle(document.body);
    if (!root) return;
    root.querySelector("h1")?.remove(); // the tab has a head
    for (const name of new Set(html.match(/--jp-[\w-]+/g))) root.style.setProperty(name, from.getPropertyValue(name));
    root.style.setProperty("--wb-page", from.getPropertyValue("--jp-layout-color1"));
    root.style.colorScheme = document.body.dataset.jpThemeLight === "false" ? "dark" : "light";
  }

  // What a reader has folded, and how far the page and its logs are scrolled, stay.
  function refill(frame, html) {
    const page = frame.contentDocument;
    const folds = () => [...page.querySelectorAll("details")].map(fold => [fold.firstElementChild.textContent, fold]);
    const boxes = () => [page.documentElement, ...page.querySelectorAll(".wb-log, pre:not(.wb-sep)")];
    const open = new Map(folds().map(([title, fold]) => [title, fold.open]));
    const scrolled = boxes().map(box => [box.scrollLeft, box.scrollTop]);
    const next = new DOMParser().parseFromString(html, "text/html");
    next.querySelector("h1").remove();
    page.body.replaceChildren(...next.body.childNodes);
    for (const [title, fold] of folds()) fold.open = open.get(title) ?? fold.open;
    boxes().forEach((box, n) => box.scrollTo(...(scrolled[n] ?? [0, 0])));
  }

  // A tab with a page of the server in a frame. The frame is seen once it has the page and JupyterLab's colours.
  function pageTab(Widget, {key, label, caption, frameTitle, loading, parts, ask, take}) {
    const widget = new Widget(), head = make("div", "dw-head");
    const note = make("span", "dw-note", "", {role: "status", "aria-live": "polite"}), {say, rest} = notes(note);
    const frame = make("iframe", "dw-frame dw-waiting", "", {sandbox: "allow-same-origin", title: frameTitle});
    let html = "", loaded = false, over = false;

    async function look() {
      try {
        const page = await ask();
        over = page.over;
        take(page, widget);
        if (loaded) rest("");
        const changed = html && page.html !== html;
        if (!html) frame.srcdoc = page.html;
        html = page.html;
        if (changed && loaded) refill(frame, html);
        return page.live ? page.took_s : Infinity; // then only its cluster can still change
      } catch (error) {
        rest(error.message, true);
      }
    }

    const themes = new MutationObserver(() => dress(frame, html));
    themes.observe(document.body, {attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"]});
    frame.onload = () => { // again where JupyterLab moves the tab: the frame then has its first page
      if (frame.contentDocument?.URL !== "about:srcdoc") return;
      if (frame.srcdoc !== html) refill(frame, html);
      dress(frame, html);
      if (!loaded) rest("");
      loaded = true;
      frame.classList.remove("dw-waiting");
    };
    rest(loading);
    widget.say = say;
    widget.id = `${NAME}-${key}`;
    widget.addClass("dw-tab");
    widget.title.label = label;
    widget.title.caption = caption;
    widget.title.closable = true;
    head.append(...parts, note);
    widget.node.append(head, frame);
    const polling = repeat(() => !over && widget.isVisible && !document.hidden, look);
    widget.onAfterShow = widget.onAfterAttach = () => polling.now();
    widget.disposed.connect(() => { polling.stop(); themes.disconnect(); });
    return widget;
  }

  function swatch(colour) {
    const box = make("span", "dw-colour");
    box.style.background = colour;
    return box;
  }

  function runTab(Widget, server, row, tools) {
    const state = make("span", "dw-state");
    const say = (...words) => widget.say(...words);
    const buttons = actions(row, {
      stop: () => tools.stop(row, say), board: () => tools.board(row, say), again: () => tools.again(row, say),
      remove: () => tools.remove(row)});
    const widget = pageTab(Widget, {
      key: `run-${row.path}`, label: row.what || row.id, caption: row.path, frameTitle: `Run ${row.id}`,
      loading: "Loading the run …", parts: [swatch(row.colour), state, make("span", "dw-id", row.id), buttons.box],
      ask: () => server.ask("page", {run: row.path}),
      take(page, tab) {
        tab.node.dataset.state = page.state;
        write(state, page.state);
        buttons.update(page);
      },
    });
    widget.node.dataset.state = row.state;
    write(state, row.state);
    buttons.update(row);
    return widget;
  }

  function compareTab(Widget, server, rows, tools) {
    const list = make("ul", "dw-list dw-legend", "", {"aria-label": "Compared runs"});
    return pageTab(Widget, {
      key: `compare-${rows.map(row => row.path).join("-")}`, label: `Compare ${rows.length} runs`,
      caption: rows.map(row => row.what || row.id).join(", "), frameTitle: `Comparison of ${rows.length} runs`,
      loading: "Loading the comparison …", parts: [list],
      ask: () => server.ask("compare", rows.map(row => ["run", row.path])),
      take: page => fit(list, page.runs, () => {
        const item = make("li", "dw-run"), open = make("button", "dw-open", "", {type: "button"});
        item.append(open);
        return item;
      }, (item, run) => {
        const open = item.firstElementChild, row = rows.find(one => one.path === run.path) ?? run;
        item.dataset.state = run.state;
        open.onclick = () => tools.open(row);
        open.title = run.id;
        if (open.textContent !== run.what + run.state)
          open.replaceChildren(swatch(run.colour), make("span", "", run.what), make("span", "dw-state", run.state));
      }),
    });
  }

  function boardTab(Widget, server, row, path) {
    const widget = new Widget(), dark = document.body.dataset.jpThemeLight === "false";
    const frame = make("iframe", "dw-frame", "", {title: `TensorBoard of run ${row.id}`});
    // TensorBoard begins with its settings folded, unless a user has changed a setting.
    const settings = "_tb_global_settings";
    if (!localStorage.getItem(settings)) localStorage.setItem(settings, '{"timeSeriesSettingsPaneOpened": false}');
    frame.src = server.url(path) + (dark ? "?darkMode=true" : "");
    widget.id = `${NAME}-${path}`;
    widget.addClass("dw-tab");
    widget.title.label = `TensorBoard: ${row.what || row.id}`;
    widget.title.caption = row.path;
    widget.title.closable = true;
    widget.node.append(frame);
    const key = path.split("/").at(-2);
    widget.disposed.connect(() => server.ask("tensorboard", {key}, {method: "DELETE"}).catch(() => {}));
    return widget;
  }

  // The form of compose() asks for a cell below its own with `detail.source`; without one it asks whether that is
  // possible. Whoever can do it prevents the event's default.
  function insertCells(notebooks) {
    document.addEventListener(`${NAME}:insert-cell`, event => {
      const book = notebooks.find(panel => panel.node.contains(event.target))?.content;
      const place = book?.widgets.findIndex(cell => cell.node.contains(event.target)) ?? -1;
      if (place < 0 || book.model.readOnly) return;
      event.preventDefault();
      const source = event.detail?.source;
      if (!source) return;
      book.model.sharedModel.insertCell(place + 1, {cell_type: "code", source, metadata: {trusted: true}});
      book.activeCellIndex = place + 1;
      book.scrollToItem(place + 1);
    });
  }

  function activate({Widget}, {LabIcon}, coreutils, services, app, browser, restorer, notebooks) {
    if (notebooks) insertCells(notebooks);
    const server = connect(app, coreutils, services), icon = new LabIcon({name: `${NAME}:runs`, svgstr: ICON});
    const where = () => browser ? app.serviceManager.contents.localPath(browser.model.path) : "";
    const tabs = new Map();

    function show(key, create) {
      let tab = tabs.get(key);
      if (!tab || tab.isDisposed) {
        tab = create();
        tab.title.icon = icon;
        tab.node.tabIndex = -1; // what has the focus is JupyterLab's current tab: its commands close that one
        tab.onActivateRequest = () => tab.node.focus();
        tabs.set(key, tab);
        app.shell.add(tab, "main");
      }
      app.shell.activateById(tab.id);
    }

    const attempt = (say, words, work) => {
      say(words);
      return work().then(done => say(done ?? "")).catch(error => say(error.message, true));
    };
    // Insert code below the active cell of the notebook in sight, or into a new notebook.
    async function insertCode(source) {
      let panel = notebooks?.currentWidget, place = 0;
      if (panel && panel === app.shell.currentWidget && !panel.content.model.readOnly) {
        place = panel.content.activeCellIndex + 1;
        panel.content.model.sharedModel.insertCell(place, {cell_type: "code", source, metadata: {trusted: true}});
      } else {
        const kernelName = app.serviceManager.kernelspecs?.specs?.default;
        panel = await app.commands.execute("notebook:create-new", {cwd: where(), kernelName});
        await panel.context.ready;
        panel.content.model.sharedModel.cells[0].setSource(source);
      }
      panel.content.activeCellIndex = place;
      panel.content.scrollToItem(place);
      return `The code is in a cell of ${panel.title.label}. Change it, then run the cell.`;
    }

    const tools = {
      ticked: new Map(), // rows to compare, by their paths
      folds: new Map(), // groups that the user opened or folded
      tick(row, on) {
        if (on) tools.ticked.set(row.path, row);
        else tools.ticked.delete(row.path);
        side.drawTicks();
      },
      compare(rows) {
        const key = `compare ${rows.map(row => row.path).join("\n")}`;
        show(key, () => compareTab(Widget, server, rows, tools));
      },
      open: row => show(row.path, () => runTab(Widget, server, row, tools)),
      again: (row, say = side.say) => attempt(say, `Reading ${row.id} …`, async () => {
        const {source} = await server.ask("again", {run: row.path});
        return insertCode(source.trimEnd());
      }),
      label: (row, changes, done) => attempt(side.say, "Saving …", async () => {
        await server.tell("label", {run: row.path, ...changes});
        done();
        side.polling.now();
      }),
      stopCluster: cluster => attempt(side.say, `Stopping ${cluster.pods} …`, async () => {
        const {message} = await server.tell("stop-cluster", {cluster: cluster.path});
        side.polling.now();
        return message;
      }),
      remove: row => attempt(side.say, `Deleting ${row.id} …`, async () => {
        const {message} = await server.tell("delete", {run: row.path});
        tools.tick(row, false);
        tabs.get(row.path)?.dispose();
        side.polling.now();
        return message;
      }),
      stop: (row, say = side.say) => attempt(say, `Stopping ${row.id} …`, async () => {
        const {message} = await server.tell("stop", {run: row.path});
        side.polling.now();
        return message;
      }),
      board: (row, say = side.say) => attempt(say, "Starting TensorBoard …", async () => {
        const {path} = await server.tell("tensorboard", {runs: [row.path]});
        show(path, () => boardTab(Widget, server, row, path));
      }),
    };
    const side = sidebar(Widget, server, where, tools);
    side.title.icon = icon;
    browser?.model.pathChanged.connect(() => side.polling.now());
    app.shell.add(side, "left", {rank: 250});
    restorer?.add(side, side.id);
  }

  async function extension() {
    const names = ["@lumino/widgets", "@jupyterlab/ui-components", "@jupyterlab/coreutils", "@jupyterlab/services",
      "@jupyterlab/filebrowser", "@jupyterlab/application", "@jupyterlab/notebook"];
    const [widgets, components, coreutils, services, files, application, notebook] = await Promise.all(names.map(shared));
    document.head.append(make("link", "", "", {rel: "stylesheet", href: STYLE}));
    return {
      id: `${NAME}:runs`,
      description: "Lists the runs of the folder that the file browser shows",
      autoStart: true,
      optional: [files.IDefaultFileBrowser, application.ILayoutRestorer, notebook.INotebookTracker],
      activate: (...given) => activate(widgets, components, coreutils, services, ...given),
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB[NAME] = {
    init(given) { scope = given; },
    async get() {
      const plugin = await extension();
      return () => ({__esModule: true, default: plugin});
    },
  };
})();
