// The attention of heads on the chosen text, read from packed bytes when it is first needed.

const ONLY_KEY = "1";
const ONE_OF_SEVERAL = "+";
const decoded = new Map();

function sampleNow() {
  return study.samples[chosen.sample];
}

// The texts of a head's queries and keys.
function viewOf(sample, head) {
  return sample.views[sample.view[study.stacks[head]]];
}

function textOf(side, head = chosen.head, sample = sampleNow()) {
  const [queries, keys] = viewOf(sample, head).sides;
  return (side === "queries" ? queries : keys) === "source" ? sample.tokens : sample.targets;
}

function readsTheSame(head) {
  return viewOf(sampleNow(), head) === viewOf(sampleNow(), chosen.head);
}

// A plain loop: a callback for each byte takes ten times as long, and a page has millions.
function bytesOf(data) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  return bytes;
}

// A function from a query to its pairs [key, weight], the largest weight first; null if the page
// does not have the attention of this head.
function pairsOf(head, sample = sampleNow()) {
  const name = `${study.samples.indexOf(sample)} ${head}`;
  if (!decoded.has(name)) decoded.set(name, decode(head, sample));
  return decoded.get(name);
}

function decode(head, sample) {
  if (sample.maps[head]) return decodeMap(sample.maps[head], viewOf(sample, head).cells);
  if (sample.pairs[head]) return decodePairs(sample.pairs[head], textOf("queries", head, sample).length);
  return null;
}

// Bytes hold the cells with a choice of keys, row by row, as 255ths of the peak.
function decodeMap([peak, data], cells) {
  const bytes = bytesOf(data);
  const starts = [];
  let next = 0;
  for (const row of cells) {
    starts.push(next);
    next += row.split(ONE_OF_SEVERAL).length - 1;
  }
  return (query) => {
    let place = starts[query];
    return [...cells[query]].flatMap((sign, key) =>
      sign === ONE_OF_SEVERAL ? [[key, (bytes[place++] / 255) * peak]]
        : sign === ONLY_KEY ? [[key, 1]] : []).sort((a, b) => b[1] - a[1]);
  };
}

// All keys in 16 bits, then all weights in 8.
function decodePairs([peak, data], length) {
  const bytes = bytesOf(data);
  const many = bytes.length / 3;
  const keys = new DataView(bytes.buffer);
  const each = many / length;
  return (query) => Array.from({ length: each }, (_, index) => query * each + index)
    .map((place) => [
      keys.getUint16(place * 2, true), (bytes[many * 2 + place] / 255) * peak,
    ]).filter(([, weight]) => weight > 0);
}

// What each key receives from all queries and heads of a layer; null if the page does not have it.
function receivedIn(head, sample = sampleNow()) {
  const packed = sample.received[`${study.stacks[head]} ${study.layers[head]}`];
  return packed ? [...bytesOf(packed[1])].map((byte) => (byte / 255) * packed[0]) : null;
}

// The query whose attention is shown: the chosen one, else the content word with the strongest
// pair that is neither itself nor the first token.
function queryNow() {
  if (chosen.query !== null) return chosen.query;
  const pairs = pairsOf(chosen.head);
  if (!pairs) return 0;
  const queries = contentOf(textOf("queries"));
  let [best, strongest] = [queries[0], -1];
  for (const query of queries) {
    for (const [key, weight] of pairs(query)) {
      if (key !== query && key !== 0 && weight > strongest) [best, strongest] = [query, weight];
    }
  }
  return best;
}

// The chosen head and those kept beside it that read the same texts.
function drawnHeads() {
  return [chosen.head, ...chosen.kept.filter((head) => head !== chosen.head && readsTheSame(head))];
}
