// From the form to the server and back: a request, its `denoise` stream, and what to say when there is none.

const SHARE = { min: 0, max: 1, step: "any" };
const FIELDS = [
  ["num_lookahead", "k", "lookahead branches beside the anchor", { min: 0, step: 1 }],
  ["skip_threshold", "tau_conf", "fill every mask more probable than this", SHARE],
  ["block_add_threshold", "tau_add", "a block opens at this share of the last one", SHARE],
  ["decoded_token_threshold", "tau_act", "a block fills in every pass from this share of the one before", SHARE],
  ["block_size", "Block size", "positions of a block", { min: 1, step: 1 }],
  ["max_tokens", "Most tokens", "positions that the answer may fill", { min: 1, step: 1 }],
];

// What went wrong, in a title and a sentence that says what to do.
class Problem extends Error {
  constructor(title, text) {
    super(text);
    this.title = title;
  }
}

// served: the server's settings, as far as they are known.
function addFields(served) {
  for (const [name, title, text, limits] of FIELDS) {
    const placeholder = served[name] ?? "server's";
    addField(title, text, Object.assign(make("input"), { type: "number", name, placeholder, ...limits }));
  }
  const format = Object.assign(make("input"), { type: "text", id: "format", autocomplete: "off", spellcheck: false });
  addField("Format", "a JSON schema or a regular expression that the answer keeps to", format);
  const key = Object.assign(make("input"), { type: "password", id: "key", autocomplete: "off" });
  addField("API key", "kept by this page until it is closed", key);
}

function addField(title, text, input) {
  const label = make("label", "", title);
  label.append(input, make("span", "", text));
  byId("fields").append(label);
}

// The settings that the form gives a value.
function chosenSettings() {
  const chosen = {};
  for (const [name] of FIELDS) {
    const { value } = byId("fields").querySelector(`[name=${name}]`);
    if (value !== "") chosen[name] = Number(value);
  }
  return chosen;
}

// What is posted to /generate. format: of the answer, empty for any.
function bodyOf(prompt, isChat, format, { max_tokens, ...diffusion }) {
  const asked = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  if (format) asked.structured_outputs = { [format.startsWith("{") ? "json" : "regex"]: format };
  else Object.assign(asked, { return_logprob: true, top_logprobs_num: 4 }); // not every strategy tells both
  return { ...asked, stream: true, stream_mode: "denoise", max_tokens, diffusion };
}

// Post it; onEvent gets every pass as it comes, with the seconds since the request was sent, and onAnswer what the
// passes have come to. Raises a Problem.
async function stream(body, key, signal, onEvent, onAnswer) {
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const begin = performance.now(), sent = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await reach(() => fetch("generate", sent));
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isOver = false;
  while (!isOver) {
    const { done, value } = await reach(() => reader.read());
    const parts = (rest + (value ?? "")).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const event = read(part);
      if (event === DONE) isOver = true;
      else if (event?.pass !== undefined) onEvent(event, (performance.now() - begin) / 1000);
      else if (event) onAnswer(event);
    }
    if (done) break;
  }
  const text = "The server ended it early. What has arrived is shown; decode again.";
  if (!isOver) throw new Problem("The stream broke off.", text);
}

const DONE = Symbol("the end of a stream");

// What a server-sent event holds; null for a comment. Raises a Problem that the server tells of.
function read(part) {
  const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  const data = lines.map((line) => line.slice(5).trim()).join("\n");
  if (!data) return null;
  if (data === "[DONE]") return DONE;
  const event = JSON.parse(data);
  if (event.error) throw new Problem("The server gave up on this request.", event.error.message ?? String(event.error));
  return event;
}

// Network errors as a Problem; an end by `Stop` as it is.
async function reach(call) {
  try {
    return await call();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(
      "The server does not answer.",
      `Nothing came from ${location.origin}. See whether it still runs (lopa serve), then decode again.`,
    );
  }
}

async function refusal(response) {
  let said = "";
  try {
    const { error, message, detail } = await response.json();
    said = String(error?.message ?? message ?? (typeof error === "string" ? error : detail) ?? "");
  } catch {
    // no JSON: the status says enough
  }
  const after = Number(response.headers.get("Retry-After"));
  const wait = after > 0 ? `Try again in ${plural(after, "second")}.` : "Try again in a moment.";
  const problems = {
    401: ["The server wants an API key.", "Open “Settings and API key”, enter the key, and decode again."],
    403: ["This API key is not allowed to decode.", "Enter another key and decode again."],
    404: ["This server has no /generate.", "Serve this page by `lopa serve`."],
    429: ["Too many requests.", wait],
    503: ["The server takes no request now.", wait],
  };
  const [title, text] = problems[response.status] ?? [`The server refused the request (${response.status}).`, ""];
  const sentence = said && !/[.!?]$/.test(said) ? `${said}.` : said;
  return Object.assign(new Problem(title, [sentence, text].filter(Boolean).join(" ")), { status: response.status });
}
