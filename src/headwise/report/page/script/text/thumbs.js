// All heads at a glance: a small picture of each map on the chosen text.

const THUMB = 32;
const MOST_AT_ONCE = 512;
const whenVisible = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    whenVisible.unobserve(target);
    // A click on a picture that is replaced before the button is up would be lost.
    if (!target.firstChild) drawThumb(target);
  }
}, { rootMargin: "200px" });

function drawThumbs() {
  whenVisible.disconnect();
  fill("thumbs", ...stacks.map(drawThumbsOf));
  const cells = thumbCells();
  for (const cell of cells) whenVisible.observe(cell);
  // A screenshot of the whole page has them all; of thousands only those in view.
  if (cells.length <= MOST_AT_ONCE) requestIdleCallback((idle) => drawInIdleTime(cells, idle));
  if (stacks.length > 1) drawTabs();
}

function drawInIdleTime(cells, idle) {
  while (cells.length && idle.timeRemaining() > 2) {
    const cell = cells.shift();
    if (cell.isConnected && !cell.firstChild) drawThumb(cell);
  }
  if (cells.length) requestIdleCallback((next) => drawInIdleTime(cells, next));
}

function drawThumbsOf(stack) {
  return makeHeadGrid(stack, {
    label: "Maps of all heads",
    cell: (head) => ({ place: null, label: study.heads[head] }),
    kind: (width) => width > 16 ? "thumbs many" : "thumbs",
  });
}

// Those of the heads whose attention the page has.
function thumbCells() {
  const { maps, pairs } = sampleNow();
  return [...document.querySelectorAll("#thumbs [data-head]")]
    .filter(({ dataset: { head } }) => maps[head] || pairs[head]);
}

// Rows are queries and columns are keys; a long text is drawn at the size of the picture.
function drawThumb(cell) {
  const head = Number(cell.dataset.head);
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

if (study.samples.length) {
  drawOn(["sample"], drawThumbs);
  addEventListener("beforeprint", () => thumbCells().forEach(drawThumb));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawThumbs);
}
