// The fields of a request: one table of them, the form with their controls, and the request body made from it.
// The server checks the values; this file reports only text that cannot be parsed as the field's kind.

export const FIELDS = [
  { name: "temperature", label: "Temperature", kind: "number", step: 0.1, min: 0, place: "sampling", help: "0: greedy decoding." },
  { name: "max_tokens", label: "Maximum tokens", kind: "whole", min: 1, place: "sampling", value: 96, inChat: 256 },
  { name: "top_p", label: "Top p", kind: "number", step: 0.05, min: 0, max: 1, place: "sampling" },
  { name: "seed", label: "Seed", kind: "whole", place: "sampling", help: "Empty: random for each run." },
  { name: "top_k", label: "Top k", kind: "whole", place: "more" },
  { name: "min_p", label: "Min p", kind: "number", step: 0.05, min: 0, max: 1, place: "more" },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", step: 0.1, place: "more" },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", step: 0.1, place: "more" },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", step: 0.1, place: "more" },
  { name: "min_tokens", label: "Minimum tokens", kind: "whole", place: "more" },
  { name: "stop", label: "Stop strings", kind: "lines", place: "more", help: "One per line." },
  { name: "bad_words", label: "Bad words", kind: "lines", place: "more", help: "One per line." },
  { name: "stop_token_ids", label: "Stop token ids", kind: "ids", place: "more", help: "Separated by commas." },
  { name: "banned_tokens", label: "Banned token ids", kind: "ids", place: "more", help: "Separated by commas." },
  { name: "logit_bias", label: "Logit bias", kind: "object", place: "more", help: "As in {\"50\": -5}." },
  { name: "ignore_eos", label: "Continue after the end token", kind: "flag", place: "more" },
  { name: "include_stop_str_in_output", label: "Include the stop string", kind: "flag", place: "more" },
  { name: "skip_special_tokens", label: "Skip special tokens", kind: "flag", value: true, place: "more" },
  { name: "other", label: "Other fields of the body", kind: "object", place: "more", help: "As a JSON object." },
];
export const DRAFTING = [
  { name: "depth", label: "Depth", kind: "text", place: "drafting", value: "auto", help: "auto, or a number of tokens." },
  { name: "width", label: "Width", kind: "whole", min: 1, place: "drafting", help: "Above 1: a draft tree." },
  { name: "nodes", label: "Maximum nodes", kind: "whole", min: 1, place: "drafting", help: "Of a draft tree." },
  { name: "drafter", label: "Drafter", kind: "choice", place: "drafting", options: [] },
];

export class FieldError extends Error {
  constructor(field, message) {
    super(`${field.label}: ${message}`);
    this.control = document.getElementById(`f-${field.name}`);
  }
}

// Add the controls of all fields to the form; `settings` is the server's answer to page/settings.
export function buildForm(settings) {
  for (const field of [...FIELDS, ...DRAFTING]) {
    const control = controlOf(field, settings);
    control.id = `f-${field.name}`;
    const label = document.createElement("label");
    label.htmlFor = control.id;
    const line = document.createElement("div");
    line.className = `field ${field.kind}`;
    label.append(field.label);
    line.append(...(field.kind === "flag" ? [control, label] : [label, control]));
    if (field.help) {
      const help = document.createElement("p");
      help.className = "hint";
      help.id = `${control.id}-help`;
      help.textContent = field.help;
      control.setAttribute("aria-describedby", help.id);
      line.append(help);
    }
    document.getElementById(field.place).append(line);
  }
}

function controlOf(field, settings) {
  if (field.kind === "choice") {
    const select = document.createElement("select");
    const { arms } = settings; // the drafters
    const names = arms.length > 1 ? [["", "chosen per round"], ...arms.map((name) => [name, name])] : arms.map((name) => ["", name]);
    for (const [value, text] of names.length ? names : [["", "none"]]) select.append(new Option(text, value));
    select.disabled = names.length < 2;
    return select;
  }
  if (field.kind === "lines") return Object.assign(document.createElement("textarea"), { rows: 2, spellcheck: false });
  const input = document.createElement("input");
  if (field.kind === "flag") {
    input.type = "checkbox";
    input.checked = Boolean(field.value);
    return input;
  }
  const usual = settings.defaults[field.name];
  input.type = field.kind === "number" || field.kind === "whole" ? "number" : "text";
  input.step = field.step ?? (field.kind === "whole" ? 1 : "any");
  for (const name of ["min", "max"]) if (field[name] !== undefined) input[name] = field[name];
  if (usual !== undefined && usual !== null) input.placeholder = usual;
  if (field.name === "depth") input.value = settings.speculation.depth;
  else if (field.name === "width" && settings.speculation.width > 1) input.value = settings.speculation.width;
  else if (field.value !== undefined) input.value = settings.chat && field.inChat ? Math.min(field.inChat, settings.max_model_len >> 1) : field.value;
  return input;
}

// The value of a field; undefined for the server's default. Throws FieldError for text that cannot be parsed.
function valueOf(field) {
  const control = document.getElementById(`f-${field.name}`);
  if (field.kind === "flag") return control.checked === Boolean(field.value) ? undefined : control.checked;
  if (control.validity?.badInput) throw new FieldError(field, "this is not a number.");
  const text = control.value;
  if (text.trim() === "") return undefined;
  if (field.kind === "number" || field.kind === "whole") {
    const number = Number(text);
    if (!Number.isFinite(number) || (field.kind === "whole" && !Number.isSafeInteger(number))) throw new FieldError(field, "use a whole number.");
    return number;
  }
  if (field.kind === "lines") return text.split("\n").filter((line) => line !== "");
  if (field.kind === "ids") {
    const ids = text.split(",").map((part) => Number(part.trim() || NaN));
    if (!ids.every(Number.isSafeInteger)) throw new FieldError(field, "use token ids separated by commas.");
    return ids;
  }
  if (field.kind === "object") return objectOf(field, text);
  return text.trim();
}

function objectOf(field, text) {
  try {
    const value = JSON.parse(text);
    if (value && typeof value === "object" && !Array.isArray(value)) return value;
  } catch {
    // the error is thrown below
  }
  throw new FieldError(field, "this is not a JSON object.");
}

// The body of a request, with a seed but without a prompt. Throws FieldError for an invalid field.
export function bodyOf() {
  const body = {};
  let other = {};
  for (const field of FIELDS) {
    const value = valueOf(field);
    if (field.name === "other") other = value ?? {};
    else if (value !== undefined) body[field.name] = value;
  }
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const speculation = {};
  for (const field of DRAFTING) {
    const value = valueOf(field);
    if (field.name === "depth" && value !== undefined && value !== "auto") {
      if (!/^\d+$/.test(value)) throw new FieldError(field, "use auto or a whole number.");
      speculation.depth = Number(value);
    } else if (value !== undefined) speculation[field.name] = value;
  }
  return { ...body, speculation, ...other };
}
