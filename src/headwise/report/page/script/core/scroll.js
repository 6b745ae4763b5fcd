// Regions with content that is wider or longer than they are: it fades at the edge, and the keyboard scrolls.

function markOverflow(region) {
  const hidden = region.scrollWidth - region.clientWidth;
  region.classList.toggle("more", hidden - region.scrollLeft > 1);
  const below = region.scrollHeight - region.clientHeight - region.scrollTop > 1;
  region.classList.toggle("below", below && hidden - region.scrollLeft <= 1);
  const { label } = region.dataset;
  if (!label) return;
  const attributes = { tabindex: 0, role: "region", "aria-label": `${label}, scrolls sideways` };
  for (const [name, value] of Object.entries(attributes)) {
    if (hidden > 1) region.setAttribute(name, value);
    else region.removeAttribute(name);
  }
}

for (const region of document.querySelectorAll(".scroll")) {
  const sizes = new ResizeObserver(() => markOverflow(region));
  const observe = () => {
    sizes.disconnect();
    for (const element of [region, ...region.children]) sizes.observe(element);
  };
  new MutationObserver(observe).observe(region, { childList: true });
  region.addEventListener("scroll", () => markOverflow(region), { passive: true });
  observe();
}
