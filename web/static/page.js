// Times in words, filters of the live lists, copy buttons, and the state of the connection. The page reads well without.

const { now: drawn, still } = document.documentElement.dataset;
const skew = Number(drawn) - Date.now(); // this browser's clock against the server's
const now = still === undefined ? () => Date.now() + skew : () => Number(drawn); // a page of the past: ages are of then

function length(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

const timeZone = still === undefined ? undefined : "UTC"; // the reader's own; but a moment of the past is named, and asked for, in UTC
const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", timeZone });
const fullFormat = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long", timeZone });

const modes = {
  age: (at) => length(now() - at),
  ago: (at) => (now() - at < 2000 ? "just now" : `${length(now() - at)} ago`),
  until: (at) => (at <= now() ? "now" : `in ${length(at - now() + 999)}`),
  clock: (at) => clockFormat.format(at), // as the log and the command line have it, whatever this clock says
};

function tell(root) {
  for (const time of root.querySelectorAll("time")) {
    for (const [mode, say] of Object.entries(modes)) {
      const at = time.dataset[mode];
      if (at === undefined) continue;
      const words = say(Number(at));
      if (time.textContent !== words) time.textContent = words;
      if (!time.title) time.title = fullFormat.format(Number(at));
    }
  }
}

// ---- filters: the stream is the same for every page, so what a page hides is its own affair ---------------------

function filter() {
  for (const form of document.querySelectorAll("form[data-filters]")) {
    const list = document.getElementById(form.dataset.filters);
    if (!list) continue;
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    let shown = 0;
    const rows = list.querySelectorAll("tr[data-model], li[data-aggregate]");
    for (const row of rows) {
      row.hidden = !wanted.every(([name, value]) => row.dataset[name] === value);
      shown += !row.hidden;
    }
    const none = document.querySelector(`[data-empty="${form.dataset.filters}"]`);
    if (none) none.hidden = shown > 0 || rows.length === 0;
  }
}

document.addEventListener("change", (event) => {
  if (event.target.closest("form[data-filters]")) filter();
});

// ---- the connection ---------------------------------------------------------------------------------------------

const wire = document.getElementById("wire");
let lost; // the notice waits a moment: a reconnect usually takes less
let notice = "";

function connection(words) {
  notice = words;
  if (!words) {
    clearTimeout(lost);
    lost = undefined;
    wire.hidden = true;
    wire.textContent = "";
    document.documentElement.classList.remove("cut");
    return;
  }
  if (!wire.hidden) wire.textContent = words;
  lost ??= setTimeout(() => {
    wire.textContent = notice;
    wire.hidden = false;
    document.documentElement.classList.add("cut");
  }, 900);
}

const SILENT_MS = 40_000; // the stream beats every 15 s
let heard; // when it last said anything; undefined: it is paused, or being connected again
let stream;
let signedOut = false; // then trying again is in vain

document.addEventListener("htmx:sse:after:connection", (event) => {
  stream = event.detail.connection;
  heard = performance.now();
  connection("");
});
document.addEventListener("htmx:sse:before:message", () => { heard = performance.now(); });
document.addEventListener("htmx:sse:before:connection", (event) => {
  if (signedOut) event.preventDefault();
  if (signedOut || event.detail.connection.attempt === 0) return;
  heard = undefined;
  connection("No connection to enginehouse. What is shown is the last that was heard; trying again.");
});
// Nothing closes a connection to a process that hangs, or over a network that is gone: it is only silent.
setInterval(() => {
  if (heard === undefined || performance.now() - heard < SILENT_MS) return;
  heard = undefined;
  stream.reader?.cancel(); // what reads it connects again
}, 1000);
document.addEventListener("visibilitychange", () => { if (document.hidden) heard = undefined; });
document.addEventListener("htmx:sse:error", (event) => {
  if (event.detail.status !== 401 && event.detail.status !== 403) return;
  signedOut = true;
  connection("You are signed out. What is shown is the last that was heard; load this page again to sign in.");
});

// ---- swaps ------------------------------------------------------------------------------------------------------

function fade() {
  for (const said of document.querySelectorAll("[data-fades]")) {
    delete said.dataset.fades;
    setTimeout(() => said.remove(), 5000);
  }
}

function copying(root) {
  if (!navigator.clipboard) return; // not to be had over plain http to another host
  for (const button of root.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});

function freshen() {
  tell(document);
  filter();
  copying(document);
  fade();
}

document.addEventListener("htmx:after:swap", freshen); // in the task of the swap: nothing is painted in between
setInterval(() => { if (!document.hidden) tell(document); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) tell(document); });
freshen();
