// Lines between two columns of tokens: queries on the left, keys on the right.

const LINE_ROWS = 30;
const ROW_HEIGHT = 22;

function drawLines(query = queryNow()) {
  const [queries, keys] = [textOf("queries"), textOf("keys")];
  const ends = [windowAround(query, queries.length), windowAround(query, keys.length)];
  const heads = drawnHeads().filter((head) => pairsOf(head));
  const width = Math.min(Math.max(byId("lines").clientWidth, 260), 560);
  const middle = [width * 0.36, width * 0.64];
  const height = ROW_HEIGHT * Math.max(...ends.map(([from, to]) => to - from)) + 24;
  const drawn = heads.flatMap((head, hue) => linesOf(head, hue, query, ends, middle));
  const picture = makeSvg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Lines from each word to the words it attends to, for ${study.heads[chosen.head]}`,
  }, [
    ...drawn.sort((a, b) => a.depth - b.depth).map(({ line }) => line),
    ...columnOf(queries, ends[0], middle[0] - 6, "end", query),
    ...columnOf(keys, ends[1], middle[1] + 6, "start", null),
    makeSvg("text", { class: "axis", x: middle[0] - 6, y: 12, "text-anchor": "end", text: "query" }),
    makeSvg("text", { class: "axis", x: middle[1] + 6, y: 12, text: "key" }),
  ]);
  picture.addEventListener("click", ({ target }) => {
    if (target.dataset.query) choose("query", Number(target.dataset.query));
  });
  fill("lines", picture);
  const [from, to] = ends[0];
  byId("lines-readout").textContent = to - from < queries.length
    ? `Words ${from + 1} to ${to} of ${formatCount(queries.length)}. Lines to other words are left out.`
    : "";
}

function windowAround(query, length) {
  const from = Math.max(0, Math.min(query - LINE_ROWS / 2, length - LINE_ROWS));
  return [from, Math.min(length, from + LINE_ROWS)];
}

function linesOf(head, hue, chosenQuery, [[from, to], [first, last]], [left, right]) {
  const lines = [];
  for (let query = from; query < to; query++) {
    for (const [key, weight] of pairsOf(head)(query)) {
      if (key < first || key >= last || weight < 0.02) continue;
      const strong = query === chosenQuery;
      const [y1, y2] = [rowAt(query - from), rowAt(key - first)];
      lines.push({
        depth: strong + weight / 2,
        line: makeSvg("path", {
          class: `line hue-${hue % HUES}`, d: `M${left} ${y1}C${left + 40} ${y1} ${right - 40} ${y2} ${right} ${y2}`,
          "stroke-opacity": (strong ? 0.25 + 0.75 * weight : 0.35 * weight).toFixed(3),
          "stroke-width": (strong ? 1 + 3 * weight : 1.2).toFixed(2),
        }),
      });
    }
  }
  return lines;
}

function rowAt(index) {
  return 24 + ROW_HEIGHT * (index + 0.5);
}

function columnOf(tokens, [from, to], x, anchor, query) {
  return tokens.slice(from, to).map((token, index) => {
    const short = [...token].length > 16 ? `${[...token].slice(0, 15).join("")}…` : token;
    return makeSvg("text", {
      class: from + index === query ? "row query" : "row", x, y: rowAt(index),
      "text-anchor": anchor, text: short, "data-query": query === null ? undefined : from + index,
    });
  });
}

if (study.samples.length) {
  drawOn(["head", "sample", "query", "kept"], () => drawLines());
  addEventListener("resize", () => drawLines());
}
