// The panel that asks a model: one streamed chat completion, with what the server says while it waits.

const form = document.querySelector("form[data-try]");
const panel = form?.closest("section");
const part = (name) => panel.querySelector(`[data-${name}]`);
const TOKENS = 300;
let running; // the AbortController of the call under way

let written = ""; // of the answer under way, or the last one: it stays, whatever ends it

function show({ wait = "", figures = "", bad = "" }) {
  part("answer").hidden = false;
  for (const [name, words] of Object.entries({ wait, text: written, figures, bad })) part(name).textContent = words;
}

async function refusal(response) {
  if (response.status === 401) return "You are signed out. Load this page again to sign in.";
  try {
    return (await response.json()).error.message;
  } catch {
    return `Something between this page and enginehouse answered, with HTTP status ${response.status}.`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    yield* whole;
  }
}

async function ask(model, message, signal) {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      model, stream: true, stream_options: { include_usage: true }, max_tokens: TOKENS,
      messages: [{ role: "user", content: message }],
    }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  let first;
  let cut = "";
  for await (const event of events(response.body)) {
    if (event.startsWith(": ")) {
      if (!written) show({ wait: event.slice(2) });
      continue;
    }
    const data = event.replace(/^data: /, "");
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const piece = chunk.choices[0]?.delta?.content;
    if (piece) {
      first ??= performance.now() - began;
      written += piece;
      show({});
    }
    if (chunk.choices[0]?.finish_reason === "length") cut = ", and cut there";
    if (chunk.usage) {
      const took = (performance.now() - began) / 1000;
      const speed = chunk.usage.completion_tokens / Math.max(took - (first ?? 0) / 1000, 0.001);
      const head = first === undefined ? "" : `first token after ${(first / 1000).toFixed(2)} s, `;
      show({ figures: `${head}${chunk.usage.completion_tokens} tokens, ${speed.toFixed(0)} a second${cut}` });
    }
  }
  throw new TypeError("the answer ended without its end");
}

function busy(is) {
  form.querySelector("button").textContent = is ? "Stop" : "Send";
  panel.setAttribute("aria-busy", String(is));
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const { model, message } = Object.fromEntries(new FormData(form));
  running = new AbortController();
  busy(true);
  written = "";
  show({ wait: `asking ${model}` });
  try {
    await ask(model, message, running.signal);
  } catch (error) {
    if (error.name === "AbortError") show({ figures: "Stopped." });
    else show({ bad: error instanceof TypeError ? "The connection to enginehouse broke off. Send it again." : error.message });
  } finally {
    running = undefined;
    busy(false);
  }
});

// Models come and go while the page is open; what can be asked is what the list of models names.
function offer() {
  const select = form.elements.model;
  const names = [...document.querySelectorAll("#models .model h3 a")].map((one) => one.textContent);
  panel.hidden = names.length === 0;
  if (names.join("\n") === [...select.options].map((one) => one.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

if (panel) {
  offer();
  document.addEventListener("htmx:after:swap", offer);
}
