// The map of strongest roles, which is drawn without a script: a click or the arrow keys choose.

const squares = new Map();

function enhanceMap(picture) {
  const rows = new Map();
  for (const square of picture.querySelectorAll("[data-head]")) {
    const head = Number(square.dataset.head);
    squares.set(head, square);
    square.setAttribute("role", "button");
    square.setAttribute("aria-label", `${study.heads[head]}: ${square.dataset.text || "no role"}`);
    square.setAttribute("tabindex", -1);
    const row = square.getAttribute("y");
    rows.set(row, [...(rows.get(row) ?? []), square]);
  }
  picture.setAttribute("role", "group");
  const cells = [...rows.values()];
  const headAt = (row, column) => Number(cells[row][column].dataset.head);
  makeNavigable(picture, cells, (...place) => describeSquare(headAt(...place)),
    (...place) => choose("head", headAt(...place)));
  picture.addEventListener("pointerleave", () => describeSquare(chosen.head));
}

function describeSquare(head) {
  const text = squares.get(head)?.dataset.text || "no role found";
  fill("map-of-roles-readout", make("b", { text: study.heads[head] }), `: ${text}`);
}

function markSquare() {
  squares.forEach((square, head) => {
    square.classList.toggle("chosen", head === chosen.head);
    square.setAttribute("aria-pressed", head === chosen.head);
    square.setAttribute("tabindex", head === chosen.head ? 0 : -1);
  });
  describeSquare(chosen.head);
}

// A count in the sentence opens its evidence and shows its heads in the map.
function linkCounts() {
  for (const link of document.querySelectorAll("a.count")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const evidence = byId(link.hash.slice(1));
      evidence.open = !evidence.open;
      if (evidence.open) evidence.scrollIntoView({ block: "nearest" });
    });
  }
  for (const details of document.querySelectorAll("details.evidence-of")) {
    details.addEventListener("toggle", markEvidence);
  }
}

function markEvidence() {
  const names = new Set(
    [...document.querySelectorAll("details.evidence-of[open] [data-show]")]
      .map((button) => button.dataset.show));
  squares.forEach((square, head) => {
    square.classList.toggle("faint", names.size > 0 && !names.has(study.heads[head]));
  });
}

if (byId("map-of-roles")) {
  for (const picture of document.querySelectorAll("#map-of-roles svg")) enhanceMap(picture);
  linkCounts();
  drawOn(["head"], markSquare);
}
