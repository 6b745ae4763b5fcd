// All heads at a glance: a small picture of each map on the chosen text.

const THUMB = 32;
let thumbCells = [];
const whenVisible = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    whenVisible.unobserve(target);
    drawThumb(target);
  }
}, { rootMargin: "200px" });

function drawThumbs() {
  thumbCells = [];
  whenVisible.disconnect();
  fill("thumbs", ...stacks.map(drawThumbsOf));
  markThumb();
  if (stacks.length > 1) drawTabs();
}

function drawThumbsOf(stack) {
  const table = makeHeadGrid(stack, {
    label: "Maps of all heads",
    cell: (head) => ({ place: null, label: study.heads[head] }),
    found: (head, cell) => {
      thumbCells[head] = cell;
      cell.dataset.thumb = head;
      if (pairsKept(head)) whenVisible.observe(cell);
    },
    kind: (width) => width > 16 ? "thumbs many" : "thumbs",
  });
  return make("figure", stacks.length > 1 ? { "data-stack": stack } : {}, [table]);
}

function pairsKept(head) {
  const { maps, pairs } = sampleNow();
  return Boolean(maps[head] || pairs[head]);
}

// Rows are queries and columns are keys; a long text is drawn at the size of the picture.
function drawThumb(cell) {
  const head = Number(cell.dataset.thumb);
  const [rows, columns] = ["queries", "keys"].map((side) => textOf(side, head).length);
  const canvas = make("canvas", {
    width: Math.min(columns, THUMB), height: Math.min(rows, THUMB), "aria-hidden": "true",
  });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  context.fillStyle = style.getPropertyValue("--high");
  const [down, right] = [canvas.height / rows, canvas.width / columns];
  const pairs = pairsOf(head);
  for (let query = 0; query < rows; query++) {
    for (const [key, weight] of pairs(query)) {
      if (weight < 0.02) continue;
      context.globalAlpha = Math.min(1, Math.sqrt(weight));
      context.fillRect(Math.floor(key * right), Math.floor(query * down), 1, 1);
    }
  }
  cell.classList.remove("hatched");
  cell.replaceChildren(canvas);
}

function drawAllThumbs() {
  for (const cell of thumbCells) {
    if (cell && pairsKept(Number(cell.dataset.thumb))) drawThumb(cell);
  }
}

function markThumb() {
  thumbCells.forEach((cell, head) => cell.setAttribute("aria-selected", head === chosen.head));
}

if (study.samples.length) {
  drawOn(["sample"], drawThumbs);
  drawOn(["head"], markThumb);
  addEventListener("beforeprint", drawAllThumbs);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawThumbs);
}
