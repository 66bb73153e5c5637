"""Plain passes of the target: its logits without the engine and without drafts, as a reference for the proofs.

It also measures how much logits depend on chunking and batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import has_doubles
from forerun.llm import LLM
from forerun.models.runner import Read
from forerun.prove.cells import TokenIds
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams

PASS_TOKENS = 512
CHUNKS = (1, 2, 3, 5, 16)


def last_logits(llm: LLM, texts: Sequence[TokenIds]) -> Float[Tensor, "texts vocab"]:
    """The target's logits after each text; every text is prefilled in one chunk, several texts per pass."""
    runner, rows = llm.engine.runner, []
    for group in grouped(texts, min(PASS_TOKENS, runner.cache.num_free_tokens // 2)):
        reads = [Read(next(llm.requests.seq_ids), text, judged=[len(text) - 1]) for text in group]
        rows.append(runner.read(reads).logits)
        runner.release([read.seq_id for read in reads])
    return torch.cat(rows)


def grouped(texts: Sequence[TokenIds], most_tokens: int) -> list[list[TokenIds]]:
    """Texts in order, in groups of at most `most_tokens` tokens; a longer text is a group by itself."""
    groups: list[list[TokenIds]] = []
    room = 0
    for text in texts:
        if not groups or len(text) > room:
            groups.append([])
            room = most_tokens
        groups[-1].append(text)
        room -= len(text)
    return groups


def law_after(
    llm: LLM, texts: Sequence[TokenIds], num_prompt: int, params: SamplingParams
) -> Float[Tensor, "texts vocab"]:
    """The exact law of the token after each text, with all transforms, in float64 if the device has it."""
    logits = last_logits(llm, texts)
    logits = logits.double() if has_doubles(logits.device) else logits
    draws = draws_after(llm, texts, num_prompt, params)
    return draws.probs(logits, draws.roots())


def scores_after(
    llm: LLM, text: TokenIds, num_prompt: int, params: SamplingParams, logits: Float[Tensor, "1 vocab"]
) -> Float[Tensor, " vocab"]:
    """The scores whose argmax plain decoding emits after a text: transformed logits, plus noise unless greedy."""
    draws = draws_after(llm, [text], num_prompt, params)
    return draws.scores(logits, draws.roots())[0]


def draws_after(llm: LLM, texts: Sequence[TokenIds], num_prompt: int, params: SamplingParams) -> Draws:
    """The Draws for the token after each text, as in a round; `params` has a seed."""
    runner, seed, eos_ids = llm.engine.runner, params.resolve_seed(), llm.requests.eos_ids
    rows = [RowSampling(0, params, seed, 0, text, num_prompt, eos_ids) for text in texts]
    return Draws(rows, runner.vocab_size, num_ids=llm.requests.num_ids, device=runner.device)


def rounding_noise(llm: LLM, texts: Sequence[TokenIds]) -> float:
    """The largest difference between logits of one position in different batches and chunks: 0 on CPUs.

    Every text is prefilled in one chunk, in a batch with the others, and in chunks of several sizes.
    """
    in_one_chunk = [logits_in_chunks(llm, text, len(text)) for text in texts]
    batched = last_logits(llm, texts)
    largest = max(float((one[-1] - row).abs().max()) for one, row in zip(in_one_chunk, batched, strict=True))
    for text, logits in zip(texts, in_one_chunk, strict=True):
        for chunk in CHUNKS:
            largest = max(largest, float((logits_in_chunks(llm, text, chunk) - logits).abs().max()))
    return largest


def logits_in_chunks(llm: LLM, text: TokenIds, chunk: int) -> Float[Tensor, "tokens vocab"]:
    """The logits after every token of a text that is prefilled `chunk` tokens at a time."""
    runner, seq_id = llm.engine.runner, next(llm.requests.seq_ids)
    chunks = []
    for start in range(0, len(text), chunk):
        tokens = text[start : start + chunk]
        chunks.append(runner.read([Read(seq_id, tokens, judged=range(len(tokens)))]).logits.float())
        runner.keep([seq_id], [range(len(tokens))])
    runner.release([seq_id])
    return torch.cat(chunks)
