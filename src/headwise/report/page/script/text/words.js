// The text itself: each word shaded by the weight that it gets from the token pointed at.

const HUES = 6;
const PARAGRAPH = 300; // words and the spaces between them
const wordBoxes = { queries: [], keys: [] };
let shadedWords = new Map(); // each shaded word, and its shade
let shadedForAll = ""; // the sample and the heads whose shades are the same for every query
let shownQuery = 0;

function drawWords() {
  const { sides } = viewOf(sampleNow(), chosen.head);
  const two = sides[0] !== sides[1];
  const queries = makeWords(textOf("queries"), two ? "queries" : "both");
  const keys = two ? makeWords(textOf("keys"), "keys") : [];
  const alone = (words) => words.filter((word) => word !== " ");
  wordBoxes.queries = alone(queries);
  wordBoxes.keys = two ? alone(keys) : wordBoxes.queries;
  const label = (side) => make("h3", { text: side === "source" ? "Source text" : "Target text" });
  const box = (words, name) => make("div", {
    class: "words", role: "listbox", "aria-label": name, tabindex: 0,
  }, inParagraphs(words));
  fill("words", ...(two || sampleNow().targets.length ? [label(sides[0])] : []),
    box(queries, "Words of the text: point at one to see where it attends"));
  if (two) byId("words").append(label(sides[1]), box(keys, "Words attended to"));
  makeWordsNavigable(byId("words").querySelector(".words"), wordBoxes.queries);
  shadedWords = new Map();
  shadedForAll = "";
  drawQuery();
}

// What each token shows without its tokenizer's marks, and whether no space stands before it.
function readTokens(tokens) {
  const spaced = tokens.some((token) => token.startsWith("␣"));
  return tokens.map((token, index) => ({
    bare: token.replace(/^␣/, "").replace(/^##(?=.)/, "") || token,
    joined: index === 0 || (spaced ? !token.startsWith("␣") : token.startsWith("##")),
  }));
}

const INSIDE_A_WORD = /^[\p{L}\p{M}\p{N}\uFFFD]{2}$/u;
const WITHOUT_SPACES = /[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Thai}]/u;
const knownWords = new Map(); // a text of 8,000 tokens takes milliseconds, and each choice asks

// The word of each token: its text, and the positions of all its tokens. Punctuation stands alone,
// and so does each token of a script without spaces between words. The two words that the page was
// given are as they were given: a name of several words is one.
function wordsOf(tokens) {
  if (knownWords.has(tokens)) return knownWords.get(tokens);
  let [word, last] = [null, ""];
  knownWords.set(tokens, readTokens(tokens).map(({ bare, joined }, index) => {
    const seam = last + [...bare][0];
    const given = study.pair.map((places) =>
      [index - 1, index].filter((place) => places.includes(place)).length);
    const isInside = joined && INSIDE_A_WORD.test(seam) && !WITHOUT_SPACES.test(seam);
    const goesOn = given.includes(2) || (isInside && !given.includes(1));
    if (!goesOn) word = { text: "", places: [] };
    word.text += goesOn && !joined ? ` ${bare}` : bare;
    word.places.push(index);
    last = [...bare].at(-1);
    return word;
  }));
  return knownWords.get(tokens);
}

// Positions of content words near the beginning. Function words are short in every language (Zipf's
// law of abbreviation), so words of at least the median length are taken, without a list of words.
// Special tokens stand in brackets, and punctuation has no letters.
function contentOf(tokens) {
  const lengths = wordsOf(tokens).slice(0, 400).map(({ text }) =>
    /^[[<].*[\]>]$/.test(text) ? 0 : (text.match(/\p{L}/gu) ?? []).length);
  const known = lengths.filter(Boolean).sort((a, b) => a - b);
  const median = known[known.length >> 1] ?? 0;
  return [...lengths.keys()].filter((index) => lengths[index] >= median);
}

// Subwords stand together as the text has them; the spaces that tokens begin with become gaps.
function makeWords(tokens, kind) {
  const first = make("span", {
    class: kind === "keys" ? "word still" : "word", role: "option", "aria-selected": "false",
  }, [make("bdi")]);
  return readTokens(tokens).flatMap(({ bare, joined }, index) => {
    const word = first.cloneNode(true);
    word.firstChild.textContent = bare;
    word.dataset.at = index;
    // A real space lets the line break there.
    return joined ? [word] : [" ", word];
  });
}

// Paragraphs of a long text, which end with a sentence if they can. A browser draws only those in
// view, and again only those whose shades change.
function inParagraphs(words) {
  const paragraphs = [[]];
  for (const word of words) {
    const last = paragraphs.at(-1);
    const ended = last.length > PARAGRAPH && /[.!?\n↵]$/.test(last.at(-1).textContent);
    if (word === " " && (ended || last.length > 2 * PARAGRAPH)) paragraphs.push([]);
    else last.push(word);
  }
  return paragraphs.map((children) => make("div", { class: "paragraph", role: "group" }, children));
}

function beginningOf(tokens) {
  return readTokens(tokens.slice(0, 60))
    .map(({ bare, joined }) => (joined ? bare : ` ${bare}`)).join("").trim();
}

function makeWordsNavigable(box, words) {
  const at = (event) => event.target.closest?.(".word")?.dataset.at;
  const point = (event) => { if (at(event) !== undefined) drawQuery(Number(at(event))); };
  box.addEventListener("pointerover", point);
  box.addEventListener("pointerleave", () => drawQuery());
  // Shift would select the text between two clicks.
  box.addEventListener("mousedown", (event) => {
    if (!event.shiftKey) return;
    event.preventDefault();
    box.focus({ preventScroll: true });
  });
  box.addEventListener("click", (event) => {
    if (at(event) !== undefined) choose(event.shiftKey ? "target" : "query", Number(at(event)));
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step === undefined) return;
    const next = Math.min(Math.max(queryNow() + step, 0), words.length - 1);
    choose("query", next);
    words[next].scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
}

function drawQuery(query = queryNow()) {
  wordBoxes.queries[shownQuery]?.classList.remove("query");
  wordBoxes.queries[shownQuery]?.setAttribute("aria-selected", "false");
  shownQuery = query;
  const heads = drawnHeads();
  const forAll = heads.some((head) => pairsOf(head)) ? "" : `${chosen.sample} ${heads}`;
  if (forAll && forAll === shadedForAll) return;
  shadedForAll = forAll;
  const weights = heads.map((head) => weightsFrom(head, query));
  shadeWords(weights);
  if (pairsOf(chosen.head)) {
    wordBoxes.queries[query]?.classList.add("query");
    wordBoxes.queries[query]?.setAttribute("aria-selected", "true");
  }
  describeQuery(query, weights[0]);
}

// Only the words whose shade changes are touched, so that long texts stay smooth.
function shadeWords(weights) {
  const shades = new Map();
  for (const key of new Set(weights.flatMap((weight) => [...weight.keys()]))) {
    const shares = weights.map((weight) => weight.get(key) ?? 0);
    if (wordBoxes.keys[key]) shades.set(wordBoxes.keys[key], makeStripes(shares));
  }
  for (const word of shadedWords.keys()) {
    if (!shades.has(word)) word.style.removeProperty("background-image");
  }
  for (const [word, shade] of shades) {
    if (shadedWords.get(word) !== shade) word.style.setProperty("background-image", shade);
  }
  shadedWords = shades;
}

// The weights that a query gives; for a head without pairs, what the keys of its layer receive.
function weightsFrom(head, query) {
  const pairs = pairsOf(head);
  if (pairs) return new Map(pairs(query).filter(([, weight]) => weight >= 0.004));
  const received = receivedIn(head) ?? [];
  const most = Math.max(...received, 1e-9);
  return new Map(received.map((share, key) => [key, share / most])
    .filter(([, share]) => share >= 0.02));
}

// A stripe for each head; the square root, since most weights are small.
function makeStripes(shares) {
  const stops = shares.flatMap((share, index) => {
    const depth = Math.round(Math.sqrt(Math.min(share, 1)) * 58);
    const color = `color-mix(in srgb, var(--hue-${index % HUES}) ${depth}%, transparent)`;
    const [from, to] = [index, index + 1].map((edge) => `${(edge / shares.length) * 100}%`);
    return [`${color} ${from}`, `${color} ${to}`];
  });
  return `linear-gradient(to bottom, ${stops.join(", ")})`;
}

function describeQuery(query, weights) {
  const [queries, keys] = [textOf("queries"), textOf("keys")];
  const name = study.heads[chosen.head];
  if (!pairsOf(chosen.head)) {
    const where = `all heads of layer ${study.layers[chosen.head]}`;
    fill("words-readout", receivedIn(chosen.head)
      ? `The pairs of ${name} are not on this page. Shaded: what each word receives from ${where}.`
      : `The attention of ${name} on this text is not on this page.`);
    return;
  }
  const strongest = [...weights].slice(0, 4).flatMap(([key, weight], index) =>
    [index ? ", " : "", tokenText(keys[key]), ` ${formatWeight(weight)}`]);
  fill("words-readout", make("b", { text: name }), ": ", tokenText(queries[query]),
    strongest.length ? " looks at " : " looks at nothing much", ...strongest);
}

function drawKept() {
  const chips = drawnHeads().map((head, index) => {
    const chip = make("span", { class: "chip" }, [study.heads[head]]);
    chip.prepend(make("span", { class: `swatch hue-${index % HUES}`, "aria-hidden": "true" }));
    if (head !== chosen.head) {
      const remove = make("button", {
        type: "button", text: "×", "aria-label": `Remove ${study.heads[head]}`,
      });
      remove.addEventListener("click", () =>
        choose("kept", chosen.kept.filter((other) => other !== head)));
      chip.append(remove);
    }
    return chip;
  });
  fill("kept", ...chips);
  byId("keep").disabled = chosen.kept.includes(chosen.head) || chosen.kept.length >= HUES - 1;
}

if (study.samples.length) {
  bindSelect(byId("sample"), "sample", study.samples.map(({ tokens }, index) => (
    { options: [[index, `${index + 1}: ${beginningOf(tokens)}`]] })));
  byId("sample-choice").hidden = study.samples.length === 1;
  byId("keep").addEventListener("click", () => choose("kept", [...chosen.kept, chosen.head]));
  let drawnSample = null;
  drawOn(["head", "sample"], () => {
    const drawn = `${chosen.sample} ${viewOf(sampleNow(), chosen.head).sides}`;
    if (drawn === drawnSample) drawQuery();
    else drawWords();
    drawnSample = drawn;
  });
  drawOn(["query", "kept"], () => drawQuery());
  drawOn(["head", "sample", "kept"], drawKept);
}
