document$.subscribe(() => {
  // Wide tables scroll: the keyboard must reach them.
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const table of document.querySelectorAll(".md-typeset table")) {
    const heads = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (heads.includes("found here") && heads.includes("learns from")) searchable(table, heads);
  }
});

// Sort a table by a click on a column, and filter it by words, task, data and evidence.
function searchable(table, heads) {
  const rows = [...table.tBodies[0].rows];
  const words = (row, column) => row.cells[column].textContent.trim();
  const filters = Object.assign(document.createElement("div"), { className: "filters" });
  const search = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter methods" });
  search.setAttribute("aria-label", "Filter methods");
  filters.append(search);
  const chosen = new Map();
  for (const head of ["trains", "learns from", "found here"]) {
    const column = heads.indexOf(head);
    const values = [...new Set(rows.flatMap((row) => words(row, column).split(/[,;] /)))].sort();
    const select = document.createElement("select");
    select.setAttribute("aria-label", head);
    select.append(new Option(`${head}: any`, ""), ...values.map((value) => new Option(value, value)));
    chosen.set(column, select);
    filters.append(select);
  }
  const show = () => {
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = [...chosen].every(([column, select]) => words(row, column).split(/[,;] /).includes(select.value) || !select.value);
      row.hidden = !fits || !text.includes(search.value.toLowerCase());
    }
  };
  filters.addEventListener("input", show);
  const place = table.closest(".md-typeset__scrollwrap") ?? table;
  place.before(filters);
  heads.forEach((head, column) => {
    const cell = table.tHead.rows[0].cells[column];
    const button = Object.assign(document.createElement("button"), { textContent: head });
    cell.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => words(a, column).localeCompare(words(b, column)) * (down ? -1 : 1));
      table.tBodies[0].append(...rows);
    });
  });
}
