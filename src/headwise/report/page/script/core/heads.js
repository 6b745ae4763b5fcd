// The select elements that choose a head.

for (const select of document.querySelectorAll("select[data-choose='head']")) {
  select.replaceChildren(...headGroups().filter(({ options }) => options.length).map(makeGroup));
  select.addEventListener("change", () => choose("head", Number(select.value)));
  drawOn(["head"], () => { select.value = String(chosen.head); });
}
drawOn(["head"], drawName);

function drawName() {
  for (const name of document.querySelectorAll("[data-name]")) {
    name.textContent = study.heads[chosen.head];
  }
}
