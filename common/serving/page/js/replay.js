// What is known of a request: its passes, and from them the canvas after any of them. No DOM here.
//
// A pass is one event of the `denoise` stream, described in common/serving/events.py. Text of events is never parsed as markup.

class Replay {
  constructor(settings) {
    this.settings = settings;
    this.passes = [];
    this.cells = []; // by place on the canvas: how it was filled and then edited, the latest last, or undefined
    this.texts = new Map(); // token id -> text, as far as events have told
    this.seconds = []; // from the start to the end of each pass
    this.answer = null; // { text, length } as the tokenizer has it, where that is known
    this.tops = []; // by place of the answer: [log probability, token, text] of the most probable when it was filled
    this.isOver = false; // nothing more will come
    this.isEntropy = settings.sampling_strategy === "neg_entropy";
  }

  get length() {
    return this.passes.length;
  }

  get finished() {
    return this.length ? this.passes[this.length - 1].finished : null;
  }

  // One event. Raises an Error where it is none of this request's.
  add(event, seconds) {
    if (![event.filled, event.edited, event.branch_scores].every(Array.isArray)) {
      throw new Error("an event without `filled`, `edited` and `branch_scores`");
    }
    const number = this.length + 1;
    for (const [position, token, text] of event.given ?? []) {
      this.texts.set(token, text);
      this.cells[position - event.prompt_length] = [{ pass: 0, token, text, isGiven: true }];
    }
    event.filled.forEach(([position, token, text, confidence], index) => {
      this.isEntropy ||= confidence < 0;
      this.texts.set(token, text);
      const won = index < event.num_won; // the winning lookahead's own tokens come first
      const place = position - event.prompt_length;
      this.cells[place] = [...(this.cells[place] ?? []), { pass: number, token, text, confidence, won }];
    });
    for (const [position, token, text, confidence] of event.edited) {
      this.texts.set(token, text);
      const states = this.cells[position - event.prompt_length], before = states[states.length - 1];
      states.push({ pass: number, token, text, confidence, before });
    }
    for (const position of event.masked ?? []) {
      this.cells[position - event.prompt_length]?.push({ pass: number, isMask: true });
    }
    for (const [fills, confidence] of event.lookahead) {
      this.isEntropy ||= confidence < 0;
      for (const [, token, text] of fills) this.texts.set(token, text);
    }
    this.passes.push(event);
    this.seconds.push(seconds);
    this.isOver ||= Boolean(event.finished);
  }

  // The answer's text, its length in tokens, and what was most probable at each, where that is known.
  conclude(text, length, tops = []) {
    this.answer = { text, length };
    this.tops = tops;
  }

  // What was most probable at a place when it was filled, as phrases: none until the answer has ended.
  chancesAt(place) {
    return (this.tops[place] ?? []).map(([logprob, , text]) => `${quoted(text)} ${decimal(100 * Math.exp(logprob), 1)} %`);
  }

  // What a pass predicted at a mask, as a phrase; null where it predicted nothing.
  predictedAt(place, pass) {
    const event = this.passes[pass - 1];
    const found = event?.predicted?.find(([position]) => position - event.prompt_length === place);
    return found ? `${quoted(found[2])} ${decimal(100 * found[3], 1)} %` : null;
  }

  // From 0 to 1. An entropy of h nats is that of e^h equally probable tokens.
  sureness(confidence) {
    return Math.max(0, Math.min(1, this.isEntropy ? Math.exp(confidence) : confidence));
  }

  // Positions of the answer once it has ended, its end token included; null while it goes on.
  get answerLength() {
    if (!this.finished) return null;
    if (this.answer) return this.answer.length;
    const final = this.passes[this.length - 1].final_length;
    const end = this.cells.findIndex((states) => states !== undefined && isSpecial(states[states.length - 1].text ?? ""));
    return this.finished === "eos" && end >= 0 && end < final ? end + 1 : final;
  }

  // The cell as it is after a pass: undefined for a mask. `before` is what an edit has replaced.
  cellAt(place, pass) {
    const found = this.cells[place]?.findLast((state) => state.pass <= pass);
    return found?.isMask ? undefined : found;
  }

  // What the lookaheads of the coming pass try: place -> [branch, text, confidence].
  triesAfter(pass) {
    const tries = new Map();
    if (!pass || this.passes[pass - 1].finished) return tries;
    const { lookahead, prompt_length: prompt } = this.passes[pass - 1];
    lookahead.forEach(([fills, confidence], index) => {
      for (const [position, token] of fills) {
        if (!tries.has(position - prompt)) {
          tries.set(position - prompt, { branch: index + 1, text: this.textOf(token), confidence });
        }
      }
    });
    return tries;
  }

  textOf(token) {
    return this.texts.get(token) ?? `#${token}`;
  }

  // The branches of a pass in their order, the anchor last.
  branchesOf(pass) {
    const event = this.passes[pass - 1];
    const tried = pass > 1 ? this.passes[pass - 2].lookahead : [];
    const last = event.branch_scores.length - 1;
    return event.branch_scores.map((score, index) => ({
      name: index === last ? "Anchor" : `B${index + 1}`,
      tokens: (index < last && tried[index] ? tried[index][0] : []).map(([position, token]) => ({
        place: position - event.prompt_length,
        text: this.textOf(token),
      })),
      score,
      window: event.window_lengths[index],
      isWinner: index === event.winner,
    }));
  }

  // The blocks that are open after a pass, by places of the canvas; the prompt's part of the first is left out. Before
  // the first pass they are that pass's.
  blocksAt(pass) {
    const event = this.passes[Math.max(pass, 1) - 1], { prompt_length: prompt, block_size: size } = event;
    const end = event.canvas_length, cachedTo = event.start + event.commit_length - prompt;
    const blocks = [];
    for (let begin = event.block_start - prompt; begin < end; begin += size) {
      const first = Math.max(begin, 0), next = Math.min(begin + size, end);
      let filled = 0;
      for (let place = first; place < next; place++) filled += this.cellAt(place, pass) !== undefined;
      const state = filled < next - first ? "active" : next <= cachedTo ? "cached" : "full";
      blocks.push({ first, next, filled, state });
    }
    return blocks;
  }

  get hasGiven() {
    return Boolean(this.passes[0]?.given);
  }

  numFilled(pass) {
    return this.passes.slice(0, pass).reduce((sum, event) => sum + event.filled.length, 0);
  }

  // Tokens that were deleted, and masks that were inserted.
  numMoved(pass) {
    const count = (event) => (event.deleted?.length ?? 0) + (event.inserted?.length ?? 0);
    return this.passes.slice(0, pass).reduce((sum, event) => sum + count(event), 0);
  }

  numEdited(pass) {
    return this.passes.slice(0, pass).reduce((sum, event) => sum + event.edited.length, 0);
  }

  numWins(pass) {
    const hasWon = (event) => event.winner < event.branch_scores.length - 1;
    return this.passes.slice(0, pass).filter(hasWon).length;
  }
}
