// Sort a table by a click on a column's title, or by Enter on it, and filter its rows; once a page, for all its tables.
if (!window.wbSort) {
  window.wbSort = true;
  document.head.insertAdjacentHTML("beforeend", `<style>.wb-sort th[tabindex] { cursor: pointer; }
    .wb-sort th[aria-sort=ascending]::after { content: " \\2191"; }
    .wb-sort th[aria-sort=descending]::after { content: " \\2193"; }</style>`);
  const sortedBy = (rows, column) => {
    const text = rows[0].cells[column]?.dataset.v;
    return !text ? null : isNaN(text) ? text : Number(text);
  };
  // The rows after the first go on in folded tables, which have the class wb-bare.
  const pages = (table) => {
    const view = table.closest(".wb");
    return view?.querySelector(".wb-bare") ? [...view.querySelectorAll(".wb-sort")] : [table];
  };
  const sort = (title) => {
    const order = title.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const tables = pages(title.closest("table"));
    for (const table of tables) {
      table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      table.rows[title.parentElement.rowIndex].cells[title.cellIndex].setAttribute("aria-sort", order);
    }
    // A table alone keeps its parts apart; pages are sorted as one table, and stay as long as they are.
    const parts = tables.length > 1 ? [tables.map((table) => table.tBodies[0])] : [...tables[0].tBodies].map((body) => [body]);
    for (const bodies of parts) {
      const lengths = bodies.map((body) => body.rows.length);
      const groups = []; // a row without keys goes with the one above it
      for (const row of bodies.flatMap((body) => [...body.rows])) {
        if (row.querySelector("[data-v]") || !groups.length) groups.push([row]);
        else groups.at(-1).push(row);
      }
      const keyed = groups.map((rows) => [sortedBy(rows, title.cellIndex), rows]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
        : sign * (a < b ? -1 : a > b ? 1 : 0));
      const sorted = keyed.flatMap(([, rows]) => rows);
      bodies.forEach((body, n) => body.append(...sorted.splice(0, lengths[n])));
    }
    const field = title.closest(".wb")?.querySelector(".wb-filter input");
    if (field?.value) filter(field);
  };
  const filter = (field) => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0, total = 0;
    for (const table of field.closest(".wb").querySelectorAll(".wb-sort")) {
      let here = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        here += !row.hidden;
        total += 1;
      }
      found += here;
      const fold = table.closest("details");
      if (!fold) continue;
      fold.hidden = !here;
      if (words.length && !fold.open) fold.dataset.filtered = fold.open = true;
      else if (!words.length && fold.dataset.filtered) { fold.open = false; delete fold.dataset.filtered; }
    }
    field.nextSibling.textContent = words.length ? `${found} of ${total}` : "";
  };
  // The field is made here: where no script runs, a field could not filter.
  window.wbFilters = (tries) => {
    for (const place of document.querySelectorAll(".wb-filter:empty")) {
      const field = document.createElement("input"), count = document.createElement("span");
      Object.assign(field, { type: "search", placeholder: place.title, oninput: () => filter(field) });
      field.setAttribute("aria-label", place.title);
      count.setAttribute("role", "status");
      place.append(field, count);
    }
    if (tries) setTimeout(window.wbFilters, 200, tries - 1); // the output may not be in the page yet
  };
  const title = (event) => event.target.closest?.(".wb-sort th[tabindex]");
  document.addEventListener("click", (event) => title(event) && sort(title(event)));
  document.addEventListener("keydown", (event) => event.key === "Enter" && title(event) && sort(title(event)));
}
window.wbFilters(10);
