"use strict";
// Sorting: numbers by the value that was rounded, texts by their letters; what is not a number goes last.
const keyOf = (cell) => cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
const before = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b, "en", { numeric: true });
};
// Merged cells are for reading down: rows that were sorted or filtered have all their cells.
const setMerged = (table, merged) => {
  table.classList.toggle("apart", !merged);
  for (const cell of table.querySelectorAll("td[data-span]")) {
    const span = Number(cell.dataset.span);
    cell.hidden = merged && span === 0;
    cell.rowSpan = merged ? Math.max(span, 1) : 1;
  }
};
const isSorted = (table) => table.querySelector("th[aria-sort=ascending], th[aria-sort=descending]") !== null;
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const table = head.closest("table");
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    setMerged(table, false);
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [keyOf(a.cells[head.cellIndex]), keyOf(b.cells[head.cellIndex])];
      return typeof x === typeof y && descending ? before(y, x) : before(x, y);
    });
    body.append(...rows);
  });
}
// Filtering: a row stays if it and its table's title contain all of the words.
document.querySelector("input[type=search]").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const figure of document.querySelectorAll("figure.table")) {
    let shown = 0;
    const table = figure.querySelector("table");
    setMerged(table, !words.length && !isSorted(table));
    for (const row of figure.querySelectorAll("tbody tr")) {
      const text = `${figure.dataset.words} ${row.textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    figure.hidden = !shown;
    found += shown;
    for (const details of figure.querySelectorAll("details")) details.open = words.length > 0 && shown > 0;
  }
  document.querySelector(".none").hidden = found > 0;
});
// A hint where a table or a plot is wider than the screen.
const markWide = () => {
  for (const figure of document.querySelectorAll("figure.table, figure.plot")) {
    const box = figure.querySelector(".scroll");
    figure.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
  }
};
addEventListener("resize", markWide);
document.addEventListener("toggle", markWide, true);
markWide();
// On paper everything is shown.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
