"""Conversations that go on at once, and how much of their prompts was known."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NUM_CONVERSATIONS, NUM_TURNS = 8, 4
OPENINGS = [f"def function_{number}({', '.join('abcdefgh'[:number])}):\n" + "    x = 1\n" * 24 for number in range(8)]


def known_share(post: Callable[[dict[str, Any]], dict[str, Any]]) -> float:
    """The share of all prompts' tokens that was not read again; a turn's prompt is the whole conversation so far."""

    def hold(number: int) -> list[dict[str, Any]]:
        text, usages = OPENINGS[number], []
        for _ in range(NUM_TURNS):
            body = {"prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = post(body)
            usages.append(answer["usage"])
            text += answer["choices"][0]["text"] + "\n    return x\n"
        return usages

    with ThreadPoolExecutor(NUM_CONVERSATIONS) as pool:
        usages = [usage for usages in pool.map(hold, range(NUM_CONVERSATIONS)) for usage in usages]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return float(cached) / sum(usage["prompt_tokens"] for usage in usages)
