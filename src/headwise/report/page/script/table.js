// All heads, a row each, in the order of any column.

// What a printed page shows of a long table.
const PRINTED = 48;

const order = { column: null, down: true };
const headRows = study.heads.map(makeHeadRow);

function makeHeadRow(name, head) {
  const button = make("button", { type: "button", text: name });
  button.addEventListener("click", () => choose("head", head));
  return make("tr", {}, [
    make("th", { scope: "row" }, [button]),
    ...tableColumns().map(({ mean }) => make("td", { text: formatNumber(mean[head]) })),
  ]);
}

function tableColumns() {
  return statisticGroups().flatMap(({ those }) => those);
}

function makeTable() {
  const groups = statisticGroups().map(({ label, those }) =>
    make("th", { colspan: those.length, scope: "colgroup", text: label }));
  const columns = tableColumns().map((statistic) => [statistic.name, statistic]);
  const titles = [["Head", null], ...columns];
  const head = make("thead", {}, [
    make("tr", { class: "group" }, [make("td"), ...groups]),
    make("tr", {}, titles.map(([name, statistic]) => makeTitle(name, statistic))),
  ]);
  return make("table", { class: "heads" }, [head, make("tbody")]);
}

function makeTitle(name, statistic) {
  const button = make("button", { type: "button", text: name, title: statistic?.says });
  const title = make("th", { scope: "col", "aria-sort": "none" }, [button]);
  button.addEventListener("click", () => sortBy(title, statistic));
  return title;
}

// Largest first, then smallest first; by name, as the model has them, then backwards.
function sortBy(title, statistic) {
  const again = title.getAttribute("aria-sort") !== "none";
  order.down = again ? !order.down : statistic !== null;
  order.column = statistic;
  for (const other of title.parentNode.children) other.setAttribute("aria-sort", "none");
  title.setAttribute("aria-sort", order.down ? "descending" : "ascending");
  drawRows();
}

// What does not apply stands last, whichever way the rest goes.
function compareHeads(a, b) {
  const sign = order.down ? -1 : 1;
  if (!order.column) return sign * (a - b);
  const [x, y] = [order.column.mean[a], order.column.mean[b]];
  if (x === null || y === null) return (x === null) - (y === null) || a - b;
  return sign * (x - y) || a - b;
}

function drawRows() {
  const heads = study.heads.map((_, at) => at).sort(compareHeads);
  byId("table").querySelector("tbody").replaceChildren(...heads.map((head) => headRows[head]));
}

function markRow() {
  headRows.forEach((row, head) => row.classList.toggle("chosen", head === chosen.head));
}

fill("table", makeTable());
sortBy(byId("table").querySelector("[aria-sort]"), null);
if (study.heads.length > PRINTED) {
  byId("print-note").textContent =
    `Printed are the first ${PRINTED} heads in this order; the page itself holds all.`;
}
follow(["head"], markRow);
