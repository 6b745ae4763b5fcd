// The numbers of the chosen head, and its roles.

function drawNumbers() {
  const table = make("table", { class: "numbers" }, [
    makeHeader(["Statistic", "Mean ± s.e.", "Even", "Maximum", "Queries"]),
    ...statisticGroups().flatMap(drawGroup),
  ]);
  fill("numbers", table);
  for (const name of document.querySelectorAll("[data-head]")) {
    name.textContent = study.heads[chosen.head];
  }
}

function drawGroup({ label, statistics }) {
  const title = make("th", { colspan: 5, scope: "rowgroup", text: label });
  const rows = statistics.map(drawStatistic);
  return [make("tbody", {}, [make("tr", { class: "group" }, [title]), ...rows])];
}

function drawStatistic(statistic) {
  const value = valueOf(statistic, chosen.head);
  const hasBar = statistic.unit === "share" && value.mean !== null;
  const bars = hasBar ? [makeBar(value.mean, value.even)] : [];
  return make("tr", {}, [
    make("th", { scope: "row" }, [
      make("span", { text: statistic.name }), make("small", { text: statistic.meaning }),
    ]),
    make("td", { class: "main" }, [formatMean(value), ...bars]),
    make("td", { text: formatNumber(value.even) }),
    make("td", { text: formatNumber(value.maximum) }),
    make("td", { text: formatCount(value.count) }),
  ]);
}

// A share as a bar, with a mark at the share of even attention.
function makeBar(share, even) {
  const bar = setVariables(make("span", { class: "bar", "aria-hidden": "true" }), { v: share });
  if (even !== null) bar.append(makeTick(even));
  return bar;
}

// The roles of the head: often none was found, or none could be tested.
function drawRoles() {
  if (!study.roles) return;
  const { none, rows, lines } = study.roles[chosen.head];
  const items = rows.map(({ role, meaning, effect, null: score, lift, p, n }) => make("li", {}, [
    tokenText(role),
    ` (${meaning}): ${effect} against ${score}; lift ${lift}, p ${p}, ${n}`,
  ]));
  fill("head-roles",
    rows.length ? make("ul", { class: "roles" }, items) : make("p", { class: "none", text: none }),
    ...lines.map((text) => make("p", { class: "note", text: `${text}.` })));
}

// A button at each finding shows its head and statistic.
function linkFindings() {
  study.findings.forEach(({ head, statistic }, index) => {
    const name = `Show ${study.heads[head]}`;
    const button = make("button", { type: "button", text: "show", "aria-label": name });
    button.addEventListener("click", () => {
      choose("statistic", statistic);
      choose("head", head);
      byId("every-title").scrollIntoView();
    });
    byId("findings").children[index].append(" ", button);
  });
}

function linkRoles() {
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      choose("head", study.heads.indexOf(button.dataset.show));
      byId("every-title").scrollIntoView();
    });
  }
}

linkFindings();
linkRoles();
bindSelect("head", [...new Set(study.stacks)].map((stack) => ({
  label: stack || "Layer and head",
  options: study.heads.map((name, head) => [head, name])
    .filter(([head]) => study.stacks[head] === stack),
})));
drawOn(["head"], drawRoles);
drawOn(["head"], drawNumbers);
