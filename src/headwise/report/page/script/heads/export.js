// Tables as CSV, and pictures as SVG files.

function csvOf(table) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = [...table.rows].filter((row) => !row.classList.contains("group"));
  return rows.map((row) => [...row.cells].map((cell) => {
    const text = asNumber(cell.innerText.trim().replace(/ [↑↓]$/, "").replace(/\s*\n\s*/g, "; "));
    // A spreadsheet would run a cell that begins like a formula.
    return quote(/^[=+@\t]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
  }).join(",")).join("\n");
}

// As other programs write numbers: 1·10⁻⁷ is 1e-7, and 1,192 is 1192.
function asNumber(text) {
  return text.replaceAll("−", "-").replace(/^\d{1,3}(,\d{3})+$/, (all) => all.replaceAll(",", ""))
    .replace(/·10(⁻?)([⁰¹²³⁴⁵⁶⁷⁸⁹]+)/g, (_, sign, power) =>
      `e${sign && "-"}${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹".indexOf(digit)).join("")}`);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or an old browser
    const area = make("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// The computed style of each shape is written into the copy, which has no style sheet.
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity",
  "font-size", "font-family", "font-weight", "text-anchor", "dominant-baseline"];

function standaloneSvg(picture) {
  const copy = picture.cloneNode(true);
  const originals = [picture, ...picture.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, index) => {
    const style = getComputedStyle(original);
    for (const name of DRAWN) copies[index].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "tabindex", "role"]) copies[index].removeAttribute(name);
  });
  copy.setAttribute("xmlns", SVG);
  return copy;
}

// The cells of a grid as squares, with the labels of its rows and columns.
function svgOfGrid(table) {
  const origin = table.getBoundingClientRect();
  const parts = [];
  for (const cell of table.querySelectorAll("td.cell, th")) {
    const box = cell.getBoundingClientRect();
    const style = getComputedStyle(cell);
    const [x, y] = [box.left - origin.left, box.top - origin.top];
    if (cell.tagName === "TD") {
      parts.push(makeSvg("rect", {
        x, y, width: box.width, height: box.height, rx: 2, fill: style.backgroundColor,
        stroke: cell.classList.contains("hatched") ? style.color : "none",
      }));
    }
    const middle = [x + box.width / 2, y + box.height / 2];
    const label = cell.querySelector("span");
    const upright = label !== null && getComputedStyle(label).writingMode.startsWith("vertical");
    parts.push(makeSvg("text", {
      x: middle[0], y: middle[1], transform: upright && `rotate(-90 ${middle.join(" ")})`, fill: style.color, "text-anchor": "middle",
      "dominant-baseline": "central", "font-size": style.fontSize, "font-family": "sans-serif",
      text: cell.textContent,
    }));
  }
  return makeSvg("svg", {
    xmlns: SVG, viewBox: `0 0 ${origin.width} ${origin.height}`, width: origin.width,
    height: origin.height,
  }, parts);
}

function saveSvg(name, picture) {
  const text = new XMLSerializer().serializeToString(picture);
  const link = make("a", {
    href: URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })), download: `${name}.svg`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function savePictures(id) {
  const place = byId(id);
  const shown = (element) => element.getClientRects().length > 0;
  const picture = [...place.querySelectorAll("svg")].find(shown);
  if (picture) saveSvg(id, standaloneSvg(picture));
  const grid = [...place.querySelectorAll("table.grid")].find(shown);
  if (!picture && grid) saveSvg(id, svgOfGrid(grid));
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    await copyText(csvOf(byId(button.dataset.copy).querySelector("table")));
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
}
for (const button of document.querySelectorAll("[data-save]")) {
  button.hidden = false;
  button.addEventListener("click", () => savePictures(button.dataset.save));
}
