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
  const sort = (title) => {
    const order = title.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const table = title.closest("table");
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    title.setAttribute("aria-sort", order);
    for (const body of table.tBodies) {
      const groups = []; // a row without keys goes with the one above it
      for (const row of body.rows) {
        if (row.querySelector("[data-v]") || !groups.length) groups.push([row]);
        else groups.at(-1).push(row);
      }
      const keyed = groups.map((rows) => [sortedBy(rows, title.cellIndex), rows]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
        : sign * (a < b ? -1 : a > b ? 1 : 0));
      body.append(...keyed.flatMap(([, rows]) => rows));
    }
    const field = title.closest(".wb")?.querySelector(".wb-filter input");
    if (field?.value) filter(field);
  };
  const filter = (field) => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0, total = 0;
    for (const table of field.closest(".wb").querySelectorAll(".wb-sort")) {
      const isFold = table.closest("details"); // the same rows, with more columns
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        found += !row.hidden && !isFold;
        total += !isFold;
      }
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
