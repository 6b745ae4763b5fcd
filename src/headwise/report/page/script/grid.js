// A grid of colored cells, for the eye, the pointer and the keyboard. The heads of a model are
// one, and the weights of a head are another.

const STEPS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
};

// From here on the scale is so strong that the text on it changes its color.
const FLIP = 0.61;

// `cell(row, column)` says { place, text, label }: its place on the scale 0 … 1, null for one
// that does not apply; or says null where there is no cell.
function makeGrid({ label, corner, rows, columns, cell, look, pick = () => {}, kind = "" }) {
  const cells = rows.map((_, row) => columns.map((_, column) => makeCell(cell(row, column))));
  const head = make("thead", {}, [make("tr", {}, [
    make("td", { text: corner, class: "corner" }), ...columns.map((name) => makeLabel(name, "col")),
  ])]);
  const body = make("tbody", {}, rows.map((name, row) =>
    make("tr", {}, [makeLabel(name, "row"), ...cells[row].map((made) => made ?? make("td"))])));
  const about = { class: `grid ${kind}`, role: "grid", "aria-label": label };
  const table = make("table", about, [head, body]);
  setVariables(table, { columns: columns.length });
  makeWalkable(table, cells, look, pick);
  return { table, cells };
}

function makeLabel(name, scope) {
  return make("th", { scope }, [make("span", {}, [tokenText(name)])]);
}

function makeCell(content) {
  if (content === null) return null;
  const { place, text, label } = content;
  const kind = place === null ? "cell hatched" : place > FLIP ? "cell strong" : "cell";
  const made = make("td", { class: kind, title: label, "aria-label": label, tabindex: -1, text });
  if (place !== null) setVariables(made, { v: place.toFixed(3) });
  return made;
}

// One cell at a time is in the order of tabs; arrows lead from it to the others.
function makeWalkable(table, cells, look, pick) {
  const places = new Map();
  cells.forEach((line, row) => line.forEach((made, column) => {
    if (made) places.set(made, [row, column]);
  }));
  const [first] = places.keys();
  first?.setAttribute("tabindex", 0);
  const onCell = (act) => (event) => {
    const place = places.get(event.target.closest("td"));
    if (place) act(event, ...place);
  };
  table.addEventListener("pointerover", onCell((_, row, column) => look(row, column)));
  table.addEventListener("focusin", onCell((event, row, column) => {
    table.querySelector("td[tabindex='0']")?.setAttribute("tabindex", -1);
    event.target.setAttribute("tabindex", 0);
    look(row, column);
  }));
  table.addEventListener("click", onCell((_, row, column) => pick(row, column)));
  table.addEventListener("keydown", onCell((event, row, column) => {
    if (event.key in STEPS) {
      walk(cells, row, column, STEPS[event.key]);
    } else if (event.key === "Enter" || event.key === " ") {
      pick(row, column);
    } else {
      return;
    }
    event.preventDefault();
  }));
}

function walk(cells, row, column, [down, right]) {
  do {
    row += down;
    column += right;
  } while (cells[row]?.[column] === null);
  cells[row]?.[column]?.focus();
}
