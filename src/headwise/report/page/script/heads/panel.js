// The chosen head: its roles with their evidence, what ablating it does, and its statistics.

function drawNumbers() {
  fill("numbers", make("table", { class: "numbers" }, [
    makeHeader(["Statistic", "Mean ± s.e.", "Uniform", "Maximum", "Queries"]),
    ...statisticGroups().flatMap(drawGroup),
  ]));
}

function drawGroup({ label, statistics }) {
  const title = make("th", { colspan: 5, scope: "rowgroup", text: label });
  return [make("tbody", {}, [make("tr", { class: "group" }, [title]), ...statistics.map(drawStatistic)])];
}

function drawStatistic(statistic) {
  const value = valueOf(statistic, chosen.head);
  const hasBar = statistic.unit === "share" && value.mean !== null;
  const bars = hasBar ? [makeBar(value.mean, value.even)] : [];
  const link = make("a", {
    href: `#${study.heads[chosen.head]}/${encodeURIComponent(statistic.name)}`,
    text: statistic.label,
  });
  return make("tr", {}, [
    make("th", { scope: "row" }, [link, make("small", { text: statistic.meaning })]),
    make("td", { class: "main" }, [formatMean(value), ...bars]),
    make("td", { text: formatNumber(value.even) }),
    make("td", { text: formatNumber(value.maximum) }),
    make("td", { text: formatCount(value.count) }),
  ]);
}

function drawRoles() {
  if (!study.roles) return;
  const head = study.roles[chosen.head];
  fill("head-roles",
    ...(head.rows.length ? head.rows.map(drawRole) : drawNoRole(head)),
    ...(head.shape ? [make("p", { class: "note", text: `${head.shape}.` })] : []),
    ...drawEffects(head.effects),
    ...head.groups.map((text) => make("p", { class: "note", text: `${text}.` })),
    ...(head.why.length ? [makeDetails("The whole evidence",
      [make("pre", { class: "why", tabindex: 0, text: head.why.join("\n") })])] : []));
}

function drawRole({ role, meaning, effect, null: score, lift, p, n, half }) {
  const facts = [
    ["Effect", effect], ["Held-out queries", n], ["Strongest null", score],
    ["Lift", `${lift}, adjusted p ${p}`], ["Held-out check", `${half} on the other half`],
  ];
  return make("div", { class: "role-card" }, [
    make("h3", {}, [tokenText(role)]), make("p", { class: "note", text: `${meaning}.` }),
    make("dl", {}, facts.map(([name, value]) =>
      make("div", {}, [make("dt", { text: name }), make("dd", { text: value })]))),
  ]);
}

function drawNoRole({ none, tested, nearest }) {
  const lines = [make("p", { class: "none", text: none })];
  if (nearest) lines.push(make("p", { class: "note" }, ["Tested; nearest was ", nearest, "."]));
  return tested ? lines : lines.slice(0, 1);
}

function makeDetails(title, children) {
  return make("details", {}, [make("summary", { text: title }), ...children]);
}

// How much each behavior loses without the head: a bar with its interval around zero.
function drawEffects(effects) {
  if (!effects.length) return [];
  const furthest = Math.max(...effects.flatMap(({ values }) => values.map(Math.abs))) || 1;
  const [significant, other] = [true, false].map((kind) =>
    effects.filter((effect) => effect.significant === kind)
      .map((effect) => drawEffect(effect, furthest)));
  const count = other.length === 1 ? "1 effect is" : `${other.length} effects are`;
  return [
    make("h3", { text: "Without this head" }),
    ...(significant.length ? significant
      : [make("p", { class: "note", text: "No behavior that was measured changes significantly." })]),
    ...(other.length ? [makeDetails(`${count} not significant`, other)] : []),
  ];
}

function drawEffect({ behavior, meaning, values, text }, furthest) {
  const [effect, low, high] = values.map((value) => 100 + (value / furthest) * 95);
  const picture = makeSvg("svg", {
    class: "effect", viewBox: "0 0 200 14", width: 200, height: 14, "aria-hidden": "true",
  }, [
    makeSvg("rect", { x: Math.min(100, effect), y: 3, width: Math.abs(effect - 100), height: 8 }),
    makeSvg("path", { d: `M${low} 7H${high}M${low} 4v6M${high} 4v6` }),
    makeSvg("path", { class: "zero", d: "M100 0v14" }),
  ]);
  return make("div", { class: "effect-line" }, [
    make("span", {}, [tokenText(behavior)]), picture,
    make("small", { text: `${text}; ${meaning}` }),
  ]);
}

function drawImportance() {
  const value = study.importance?.values[chosen.head];
  byId("head-importance").hidden = !value;
  if (!value) return;
  const [importance, low, high] = value.map(formatNumber);
  const ends = value[1] === null ? "" : ` [${low}, ${high}]`;
  fill("head-importance", make("b", { text: "Importance " }),
    `${importance}${ends} of the loss ${study.importance.loss}, by ${study.importance.method}`);
}

// A button at each finding shows its head and statistic.
function linkFindings() {
  study.findings.forEach(({ head, statistic }, index) => {
    const name = `Show ${study.heads[head]}`;
    const button = make("button", { type: "button", class: "plain", text: "show", "aria-label": name });
    button.addEventListener("click", () => {
      choose("statistic", statistic);
      choose("head", head);
      byId("overview").scrollIntoView();
    });
    byId("findings").children[index].append(" ", button);
  });
}

function linkHeads() {
  for (const button of document.querySelectorAll("[data-show]")) {
    const head = study.heads.indexOf(button.dataset.show);
    button.addEventListener("click", () => {
      showHead(head);
      byId(button.closest(".evidence-of") ? "overview" : "one").scrollIntoView();
    });
  }
}

linkFindings();
linkHeads();
drawOn(["head"], () => fill("head-title", study.heads[chosen.head]));
for (const draw of [drawRoles, drawNumbers, drawImportance]) drawOn(["head"], draw);
