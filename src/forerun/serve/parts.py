"""Parts: splits an answer into reasoning, text and tool calls.

Blanks around reasoning tags, and directly before and after a call, are dropped. Everything else is returned as the
model wrote it, including text that only resembles a call. The result does not depend on how a stream is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

from forerun.accept.delta import Delta
from forerun.sampling.grammar import Grammar
from forerun.serve.call_grammar import lark_tag
from forerun.serve.calls import CallForm, Functions, ToolCall, call_of, parse_json
from forerun.serve.growing import BLANKS, GrowingText, Literals, Scan, tags_of, unbroken
from forerun.serve.harmony import MARKS, STOPS, callee, final_grammar, is_analysis, read_header
from forerun.serve.logprob_text import TokenTexts

PartKind = Literal["reasoning", "content", "call"]
SplitState = Literal["start", "reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning; `opened`: the opening tag is already in the prompt."""

    opening: str
    closing: str
    opened: bool = False


TAGS = (
    ReasoningTags("<think>", "</think>"),  # of Qwen, DeepSeek and most others
    ReasoningTags("[THINK]", "[/THINK]"),  # of Magistral and Ministral 3
)


def reasons(template: str) -> bool:
    """Whether a chat template supports reasoning between tags."""
    return any(tags.closing in template for tags in TAGS)


def reasoning_tags(template: str, prompt: str, continued: str | None = None) -> ReasoningTags | None:
    """The reasoning tags of answers to `prompt`, which this template rendered; None for answers without reasoning.

    The opening tag may already be at the prompt's end or, if the answer continues a message, in its text `continued`.
    """
    for tags in TAGS:
        if tags.closing not in template:
            continue
        if continued is not None and tags.opening in continued:
            opened = continued.rfind(tags.opening) > continued.rfind(tags.closing)
            return ReasoningTags(tags.opening, tags.closing, opened=True) if opened else None
        end = prompt.rstrip()
        if not end.endswith(tags.closing):
            return ReasoningTags(tags.opening, tags.closing, opened=end.endswith(tags.opening))
    return None


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of reasoning or text, or a complete tool call."""

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The format of the answers to one prompt: reasoning tags, tool call format, and callable functions.

    `begun`: in Harmony, the part of the answer's first message that is in the prompt; None in other formats. `special`:
    ids of the tags that are special tokens; the same characters from other tokens are plain text. The detokenizer must
    not skip `shown_special_ids`.
    """

    reasoning: ReasoningTags | None = None
    calls: CallForm | None = None
    functions: Functions = field(default_factory=dict)
    begun: str | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    shown_special_ids: frozenset[int] = frozenset()

    @property
    def reasons(self) -> bool:
        """Whether answers may contain reasoning."""
        return self.reasoning is not None or self.begun is not None

    def around(self, grammar: Grammar) -> Grammar:
        """The grammar of a complete answer: reasoning, if any, followed by text that matches `grammar`."""
        tags = self.reasoning
        if self.begun is not None:
            return final_grammar(grammar, self.begun)
        if tags is None:
            return grammar
        if tags.closing not in self.special:
            return grammar.behind(tags.closing, "" if tags.opened else tags.opening)
        opening, often = ("", "") if tags.opened else (lark_tag(tags.opening, self.special), "?")
        rules = f"start: before{often} @answer\nbefore: {opening} TEXT? {lark_tag(tags.closing, self.special)} BLANKS?"
        return Grammar.lark(f"{rules}\nTEXT: /(.|\\n)+/\nBLANKS: /[ \\n]{{1,4}}/", answer=grammar)


class AnswerSplitter:
    """Splits one growing answer into its parts. `kind` is the kind of the text at its end, if already known."""

    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self.kind: SplitState = "content"
        self.text = GrowingText()
        self.literals = Literals(form.special)
        self.shown: set[SplitState] = set()
        self.separator = ""  # prefix of the next text part
        self.num_calls = 0  # in the parts so far
        self.parts: list[AnswerPart] = []
        self.steps = self.tagged() if form.begun is None else self.channels()
        self.feed((form.begun or "").rstrip())

    def feed(self, text: str) -> list[AnswerPart]:
        """Append text (with literal tags marked); returns the parts that are now certain."""
        self.text.append(text)
        next(self.steps, None)
        parts, self.parts = self.parts, []
        return parts

    def take(self, delta: Delta) -> list[AnswerPart]:
        """Append a delta; returns the parts that are now certain; after the last delta, all remaining parts."""
        text = "".join(self.literals.broken(segment.text, segment.special) for segment in delta.segments)
        return self.feed(text) + (self.close() if delta.finish_reason else [])

    def close(self) -> list[AnswerPart]:
        """The remaining parts, once the answer has ended."""
        self.text.ended = True
        return self.feed("")

    def show(self, text: str) -> None:
        """Add a text part."""
        if text := unbroken(text):
            self.parts.append(AnswerPart("reasoning" if self.kind == "reasoning" else "content", self.separator + text))
            self.shown.add(self.kind)
            self.separator = ""

    def called(self, calls: Seq[ToolCall]) -> None:
        """Add a part for each call."""
        self.parts += [AnswerPart("call", call=call) for call in calls]
        self.num_calls += len(calls)

    def upto(self, kind: SplitState, *tags: str) -> Scan[str]:
        """Show the text up to one of the tags; returns the tag, "" at the end."""
        self.kind = kind
        return (yield from self.text.passage(tags_of(tags), self.show))

    def tagged(self) -> Scan[None]:
        """Parse an answer with reasoning between tags and calls in its text."""
        tags, form, text = self.form.reasoning, self.form.calls, self.text
        if tags is not None and (tags.opened or (yield from self.opened(tags))):
            self.kind = "reasoning"
            yield from text.run(BLANKS)
            yield from self.upto("reasoning", tags.closing)
            self.kind = "content"
            yield from text.run(BLANKS)
        if form is not None and not form.opening:
            start = text.at
            calls = yield from form.calls(text, self.form.functions)
            yield from text.run(BLANKS)
            if calls and text.is_over:
                return self.called(calls)
            text.at = start
        while (tag := (yield from self.upto("content", *([form.tag] if form and form.opening else [])))) and form:
            start = text.at
            if calls := (yield from form.calls(text, self.form.functions)):
                self.called(calls)
                yield from text.run(BLANKS)
            else:
                self.show(text.before + tag)
                text.at = start

    def opened(self, tags: ReasoningTags) -> Scan[bool]:
        """Whether the answer begins with the opening tag, which is then consumed."""
        self.kind = "start"
        yield from self.text.run(BLANKS)
        if (yield from self.text.one_of((tags.opening,))):
            return True
        self.text.at, self.kind = 0, "content"
        return False

    def channels(self) -> Scan[None]:
        """Parse an answer in Harmony, whose messages have channels, and are calls if their recipient is a function."""
        text = self.text
        while not text.is_over:
            self.kind = "reasoning"
            header = yield from read_header(text)
            start, call, stop = text.at, None, ""
            if name := callee(header, self.form.functions):
                yield from text.run(BLANKS)
                value = parse_json((yield from text.json()))
                yield from text.run(BLANKS)
                stop = yield from text.one_of(STOPS)
                call = call_of(name, value, self.form.functions) if stop or text.is_over else None
            if call is not None:
                self.called([call])
            else:
                text.at = start
                kind: SplitState = "reasoning" if is_analysis(header) else "content"
                self.separator = "\n" if kind in self.shown else ""
                stop = yield from self.upto(kind, *STOPS)
                self.show(text.before)
            text.at -= len(stop) if stop in MARKS else 0


class TokenCounter:
    """Counts the reasoning tokens of one growing answer, including tags and message headers."""

    def __init__(self, form: AnswerForm, texts: TokenTexts) -> None:
        self.texts = texts
        self.splitter = AnswerSplitter(replace(form, calls=None, functions={}))
        self.special = frozenset(form.special.values())
        self.num_undecided = self.num_reasoning = 0

    def feed(self, tokens: Seq[int]) -> list[SplitState]:
        """Count the next tokens; returns the kinds of those that are now certain, since a tag may span several."""
        certain: list[SplitState] = []
        for token in tokens:
            self.num_undecided += 1
            kind = self.splitter.kind
            text = self.texts.bytes_of(token).decode("latin-1")  # the tags of reasoning are ASCII
            self.splitter.feed(self.splitter.literals.broken(text, token in self.special))
            kind = self.splitter.kind if kind == "start" else kind
            if kind != "start":
                certain += [kind] * self.num_undecided
                self.num_undecided = 0
        self.num_reasoning += certain.count("reasoning")
        return certain
