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
        const url = URLExt.join(settings.baseUrl, "workbench/api", path) + URLExt.objectToQueryString(query);
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

  // The buttons of a run; the first click on Stop asks, the second within some seconds is the one that counts.
  function actions(row, {stop, board}) {
    const box = make("div", "dw-actions");
    const ends = make("button", "dw-button", "Stop", {type: "button"});
    const shows = make("button", "dw-button", "TensorBoard", {type: "button"});
    ends.title = "Ends training within two steps; the model is saved and copied back";
    ends.setAttribute("aria-label", `Stop run ${row.id}`);
    shows.setAttribute("aria-label", `TensorBoard of run ${row.id}`);
    let calm;
    ends.onclick = () => {
      clearTimeout(calm);
      const sure = ends.textContent !== "Stop";
      ends.textContent = sure ? "Stop" : "Really stop?";
      if (sure) stop(row);
      else calm = setTimeout(() => { ends.textContent = "Stop"; }, SURE_MS);
    };
    shows.onclick = () => board(row);
    box.append(ends, shows);
    return {box, update: live => { ends.hidden = !live; }};
  }

  function runElement(row, tools) {
    const item = make("li", "dw-run");
    const open = make("button", "dw-open", "", {type: "button"});
    const parts = Object.fromEntries(
      ["what", "state", "id"].map(name => [name, open.appendChild(make("span", `dw-${name}`))]));
    const bar = make("div", "dw-bar", "", {role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100});
    const fill = bar.appendChild(make("div", ""));
    const facts = make("div", "dw-facts"), message = make("div", "dw-message");
    const buttons = actions(row, tools);
    open.onclick = () => tools.open(item.row);
    item.append(open, bar, facts, message, buttons.box);
    item.update = now => {
      item.row = now;
      item.dataset.state = now.state;
      write(parts.what, now.what || now.id);
      write(parts.state, now.state);
      write(parts.id, now.what ? now.detail : "");
      bar.hidden = now.share === null;
      fill.style.width = `${100 * (now.share ?? 0)}%`;
      bar.setAttribute("aria-valuenow", Math.round(100 * (now.share ?? 0)));
      bar.setAttribute("aria-label", `Progress of run ${now.id}`);
      write(facts, [now.bar, now.memory].filter(Boolean).join(" · "));
      write(message, now.state === "succeeded" || now.message === now.bar ? "" : now.message);
      message.title = now.message;
      buttons.update(now.live);
    };
    return item;
  }

  function clusterElement(tools) {
    const item = make("li", "dw-cluster");
    const head = item.appendChild(make("h3", "dw-name")), list = make("ul", "dw-list");
    const name = head.appendChild(make("span", "")), phase = head.appendChild(make("span", "dw-phase"));
    item.append(list);
    item.update = group => {
      write(name, group.path.split("/").pop() || "/");
      name.title = group.path;
      write(phase, [group.phase, group.pods].filter(Boolean).join(", "));
      fit(list, group.runs, row => runElement(row, tools), (child, row) => child.update(row));
    };
    return item;
  }

  // A cluster that is over and has no run to show is left out.
  function grouped({runs, clusters}) {
    const known = new Map(clusters.map(cluster => [cluster.path, cluster]));
    const groups = new Map(
      clusters.filter(cluster => cluster.live).map(cluster => [cluster.path, {...cluster, runs: []}]));
    for (const row of runs) {
      if (!groups.has(row.cluster)) groups.set(row.cluster, {path: row.cluster, ...known.get(row.cluster), runs: []});
      groups.get(row.cluster).runs.push(row);
    }
    return [...groups.values()];
  }

  function sidebar(Widget, server, where, tools) {
    const widget = new Widget();
    const head = make("div", "dw-head"), list = make("ul", "dw-list dw-clusters", "", {"aria-label": "Clusters"});
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
        const asked = where();
        const answer = await server.ask("runs", {folder: asked, limit});
        if (asked !== folder) live = new Map();
        for (const row of answer.runs) if (live.get(row.path) && !row.live) notify(row);
        live = new Map(answer.runs.map(row => [row.path, row.live]));
        folder = asked;
        const runs = `${answer.total} ${answer.total === 1 ? "run" : "runs"}`;
        write(place, `${runs}${folder && ` below ${folder}`}, ${answer.live} live`);
        fit(list, grouped(answer), () => clusterElement(tools), (child, group) => child.update(group));
        const far = "Too many folders to look through: in the file browser, open one that is nearer to the runs.";
        const none = answer.total ? "" : "No runs yet. Those that a notebook starts appear here.";
        notice.rest(answer.cut ? far : none);
        more.hidden = answer.runs.length >= answer.total;
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
    more.hidden = note.hidden = true;
    ring();
    head.append(make("h2", "dw-title", "Runs"), bell);
    widget.node.append(head, place, note, list, more);
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
    const boxes = () => [page.documentElement, ...page.querySelectorAll(".wb-log, pre")];
    const open = new Map(folds().map(([title, fold]) => [title, fold.open]));
    const scrolled = boxes().map(box => [box.scrollLeft, box.scrollTop]);
    const next = new DOMParser().parseFromString(html, "text/html");
    next.querySelector("h1").remove();
    page.body.replaceChildren(...next.body.childNodes);
    for (const [title, fold] of folds()) fold.open = open.get(title) ?? fold.open;
    boxes().forEach((box, n) => box.scrollTo(...(scrolled[n] ?? [0, 0])));
  }

  function runTab(Widget, server, row, tools) {
    const widget = new Widget(), head = make("div", "dw-head"), state = make("span", "dw-state");
    const note = make("span", "dw-note", "", {role: "status", "aria-live": "polite"}), {say, rest} = notes(note);
    const buttons = actions(row, {stop: () => tools.stop(row, say), board: () => tools.board(row, say)});
    const frame = make("iframe", "dw-frame", "", {sandbox: "allow-same-origin", title: `Run ${row.id}`});
    let html = "", over = false;

    async function look() {
      try {
        const page = await server.ask("page", {run: row.path});
        widget.node.dataset.state = page.state;
        write(state, page.state);
        over = page.over;
        buttons.update(page.live);
        rest("");
        if (!html) frame.srcdoc = page.html;
        else if (page.html !== html) refill(frame, page.html);
        html = page.html;
        return page.live ? page.took_s : Infinity; // then only its cluster can still change
      } catch (error) {
        rest(error.message, true);
      }
    }

    const themes = new MutationObserver(() => dress(frame, html));
    themes.observe(document.body, {attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"]});
    frame.onload = () => dress(frame, html);
    widget.id = `${NAME}-run-${row.path}`;
    widget.addClass("dw-tab");
    widget.title.label = row.what || row.id;
    widget.title.caption = row.path;
    widget.title.closable = true;
    buttons.update(row.live);
    head.append(state, make("span", "dw-id", row.id), buttons.box, note);
    widget.node.append(head, frame);
    const polling = repeat(() => !over && widget.isVisible && !document.hidden, look);
    widget.onAfterShow = widget.onAfterAttach = () => polling.now();
    widget.disposed.connect(() => { polling.stop(); themes.disconnect(); });
    return widget;
  }

  function boardTab(Widget, server, row, path) {
    const widget = new Widget(), dark = document.body.dataset.jpThemeLight === "false";
    const frame = make("iframe", "dw-frame", "", {title: `TensorBoard of run ${row.id}`});
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
    const tools = {
      open: row => show(row.path, () => runTab(Widget, server, row, tools)),
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
