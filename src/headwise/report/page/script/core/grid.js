// Grids of cells that can be used by pointer and keyboard: the heads of a model, and the attention
// map of a head.

const ARROWS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};

// Above this place on the scale the cell is dark, so that its text needs the other color.
const DARK_CELL = 0.61;

// `cell(row, column)` returns { place, text, label }, or null if there is no cell. `place` is the
// position on the scale, 0 … 1, or null for a value that does not apply. `onPoint` is called for
// the cell under the pointer or the keyboard focus, `onPick` for the cell that is chosen.
function makeGrid({ label, corner, rows, columns, cell, onPoint, onPick = () => {}, kind = "" }) {
  const cells = rows.map((_, row) => columns.map((_, column) => makeCell(cell(row, column))));
  const head = make("thead", {}, [make("tr", {}, [
    make("td", { text: corner, class: "corner" }), ...columns.map((name) => makeLabel(name, "col")),
  ])]);
  const body = make("tbody", {}, rows.map((name, row) =>
    make("tr", {}, [makeLabel(name, "row"), ...cells[row].map((element) => element ?? make("td"))])));
  const attributes = { class: `grid ${kind}`, role: "grid", "aria-label": label };
  const table = make("table", attributes, [head, body]);
  setVariables(table, { columns: columns.length });
  makeNavigable(table, cells, onPoint, onPick);
  return { table, cells };
}

function makeLabel(name, scope) {
  return make("th", { scope }, [make("span", {}, [tokenText(name)])]);
}

function makeCell(content) {
  if (content === null) return null;
  const { place, text, label } = content;
  const kind = place === null ? "cell hatched" : place > DARK_CELL ? "cell strong" : "cell";
  const attributes = { class: kind, title: label, "aria-label": label, tabindex: -1, text };
  const element = make("td", attributes);
  if (place !== null) setVariables(element, { v: place.toFixed(3) });
  return element;
}

// The Tab key reaches one cell of a table or a picture; the arrow keys move from it to the others.
function makeNavigable(table, cells, onPoint, onPick) {
  const positions = new Map();
  cells.forEach((line, row) => line.forEach((element, column) => {
    if (element) positions.set(element, [row, column]);
  }));
  const [first] = positions.keys();
  first?.setAttribute("tabindex", 0);
  const onCell = (handle) => (event) => {
    const position = positions.get(event.target.closest("td, rect"));
    if (position) handle(event, ...position);
  };
  table.addEventListener("pointerover", onCell((_, row, column) => onPoint(row, column)));
  table.addEventListener("focusin", onCell((event, row, column) => {
    table.querySelector("[tabindex='0']")?.setAttribute("tabindex", -1);
    event.target.setAttribute("tabindex", 0);
    onPoint(row, column);
  }));
  table.addEventListener("click", onCell((_, row, column) => onPick(row, column)));
  table.addEventListener("keydown", onCell((event, row, column) => {
    if (event.key in ARROWS) {
      moveFocus(cells, row, column, ARROWS[event.key]);
    } else if (event.key === "Enter" || event.key === " ") {
      onPick(row, column);
    } else {
      return;
    }
    event.preventDefault();
  }));
}

function moveFocus(cells, row, column, [down, right]) {
  do {
    row += down;
    column += right;
  } while (cells[row]?.[column] === null);
  cells[row]?.[column]?.focus();
}
