// Sort a table by a click on a column's title, or by Enter on it; once a page, for all its tables.
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
    const table = title.closest("table");
    const order = title.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    title.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    for (const body of table.tBodies) {
      const groups = []; // a row without keys goes with the one above it
      for (const row of body.rows) {
        if (row.querySelector("[data-v]") || !groups.length) groups.push([row]);
        else groups.at(-1).push(row);
      }
      const keyed = groups.map((rows) => [sortedBy(rows, title.cellIndex), rows]);
      keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null)
        : sign * (a < b ? -1 : a > b ? 1 : 0));
      for (const [, rows] of keyed) body.append(...rows);
    }
  };
  const title = (event) => event.target.closest?.(".wb-sort th[tabindex]");
  document.addEventListener("click", (event) => title(event) && sort(title(event)));
  document.addEventListener("keydown", (event) => event.key === "Enter" && title(event) && sort(title(event)));
}
