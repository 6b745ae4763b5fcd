// Numbers as text, and positions on a color scale.

const NONE = "–";
const RAISED = { "-": "⁻", "+": "" };
[..."⁰¹²³⁴⁵⁶⁷⁸⁹"].forEach((digit, index) => { RAISED[index] = digit; });

// Three decimals, or as many as a smaller number needs to differ from zero.
function formatNumber(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size > 0 && size < 0.0001) {
    const [factor, power] = value.toExponential(0).split("e");
    return withMinus(`${factor}·10${[...power].map((sign) => RAISED[sign]).join("")}`);
  }
  if (size > 0 && size < 0.001) return withMinus(value.toFixed(4));
  return withMinus(value.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1));
}

// Short enough for a cell of the heatmap.
function formatBrief(value) {
  const size = Math.abs(value);
  const text = value.toFixed(size < 1 ? 2 : size < 10 ? 1 : 0);
  return withMinus(text.replace(/^(-?)0\./, "$1."));
}

function withMinus(text) {
  return text.replace("-", "−");
}

// A weight is stored in a byte, which is precise to two digits.
function formatWeight(value) {
  return value > 0 && value < 0.01 ? value.toPrecision(1) : value.toFixed(2);
}

function formatCount(value) {
  return value === null ? NONE : value.toLocaleString("en");
}

function formatMean({ mean, error }) {
  if (mean === null || error === null) return formatNumber(mean);
  return `${formatNumber(mean)} ± ${formatNumber(error)}`;
}

// The smallest round number that is not below the value.
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value * 0.9999);
}

function makeScale(statistic) {
  const values = statistic.mean.filter((value) => value !== null);
  const highest = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const lowest = values.reduce((a, b) => Math.min(a, b), Infinity);
  if (!values.length) return { low: 0, high: 1 };
  if (statistic.from_zero) return { low: 0, high: roundUp(highest) };
  return { low: lowest, high: highest > lowest ? highest : lowest + 1 };
}

// The position of a value on a scale, 0 … 1.
function placeOn({ low, high }, value) {
  return Math.min(Math.max((value - low) / (high - low), 0), 1);
}

function makeLegend(scale, { unit = "", evens = [], hatched = "" }) {
  const [low, high] = [scale.low, scale.high].map((limit) =>
    make("span", { text: withMinus(Number(limit.toPrecision(3)).toString()) }));
  const ramp = make("span", { class: "ramp" });
  const known = [evens].flat().filter((even) => even !== null);
  const middle = (Math.min(...known) + Math.max(...known)) / 2;
  if (known.length) ramp.append(makeTick(placeOn(scale, middle)));
  return [
    low, ramp, high,
    ...(unit ? [make("span", { text: unit })] : []),
    ...(known.length
      ? [make("span", { class: "tick-key", text: `uniform attention: ${formatRange(known)}` })] : []),
    ...(hatched ? [make("span", { class: "hatch-key", text: hatched })] : []),
  ];
}

function makeTick(place) {
  return setVariables(make("span", { class: "tick" }), { position: place });
}

// A share as a bar, with a mark at the share of uniform attention.
function makeBar(share, even) {
  const bar = setVariables(make("span", { class: "bar", "aria-hidden": "true" }), { v: share });
  if (even !== null) bar.append(makeTick(even));
  return bar;
}

function formatRange(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)].map(formatNumber);
  return low === high ? low : `${low}–${high}`;
}
