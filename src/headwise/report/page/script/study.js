// The study, the current choice of head, statistic and sample, and what is drawn for it.

const study = JSON.parse(byId("data").textContent);
// The page opens with the head and statistic of the first finding.
const [initial = { head: 0, statistic: 0 }] = study.findings;
const chosen = { ...initial, sample: 0 };
const listeners = { head: [], statistic: [], sample: [] };

function choose(name, value) {
  chosen[name] = value;
  for (const draw of listeners[name]) draw();
}

// Draw now, and again whenever one of these choices changes.
function drawOn(choices, draw) {
  for (const name of choices) listeners[name].push(draw);
  draw();
}

// A select element that sets a choice, and that shows a choice made elsewhere.
function bindSelect(name, groups) {
  const select = byId(name);
  select.replaceChildren(...groups.filter((group) => group.options.length).map(makeGroup));
  select.addEventListener("change", () => choose(name, Number(select.value)));
  drawOn([name], () => { select.value = String(chosen[name]); });
}

function makeGroup({ label, options }) {
  const elements = options.map(([value, text]) => make("option", { value, text }));
  return label ? make("optgroup", { label }, elements) : elements[0];
}

function statisticGroups() {
  const numbered = study.statistics.map((statistic, index) => ({ ...statistic, index }));
  const [requested, builtIn] = [true, false].map((kind) =>
    numbered.filter((statistic) => statistic.requested === kind));
  return [
    { label: "Built-in statistics", statistics: builtIn },
    { label: "Requested relations and token classes", statistics: requested },
  ].filter(({ statistics }) => statistics.length);
}

// The values of one statistic for one head.
function valueOf(statistic, head) {
  return {
    mean: statistic.mean[head],
    error: statistic.error[head],
    count: statistic.count[head],
    maximum: statistic.maximum[head],
    even: statistic.even[head],
  };
}
