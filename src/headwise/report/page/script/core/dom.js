// Elements. Text is set as text, never as markup: tokens can hold anything.

// Parts that say nothing without a script are hidden until it runs.
for (const part of document.querySelectorAll("[data-script]")) part.hidden = false;

function byId(id) {
  return document.getElementById(id);
}

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, children) {
  return dress(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes, children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, { text, ...attributes } = {}, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

function fill(id, ...children) {
  byId(id).replaceChildren(...children);
}

// Isolated, so that the direction of a token's script does not rearrange its neighbors.
function tokenText(token) {
  return make("bdi", { text: token, class: "token", title: token });
}

function makeHeader(names) {
  const cells = names.map((name) => make("th", { text: name, scope: "col" }));
  return make("thead", {}, [make("tr", {}, cells)]);
}

function setVariables(element, variables) {
  for (const [name, value] of Object.entries(variables)) {
    element.style.setProperty(`--${name}`, value);
  }
  return element;
}
