"""Harmony: the answer format of gpt-oss, with channels for reasoning, answers and tool calls.

A message is `<|start|>`, a role, a channel, optionally a recipient, `<|message|>` and its text. The channel "analysis"
is reasoning; "final" and "commentary" are for the user. A message to `functions.NAME` is a tool call, in any channel,
if the function was offered and the text is a JSON object; one to any other recipient is text of its channel.
Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise, takewhile
from typing import Any

from forerun.sampling.grammar import Grammar, quoted
from forerun.serve.calls import Functions
from forerun.serve.growing import BLANKS, GrowingText, Scan

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE)  # a template that writes these uses Harmony
STOPS = ("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)  # after a message's text
TAGS = (*MARKS, *STOPS, CONSTRAIN)
THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # fields of messages
FUNCTIONS = "functions."
NEXT = f"<|end|> {START} {quoted('assistant')}"
RULES = f"""thought: {CHANNEL} "analysis" {MESSAGE} TEXT? {NEXT}
said: {CHANNEL} WHERE {MESSAGE} TEXT?
TEXT: /(.|\\n)+/
WHERE: "analysis" | "commentary" | "final"
"""


def read_header(text: GrowingText) -> Scan[str]:
    """Parse a message's header, up to its text; "" if there is text without a header."""
    start = text.at
    yield from text.run(BLANKS)
    if text.is_over:
        return ""
    if (yield from text.one_of((f"{START}assistant", START))):
        start = text.at
        yield from text.run(BLANKS)
    first = yield from text.one_of((CHANNEL, MESSAGE, CONSTRAIN, "to="))
    if not first:
        text.at = start
    elif first != MESSAGE and not (yield from text.upto(MESSAGE)):
        text.at = len(text.text)
    return text.text[start : text.at]


def is_analysis(header: str) -> bool:
    """Whether a message with this header is reasoning; the last of several channels counts."""
    return header.rpartition(CHANNEL)[2].lstrip().startswith("analysis")


def callee(header: str, functions: Functions) -> str:
    """The function that a message with this header calls; "" for none."""
    names = "|".join(re.escape(name) for name in functions)
    match = re.search(rf"\bto={re.escape(FUNCTIONS)}({names})(?=[\s<])", header)
    return match[1] if match else ""


def final_grammar(answer: Grammar, begun: str) -> Grammar:
    """The grammar of a whole answer whose final message matches `answer`; `begun` is the end of the prompt."""
    if MESSAGE in begun and not is_analysis(begun.partition(MESSAGE)[0]):
        return answer
    return Grammar.lark(
        f"start: {preamble(begun)} {CHANNEL} {quoted('final')} {MESSAGE} @answer\n{RULES}", answer=answer
    )


def calls_grammar(arguments: Mapping[str, Grammar], begun: str, *, free: bool) -> Grammar:
    """The grammar of an answer that calls one of the functions (if `free`: may call); arguments by function name."""
    calls = [
        f"call_{i}: {CHANNEL} {quoted(f'commentary to={FUNCTIONS}{name} ')} {CONSTRAIN} "
        f"{quoted('json')} {MESSAGE} @arguments_{i}"
        for i, name in enumerate(arguments)
    ]
    which = " | ".join(f"call_{i}" for i in range(len(calls)))
    start = f"(said {NEXT})* (said | which)" if free else f"{preamble(begun)} which"
    rules = "\n".join([f"start: {start}", f"which: {which}", *calls, RULES])
    return Grammar.lark(rules, **{f"arguments_{i}": grammar for i, grammar in enumerate(arguments.values())})


def preamble(begun: str) -> str:
    """The rule for what comes before the final message or a call; `begun` is the end of the prompt."""
    return f"TEXT? {NEXT}" if MESSAGE in begun else "thought?"


def harmony_messages(messages: Seq[Any]) -> list[Any]:
    """Earlier messages as Harmony's chat template expects them.

    Reasoning is in the field `thinking`; content before a call becomes part of it, since the template accepts only one
    of the two. Every call gets a separate message, with its results after it.
    """
    rewritten: list[Any] = []
    moved: set[int] = set()
    for place, message in enumerate(messages):
        if place in moved:
            continue
        thinking = next((message[name] for name in THOUGHTS if message.get(name)), None)
        calls, content = message.get("tool_calls", []), message.get("content")
        if thinking and content and calls:
            thinking, message = f"{thinking}\n\n{content}", message | {"content": ""}
        first = {"thinking": thinking} if thinking else {}
        rewritten.append(message | first | ({"tool_calls": calls[:1]} if calls else {}))
        results = results_after(messages, place) if len(calls) > 1 else {}
        for call, following in pairwise(calls):
            places = results.pop(str(call.get("id")), [])
            moved.update(places)
            rewritten += [messages[result] for result in places]
            rewritten.append({"role": "assistant", "content": "", "tool_calls": [following]})
    return rewritten


def results_after(messages: Seq[Any], place: int) -> dict[str, list[int]]:
    """Indexes of the tool results directly after a message, by the ids of their calls."""
    results: dict[str, list[int]] = {}
    for result in takewhile(lambda i: messages[i].get("role") == "tool", range(place + 1, len(messages))):
        results.setdefault(str(messages[result].get("tool_call_id")), []).append(result)
    return results
