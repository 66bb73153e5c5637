"""Reasoning: the part of an answer that a model writes between tags before it answers, told apart from the answer.

This file decides which templates reason, where an answer's reasoning begins and ends, in text and in tokens, and which
blanks around the tags belong to neither. A streamed text is split as the whole one is, wherever its pieces are cut.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from forerun.serve.spelled import TokenTexts
from forerun.text.tokenizer import Tokenizer

PartKind = Literal["reasoning", "content"]
SplitState = Literal["start", "reasoning", "content"]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around reasoning; `opened` where the prompt has the opening tag already."""

    opening: str
    closing: str
    opened: bool = False

    def hidden(self, tokenizer: Tokenizer) -> bool:
        """Whether the closing tag is a special token, which a text shows only where it is asked to."""
        return any(tokenizer.decode([token]) == self.closing for token in tokenizer.special_ids)


TAGS = (ReasoningTags("<think>", "</think>"),)  # of Qwen, DeepSeek and most others


def reasons(template: str) -> bool:
    """Whether answers to this template's prompts may begin with reasoning."""
    return any(tags.closing in template for tags in TAGS)


def reasoning_tags(template: str, prompt: str, continued: str | None = None) -> ReasoningTags | None:
    """The tags of an answer to `prompt`, as this template wrote it; None where the answer has no reasoning.

    Whether the reasoning is open already is seen at the prompt's end or, where the answer goes on from the text
    `continued`, in that text.
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


class ReasoningSplitter:
    """Splits one growing answer. Without tags all of it is content."""

    def __init__(self, tags: ReasoningTags | None) -> None:
        self.tags = tags
        self.state: SplitState = "start"
        self.held = ""
        self.bare = False  # whether blanks at the front of what comes next belong to the tag before them
        if tags is None:
            self.state = "content"
        elif tags.opened:
            self.state, self.bare = "reasoning", True

    def feed(self, text: str) -> list[tuple[PartKind, str]]:
        """The parts that are certain with this text, in order."""
        found: list[tuple[PartKind, str]] = []
        self.held += text
        if self.state == "start":
            self.begin()
        if self.state == "reasoning":
            found += self.reason()
        if self.state == "content":
            found += self.take("content", len(self.held))
        return found

    def close(self) -> list[tuple[PartKind, str]]:
        """The rest, once the answer has ended."""
        kind: PartKind = "reasoning" if self.state == "reasoning" else "content"
        return self.take(kind, len(self.held))

    def whole(self, text: str) -> dict[PartKind, str]:
        """A whole answer's parts."""
        parts: dict[PartKind, str] = {"reasoning": "", "content": ""}
        for kind, piece in (*self.feed(text), *self.close()):
            parts[kind] += piece
        return parts

    def begin(self) -> None:
        """Decide whether the answer begins with reasoning, as soon as that is certain."""
        assert self.tags is not None, "without tags an answer begins with its content"
        opening, said = self.tags.opening, self.held.lstrip()
        if said.startswith(opening):
            self.state, self.held, self.bare = "reasoning", said[len(opening) :], True
        elif not opening.startswith(said):
            self.state = "content"

    def reason(self) -> list[tuple[PartKind, str]]:
        """The reasoning that is certain; behind the closing tag the content begins."""
        assert self.tags is not None, "without tags there is no reasoning"
        closing = self.tags.closing
        at = self.held.find(closing)
        if at < 0:
            return self.take("reasoning", len(self.held) - len(self.unsure(closing)))
        rest = self.held[at + len(closing) :]
        self.held = self.held[:at].rstrip()
        found = self.take("reasoning", len(self.held))
        self.state, self.held, self.bare = "content", rest, True
        return found

    def unsure(self, closing: str) -> str:
        """The end of the held text that may begin the closing tag, with the blanks in front of it."""
        text = self.held
        begun = next((i for i in range(min(len(closing), len(text)), 0, -1) if closing.startswith(text[-i:])), 0)
        kept = text[: len(text) - begun].rstrip()
        return text[len(kept) :]

    def take(self, kind: PartKind, length: int) -> list[tuple[PartKind, str]]:
        """So much of the held text as a part; blanks behind a tag are dropped."""
        text, self.held = self.held[:length], self.held[length:]
        if self.bare:
            text = text.lstrip()
            self.bare = not text
        return [(kind, text)] if text else []


class TokenCounter:
    """Counts the tokens of one growing answer: of its reasoning, tags included, and of its content."""

    def __init__(self, tags: ReasoningTags | None, texts: TokenTexts) -> None:
        self.tags = tags
        self.texts = texts
        self.said = b""
        self.num_undecided = self.num_reasoning = self.num_content = 0
        self.state: SplitState = "content" if tags is None else "start"
        if tags is not None and tags.opened:
            self.state = "reasoning"

    def feed(self, tokens: Seq[int]) -> None:
        """Count the next tokens. Those that may be of an opening tag are counted once that is certain."""
        for token in tokens:
            self.num_undecided += 1
            state = self.state
            if self.tags is not None and state != "content":
                self.said += self.texts.bytes_of(token)
                state = self.begin(self.tags) if state == "start" else state
                self.state = self.reason(self.tags) if state == "reasoning" else state
            if state == "reasoning":
                self.num_reasoning, self.num_undecided = self.num_reasoning + self.num_undecided, 0
            elif state == "content":
                self.num_content, self.num_undecided = self.num_content + self.num_undecided, 0

    def begin(self, tags: ReasoningTags) -> SplitState:
        """What the answer begins with."""
        opening, said = tags.opening.encode(), self.said.lstrip()
        if said.startswith(opening):
            return "reasoning"
        return "start" if opening.startswith(said) else "content"

    def reason(self, tags: ReasoningTags) -> PartKind:
        """What comes behind the last token."""
        closing = tags.closing.encode()
        if closing in self.said:
            return "content"
        self.said = self.said[-len(closing) :]
        return "reasoning"
