// The page: a trace that came with it, or a form whose answers arrive pass by pass, with what is served and an example.

const shown = JSON.parse(byId("trace").textContent);
const trace = shown.events ? shown : null;
let canvas = null;
let request = null; // what stops the request under way

function show(replay, pass) {
  canvas.show(pass);
  showNumbers(replay, pass);
  showBranches(replay, pass, canvas);
  showLegend(replay, canvas);
  const isEnd = replay.isOver && pass === replay.length, reason = replay.finished ?? "abort";
  byId("state").textContent = isEnd ? (REASONS[reason] ?? reason) : replay.isOver ? "under way" : "decoding";
  byId("state").classList.toggle("live", !replay.isOver);
}

const player = new Player(show);

function begin(replay, prompt) {
  byId("given").hidden = trace === null;
  byId("asked").textContent = prompt;
  byId("empty").hidden = true;
  byId("stage").hidden = false;
  canvas = new CanvasView(replay);
  player.load(replay);
}

function explain(problem) {
  const box = byId("problem");
  box.hidden = problem === null;
  box.replaceChildren(...(problem ? [make("strong", "", problem.title), problem.message] : []));
}

function colourBy(value) {
  byId("stage").classList.toggle("by-confidence", value === "confidence");
  document.querySelector(`[name=colour][value=${value}]`).checked = true;
  showLegend(player.replay, canvas);
}

// What was decoded before stays until the first pass of the new answer comes. An empty box takes the example's prompt.
async function send() {
  if (request) return;
  explain(null);
  byId("settings").open ||= !byId("ask").checkValidity(); // a browser says nothing of a field that cannot be seen
  if (!byId("ask").reportValidity()) return;
  const prompt = (byId("prompt").value ||= byId("prompt").placeholder);
  const settings = chosenSettings(), replay = new Replay(settings);
  request = new AbortController();
  setBusy(true);
  try {
    const body = bodyOf(prompt, byId("kind").value === "chat", byId("format").value.trim(), settings);
    await stream(body, byId("key").value, request.signal, (event, seconds) => {
      arrived(replay, prompt, event, seconds);
    }, ({ text, token_ids: ids, meta_info: told }) => replay.conclude(text, ids.length, told?.output_top_logprobs));
  } catch (error) {
    ended(error);
  } finally {
    request = null;
    replay.isOver = true;
    setBusy(false);
    if (replay.length) player.grown();
  }
}

function arrived(replay, prompt, event, seconds) {
  replay.add(event, seconds);
  if (replay.length === 1) {
    byId("waiting").hidden = true;
    begin(replay, prompt);
    showPairs({ ...shown.settings, ...replay.settings });
    player.follow();
  }
  player.grown();
}

// A request that has not come to its end.
function ended(error) {
  if (error instanceof Problem) explain(error);
  else if (error.name !== "AbortError") explain(new Problem("The answer could not be read.", error.message));
  if (error.status === 401 || error.status === 403) {
    byId("settings").open = true;
    byId("key").focus();
  }
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("waiting").hidden = !isBusy;
}

function pressed(event) {
  const { key, target } = event;
  if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
  if (key === "Escape") target.blur(); // the keys are the player's again
  if (target.closest("textarea, select, input:not([type=range], [type=radio])")) return;
  const isArrow = key.startsWith("Arrow") || key === "Home" || key === "End";
  if (isArrow && target.closest("input")) return; // the slider and the choice have their own
  if (key === " " && target.closest("button, summary")) return;
  const isTaken = (target === byId("canvas") && canvas?.move(key)) || player.press(key);
  if (isTaken) event.preventDefault();
  else if (key.toLowerCase() === "c") colourBy(byId("stage").classList.contains("by-confidence") ? "pass" : "confidence");
}

function startLive({ model, settings, example }) {
  const served = { ...settings, max_tokens: settings.max_new_tokens };
  addFields(served);
  byId("ask").hidden = false;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => request?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  });
  byId("prompt").placeholder = example.prompt;
  byId("prompt").focus();
  if (model !== null) {
    const known = FIELDS.filter(([name]) => isNumber(served[name])).map(([name, title]) => `${title} ${served[name]}`);
    byId("about").textContent = `Serves ${model}: ${known.join(", ")}`;
    const all = Object.entries(settings).filter(([, value]) => value !== null);
    byId("served").textContent += `: ${all.map(([name, value]) => `${name} ${value}`).join(", ")}`;
  }
  load(example);
  byId("empty").hidden = false;
}

function startTrace(recorded) {
  byId("about").textContent = `${recorded.model}, profile ${recorded.profile}`;
  document.title = `LoPA trace: ${recorded.prompt.slice(0, 60)}`;
  load(recorded);
}

function load({ prompt, settings, events, seconds, answer }) {
  const replay = new Replay(settings);
  replay.isOver = true;
  events.forEach((event, index) => replay.add(event, seconds[index]));
  replay.answer = answer;
  showPairs(settings);
  begin(replay, prompt);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) player.seek(replay.length);
  else player.play();
}

byId("theme").addEventListener("change", (event) => {
  document.documentElement.style.colorScheme = event.target.value;
});
for (const choice of document.getElementsByName("colour")) {
  choice.addEventListener("change", () => colourBy(choice.value));
}
document.addEventListener("keydown", pressed);
if (trace === null) startLive(shown);
else startTrace(trace);
