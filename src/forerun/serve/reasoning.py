"""Reasoning: the part of an answer that a model writes between tags before it answers.

This file decides which templates reason, and whether a prompt has the opening tag already. `parts.py` tells the
reasoning apart from the answer, also that of Harmony, which has channels in place of tags.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around reasoning; `opened` where the prompt has the opening tag already."""

    opening: str
    closing: str
    opened: bool = False


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
