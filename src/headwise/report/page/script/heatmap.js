// Layer × head, colored by one statistic.

let headCells = [];

function drawHeatmap() {
  const statistic = study.statistics[chosen.statistic];
  const scale = makeScale(statistic);
  headCells = [];
  fill("heatmap", ...[...new Set(study.stacks)].map((stack) => drawStack(stack, statistic, scale)));
  const missing = statistic.mean.includes(null);
  fill("legend", ...makeLegend(scale, {
    unit: statistic.unit, evens: statistic.even, hatched: missing ? "does not apply" : "",
  }));
  byId("says").textContent = statistic.says && describe(statistic);
  markHead();
}

function describe({ says, unit }) {
  const scale = unit === "share" ? "share, 0\u00a0…\u00a01" : unit;
  return says[0].toUpperCase() + says.slice(1) + (scale && ` (${scale})`) + ".";
}

function drawStack(stack, statistic, scale) {
  const members = study.heads.map((_, at) => at).filter((at) => study.stacks[at] === stack);
  const layers = [...new Set(members.map((at) => study.layers[at]))].sort((a, b) => a - b);
  const width = Math.max(...members.map((at) => study.places[at])) + 1;
  const byPlace = new Map(members.map((at) => [`${study.layers[at]} ${study.places[at]}`, at]));
  const at = (row, column) => byPlace.get(`${layers[row]} ${column}`);
  const { table, cells } = makeGrid({
    label: `${statistic.name} of every head${stack && ` of ${stack}`}`,
    corner: "layer ↓\nhead →",
    rows: layers.map(String),
    columns: Array.from({ length: width }, (_, column) => String(column)),
    cell: (row, column) => describeCell(at(row, column), statistic, scale, width),
    look: (row, column) => readOut(at(row, column), statistic),
    pick: (row, column) => choose("head", at(row, column)),
    kind: width > 16 ? "dense" : "roomy",
  });
  cells.forEach((line, row) => line.forEach((cell, column) => {
    if (cell) headCells[at(row, column)] = cell;
  }));
  return stack ? make("figure", {}, [make("figcaption", { text: stack }), table]) : table;
}

function describeCell(head, statistic, scale, width) {
  if (head === undefined) return null;
  const mean = statistic.mean[head];
  return {
    place: mean === null ? null : placeOn(scale, mean),
    text: mean === null || width > 16 ? "" : formatBrief(mean),
    label: sayValue(head, statistic),
  };
}

function sayValue(head, statistic) {
  const value = valueOf(statistic, head);
  const name = `${study.heads[head]}: ${statistic.name}`;
  if (value.mean === null) return `${name} does not apply`;
  const even = value.even === null ? "" : `; spread evenly ${formatNumber(value.even)}`;
  const unit = statistic.unit === "share" ? "" : ` ${statistic.unit}`;
  return `${name} ${formatMean(value)}${unit}${even}`;
}

function readOut(head, statistic) {
  byId("heatmap-readout").textContent = sayValue(head, statistic);
}

function markHead() {
  headCells.forEach((cell, head) => cell.setAttribute("aria-selected", head === chosen.head));
  readOut(chosen.head, study.statistics[chosen.statistic]);
}

bindSelect("statistic", statisticGroups().map(({ label, those }) => (
  { label, options: those.map(({ at, name }) => [at, name]) })));
follow(["statistic"], drawHeatmap);
follow(["head"], markHead);
