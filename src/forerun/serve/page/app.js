// The page: requests an answer with speculative and with plain decoding, shows both, and compares their tokens.
// If the model has a chat template, the page is a conversation, unless the user chooses to complete text.

import { Charts } from "./charts.js";
import { bodyOf, buildForm, FieldError } from "./fields.js";
import { Lane, quoted, describeToken } from "./lane.js";
import { ask, refusal } from "./stream.js";
import { Conversation } from "./talk.js";

const EXAMPLES = [
  ["Code: a class", "class Stack:\n    \"\"\"A last-in, first-out stack.\"\"\"\n\n    def __init__(self):\n        self.items = []\n\n    def push(self, "],
  ["Code: a parser", "import argparse\nimport sys\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser(description="],
  ["Code: a test", "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = Queue()\n\n    def test_put(self):\n"],
  ["A story", "Once upon a time, there was a little"],
  ["A question, as a message", "How does speculative decoding work? Answer in three sentences.", true],
  ["A rewrite, as a message", "Rename x to total in this function and repeat the rest as it is:\n\ndef mean(numbers):\n    x = 0\n    for number in numbers:\n        x += number\n    return x / len(numbers)\n", true],
];
const $ = (id) => document.getElementById(id);
let settings = null; // the server's answer to page/settings
let running = null; // the AbortController of the current run
let replaying = 0;
let lanes, charts, talk;

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").value = name;
  try {
    localStorage.setItem("forerun-theme", name);
  } catch {
    // the browser may not allow storage
  }
  charts?.build();
}

function alert(message) {
  $("alert").textContent = message;
  $("alert").hidden = !message;
}

// Load the server's settings and build the form; if the server requires a key, ask for the key first.
async function connect() {
  const key = $("key").value;
  const response = await fetch("page/settings", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  if (response.status === 401) {
    $("key-card").hidden = false;
    $("run").disabled = true;
    if (key) alert("The server does not accept this key.");
    $("key").focus();
    return;
  }
  if (!response.ok) throw await refusal(response);
  settings = await response.json();
  alert("");
  $("key-card").hidden = true;
  $("run").disabled = false;
  const facts = [["Model", settings.model], ["Drafter", settings.draft || "none"], ["Context", `${settings.max_model_len} tokens`], ["Fingerprint", settings.fingerprint]];
  $("facts").replaceChildren(...facts.map(([name, value]) => {
    const line = document.createElement("div");
    line.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value, title: value }));
    return line;
  }));
  $("chat-line").hidden = !settings.chat;
  $("chat").checked = settings.chat;
  buildForm(settings);
  if (!$("prompt").value) choose(EXAMPLES.findIndex(([, , message]) => Boolean(message) === settings.chat));
  showMode();
}

function inChat() {
  return Boolean(settings?.chat && $("chat").checked);
}

function showMode() {
  const chat = inChat();
  $("prompt-label").textContent = chat ? "Message" : "Prompt";
  $("talk").hidden = !chat || !talk.messages.length;
}

function choose(number) {
  const [, text, message] = EXAMPLES[number];
  $("prompt").value = text;
  $("chat").checked = Boolean(message && settings.chat);
  showMode();
}

async function run() {
  if (running || !settings) return;
  stopReplay();
  alert("");
  const chat = inChat();
  const text = $("prompt").value;
  let body;
  try {
    if (!text) throw new Error(`${chat ? "Message" : "Prompt"}: enter one first.`);
    body = bodyOf();
  } catch (error) {
    alert(error.message);
    (error instanceof FieldError ? error.control : $("prompt")).focus();
    error.control?.closest("details")?.setAttribute("open", "");
    return;
  }
  running = new AbortController();
  const race = document.querySelector("input[name=race]:checked").value;
  const most = body.max_tokens ?? body.max_completion_tokens ?? 16;
  lanes.forEach((lane) => lane.clear(most));
  lanes[1].root.hidden = race === "none";
  $("run").disabled = true;
  $("replay").hidden = true;
  $("stop").disabled = false;
  verdict("Answering with speculative decoding …", "");
  if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".results").scrollIntoView();
  talk.unfold();
  if (chat) {
    talk.ask(text);
    $("prompt").value = "";
    showMode();
  }
  const prompt = chat ? { messages: [...talk.messages] } : { prompt: text };
  const answer = (lane, speculation) => send(lane, chat, { ...body, ...prompt, speculation });
  let stopped = false;
  try {
    if (race === "beside") await Promise.all([answer(lanes[0], body.speculation), answer(lanes[1], false)]);
    else {
      await answer(lanes[0], body.speculation);
      if (race === "after") {
        verdict("Answering with plain decoding …", "");
        await answer(lanes[1], false);
      }
    }
    conclude(race, body);
  } catch (error) {
    running.abort();
    stopped = error.name === "AbortError";
    if (stopped) verdict("Stopped.", "");
    else {
      verdict("Failed.", "bad");
      alert(error.status === 401 ? "The server does not accept this key: reload the page to enter another." : error.message);
    }
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
    if (chat) keep(text, stopped);
    charts.update();
    charts.describe();
  }
}

// Add the drafted answer to the conversation; if there is none, put the message back into the prompt field.
function keep(text, stopped) {
  const [{ finish, content }] = lanes;
  if (finish || (stopped && content)) talk.answer(content);
  else {
    talk.retract();
    $("prompt").value ||= text;
  }
  showMode();
}

function send(lane, chat, body) {
  const form = { model: settings.model, stream: true, stream_options: { include_usage: true }, draft_details: true, n: 1 };
  lane.root.classList.add("live");
  return ask(chat ? "v1/chat/completions" : "v1/completions", { ...body, ...form }, $("key").value, running.signal, (chunk, ms) => {
    lane.add(chunk, ms);
    charts.update();
  }).finally(() => lane.root.classList.remove("live"));
}

function verdict(text, kind) {
  $("verdict").textContent = text;
  $("verdict").className = kind;
}

// Show whether both answers are the same, and how their speeds compare.
function conclude(race, body) {
  const [drafted, plain] = lanes;
  const seed = `seed ${body.seed}`;
  if (race === "none") {
    verdict(`${drafted.ids.length} tokens, ${seed}.`, "");
    return;
  }
  const same = drafted.whole === plain.whole && drafted.ids.length === plain.ids.length && drafted.ids.every((id, i) => id === plain.ids[i]);
  const ratio = drafted.finalRate && plain.finalRate ? drafted.finalRate / plain.finalRate : undefined;
  const speed = ratio ? ` ${ratio.toFixed(2)} times as fast after the first token${race === "beside" ? ", while both shared the machine" : ""}.` : "";
  if (same) verdict(`The same ${drafted.ids.length} tokens as plain decoding, one by one (${seed}).${speed}`, "good");
  else if (settings.verification !== "coupled") verdict(`Different tokens from the same distribution, as expected with “${settings.verification}” verification (${seed}).${speed}`, "");
  else {
    const at = drafted.ids.findIndex((id, i) => id !== plain.ids[i]);
    verdict(`Token ${(at < 0 ? Math.min(drafted.ids.length, plain.ids.length) : at) + 1} differs from plain decoding (${seed}). On a CPU this must not happen: please report it.`, "bad");
  }
  $("replay").hidden = false;
}

// Show both answers side by side again, with their recorded times, even if they were generated one after the other.
function replay() {
  stopReplay();
  const mine = ++replaying;
  const end = Math.max(...lanes.map((lane) => lane.lastMs));
  const started = performance.now();
  const frame = (now) => {
    if (mine !== replaying) return;
    const ms = now - started;
    lanes.forEach((lane) => lane.showUntil(ms));
    charts.update(ms);
    if (ms < end) requestAnimationFrame(frame);
    else stopReplay();
  };
  frame(started);
}

function stopReplay() {
  replaying++;
  lanes.forEach((lane) => lane.showUntil(Infinity));
  charts.update();
}

// Show the tip next to a token: its origin, its round, and the verdicts on the draft tokens of the round.
function showTip(lane, span) {
  const found = describeToken(lane, span.tokenNumber);
  if (!found) return;
  const make = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text });
  const list = make("ul", "", "");
  for (const line of found.lines) {
    const item = make("li", line.verdict.replace(" ", "-"), "");
    item.style.paddingInlineStart = `${Math.min(line.depth, 12) * 0.7}rem`;
    item.append(make("span", "mark", { accepted: "✓", rejected: "✗" }[line.verdict] ?? "·"), make("code", "", quoted(line.text)), make("span", "hint", line.verdict));
    list.append(item);
  }
  const tip = $("tip");
  tip.replaceChildren(make("p", "", `${quoted(found.text)}: ${found.origin}`), make("p", "hint", found.why), make("p", "", `Round ${found.round}: ${found.drafted}`), list);
  tip.hidden = false;
  document.querySelector(".tok.chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight || box.top < tip.offsetHeight + 12;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + scrollY}px`;
  return found;
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelector(".tok.chosen")?.classList.remove("chosen");
}

function inspect(lane) {
  lane.text.addEventListener("pointerover", (event) => event.target.classList.contains("tok") && showTip(lane, event.target));
  lane.text.addEventListener("click", (event) => event.target.classList.contains("tok") && showTip(lane, event.target));
  lane.text.addEventListener("blur", hideTip);
  lane.root.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !$("tip").contains(event.relatedTarget) && hideTip());
  lane.text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !lane.spans.length) return;
    event.preventDefault();
    const now = lane.spans.findIndex((span) => span.classList.contains("chosen"));
    const next = lane.spans[Math.max(0, Math.min(lane.spans.length - 1, now + step))];
    next.scrollIntoView({ block: "nearest" });
    const found = showTip(lane, next);
    if (found) $("said").textContent = `${found.text}, ${found.origin}. Round ${found.round}: ${found.drafted}. ${found.lines.map((line) => `${line.text} ${line.verdict}`).join(", ")}`;
  });
}

function start() {
  EXAMPLES.forEach(([name], number) => $("example").append(new Option(name, number)));
  $("example").prepend(new Option("Examples …", "", true, true));
  lanes = [new Lane($("lanes"), "Drafted", "drafted"), new Lane($("lanes"), "Plain", "plain")];
  lanes.forEach(inspect);
  charts = new Charts(...lanes);
  talk = new Conversation($("turns"));
  let kept = "auto";
  try {
    kept = localStorage.getItem("forerun-theme") ?? "auto";
  } catch {
    // the browser may not allow storage
  }
  theme(["light", "dark"].includes(kept) ? kept : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.build());
  $("theme").addEventListener("change", (event) => theme(event.target.value));
  $("example").addEventListener("change", (event) => {
    if (event.target.value !== "") choose(Number(event.target.value));
    event.target.value = "";
    $("prompt").focus();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (settings) run();
  });
  $("key-use").addEventListener("click", begin);
  $("key").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    begin();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("chat").addEventListener("change", showMode);
  $("anew").addEventListener("click", () => {
    if (running) return;
    talk.clear();
    showMode();
    $("prompt").focus();
  });
  $("replay").addEventListener("click", replay);
  $("inline").addEventListener("change", (event) => document.body.classList.toggle("show-rejected", event.target.checked));
  $("tip").addEventListener("pointerleave", hideTip);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    } else if (event.key === "Escape") {
      if ($("tip").hidden) running?.abort();
      hideTip();
    }
  });
  begin();
}

function begin() {
  connect().catch((error) => alert(error.message));
}

start();
