// Which pass is shown, and what moves it: time, buttons, keys, the slider, and passes that arrive.

const SPEEDS = [
  ["1", "1 pass/s"],
  ["2", "2 passes/s"],
  ["4", "4 passes/s"],
  ["10", "10 passes/s"],
  ["25", "25 passes/s"],
  ["real", "as decoded"],
];

class Player {
  // show(replay, pass): draws it.
  constructor(show) {
    this.show = show;
    this.replay = null;
    this.pass = 0;
    this.isPlaying = false;
    this.timer = 0;
    this.frame = 0;
    byId("speed").replaceChildren(...SPEEDS.map(([value, text]) => Object.assign(make("option", "", text), { value })));
    byId("speed").value = "2";
    byId("speed").addEventListener("change", () => this.isPlaying && this.play());
    const actions = {
      first: this.first, back: this.back, play: this.toggle, next: this.next, last: this.last, replay: this.again,
    };
    for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", () => action.call(this));
    byId("pass").addEventListener("input", () => this.seek(Number(byId("pass").value)));
    byId("bars").addEventListener("click", (event) => this.seekAt(event));
  }

  // Another replay, before its first pass.
  load(replay) {
    clearTimeout(this.timer);
    this.timer = this.pass = 0;
    this.isPlaying = false;
    this.replay = replay;
    byId("player").hidden = false;
    this.draw();
  }

  // The replay has a pass more, or is over.
  grown() {
    if (this.isPlaying && !this.timer) this.pass = this.replay.length;
    if (this.replay.isOver && this.pass === this.replay.length) this.isPlaying = false;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  // Show what arrives as it arrives.
  follow() {
    this.isPlaying = true;
    this.draw();
  }

  toggle() {
    if (this.isPlaying) this.pause();
    else this.play();
  }

  play() {
    if (!this.replay) return;
    if (this.pass >= this.replay.length && this.replay.isOver) this.pass = 0;
    this.isPlaying = true;
    this.wait();
    this.draw();
  }

  pause() {
    this.isPlaying = false;
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.replay) this.draw();
  }

  // Show the next pass when its time has come; after the last one, follow what arrives.
  wait() {
    clearTimeout(this.timer);
    const { length, isOver, seconds } = this.replay;
    this.timer = 0;
    if (this.pass >= length) {
      this.isPlaying = !isOver;
      return;
    }
    const speed = byId("speed").value, before = this.pass ? seconds[this.pass - 1] : 0;
    const isTimed = speed === "real" && isNumber(seconds[this.pass]);
    const delay = isTimed ? seconds[this.pass] - before : 1 / (Number(speed) || 2);
    this.timer = setTimeout(() => {
      this.pass += 1;
      this.wait();
      this.draw();
    }, 1000 * delay);
  }

  seek(pass) {
    if (!this.replay) return;
    this.pass = Math.max(0, Math.min(this.replay.length, pass));
    this.pause();
    this.tell();
  }

  seekAt(event) {
    const box = byId("bars").getBoundingClientRect();
    this.seek(Math.round((this.replay.length * (event.clientX - box.left)) / box.width));
  }

  first() { this.seek(0); }
  back() { this.seek(this.pass - 1); }
  next() { this.seek(this.pass + 1); }
  last() { this.seek(this.replay ? this.replay.length : 0); }

  again() {
    this.pass = 0;
    this.play();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { replay, pass } = this, slider = byId("pass");
    slider.max = replay.length;
    slider.value = pass;
    slider.setAttribute("aria-valuetext", `pass ${pass} of ${replay.length}`);
    byId("place").textContent = `Pass ${pass} of ${replay.length}`;
    byId("player").classList.toggle("playing", this.isPlaying);
    byId("play").setAttribute("aria-label", this.isPlaying ? "Pause" : "Play");
    byId("first").disabled = byId("back").disabled = pass === 0;
    byId("next").disabled = byId("last").disabled = pass === replay.length;
    this.drawBars();
    this.show(replay, pass);
  }

  // A bar a pass: how many positions it has filled.
  drawBars() {
    const { replay, pass } = this, bars = byId("bars");
    while (bars.children.length > replay.length) bars.lastChild.remove();
    while (bars.children.length < replay.length) bars.append(make("i"));
    const most = Math.max(1, ...replay.passes.map((event) => event.filled.length));
    replay.passes.forEach((event, index) => {
      const bar = bars.children[index], hasWon = event.winner < event.branch_scores.length - 1;
      bar.className = `${hasWon ? "lookahead " : ""}${index < pass ? "done " : ""}${index === pass - 1 ? "here" : ""}`;
      const width = `min(1.4rem, ${70 / replay.length}%)`;
      bar.style.width = width;
      bar.style.left = `calc(${(100 * (index + 1)) / replay.length}% - ${width} / 2)`;
      bar.style.height = `${(100 * event.filled.length) / most}%`;
    });
  }

  // For those who hear the page: what the pass that was stepped to has done.
  tell() {
    const { replay, pass } = this;
    if (!pass) {
      byId("status").textContent = "Before the first pass.";
      return;
    }
    const winner = replay.branchesOf(pass).find((branch) => branch.isWinner);
    const { filled, edited, deleted = [], inserted = [] } = replay.passes[pass - 1];
    const others = Object.entries({ replaced: edited, deleted, inserted }).filter(([, places]) => places.length);
    const done = [`${plural(filled.length, "token")} filled`, ...others.map(([what, places]) => `${places.length} ${what}`)].join(", ");
    byId("status").textContent = `Pass ${pass} of ${replay.length}: ${done}, ${winner.name} won.`;
  }

  // A key that nothing else has use for; true if it was one of the player's.
  press(key) {
    const actions = {
      " ": this.toggle, ArrowLeft: this.back, ArrowRight: this.next, Home: this.first, End: this.last, r: this.again,
    };
    const action = actions[key.length === 1 ? key.toLowerCase() : key];
    if (action && this.replay) action.call(this);
    return Boolean(action && this.replay);
  }
}
