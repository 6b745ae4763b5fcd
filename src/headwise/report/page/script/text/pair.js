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

// The weight of each head from a word to a target, and that of uniform attention. A word's tokens
// are summed over where they are attended to, and averaged over where they attend: over those that
// may attend to the target and have a choice.
function linksTo(target, from, heads) {
  const { cells } = viewOf(sampleNow(), chosen.head);
  const isTarget = new Set(target.places);
  const queries = cells ? from.places.filter((query) =>
    target.places.some((key) => cells[query][key] === ONE_OF_SEVERAL)) : from.places;
  const average = (pairsFrom) => queries.flatMap(pairsFrom)
    .reduce((sum, [key, weight]) => sum + (isTarget.has(key) ? weight : 0), 0) / queries.length;
  const uniform = (query) => {
    const seen = [...cells[query]].flatMap((sign, key) => sign === "." ? [] : [key]);
    return seen.map((key) => [key, 1 / seen.length]);
  };
  return {
    even: cells && average(uniform),
    links: heads.map((head) => ({ head, weight: average(pairsOf(head)) }))
      .sort((a, b) => b.weight - a.weight),
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
    text: isRepeated(word) ? `${word.text} (${word.places[0]})` : word.text,
  })));
  byId("target").value = String(target.places[0]);
  fill("links-from", tokenText(from.text));
  const { even, links } = linksTo(target, from, heads);
  const rows = links.slice(0, LINKS).map((link) => drawLink(link, even));
  const header = makeHeader(["Head", "Weight", "", "Uniform"]);
  fill("links", make("table", { class: "numbers" }, [header, make("tbody", {}, rows)]));
  byId("links-note").textContent = (even === null
    ? "Of this text the page has only the strongest pairs of each query: all others count as 0. " : "") +
    (links.length > LINKS ? `The ${LINKS} strongest of ${formatCount(links.length)} heads.` : "");
}

function drawLink({ head, weight }, even) {
  const button = make("button", { type: "button", class: "plain", text: study.heads[head] });
  button.addEventListener("click", () => choose("head", head));
  return make("tr", head === chosen.head ? { class: "chosen" } : {}, [
    make("td", {}, [button]),
    make("td", { class: "main", text: formatWeight(weight) }),
    make("td", {}, [makeBar(weight, even)]),
    make("td", { text: even === null ? NONE : formatWeight(even) }),
  ]);
}

if (study.samples.length) {
  byId("target").addEventListener("change", ({ target }) => choose("target", Number(target.value)));
  drawOn(["head", "sample", "query", "target"], drawLinks);
}
