// The exact map of the chosen head on a short text.

function drawMap() {
  const { cells, sides } = viewOf(sampleNow(), chosen.head);
  const pairs = pairsOf(chosen.head);
  byId("map-part").hidden = !pairs || !cells;
  if (!pairs || !cells) return;
  const weights = cells.map((_, query) => new Map(pairs(query)));
  const [queries, keys] = [textOf("queries"), textOf("keys")];
  const scale = { low: 0, high: roundUp(sampleNow().maps[chosen.head][0]) };
  const describePair = (query, key) => {
    const only = cells[query][key] === ONLY_KEY ? " (the only visible key)" : "";
    return `${queries[query]} → ${keys[key]}: ${formatWeight(weights[query].get(key))}${only}`;
  };
  const { table } = makeGrid({
    label: `Attention of ${study.heads[chosen.head]} on the text`,
    corner: "query ↓\nkey →",
    rows: queries,
    columns: keys,
    cell: (query, key) => cells[query][key] === "." ? null : {
      place: cells[query][key] === ONLY_KEY ? null : placeOn(scale, weights[query].get(key)),
      label: describePair(query, key),
    },
    onPoint: (query, key) => { byId("map-readout").textContent = describePair(query, key); },
    onPick: (query, key) => {
      choose("target", key);
      choose("query", query);
    },
    kind: queries.length > 32 ? "map small" : "map",
  });
  fill("map", table);
  const hatched = cells.some((row) => row.includes(ONLY_KEY)) ? "only one visible key" : "";
  fill("map-legend", ...makeLegend(scale, { unit: "share of the query's attention", hatched }));
  const names = sampleNow().views.length > 1 ? `Rows: ${sides[0]}; columns: ${sides[1]}. ` : "";
  fill("map-readout", `${names}Point at a cell to see its weight.`);
}

function sampleNote() {
  const parts = [];
  const { missing } = study.samples.length ? sampleNow() : { missing: 0 };
  const all = study.heads.length;
  if (study.left_out) {
    const texts = study.left_out > 1 ? "texts were" : "text was";
    parts.push(`${study.left_out} more ${texts} left out to keep this page small.`);
  }
  if (missing) {
    parts.push(`Of this text the page has the attention of ${formatCount(all - missing)} of ` +
      `${formatCount(all)} heads; for the others it has sums per layer. To keep all, make the ` +
      `page with --full.`);
  }
  return parts.join(" ");
}

if (study.samples.length) {
  drawOn(["head", "sample"], drawMap);
  drawOn(["sample"], () => fill("sample-note", sampleNote()));
} else {
  const text = sampleNote() || "The study has no text with maps.";
  byId("sample-section").replaceChildren(byId("sample-title"), make("p", { class: "note", text }));
}
