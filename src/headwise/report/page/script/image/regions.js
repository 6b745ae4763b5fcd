// Attention on images: the regions that a token attends to, and the words that attend to a region.

const GLANCE = 72; // pixels of a picture in the grid of heads
const looking = {
  query: study.queries[study.queries.length - 1], token: null, mean: false, sinks: true,
};
const isSink = new Set(study.sinks.map(([token]) => token));
const rowOf = new Map(study.queries.map((token, row) => [token, row]));
const regionsOf = study.pictures.map((_, picture) =>
  study.regions.filter((region) => region[1] === picture));
const withPixels = new Set(study.regions.map(([token]) => token));
const images = study.pictures.map(({ source }) => Object.assign(new Image(), { src: source }));
const unpacked = new Map();

// The weights of all queries of a head, or of the mean of a layer, as a function of row and token.
function mapOf(content) {
  if (!content) return null;
  if (!unpacked.has(content)) {
    unpacked.set(content, Uint8Array.from(atob(content[1]), (byte) => byte.charCodeAt(0)));
  }
  const bytes = unpacked.get(content);
  const width = study.tokens.length;
  return (row, token) => !looking.sinks && isSink.has(token)
    ? 0 : (bytes[row * width + token] / 255) * content[0];
}

function mapNow() {
  return mapOf(looking.mean ? study.means[study.layers[chosen.head]] : study.maps[chosen.head]);
}

function largest(map, row) {
  return Math.max(0, ...study.regions.map(([token]) => map(row, token)));
}

// Opaque where the weight is the largest: the picture shines through where there is little.
function paintRegions(canvas, picture, weightOf, scale) {
  const { width, height } = study.pictures[picture];
  const context = canvas.getContext("2d");
  const [across, down] = [canvas.width / width, canvas.height / height];
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  context.filter = "grayscale(1) opacity(0.8)"; // the only color is that of attention
  context.drawImage(images[picture], 0, 0, canvas.width, canvas.height);
  context.filter = "none";
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--pick");
  for (const [token, , ...edges] of regionsOf[picture]) {
    const [left, top, right, bottom] = edges.map((edge, side) =>
      Math.round(edge * (side % 2 ? down : across)));
    context.globalAlpha = 0.85 * Math.min(1, weightOf(token) / scale);
    context.fillRect(left, top, right - left, bottom - top);
    if (token !== looking.token) continue;
    context.globalAlpha = 1;
    context.strokeStyle = context.fillStyle;
    context.lineWidth = 2;
    context.strokeRect(left + 1, top + 1, right - left - 2, bottom - top - 2);
  }
}

const canvases = study.pictures.map(({ width, height }, picture) => {
  const size = Math.min(1, 1024 / Math.max(width, height)); // that of the picture in the page
  const canvas = make("canvas", {
    width: Math.round(width * size), height: Math.round(height * size), tabindex: 0, role: "img",
    "aria-label": `Image ${picture + 1}: the arrow keys move from region to region`,
  });
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const [x, y] = [offsetX * width / canvas.clientWidth, offsetY * height / canvas.clientHeight];
    // The smallest: a tile lies over a view of the whole image.
    const around = regionsOf[picture].filter(([, , left, top, right, bottom]) =>
      left <= x && x < right && top <= y && y < bottom);
    around.sort((a, b) => (a[4] - a[2]) * (a[5] - a[3]) - (b[4] - b[2]) * (b[5] - b[3]));
    if (around.length) chooseRegion(around[0][0]);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in ARROWS)) return;
    event.preventDefault();
    chooseRegion(neighbor(regionsOf[picture], ARROWS[event.key]));
  });
  return canvas;
});

// The nearest region in a direction; the first one if none is chosen.
function neighbor(regions, [down, right]) {
  const center = ([, , left, top, end, bottom]) => [(left + end) / 2, (top + bottom) / 2];
  const here = regions.find(([token]) => token === looking.token);
  if (!here) return regions[0][0];
  const [x, y] = center(here);
  let [best, least] = [looking.token, Infinity];
  for (const region of regions) {
    const [dx, dy] = center(region).map((value, axis) => value - [x, y][axis]);
    const along = dx * right + dy * down;
    const distance = along + 3 * Math.abs(dx * down + dy * right);
    if (along > 0.5 && distance < least) [best, least] = [region[0], distance];
  }
  return best;
}

// In an encoder a region is a query of its own; in a text, words look at it.
function chooseRegion(token) {
  looking.token = token;
  if (rowOf.has(token)) looking.query = token;
  drawLook();
}

function chooseQuery(token) {
  [looking.query, looking.token] = [token, null];
  drawLook();
}

function placeOf(token) {
  const [, picture, ...edges] = study.regions.find((region) => region[0] === token);
  const [left, top, right, bottom] = edges.map(Math.round);
  const where = `${left}–${right} × ${top}–${bottom}`;
  return study.pictures.length > 1 ? `image ${picture + 1}, ${where}` : where;
}

const words = study.queries.filter((token) => !withPixels.has(token)).map((token) => {
  const button = make("button", { type: "button", class: "word plain" }, [
    tokenText(study.tokens[token])]);
  button.addEventListener("click", () => chooseQuery(token));
  return [token, button];
});

function drawLook() {
  const map = mapNow();
  const row = rowOf.get(looking.query);
  const toRegion = looking.token !== null && !rowOf.has(looking.token);
  const scale = !map ? 1 : roundUp(toRegion
    ? Math.max(...words.map(([token]) => map(rowOf.get(token), looking.token)))
    : largest(map, row));
  const weightOf = !map ? () => 0 : (token) => (toRegion ? 0 : map(row, token));
  canvases.forEach((canvas, picture) => paintRegions(canvas, picture, weightOf, scale));
  for (const [token, button] of words) {
    const isQuery = !toRegion && token === looking.query;
    const weight = map && toRegion ? map(rowOf.get(token), looking.token) : 0;
    button.setAttribute("aria-pressed", isQuery);
    button.classList.toggle("query", isQuery);
    setVariables(button, { weight: `${85 * Math.min(1, weight / scale)}%` });
    button.title = toRegion ? formatWeight(weight) : "";
  }
  fill("scale", make("span", { text: "0" }), make("span", { class: "ramp over" }),
    make("span", { text: String(Number(scale.toPrecision(3))) }),
    make("span", { text: toRegion ? "weight of each word on the region" : "weight of each region" }));
  byId("look-readout").textContent = map ? describe(map, row, toRegion) : "This head is not in the page.";
  drawGlance(row, toRegion);
}

function describe(map, row, toRegion) {
  const who = looking.mean ? `The mean of layer ${study.layers[chosen.head]}` : study.heads[chosen.head];
  const best = (pairs) => pairs.sort((a, b) => b[1] - a[1]).slice(0, 3);
  if (toRegion) {
    const most = best(words.map(([token]) => [token, map(rowOf.get(token), looking.token)]));
    const named = most.map(([token, weight]) => `“${study.tokens[token]}” ${formatWeight(weight)}`);
    return `${who}: the region ${placeOf(looking.token)} gets most from ${named.join(", ")}.`;
  }
  const tokens = [...withPixels];
  const all = tokens.reduce((sum, token) => sum + map(row, token), 0);
  const named = best(tokens.map((token) => [token, map(row, token)]))
    .map(([token, weight]) => `${placeOf(token)} ${formatWeight(weight)}`);
  const query = withPixels.has(looking.query)
    ? `the region ${placeOf(looking.query)}` : `“${study.tokens[looking.query]}”`;
  return `${who}: ${query} gives ${formatWeight(all)} to the image, most to ${named.join(", ")}.`;
}

const glances = [];
for (const stack of stacks) {
  byId("glance").append(makeHeadGrid(stack, {
    label: "Pictures of all heads", cell: (head) => ({ place: null, label: study.heads[head] }),
    kind: () => "thumbs glance",
  }));
}
for (const cell of document.querySelectorAll("#glance [data-head]")) {
  const head = Number(cell.dataset.head);
  if (!study.maps[head]) continue;
  const { width, height } = study.pictures[0];
  const size = GLANCE / Math.max(width, height);
  const canvas = make("canvas", {
    width: Math.ceil(width * size), height: Math.ceil(height * size), "aria-hidden": "true",
  });
  cell.classList.remove("hatched");
  cell.replaceChildren(canvas);
  glances.push([head, canvas]);
}

// Of the first image, on the scale of the head that looks most at a single region.
function drawGlance(row, toRegion) {
  const known = glances.map(([head, canvas]) => [mapOf(study.maps[head]), canvas]);
  const scale = roundUp(Math.max(0, ...known.map(([map]) => largest(map, row))));
  for (const [map, canvas] of known) paintRegions(canvas, 0, (token) => map(row, token), scale);
  byId("glance-scale").textContent = String(Number(scale.toPrecision(3)))
    + (toRegion ? `, for “${study.tokens[looking.query]}”` : "");
}

fill("queries", ...words.map(([, button]) => button));
byId("queries").hidden = !words.length;
fill("pictures", ...canvases);
const sinkNames = study.sinks.map(([token, weight]) => {
  const name = withPixels.has(token) ? `the region ${placeOf(token)}` : `“${study.tokens[token]}”`;
  return `${name} (${formatWeight(weight)} of all attention)`;
});
byId("sinks").textContent = study.sinks.length
  ? `Sinks, which get ten times what even attention would give: ${sinkNames.join(", ")}.`
  : "No token is a sink: none gets ten times what even attention would give.";
byId("without-sinks").disabled = !study.sinks.length;
byId("missing").textContent = study.missing
  ? `${study.missing} heads are left out to keep the page small; means of layers have all.` : "";
byId("view").addEventListener("change", ({ target }) => {
  looking.mean = target.value === "layer";
  drawLook();
});
byId("without-sinks").addEventListener("change", ({ target }) => {
  looking.sinks = !target.checked;
  drawLook();
});
Promise.all(images.map((image) => image.decode())).then(() => drawOn(["head"], drawLook));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLook);
