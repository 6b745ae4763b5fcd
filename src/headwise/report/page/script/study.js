// The study, what is chosen of it, and who follows the choice.

const study = JSON.parse(byId("data").textContent);
// The page opens with what the first finding speaks of.
const [opening = { head: 0, statistic: 0 }] = study.findings;
const chosen = { ...opening, sample: 0 };
const followers = { head: [], statistic: [], sample: [] };

function choose(what, value) {
  chosen[what] = value;
  for (const draw of followers[what]) draw();
}

// Draw now, and again whenever one of these is chosen anew.
function follow(choices, draw) {
  for (const what of choices) followers[what].push(draw);
  draw();
}

// A select element that chooses, and that shows what was chosen elsewhere.
function bindSelect(what, groups) {
  const select = byId(what);
  select.replaceChildren(...groups.filter((group) => group.options.length).map(makeGroup));
  select.addEventListener("change", () => choose(what, Number(select.value)));
  follow([what], () => { select.value = String(chosen[what]); });
}

function makeGroup({ label, options }) {
  const made = options.map(([value, text]) => make("option", { value, text }));
  return label ? make("optgroup", { label }, made) : made[0];
}

function statisticGroups() {
  const numbered = study.statistics.map((statistic, at) => ({ ...statistic, at }));
  return [
    { label: "How a head attends", those: numbered.filter(({ asked }) => !asked) },
    { label: "Relations and classes asked for", those: numbered.filter(({ asked }) => asked) },
  ].filter(({ those }) => those.length);
}

// What one statistic says of one head.
function valueOf(statistic, head) {
  return {
    mean: statistic.mean[head],
    error: statistic.error[head],
    count: statistic.count[head],
    maximum: statistic.maximum[head],
    even: statistic.even[head],
  };
}
