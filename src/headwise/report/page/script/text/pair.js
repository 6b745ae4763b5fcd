// The heads that link two words of the text, as `hw.links` has them.

const LINKS = 10;

// The words that a word may attend to, in the order of the text: those that some head does attend
// to where the page has no whole maps.
function wordsLinked(from, heads) {
  const { cells } = viewOf(sampleNow(), chosen.head);
  const words = wordsOf(textOf("keys"));
  const keys = from.places.flatMap((query) => cells
    ? [...words.keys()].filter((key) => cells[query][key] === ONE_OF_SEVERAL)
    : heads.flatMap((head) => pairsOf(head)(query).map(([key]) => key)));
  // The two words that the page opens on can be chosen, even if no head has them among its pairs.
  if (!cells && from.places.includes(study.pair[0]?.[0])) keys.push(study.pair[1][0]);
  return [...new Set(keys.sort((a, b) => a - b).map((key) => words[key]))];
}

// The weight of each head from a word to a target, that of uniform attention, and what the other
// tokens give the target. A word's tokens are summed over where they are attended to, and averaged
// over where they attend: over those that may attend to the target and have a choice.
function linksTo(target, from, heads) {
  const { cells } = viewOf(sampleNow(), chosen.head);
  const mayAttend = (query) => !cells || target.places.some((key) => cells[query][key] === ONE_OF_SEVERAL);
  const queries = from.places.filter(mayAttend);
  const others = [...wordsOf(textOf("queries")).keys()].filter((q) => mayAttend(q) && !from.places.includes(q));
  const average = (pairsFrom, rows) => rows.flatMap(pairsFrom).reduce((sum, [key, weight]) =>
    sum + (target.places.includes(key) ? weight : 0), 0) / (rows.length || 1);
  const uniform = (query) => {
    const seen = [...cells[query]].flatMap((sign, key) => sign === "." ? [] : [key]);
    return seen.map((key) => [key, 1 / seen.length]);
  };
  const weights = (head) => [queries, others].map((rows) => average(pairsOf(head), rows));
  return {
    even: cells && average(uniform, queries),
    links: heads.map((head) => [head, ...weights(head)]).sort((a, b) => b[1] - b[2] - a[1] + a[2]),
  };
}

function drawLinks() {
  for (const word of document.querySelectorAll("#words .target")) word.classList.remove("target");
  const heads = [...study.heads.keys()].filter((head) => readsTheSame(head) && pairsOf(head));
  const from = wordsOf(textOf("queries"))[queryNow()];
  const words = wordsLinked(from, heads);
  byId("links-part").hidden = !words.length;
  if (!words.length) return;
  // The chosen word, or the one that the chosen head attends to most.
  const keys = [chosen.target, pairsOf(chosen.head)?.(queryNow())[0]?.[0]];
  const [target] = [...keys.flatMap((key) => words.filter(({ places }) => places.includes(key))), words[0]];
  for (const key of target.places) wordBoxes.keys[key].classList.add("target");
  const isRepeated = (word) => words.some((other) => other !== word && other.text === word.text);
  byId("target").replaceChildren(...words.map((word) => make("option", {
    value: word.places[0],
    text: isRepeated(word) ? `${word.text} (${word.places[0]})` : word.text, selected: word === target,
  })));
  fill("links-from", tokenText(from.text));
  const { even, links } = linksTo(target, from, heads);
  // Less than uniform attention links nothing.
  const above = links.filter(([, weight]) => weight > (even ?? 0));
  const rows = above.slice(0, LINKS).map((link) => drawLink(link, even));
  fill("links", make("table", { class: "numbers" },
    [makeHeader(["Head", "Weight", "", "Uniform", "Others"]), make("tbody", {}, rows)]));
  byId("links-note").textContent = (even === null
    ? "Of this text the page has only the strongest pairs of each query: all others count as 0. " : "") +
    `${formatCount(rows.length)} of ${formatCount(links.length)} heads, the weight furthest above Others first.`;
}

function drawLink([head, weight, others], even) {
  const button = make("button", { type: "button", class: "plain", text: study.heads[head] });
  button.addEventListener("click", () => choose("head", head));
  return make("tr", head === chosen.head ? { class: "chosen" } : {}, [
    make("td", {}, [button]),
    make("td", { class: "main", text: formatWeight(weight) }),
    make("td", {}, [makeBar(weight, even)]),
    make("td", { text: even === null ? NONE : formatWeight(even) }),
    make("td", { text: formatWeight(others) }),
  ]);
}

if (study.samples.length) {
  byId("target").addEventListener("change", ({ target }) => choose("target", Number(target.value)));
  drawOn(["head", "sample", "query", "target"], drawLinks);
}
