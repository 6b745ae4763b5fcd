// Tabs for the stacks of a model with several: encoder, decoder, cross-attention.

const STACK_NAMES = {
  encoder: "Encoder", decoder: "Decoder", "decoder.cross": "Cross-attention",
};
const lastHead = new Map();
const byName = [...new Set([...Object.keys(STACK_NAMES), ...stacks])]; // other stacks come last
const inOrder = byName.filter((stack) => stacks.includes(stack));

function drawTabs() {
  const current = study.stacks[chosen.head];
  lastHead.set(current, chosen.head);
  for (const list of document.querySelectorAll("[data-tabs]")) {
    const buttons = inOrder.map((stack) => {
      const button = make("button", {
        type: "button", "aria-pressed": String(stack === current), text: STACK_NAMES[stack] ?? stack,
      });
      button.addEventListener("click", () => {
        choose("head", lastHead.get(stack) ?? study.stacks.indexOf(stack));
        [...list.children].find((tab) => tab.textContent === button.textContent)?.focus();
      });
      return button;
    });
    list.replaceChildren(...buttons);
  }
  for (const part of document.querySelectorAll("[data-stack]")) {
    part.hidden = part.dataset.stack !== current;
  }
}

if (stacks.length > 1) drawOn(["head"], drawTabs);
