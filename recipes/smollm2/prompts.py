"""Stage 1: prompts that the target writes itself, so that no other data are needed.

After the beginning of a user's turn in its template, an instruct model writes a request that a user might send (Magpie,
2406.08464). Each prompt begins with an opening from `OPENINGS`, so that many kinds of requests occur. One prompt in
four is about a passage that the target wrote in answer to another prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun import LLM, SamplingParams
from forerun.store import write_whole

BATCH = 32
PROMPT_TOKENS, PASSAGE_TOKENS = 96, 192
LEAST_LETTERS = 20
TEMPERATURE, TOP_P = 1.0, 0.95
END = "<|im_end|>"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = f"{SYSTEM}<|im_start|>user\n"
OPENINGS = (
    "",
    "What",
    "Why",
    "How can I",
    "How does",
    "Who",
    "When",
    "Where",
    "Which",
    "Can you",
    "Could you explain",
    "Explain",
    "Describe",
    "Compare",
    "Write",
    "Write a story about",
    "Write a short poem about",
    "Write an email to",
    "Write a blog post about",
    "Write a Python function that",
    "Write a program in",
    "Implement",
    "Fix this code:\n",
    "Given a list of",
    "Give me",
    "List",
    "Suggest",
    "Plan",
    "Imagine that you are",
    "Pretend to be",
    "Act as",
    "You are",
    "I am",
    "I want to",
    "My",
    "If",
    "Is it true that",
    "Suppose that",
    "Solve",
    "Calculate",
    "A train",
    "A farmer has",
    "Maria bought",
    "There are",
    "Each",
    "Tom is",
    "In a class of",
    "Translate German to English:",
    "Translate the following sentence to English:",
    "Translate into German:",
    "Rewrite",
    "Correct the grammar of",
    "Extract",
    "Classify",
    "Tell me about the history of",
    "Discuss",
    "What is the difference between",
    "What are the main causes of",
    "The following is",
    "Q:",
)
ARTICLES = ("Write a newspaper article about", "Write an encyclopedia article about", "Tell me in detail about")
ABOUT = (
    "Summarize: {}",
    "Summarize the following article:\n{}",
    "{}\n\nWhat is this text about?",
    "{}\n\nGive the most important points of this text.",
    "Answer the question based on the passage below.\n\nPassage: {}\n\nQuestion: What is the passage about?",
    "Evaluate this text, and say what could be better:\n{}",
    "Extract all names, places and dates from this text:\n{}",
    "Translate into German: {}",
)


def write_prompts(model: str, count: int, path: Path, threads: int | None = None) -> None:
    """Write `count` prompts to a `.jsonl` file, without those that are too short; a quarter are about passages.

    An existing file is continued after its last batch; the result is the same as without an interruption.
    """
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    first = (json.loads(lines[-1])["number"] // BATCH + 1) * BATCH if lines else 0
    if first >= count:
        return
    llm = LLM(model, max_num_seqs=BATCH, max_model_len=1024, threads=threads)
    for start in range(first, count, BATCH):
        lines += [json.dumps({"prompt": text, "number": number}) for number, text in batch_of(llm, start)]
        write_whole(path, "\n".join(lines) + "\n")
        print(f"{start + BATCH} of {count} prompts", flush=True)


def batch_of(llm: LLM, first: int) -> Iterator[tuple[int, str]]:
    """The batch of prompts that begins with number `first`, with their numbers, without those that are too short."""
    numbers = range(first, first + BATCH)
    if (first // BATCH) % 4:
        openings = [OPENINGS[i % len(OPENINGS)] for i in numbers]
        texts = user_messages(llm, openings, numbers, PROMPT_TOKENS)
        yield from ((i, text) for i, text in zip(numbers, texts, strict=True) if len(text) >= LEAST_LETTERS)
        return
    topics = user_messages(llm, [ARTICLES[i % len(ARTICLES)] for i in numbers], numbers, 24)
    chats = [f"{USER}{topic}{END}\n<|im_start|>assistant\n" for topic in topics]
    for i, passage in zip(numbers, continuations(llm, chats, numbers, PASSAGE_TOKENS), strict=True):
        yield i, ABOUT[i % len(ABOUT)].format(passage.strip())


def user_messages(llm: LLM, openings: Sequence[str], seeds: Sequence[int], tokens: int) -> list[str]:
    """Messages of a user that start with these words."""
    rest = continuations(llm, [USER + opening for opening in openings], seeds, tokens)
    return [(opening + more).strip() for opening, more in zip(openings, rest, strict=True)]


def continuations(llm: LLM, prompts: Sequence[str], seeds: Sequence[int], tokens: int) -> list[str]:
    """The target's continuations of these texts, up to the end of a turn."""
    params = [SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, max_tokens=tokens, seed=seed) for seed in seeds]
    ids = [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    return [result.outputs[0].text for result in llm.generate(ids, params)]
