// The attention map of the chosen head on one short text, and its strongest pairs.

const PAIRS = 12;
const ONLY_KEY = "1";
const ONE_OF_SEVERAL = "+";

function drawSample() {
  const sample = study.samples[chosen.sample];
  const weights = readMap(sample, chosen.head);
  if (!weights) {
    fill("map", make("p", { class: "note", text: "There is no map of this head." }));
    fill("map-legend");
    fill("map-readout");
    fill("pairs");
    return;
  }
  drawMap(sample, weights);
  drawPairs(sample, weights);
}

// The view of a head: the texts of its queries and keys, and the cells of its map.
function viewOf({ views, view }, head) {
  return views[view[head]];
}

// Bytes hold the cells with a choice of keys, row by row, as 255ths of the peak.
function readMap(sample, head) {
  const { maps, peaks } = sample;
  const { cells } = viewOf(sample, head);
  if (maps[head] === null) return null;
  const bytes = Uint8Array.from(atob(maps[head]), (character) => character.charCodeAt(0));
  let next = 0;
  return cells.map((row) => [...row].map((sign) =>
    sign === ONE_OF_SEVERAL ? (bytes[next++] / 255) * peaks[head] : sign === ONLY_KEY ? 1 : 0));
}

function drawMap(sample, weights) {
  const { sides, queries, keys, cells } = viewOf(sample, chosen.head);
  const scale = { low: 0, high: roundUp(sample.peaks[chosen.head]) };
  const describePair = (query, key) => {
    const only = cells[query][key] === ONLY_KEY ? " (the only visible key)" : "";
    return `${queries[query]} → ${keys[key]}: ${formatWeight(weights[query][key])}${only}`;
  };
  const { table } = makeGrid({
    label: `Attention of ${study.heads[chosen.head]} on the text`,
    corner: "query ↓\nkey →",
    rows: queries,
    columns: keys,
    cell: (query, key) => cells[query][key] === "." ? null : {
      place: cells[query][key] === ONLY_KEY ? null : placeOn(scale, weights[query][key]),
      label: describePair(query, key),
    },
    onPoint: (query, key) => { byId("map-readout").textContent = describePair(query, key); },
    kind: "map",
  });
  fill("map", table);
  const hatched = cells.some((row) => row.includes(ONLY_KEY)) ? "only one visible key" : "";
  fill("map-legend", ...makeLegend(scale, { unit: "share of the query's attention", hatched }));
  const names = sample.views.length > 1 ? `Rows: ${sides[0]}; columns: ${sides[1]}. ` : "";
  fill("map-readout", `${names}Point at a cell to see its weight.`);
}

function strongestPairs(sample, weights) {
  const { cells } = viewOf(sample, chosen.head);
  const pairs = cells.flatMap((row, query) => {
    const even = 1 / [...row].filter((sign) => sign !== ".").length;
    return [...row].flatMap((sign, key) =>
      sign === ONE_OF_SEVERAL ? [{ query, key, weight: weights[query][key], even }] : []);
  });
  const shown = pairs.filter(({ weight }) => Number(formatWeight(weight)) > 0);
  return shown.sort((a, b) => b.weight - a.weight).slice(0, PAIRS);
}

function drawPairs(sample, weights) {
  const rows = strongestPairs(sample, weights).map((pair) => drawPair(sample, pair));
  const header = makeHeader(["Query → key", "Positions", "Weight", "", "Even"]);
  fill("pairs", make("table", { class: "numbers" }, [header, make("tbody", {}, rows)]));
}

function drawPair(sample, { query, key, weight, even }) {
  const { queries, keys } = viewOf(sample, chosen.head);
  return make("tr", {}, [
    make("td", {}, [tokenText(queries[query]), " → ", tokenText(keys[key])]),
    make("td", { text: `${query} → ${key}` }),
    make("td", { class: "main", text: formatWeight(weight) }),
    make("td", {}, [makeBar(weight, even)]),
    make("td", { text: formatWeight(even) }),
  ]);
}

function sampleNote() {
  const count = study.left_out;
  if (!count) return "";
  return `${count} more ${count > 1 ? "texts were" : "text was"} left out to keep this page small.`;
}

fill("sample-note", sampleNote());
if (study.samples.length) {
  bindSelect("sample", study.samples.map(({ tokens }, index) => (
    { options: [[index, `${index + 1}: ${tokens.join(" ")}`]] })));
  drawOn(["head", "sample"], drawSample);
} else {
  const text = sampleNote() || "The study has no text with maps.";
  byId("sample-section").replaceChildren(byId("sample-title"), make("p", { class: "note", text }));
}
