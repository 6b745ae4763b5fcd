// The data of the page, the current choices, and what is drawn for them.

const study = JSON.parse(byId("data").textContent);
// Not statistics, but the heads can be colored by them as well.
const [ROLES, IMPORTANCE] = [-1, -2];
// `kept` are further heads that are drawn beside the chosen one; `query` is the token whose
// attention is shown and `target` one that it may attend to, or null where none was chosen.
const chosen = {
  head: study.start, statistic: study.roles ? ROLES : study.findings[0]?.statistic ?? 0,
  sample: 0, query: study.pair[0]?.[0] ?? null, target: study.pair[1]?.[0] ?? null, kept: [],
};
if (study.places[chosen.head]) [chosen.sample, chosen.query] = study.places[chosen.head];
const listeners = { head: [], statistic: [], sample: [], query: [], target: [], kept: [] };

function choose(name, value) {
  chosen[name] = value;
  // Another text has other tokens, and heads of another stack read other texts.
  const isGone = () => !study.samples.length || chosen.query >= textOf("queries").length;
  if (name === "sample" || (name === "head" && chosen.query !== null && isGone())) {
    [chosen.query, chosen.target] = [null, null];
  }
  for (const draw of listeners[name]) draw();
}

// Show a head where its role is plainest; where no text shows it, on the text that is shown.
function showHead(head) {
  const place = study.places[head];
  if (place && place[0] !== chosen.sample) choose("sample", place[0]);
  choose("head", head);
  if (place) choose("query", place[1]);
}

// Draw now, and again whenever one of these choices changes.
function drawOn(choices, draw) {
  for (const name of choices) listeners[name].push(draw);
  draw();
}

// A select element that sets a choice, and that shows a choice made elsewhere.
function bindSelect(select, name, groups) {
  select.replaceChildren(...groups.filter((group) => group.options.length).map(makeGroup));
  select.addEventListener("change", () => choose(name, Number(select.value)));
  drawOn([name], () => { select.value = String(chosen[name]); });
}

function makeGroup({ label, options }) {
  const elements = options.map(([value, text]) => make("option", { value, text }));
  return label ? make("optgroup", { label }, elements) : elements[0];
}

const stacks = [...new Set(study.stacks)];

function headGroups() {
  return stacks.map((stack) => ({
    label: stack || "Layer and head",
    options: study.heads.map((name, head) => [head, name])
      .filter(([head]) => study.stacks[head] === stack),
  }));
}

function statisticGroups() {
  const numbered = study.statistics.map((statistic, index) => ({ ...statistic, index }));
  const ofKind = (requested) => numbered.filter((statistic) => statistic.requested === requested);
  return [
    { label: "Built-in statistics", statistics: ofKind(false) },
    { label: "Requested relations and token classes", statistics: ofKind(true) },
  ].filter(({ statistics }) => statistics.length);
}

// The values of one statistic for one head. A column that all heads share is a single number.
function valueOf(statistic, head) {
  const at = (column) => (Array.isArray(column) ? column[head] : column);
  return {
    mean: statistic.mean[head],
    error: statistic.error[head],
    count: at(statistic.count),
    maximum: at(statistic.maximum),
    even: at(statistic.even),
  };
}

// A statistic by its index; undefined for the roles.
function statisticAt(index) {
  if (index !== IMPORTANCE) return study.statistics[index];
  const { method, loss, values } = study.importance;
  const column = (part) => values.map((value) => value && value[part]);
  return {
    name: "importance", label: "Importance", unit: `of the loss ${loss}`, requested: false,
    meaning: `growth of the loss without the head, by ${method}`,
    from_zero: values.every((value) => !value || value[0] >= 0), mean: column(0),
    error: values.map((value) => value && value[2] !== null && (value[2] - value[1]) / 3.92),
    count: null, maximum: null, even: null,
  };
}
