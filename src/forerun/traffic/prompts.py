"""The prompts of a load test: a user's file or what ships, as the part of a body that asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.tune.material import TunePrompt, read_tune_prompts


@dataclass(frozen=True, slots=True)
class TrafficPrompt:
    """What a request asks, its category ("" without one), and its place in a file."""

    asked: Mapping[str, Any]
    category: str
    place: str


def traffic_prompts(path: Path | None, chat: bool) -> list[TrafficPrompt]:
    """The prompts of a file or those that ship, by turns of their categories.

    With `chat` a prompt without messages is a message of the user. Raises InvalidRequest, with file and line, for what
    cannot be read, and for messages where no chat is asked for.
    """
    return [asked_of(prompt, chat) for prompt in read_tune_prompts(path, None)]


def asked_of(prompt: TunePrompt, chat: bool) -> TrafficPrompt:
    """A prompt as a part of a body."""
    if chat:
        messages = prompt.messages or [{"role": "user", "content": prompt.words}]
        return TrafficPrompt({"messages": messages}, prompt.category, prompt.place)
    if prompt.words is None:
        raise InvalidRequest("prompts", f"{prompt.place}: it holds messages: add --chat.")
    return TrafficPrompt({"prompt": prompt.words}, prompt.category, prompt.place)
