// The places of heads in a grid, and the select elements that choose a head.

// The chosen head alone until it comes near the view: the options of 3,000 heads are half of what a browser
// styles first.
for (const select of document.querySelectorAll("select[data-choose='head']")) {
  drawOn(["head"], () => {
    if (select.options.length > 1) return;
    select.replaceChildren(make("option", { value: chosen.head, text: study.heads[chosen.head] }));
  });
  new IntersectionObserver(([{ isIntersecting }], sight) => {
    if (!isIntersecting) return;
    sight.disconnect();
    bindSelect(select, "head", headGroups());
  }, { rootMargin: "100%" }).observe(select);
}

// The layers of a stack, its number of columns, and the head at a place.
function layoutOf(stack) {
  const members = study.heads.map((_, head) => head).filter((head) => study.stacks[head] === stack);
  const layers = [...new Set(members.map((head) => study.layers[head]))].sort((a, b) => a - b);
  const width = Math.max(...members.map((head) => study.columns[head])) + 1;
  const headAt = new Map(
    members.map((head) => [`${study.layers[head]} ${study.columns[head]}`, head]));
  return {
    layers, width, head: (row, column) => headAt.get(`${layers[row]} ${column}`),
  };
}

// A grid of the heads of a stack, with its name, which marks the chosen one. `cell(head, width)` is that of
// `makeGrid`.
function makeHeadGrid(stack, { label, cell, onPoint = () => {}, kind }) {
  const { layers, width, head } = layoutOf(stack);
  const { table, cells } = makeGrid({
    label: `${label}${stack && ` of ${stack}`}`,
    corner: "layer ↓\nhead →",
    rows: layers.map(String),
    columns: Array.from({ length: width }, (_, column) => String(column)),
    cell: (...place) => head(...place) === undefined ? null : cell(head(...place), width),
    onPoint: (...place) => onPoint(head(...place)),
    onPick: (...place) => choose("head", head(...place)),
    kind: kind(width),
  });
  cells.forEach((line, row) => line.forEach((element, column) => {
    if (element) element.dataset.head = head(row, column);
  }));
  markCells(table);
  return stack
    ? make("figure", { "data-stack": stack }, [make("figcaption", { text: stack }), table]) : table;
}

function markCells(place) {
  for (const cell of place.querySelectorAll("td[data-head]")) {
    cell.setAttribute("aria-selected", Number(cell.dataset.head) === chosen.head);
  }
}
drawOn(["head"], () => markCells(document));
