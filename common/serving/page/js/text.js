// How texts and numbers are shown.

const byId = (id) => document.getElementById(id);

// A new element. Its text is set as text, whatever it holds.
function make(tag, className = "", text = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== null) element.textContent = text;
  return element;
}

const SIGNS = {
  "␣": "space", "↵": "line break", "⊣": "end, or another special token", "◌": "part of a character", "∅": "no text",
};
const isSpecial = (text) => /^(<\|[^<>]*\|>|<\/?(s|bos|eos|pad|unk|mask)>)$/i.test(text);

// A token in a cell: what cannot be seen, or is no text, gets a sign.
function visible(text) {
  if (isSpecial(text)) return "⊣";
  if (text === "") return "∅";
  if (/^[\n\r]+$/.test(text)) return "↵";
  if (/^\s+$/.test(text)) return "␣";
  return text.trim().replace(/[\n\r]+/g, "↵").replace(/\s/g, " ").replace(/\ufffd+/g, "◌");
}

const quoted = (text) => `“${text.replace(/\n/g, "↵").replace(/\ufffd+/g, "◌")}”`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function decimal(value, digits) {
  return isNumber(value) ? value.toFixed(digits).replace("-", "−") : "–";
}

const REASONS = {
  eos: "ended by its end token",
  stop: "ended by its end token or a stop string",
  length: "ended, canvas full",
  max_steps: "ended at max_steps",
  abort: "stopped",
};
