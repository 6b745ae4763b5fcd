// A heatmap of layer × head, colored by one statistic.

function drawHeatmap() {
  const statistic = statisticAt(chosen.statistic);
  for (const part of document.querySelectorAll("[data-of-roles]")) part.hidden = Boolean(statistic);
  byId("of-statistic").hidden = !statistic;
  if (!statistic) return;
  const scale = makeScale(statistic);
  fill("heatmap", ...stacks.map((stack) => drawStack(stack, statistic, scale)));
  const missing = statistic.mean.includes(null);
  fill("legend", ...makeLegend(scale, {
    unit: statistic.unit, evens: statistic.even, hatched: missing ? "does not apply" : "",
  }));
  byId("meaning").textContent = statistic.meaning && describe(statistic);
  showValue();
  if (stacks.length > 1) drawTabs();
}

function describe({ meaning, unit }) {
  const scale = unit === "share" ? "share, 0\u00a0…\u00a01" : unit;
  return meaning[0].toUpperCase() + meaning.slice(1) + (scale && ` (${scale})`) + ".";
}

function drawStack(stack, statistic, scale) {
  return makeHeadGrid(stack, {
    label: `${statistic.label} of every head`,
    cell: (head, width) => describeCell(head, statistic, scale, width),
    onPoint: showValue,
    kind: (width) => width > 16 ? "dense" : "roomy",
  });
}

function describeCell(head, statistic, scale, width) {
  const mean = statistic.mean[head];
  return {
    place: mean === null ? null : placeOn(scale, mean),
    text: mean === null || width > 16 ? "" : formatBrief(mean),
    label: valueText(head, statistic),
  };
}

function valueText(head, statistic) {
  const value = valueOf(statistic, head);
  const name = `${study.heads[head]}: ${statistic.label}`;
  if (value.mean === null) return `${name} does not apply`;
  const even = value.even === null ? "" : `; uniform attention ${formatNumber(value.even)}`;
  const unit = statistic.unit === "share" ? "" : ` ${statistic.unit}`;
  return `${name} ${formatMean(value)}${unit}${even}`;
}

function showValue(head = chosen.head) {
  const statistic = statisticAt(chosen.statistic);
  if (statistic) byId("heatmap-readout").textContent = valueText(head, statistic);
}

bindSelect(byId("statistic"), "statistic", [
  { options: study.roles ? [[ROLES, "Strongest role"]] : [] },
  { options: study.importance ? [[IMPORTANCE, "Importance"]] : [] },
  ...statisticGroups().map(({ label, statistics }) => (
    { label, options: statistics.map(({ index, label: name }) => [index, name]) })),
]);
drawOn(["statistic"], drawHeatmap);
drawOn(["head"], () => showValue());
