// A lane: one answer while it arrives, its tokens coloured by origin, its speed, and its rounds.
// Text from the model is inserted as text nodes, never as markup.

const ORIGINS = {
  drafted: "a draft token that was accepted",
  recovered: "the target’s own token, where a draft token was rejected",
  bonus: "the target’s own token, after a completely accepted draft",
  target: "the target’s own token, in a round without a draft",
};

export class Lane {
  constructor(parent, title, name) {
    this.title = title;
    this.root = Object.assign(document.createElement("section"), { className: "card lane" });
    this.root.id = `lane-${name}`;
    const heading = Object.assign(document.createElement("h2"), { textContent: title, id: `title-${name}` });
    this.root.setAttribute("aria-labelledby", heading.id);
    this.speed = Object.assign(document.createElement("p"), { className: "speed" });
    this.facts = Object.assign(document.createElement("p"), { className: "hint numbers" });
    const track = Object.assign(document.createElement("div"), { className: "track" });
    track.setAttribute("aria-hidden", "true");
    this.bar = track.appendChild(Object.assign(document.createElement("div"), { className: "bar-fill" }));
    this.text = Object.assign(document.createElement("div"), { className: "answer", tabIndex: 0 });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `${title} answer; arrow keys move between its tokens`);
    const head = Object.assign(document.createElement("div"), { className: "head" });
    head.append(heading, this.speed);
    this.root.append(head, track, this.facts, this.text);
    parent.append(this.root);
    this.clear(1);
  }

  // Remove the answer; `most` tokens will fill the bar.
  clear(most) {
    Object.assign(this, { most, ids: [], whole: "", content: "", rounds: [], roundOf: [], spans: [], marks: [], usage: null, finish: "" });
    this.text.replaceChildren();
    this.draw(0, 0);
  }

  // Add a chunk that arrived `ms` after the request was sent.
  add(chunk, ms) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      this.finish = choice.finish_reason ?? this.finish;
      this.content += choice.delta?.content ?? "";
      if (choice.draft) this.addRound(choice.draft, ms);
    }
    this.draw(this.ids.length, this.lastMs);
  }

  addRound(draft, ms) {
    const round = { ...draft, ms };
    this.rounds.push(round);
    for (const token of draft.tokens) {
      this.roundOf[this.ids.length] = round;
      this.ids.push(token.id);
    }
    const pieces = document.createDocumentFragment();
    for (const segment of draft.segments) {
      if (segment.origin === "recovered") pieces.append(rejectedOf(this.roundOf[segment.token] ?? round));
      const span = Object.assign(document.createElement("span"), { className: `tok ${segment.origin}`, textContent: segment.text });
      span.tokenNumber = segment.token;
      pieces.append(span);
      this.spans.push(span);
      this.whole += segment.text;
    }
    this.text.append(pieces);
    this.marks.push({ ms, num: this.ids.length, spans: this.spans.length });
  }

  // Show the speed and the counts of the first `num` tokens, `ms` after the request was sent.
  draw(num, ms) {
    this.speed.textContent = this.speedText(num, ms, "tokens/s") || (num ? "…" : "");
    this.bar.style.width = `${Math.min(100, (100 * num) / this.most)}%`;
    const first = this.marks[0]?.ms;
    const per = this.rounds.length ? this.ids.length / this.rounds.length : 0;
    const parts = [`${num} tokens`, `${(ms / 1000).toFixed(2)} s`];
    if (first !== undefined) parts.push(`first after ${first.toFixed(0)} ms`);
    if (this.rounds.some((round) => round.guesses.length)) parts.push(`${per.toFixed(2)} tokens per round`);
    this.facts.textContent = num ? parts.join(" · ") : "no tokens yet";
  }

  // Tokens per second since the first token arrived; undefined before the second one.
  rate(num, ms) {
    const first = this.marks[0];
    return first && num > first.num && ms > first.ms ? (1000 * (num - first.num)) / (ms - first.ms) : undefined;
  }

  // The rate as text, or "". If all tokens arrived at once, it is counted from the request.
  speedText(num = this.ids.length, ms = this.lastMs, unit = "tokens per second") {
    const rate = this.rate(num, ms);
    if (rate) return `${shown(rate)} ${unit}`;
    return this.finish && num === this.ids.length && ms > 0 ? `${shown((1000 * num) / ms)} ${unit} in total` : "";
  }

  get lastMs() {
    return this.marks.at(-1)?.ms ?? 0;
  }

  get finalRate() {
    return this.rate(this.ids.length, this.lastMs);
  }

  // For a replay: show the tokens that had arrived `ms` after the request; Infinity shows all.
  showUntil(ms) {
    let last = { num: 0, spans: 0, ms: 0 };
    for (const mark of this.marks) if (mark.ms <= ms) last = mark;
    this.spans.forEach((span, i) => {
      span.hidden = i >= last.spans;
      const before = span.previousSibling;
      if (before?.tagName === "DEL") before.hidden = span.hidden;
    });
    this.draw(last.num, Math.min(ms, this.lastMs));
  }
}

function shown(rate) {
  return rate >= 100 ? rate.toFixed(0) : rate.toFixed(1);
}

// The rejected draft tokens of a round, which the page can show in front of the recovered token.
function rejectedOf(round) {
  const rejected = Object.assign(document.createElement("del"), { className: "rejected" });
  rejected.setAttribute("aria-hidden", "true");
  let at = leafOf(round);
  for (const next of childrenOf(round, at).slice(0, 1)) {
    for (at = next; at !== undefined; at = childrenOf(round, at)[0]) rejected.append(round.guesses[at].text);
  }
  return rejected;
}

// The index of the last accepted draft token of a round; -1 if none was accepted.
function leafOf(round) {
  return round.guesses.reduce((leaf, guess, i) => (guess.accepted ? i : leaf), -1);
}

function childrenOf(round, parent) {
  return round.guesses.map((_, i) => i).filter((i) => round.guesses[i].parent === parent);
}

// The number of depths of a round at which a draft token was verified, and of those at which it was accepted.
export function depthsOf(round) {
  const accepted = round.guesses.filter((guess) => guess.accepted).length;
  return { accepted, offered: accepted + (childrenOf(round, leafOf(round)).length ? 1 : 0) };
}

// What the tip of a token shows: its origin, and the draft tokens of its round with their verdicts; null if unknown.
export function describeToken(lane, number) {
  const round = lane.roundOf[number];
  if (!round) return null;
  const token = round.tokens[number - round.first];
  const accepted = round.guesses.filter((guess) => guess.accepted).length;
  const by = round.drafter && round.guesses.length ? `, by ${round.drafter}` : "";
  const drafted = round.guesses.length ? `${round.guesses.length} drafted${by}, ${accepted} accepted` : "nothing drafted";
  const lines = [];
  const walk = (parent, depth, path) => {
    for (const i of childrenOf(round, parent)) {
      const guess = round.guesses[i];
      const verdict = guess.accepted ? "accepted" : path ? "rejected" : "not verified";
      lines.push({ depth, text: guess.text, verdict });
      walk(i, depth + 1, guess.accepted);
    }
  };
  walk(-1, 0, true);
  return { text: token.text, origin: token.origin, why: ORIGINS[token.origin], number, round: round.round, drafted, lines };
}

// Text in quotes, with symbols for line breaks and tabs.
export function quoted(text) {
  return `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;
}
