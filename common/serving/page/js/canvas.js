// The canvas: a cell a position, in blocks; the answer as running text; and what a cell tells of itself.

class CanvasView {
  constructor(replay) {
    this.replay = replay;
    this.pass = 0;
    this.cells = [];
    this.blocks = [];
    this.active = null; // the place that is inspected
    this.root = byId("canvas");
    this.root.replaceChildren();
    this.root.removeAttribute("aria-activedescendant");
    this.inspect(null);
  }

  show(pass) {
    this.pass = pass;
    const { replay } = this, blocks = replay.blocksAt(pass), tries = replay.triesAfter(pass);
    this.root.style.setProperty("--last", Math.max(replay.length, 8));
    this.resize(blocks);
    blocks.forEach((block, index) => this.showBlock(block, index));
    const end = pass === replay.length && replay.answerLength !== null ? replay.answerLength : Infinity;
    this.cells.forEach((view, place) => this.showCell(view, place, tries.get(place), place >= end));
    this.showAnswer();
    reveal(this.root, ".fresh");
    if (this.active !== null) this.inspect(Math.min(this.active, this.cells.length - 1));
  }

  // Have these blocks; those that stay keep their elements.
  resize(blocks) {
    const end = blocks.length ? blocks[blocks.length - 1].next : 0;
    const isOther = blocks.length && this.blocks.length && blocks[0].next !== this.blocks[0].size;
    const kept = isOther ? 0 : blocks.length;
    for (const { section } of this.blocks.splice(kept)) section.remove();
    this.cells.length = isOther ? 0 : Math.min(this.cells.length, end);
    blocks.slice(this.blocks.length).forEach((block) => this.addBlock(block));
  }

  addBlock(block) {
    const section = make("section", "block");
    section.setAttribute("role", "group");
    const head = make("div", "block-head"), name = make("b"), state = make("span", "block-state"), count = make("span");
    const meter = make("span", "meter"), share = make("i"), grid = make("div", "cells");
    grid.setAttribute("role", "presentation");
    meter.append(share);
    head.append(name, state, meter, count);
    section.append(head, grid);
    this.root.append(section);
    this.blocks.push({ section, name, state, count, share, grid, size: block.next - block.first });
    for (let place = block.first; place < block.next; place++) this.addCell(this.blocks[this.blocks.length - 1]);
  }

  addCell(block) {
    const place = this.cells.length, cell = make("div", "cell");
    cell.id = `cell-${place}`;
    cell.dataset.place = place;
    cell.setAttribute("role", "option");
    cell.setAttribute("aria-selected", "false");
    cell.addEventListener("pointerenter", () => this.inspect(place));
    cell.addEventListener("click", () => this.inspect(place));
    const token = make("span", "token"), when = make("span", "when"), sure = make("i", "sure");
    cell.append(token, when, sure);
    block.grid.append(cell);
    this.cells.push({ cell, token, when, sure });
  }

  showBlock({ first, next, filled, state }, index) {
    const view = this.blocks[index], size = next - first;
    const words = { active: "active", full: "full", cached: "in cache" };
    view.name.textContent = `Block ${index + 1}: ${first}–${next - 1}`;
    view.state.textContent = words[state];
    view.state.className = `block-state ${state}`;
    view.count.textContent = `${filled}/${size}`;
    view.share.style.width = `${(100 * filled) / size}%`;
    view.section.setAttribute("aria-label", `Block ${index + 1}, ${words[state]}, ${filled} of ${size} filled`);
  }

  // tried: by a branch of the next pass. Only what has changed is drawn: there may be a thousand cells.
  showCell(view, place, tried, isDropped) {
    const { replay, pass } = this, filled = replay.cellAt(place, pass), isFresh = filled?.pass === pass;
    const text = filled ? visible(filled.text) : tried ? visible(tried.text) : "·";
    const when = filled?.isGiven ? "" : filled ? String(filled.pass) : tried ? `B${tried.branch}` : "";
    const drawn = [text, when, Boolean(filled), isFresh, isDropped].join(" ");
    if (drawn === view.drawn) return;
    view.drawn = drawn;
    view.token.textContent = text;
    view.when.textContent = when;
    const confidence = filled && !filled.isGiven ? replay.sureness(filled.confidence) : 0;
    view.sure.style.width = `${100 * confidence}%`;
    view.cell.style.setProperty("--pass", filled?.pass || 1);
    view.cell.style.setProperty("--c", confidence.toFixed(3));
    const is = {
      filled, mask: !filled, tried: !filled && tried, fresh: isFresh, won: filled?.won, edited: filled?.before,
      dropped: isDropped, given: filled?.isGiven,
    };
    const names = Object.keys(is).filter((name) => is[name]);
    const others = [text.length > 6 ? "long" : "", place === this.active ? "active" : ""];
    view.cell.className = ["cell", ...names, ...others].filter(Boolean).join(" ");
    view.cell.setAttribute("aria-label", this.describe(place).join(", "));
  }

  // What is known of a place, as short phrases.
  describe(place) {
    const { replay, pass } = this, filled = replay.cellAt(place, pass), phrases = [`position ${place}`];
    if (!filled) {
      phrases.push("mask");
      const predicted = replay.predictedAt(place, pass), tried = replay.triesAfter(pass).get(place);
      if (predicted) phrases.push(`most probable: ${predicted}`);
      return tried ? [...phrases, `branch B${tried.branch} will try ${quoted(tried.text)}`] : phrases;
    }
    phrases.push(quoted(filled.text), `token ${filled.token}`);
    if (filled.isGiven) return [...phrases, "given by the request"];
    phrases.push(`${filled.before ? "replaced" : "filled"} in pass ${filled.pass}`);
    for (let { before } = filled; before; before = before.before) {
      phrases.push(`was ${quoted(before.text)}, token ${before.token}, from pass ${before.pass}`);
    }
    if (filled.won) phrases.push("by the lookahead that won");
    phrases.push(`${replay.isEntropy ? "negative entropy" : "confidence"} ${decimal(filled.confidence, 3)}`);
    const chances = replay.chancesAt(place);
    return chances.length ? [...phrases, `most probable then: ${chances.join(", ")}`] : phrases;
  }

  inspect(place) {
    this.mark(false);
    this.active = place !== null && place >= 0 ? place : null;
    const line = byId("inspected");
    if (this.active === null) {
      line.textContent = "Point at a cell, or go there with the arrow keys, to see what it is.";
      return;
    }
    const [position, ...rest] = this.describe(place);
    line.replaceChildren(make("b", "", position[0].toUpperCase() + position.slice(1)), `: ${rest.join(", ")}`);
    this.mark(true);
    this.root.setAttribute("aria-activedescendant", `cell-${place}`);
  }

  mark(isActive) {
    const view = this.active === null ? undefined : this.cells[this.active];
    view?.cell.classList.toggle("active", isActive);
    view?.cell.setAttribute("aria-selected", isActive);
  }

  // Light the cells of a branch.
  point(places) {
    this.cells.forEach(({ cell }, index) => cell.classList.toggle("pointed", places.includes(index)));
    reveal(this.root, ".pointed");
  }

  // Arrow keys while the canvas has the focus; true if the key was one.
  move(key) {
    if (!this.cells.length) return false;
    const grid = getComputedStyle(this.blocks[0].grid).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid, ArrowDown: grid };
    if (!(key in steps)) return false;
    const place = this.active === null ? 0 : this.active + steps[key];
    this.inspect(Math.max(0, Math.min(this.cells.length - 1, place)));
    this.cells[this.active].cell.scrollIntoView({ block: "nearest" });
    return true;
  }

  showAnswer() {
    const { replay, pass } = this, parts = [], event = replay.passes[pass - 1];
    const isOver = pass === replay.length && replay.answerLength !== null;
    const end = isOver ? replay.answerLength : this.cells.length;
    if (isOver && replay.answer) {
      byId("answer").replaceChildren(replay.answer.text);
      return;
    }
    for (let place = 0; place < end; place++) {
      const cell = replay.cellAt(place, pass), text = cell ? cell.text : "·";
      if (isSpecial(text)) continue;
      const state = !cell ? "gap" : cell.pass === pass ? "fresh" : place >= event.final_length ? "open" : "";
      if (parts.at(-1)?.state === state) parts.at(-1).text += text;
      else parts.push({ state, text });
    }
    byId("answer").replaceChildren(...parts.map(({ state, text }) => {
      if (state !== "gap") return make("span", state, text.replace(/\ufffd/g, "◌"));
      const gap = make("span", state);
      gap.style.width = `${0.9 * text.length}ch`;
      return gap;
    }));
    reveal(byId("answer"), ".fresh");
  }
}

// Scroll a box, and not the page, to the first such element in it, if that cannot be seen.
function reveal(box, selector) {
  const at = box.querySelector(selector)?.getBoundingClientRect(), { top, bottom } = box.getBoundingClientRect();
  if (at && (at.top < top || at.bottom > bottom)) box.scrollTop += at.top - (top + bottom) / 2;
}
