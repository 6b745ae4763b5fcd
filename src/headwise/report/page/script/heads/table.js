// The table of all heads, which any column can sort.

const order = { column: null, descending: true };
// Rows are made when they are first shown: a large model has thousands of heads.
const headRows = new Map();
const ROWS_AT_ONCE = 200;
let shownRows = ROWS_AT_ONCE;

function headRow(head) {
  if (!headRows.has(head)) {
    const button = make("button", { type: "button", text: study.heads[head] });
    button.addEventListener("click", () => choose("head", head));
    headRows.set(head, make("tr", {}, [
      make("th", { scope: "row" }, [button]),
      ...tableColumns().map(({ mean }) => make("td", { text: formatNumber(mean[head]) })),
    ]));
  }
  return headRows.get(head);
}

function tableColumns() {
  return statisticGroups().flatMap(({ statistics }) => statistics);
}

function makeTable() {
  const groups = statisticGroups().map(({ label, statistics }) =>
    make("th", { colspan: statistics.length, scope: "colgroup", text: label }));
  const columns = tableColumns().map((statistic) => [statistic.label, statistic]);
  const titles = [["Head", null], ...columns];
  const head = make("thead", {}, [
    make("tr", { class: "group" }, [make("td"), ...groups]),
    make("tr", {}, titles.map(([name, statistic]) => makeTitle(name, statistic))),
  ]);
  return make("table", { class: "heads" }, [head, make("tbody")]);
}

function makeTitle(name, statistic) {
  const button = make("button", { type: "button", text: name, title: statistic?.meaning });
  const title = make("th", { scope: "col", "aria-sort": "none" }, [button]);
  button.addEventListener("click", () => sortBy(title, statistic));
  return title;
}

// A statistic sorts descending first, names in the model's order; a second click reverses it.
function sortBy(title, statistic) {
  const sorted = title.getAttribute("aria-sort") !== "none";
  order.descending = sorted ? !order.descending : statistic !== null;
  order.column = statistic;
  for (const other of title.parentNode.children) other.setAttribute("aria-sort", "none");
  title.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
  drawRows();
}

// Values that do not apply come last in both orders.
function compareHeads(a, b) {
  const sign = order.descending ? -1 : 1;
  if (!order.column) return sign * (a - b);
  const [x, y] = [order.column.mean[a], order.column.mean[b]];
  if (x === null || y === null) return (x === null) - (y === null) || a - b;
  return sign * (x - y) || a - b;
}

function drawRows() {
  const heads = study.heads.map((_, head) => head).sort(compareHeads);
  const shown = heads.slice(0, shownRows);
  byId("table").querySelector("tbody").replaceChildren(...shown.map(headRow));
  const more = byId("table-more");
  more.hidden = heads.length <= shownRows;
  more.textContent = `Show all ${formatCount(heads.length)} heads`;
  markRow();
}

function markRow() {
  headRows.forEach((row, head) => row.classList.toggle("chosen", head === chosen.head));
}

byId("table-more").addEventListener("click", () => {
  shownRows = study.heads.length;
  drawRows();
});
fill("table", makeTable());
sortBy(byId("table").querySelector("[aria-sort]"), null);
drawOn(["head"], markRow);
