// Beside the canvas: numbers, the branches of a pass, what colours and marks mean, the settings.

function showNumbers(replay, pass) {
  const isEnd = pass === replay.length && replay.answerLength !== null;
  const final = isEnd ? replay.answerLength : pass ? replay.passes[pass - 1].final_length : 0;
  const seconds = pass ? replay.seconds[pass - 1] : undefined;
  byId("numbers").replaceChildren(
    ...numberPair("Passes", pass, ` of ${replay.length}`),
    ...numberPair("Won by a lookahead", replay.numWins(pass), ` of ${pass}`),
    ...(replay.numEdited(replay.length) ? numberPair("Replaced", replay.numEdited(pass), " tokens") : []),
  );
  byId("rates").replaceChildren(
    rateRow("Filled", replay.numFilled(pass), pass, seconds),
    rateRow(isEnd ? "Answer" : "Final", final, pass, seconds),
  );
}

function numberPair(name, value, unit) {
  const number = make("dd", "", String(value));
  number.append(make("small", "", unit));
  return [make("dt", "", name), number];
}

function rateRow(name, count, pass, seconds) {
  const row = make("tr"), head = make("th", "", name), rate = seconds > 0 ? count / seconds : NaN;
  head.scope = "row";
  row.append(head, make("td", "", count), make("td", "", decimal(pass ? count / pass : NaN, 2)));
  row.append(make("td", "", decimal(rate, rate < 10 ? 1 : 0)));
  return row;
}

function showBranches(replay, pass, canvas) {
  const branches = pass ? replay.branchesOf(pass) : [];
  byId("branches-title").textContent = pass ? `Branches of pass ${pass}` : "Branches";
  const rows = byId("branches"), focused = [...rows.children].indexOf(document.activeElement);
  canvas.point([]);
  rows.replaceChildren(...branches.map((branch) => branchRow(branch, branches, canvas)));
  rows.children[focused]?.focus();
  byId("branches-text").textContent = pass
    ? branches.length > 1
      ? "Bars: from the worst score of the pass to the best, which wins."
      : replay.passes.every((event) => event.branch_scores.length === 1)
        ? "One branch in every pass: no lookahead is tried (k is 0)."
        : "The anchor alone: no lookahead was spawned before."
    : "Before the first pass there is none.";
}

function branchRow({ name, tokens, score, isWinner }, branches, canvas) {
  const row = make("tr", isWinner ? "winner" : "");
  const scores = branches.map((branch) => branch.score).filter(isNumber);
  const least = Math.min(...scores), range = Math.max(...scores) - least;
  const first = make("td"), tried = make("td"), last = make("td", "score"), bar = make("span", "bar"), fill = make("i");
  first.append(make("span", isWinner ? "mark" : "", isWinner ? `◆ ${name}` : name));
  if (isWinner) first.append(make("span", "hidden", ", the winner"));
  if (!tokens.length) tried.append(make("span", "muted", name === "Anchor" ? "no further token" : "–"));
  for (const { place, text } of tokens) {
    tried.append(make("span", "token", visible(text)), make("span", "muted small", ` at ${place} `));
  }
  fill.style.width = `${range && score !== null ? 6 + (94 * (score - least)) / range : 100}%`;
  bar.append(fill);
  last.append(score === null ? "no mask left" : decimal(score, 4), bar);
  row.append(first, tried, last);
  row.tabIndex = 0;
  for (const event of ["pointerenter", "focus"]) {
    row.addEventListener(event, () => canvas.point(tokens.map(({ place }) => place)));
  }
  for (const event of ["pointerleave", "blur"]) row.addEventListener(event, () => canvas.point([]));
  return row;
}

// What colours, marks and signs mean, as far as they occur.
function showLegend(replay, canvas) {
  if (!replay) return;
  const { length, answerLength } = replay, texts = canvas.cells.map(({ token }) => token.textContent).join("");
  const isCut = answerLength !== null && answerLength < replay.passes[length - 1].canvas_length;
  const hasTried = replay.passes.some((event) => event.lookahead.length), hasWon = replay.numWins(length) > 0;
  const marks = [
    ["cell mask", "·", "mask", true],
    ["cell filled given", "", "given by the request", replay.hasGiven],
    ["cell filled fresh", "", "filled in this pass", true],
    ["cell filled won", "", "brought by the winning lookahead", hasWon],
    ["cell filled edited", "", "replaced; its line says what it was", replay.numEdited(length) > 0],
    ["cell mask tried", "B1", "what the next pass's branches try", hasTried],
    ["cell filled", "", "bar: confidence; number: pass", true],
    ["cell filled dropped", "x", "after the answer's end", isCut],
    ["swatch lookahead", "", "in the player: a pass won by a lookahead", hasWon],
    ["swatch", "", "in the player: a pass won by the anchor; height: tokens filled", true],
  ];
  const signs = Object.entries(SIGNS).filter(([sign]) => texts.includes(sign));
  byId("legend").replaceChildren(
    scale(),
    ...marks.filter(([, , , occurs]) => occurs).map(([name, text, meaning]) => legendItem(name, text, meaning)),
    ...signs.map(([sign, meaning]) => make("span", "", `${sign} ${meaning}`)),
  );
}

function legendItem(className, text, meaning) {
  const item = make("span"), mark = make("i", className);
  mark.append(make("span", "token", text), make("i", className === "cell filled" ? "sure" : ""));
  item.append(mark, meaning);
  return item;
}

function scale() {
  const item = make("span"), ramp = make("span", "ramp");
  for (let place = 0; place < 8; place++) {
    const cell = make("i", "cell filled");
    for (const name of ["--t", "--c"]) cell.style.setProperty(name, place / 7);
    ramp.append(cell);
  }
  const isByConfidence = byId("stage").classList.contains("by-confidence");
  item.append(...(isByConfidence ? ["unsure", ramp, "sure"] : ["first pass", ramp, "last"]));
  return item;
}

function showPairs(pairs) {
  const shown = Object.entries(pairs).filter(([, value]) => value !== null && value !== undefined && value !== "");
  byId("used").hidden = !shown.length;
  byId("pairs").replaceChildren(
    ...shown.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", String(value))]),
  );
}
