"""Transforms: raw logits to transformed logits, per node of every sequence's tree.

This file decides what each sampling parameter does to logits, and in which order (that of vLLM's sampler): banned
tokens, minimum length, bias, bad words, custom processors, grammar, penalties; then, except for greedy rows,
temperature, min-p, top-k, top-p. Everything is row-wise and elementwise, so a row's result does not depend on the other
rows of the batch. A transform that no row uses is skipped; one that some row uses keeps other rows unchanged (plus 0,
times 1).

No transform makes NaN or infinity of finite logits, whatever parameters `SamplingParams` accepts: sums and products
are limited to the largest float32 number, and only banned or filtered tokens are -inf. A row whose logits are too large
for their temperature, or hold infinity from a processor or the model, is shifted so that its largest is 0 (`centred`);
its law is then that of its largest logits. Noise and draws are in `noise.py` and `draws.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.device import is_cpu, running_sum, softmax, upload, upload_tensor
from forerun.errors import InvalidRequest, RequestFailed
from forerun.guard import no_interrupt
from forerun.sampling.constraint import ANYTHING, Allowed, Constraint, constrained, packed
from forerun.sampling.edits import TextEdits
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What one sequence brings to a round.

    `tokens` is all committed text, prompt and output, the root last; it is the sequence's own list, read only.
    `bad_words` are words of two tokens or more that must not be completed; those of one token are banned tokens.
    `seed` is the resolved one (64 bits). `edits` are those of the text or of its beginning, if somebody keeps them.
    `constraint` is the grammar's, and follows this text or its beginning.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    sample: int
    tokens: Sequence[int]
    num_prompt: int
    eos_ids: tuple[int, ...] = ()
    bad_words: Sequence[Sequence[int]] = ()
    edits: TextEdits | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class PathState:
    """Packed nodes: the places in sequences at which a law is computed. Never changed; `Draws.advance` makes new ones.

    `row` is the sequence's place in the batch, `drawn` the guessed tokens from below the root down to the node
    (-1 after its end), `position` the absolute position of the token that is drawn after the node. `known` is each
    node's row and guesses where the host has them.
    """

    row: Int[Tensor, " nodes"]
    drawn: Int[Tensor, "nodes depth"]
    position: Int[Tensor, " nodes"]
    known: Sequence[tuple[int, Sequence[int]]] | None = None

    def host(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Each node's row and guesses; read from the device, which is waited for, where they are not known."""
        return self.known or list(zip(self.row.tolist(), self.drawn.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Children:
    """A drafter's guesses after some nodes: distinct tokens in draw order, -1 where there are fewer.

    `survival` is the drafter's own probability that a child is what the target chooses there, given that its parent
    was reached; 0 where there is none; None where it was not asked for. `law` are the probabilities the children were
    drawn from, without replacement (rejection modes only; greedy rows choose, so their DraftLaw.row must be -1).
    """

    tokens: Int[Tensor, "nodes width"]
    survival: Float[Tensor, "nodes width"] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None


@dataclass(frozen=True, slots=True)
class HostChildren:
    """Children as the host sees them: node by node tokens and survival, and their law on the device."""

    tokens: Sequence[Sequence[int]]
    survival: Sequence[Sequence[float]] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None


Logits = Float[Tensor, "nodes vocab"]
_PREFIX = 1024
ANY, NEVER = -2, -3  # in the place of a token: what every text has there, and what none has


class Transforms:
    """The transforms that the rows of one round ask for, their tables built at first use."""

    def __init__(self, rows: Sequence[RowSampling], vocab: int, num_ids: int, device: torch.device) -> None:
        self.rows, self.vocab, self.num_ids, self.device = rows, vocab, num_ids, device
        self._short = any(len(r.tokens) - r.num_prompt < r.params.min_tokens for r in rows)
        self._tables: dict[str, tuple[Tensor, ...]] = {}

    @cached_property
    def all_greedy(self) -> bool:
        return all(row.params.greedy for row in self.rows)

    @cached_property
    def any_greedy(self) -> bool:
        return any(row.params.greedy for row in self.rows)

    @cached_property
    def _sampled(self) -> list[SamplingParams]:
        return [row.params for row in self.rows if not row.params.greedy]

    def shape(self, logits: Logits, at: PathState, *, guessing: bool = False) -> Logits:
        """All that comes before temperature, in float32 (float64 stays); the caller's logits are left alone.

        `guessing` leaves grammars out where the host would have to wait for the guesses that a device has drawn.
        """
        rows, kept = self.rows, logits
        biased = any(row.params.banned_tokens or row.params.logit_bias for row in rows)
        worded = any(row.bad_words for row in rows)
        logits = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        if logits is kept and (self.num_ids < self.vocab or biased or self._short or worded):
            logits = logits.clone()
        if self.num_ids < self.vocab:
            logits[:, self.num_ids :] = -math.inf
        if biased:
            self._bias(logits, at)
        if self._short:
            ids, until = self._table("short", self._short_table)
            still, ids = at.position[:, None] < until[at.row], ids[at.row]
            logits.scatter_(1, ids, torch.where(still, -math.inf, logits.gather(1, ids)))
        if worded:
            self._ban_words(logits, at)
        if any(row.params.logits_processors for row in rows):
            logits = self._process(logits, at)
        unseen = guessing and at.known is None and not is_cpu(self.device)
        if not unseen and any(row.constraint is not None for row in rows):
            masks = masks_of(rows, at.host(), logits.shape[1])
            logits = constrained(logits, upload_tensor(masks, self.device))
        if any(row.params.repetition_penalty != 1 for row in rows):
            logits = self._penalise_repeats(logits, at)
        if any(row.params.presence_penalty != 0 or row.params.frequency_penalty != 0 for row in rows):
            logits = self._penalise_counts(logits, at)
        return logits

    def narrow(self, logits: Logits, at: PathState) -> Logits:
        """Temperature and the filters, on shaped logits, of rows that are not greedy."""
        if any(p.temperature != 1 for p in self._sampled):
            temperature = self._column("temperature", lambda p: p.temperature, 1.0, logits)[at.row]
            logits = centred(logits, temperature) / temperature
        else:
            logits = centred(logits)
        if any(p.min_p > 0 for p in self._sampled):
            reach = self._column("min_p", lambda p: math.log(p.min_p) if p.min_p else -math.inf, -math.inf, logits)
            logits = mask_below(logits, logits.amax(1, keepdim=True) + reach[at.row])
        widest = max((p.top_k for p in self._sampled), default=0)
        if widest > 0:
            (top_k,) = self._table("top_k", self._top_k_table)
            logits = mask_below(logits, kth_largest(logits, top_k[at.row], min(widest, self.vocab)))
        if any(p.top_p < 1 for p in self._sampled):
            top_p = self._column("top_p", lambda p: p.top_p if p.top_p < 1 else math.inf, math.inf, logits)
            logits = keep_nucleus(logits, top_p[at.row])
        return logits

    def greedy_nodes(self, at: PathState) -> Bool[Tensor, "nodes 1"]:
        """Which nodes belong to greedy sequences."""
        (greedy,) = self._table("greedy", lambda: (self._tensor([r.params.greedy for r in self.rows], torch.bool),))
        return greedy[at.row][:, None]

    def _bias(self, logits: Logits, at: PathState) -> None:
        """Add biases and ban ids, in place."""
        ids, values = (table[at.row] for table in self._table("bias", self._bias_table))
        old = logits.gather(1, ids)
        logits.scatter_(1, ids, torch.where(values.isneginf(), values, bounded(old + values, old)).to(logits.dtype))

    def _ban_words(self, logits: Logits, at: PathState) -> None:
        """Ban, in place, the last token of each word whose other tokens the answer up to a node ends with."""
        heads, lasts, ends = (table[at.row] for table in self._table("words", self._word_table))
        text = torch.cat([ends, at.drawn], dim=1)
        reach = torch.arange(ends.shape[1], device=text.device)
        behind = text.gather(1, (at.drawn >= 0).sum(1, keepdim=True) + reach)
        met = ((heads == behind[:, None]) | (heads == ANY)).all(2)
        # Words may share their last token, which the least of them decides.
        logits.scatter_reduce_(1, lasts, torch.where(met, -math.inf, math.inf).to(logits.dtype), "amin")

    def _process(self, logits: Logits, at: PathState) -> Logits:
        """Run each row's processors node by node; user code, so this is the one place that reads tensors here."""
        done = list(logits.unbind(0))
        for node, (index, drawn) in enumerate(at.host()):
            row = self.rows[index]
            if row.params.logits_processors:
                text = [*row.tokens, *(token for token in drawn if token >= 0)]
                try:
                    done[node] = _run_processors(row, text, logits[node], self.num_ids)
                except BaseException as error:  # a request's own code: even where it exits, it ends its request alone
                    raise RequestFailed(row.seq_id) from no_interrupt(error)
        return torch.stack(done)

    def _penalise_repeats(self, logits: Logits, at: PathState) -> Logits:
        ids, seen = self._table("seen", lambda: self._counts([row.tokens for row in self.rows]))
        ids, seen = _with_path(ids, seen, at)
        by = self._column("repetition", lambda p: p.repetition_penalty, 1.0, logits, greedy_too=True)[at.row]
        old = logits.gather(1, ids)
        new = torch.where(seen > 0, torch.where(old > 0, old / by, old * by), old)
        return logits.scatter(1, ids, bounded(new, old))

    def _penalise_counts(self, logits: Logits, at: PathState) -> Logits:
        ids, counts = self._table("said", lambda: self._counts([row.tokens[row.num_prompt :] for row in self.rows]))
        ids, counts = _with_path(ids, counts, at)
        frequency = self._column("frequency", lambda p: p.frequency_penalty, 0.0, logits, greedy_too=True)[at.row]
        presence = self._column("presence", lambda p: p.presence_penalty, 0.0, logits, greedy_too=True)[at.row]
        return logits.scatter(1, ids, logits.gather(1, ids) - frequency * counts - presence * (counts > 0))

    @cached_property
    def _edits(self) -> list[TextEdits]:
        """What each row's request changes of its laws."""
        return [
            row.edits or TextEdits.of(row.params, row.tokens, row.num_prompt, row.eos_ids, row.bad_words)
            for row in self.rows
        ]

    def _bias_table(self) -> tuple[Tensor, ...]:
        """(ids, what is added to each) per row: -inf for what is banned, the request's own numbers otherwise."""
        ids, values = [[*edits.fixed] for edits in self._edits], [[*edits.added] for edits in self._edits]
        return self._tensor(self._padded(ids, 0), torch.int64), self._tensor(self._padded(values, 0.0), torch.float32)

    def _word_table(self) -> tuple[Tensor, ...]:
        """(each word but its last token, its last token, the answer's end) per row, the first and third aligned."""
        reach = max(len(word) - 1 for row in self.rows for word in row.bad_words)
        count = max(len(row.bad_words) for row in self.rows)
        heads = [
            [[*[ANY] * (reach + 1 - len(word)), *word[:-1]] for word in row.bad_words]
            + [[NEVER] * reach] * (count - len(row.bad_words))
            for row in self.rows
        ]
        lasts = [[word[-1] for word in row.bad_words] + [0] * (count - len(row.bad_words)) for row in self.rows]
        endings = [row.tokens[max(row.num_prompt, len(row.tokens) - reach) :] for row in self.rows]
        ends = [[*[-1] * (reach - len(ending)), *ending] for ending in endings]
        return tuple(self._tensor(table, torch.int64) for table in (heads, lasts, ends))

    def _short_table(self) -> tuple[Tensor, ...]:
        """(ids that end a text, the position from which they are allowed) per row."""
        ends = [[*edits.ends] for edits in self._edits]
        until = [[edits.ends_from if edits.ends else 0] for edits in self._edits]
        return self._tensor(self._padded(ends, 0), torch.int64), self._tensor(until, torch.int64)

    def _top_k_table(self) -> tuple[Tensor, ...]:
        """How many tokens each row keeps; 0 keeps all."""
        top_k = [0 if r.params.greedy else max(r.params.top_k, 0) for r in self.rows]
        return (self._tensor([[k if k < self.vocab else 0] for k in top_k], torch.int64),)

    def _column(
        self, name: str, of: Callable[[SamplingParams], float], off: float, like: Logits, *, greedy_too: bool = False
    ) -> Float[Tensor, "batch 1"]:
        """One number per row, in the logits' own precision; `off` for greedy rows unless they want it too."""

        def build() -> tuple[Tensor, ...]:
            values = [of(r.params) if greedy_too or not r.params.greedy else off for r in self.rows]
            return (self._tensor(values, like.dtype)[:, None],)

        return self._table(f"{name} {like.dtype}", build)[0]

    def _counts(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(the ids of each text, how often each occurs), padded by repeating a pair; id 0, no times, for no text."""
        counted = [np.unique(np.array(text, dtype=np.int64), return_counts=True) for text in texts]
        width = max([1, *(len(ids) for ids, _ in counted)])
        ids, counts = np.zeros((len(texts), width), np.int64), np.zeros((len(texts), width), np.float32)
        for row, (own, times) in enumerate(counted):
            if len(own):
                ids[row], counts[row] = own[0], times[0]
                ids[row, : len(own)], counts[row, : len(own)] = own, times
        return upload_tensor(torch.from_numpy(ids), self.device), upload_tensor(torch.from_numpy(counts), self.device)

    def _padded(self, entries: Sequence[list[Any]], none: Any) -> list[list[Any]]:
        """Lists of one length: the first entry is repeated, so that what is written twice is the same."""
        width = max(1, *map(len, entries))
        return [entry + [entry[0] if entry else none] * (width - len(entry)) for entry in entries]

    def _table(self, name: str, build: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if name not in self._tables:
            self._tables[name] = build()
        return self._tables[name]

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)


def _run_processors(
    row: RowSampling, text: list[int], logits: Float[Tensor, " vocab"], num_ids: int
) -> Float[Tensor, " vocab"]:
    """One node's processors in turn; what they say of padding ids, from `num_ids` on, does not count.

    A dead end (nothing left to draw) ends the text: guessed continuations reach dead ends that the target never
    would, and must not fail the request. Raises InvalidRequest for a result that is no logits.
    """
    field, original = "logits_processors", logits
    for processor in row.params.logits_processors:
        logits = processor(text, logits.clone())
        if not isinstance(logits, Tensor) or logits.shape != original.shape or not logits.is_floating_point():
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InvalidRequest(field, f"{processor!r} gave {got}; return floating logits of {tuple(original.shape)}")
    logits = torch.cat([logits.to(original)[:num_ids], original[num_ids:]])
    if logits.isnan().any() and not original.isnan().any():
        raise InvalidRequest(field, f"the result after {len(text)} tokens has NaN; return finite numbers or -inf")
    if not logits.isneginf().all() or original.isneginf().all():
        return logits
    if not row.eos_ids:
        raise InvalidRequest(field, f"no token is left after {len(text)} tokens, and the model has no end token")
    return logits.index_fill(0, torch.tensor(row.eos_ids[0], device=logits.device), 0.0)


def _with_path(
    ids: Int[Tensor, "batch texts"], counts: Float[Tensor, "batch texts"], at: PathState
) -> tuple[Int[Tensor, "nodes ids"], Float[Tensor, "nodes ids"]]:
    """All ids of each node's text, its path included, and how often each occurs; an id may stand there twice."""
    ids, counts, path = ids[at.row], counts[at.row], at.drawn.clamp_min(0)
    before = ((path[:, :, None] == ids[:, None]) * counts[:, None]).amax(2)
    ids, counts = torch.cat([ids, path], dim=1), torch.cat([counts, before], dim=1)
    return ids, counts + (ids[:, :, None] == at.drawn[:, None]).sum(2)


def bounded(new: Logits, old: Logits) -> Logits:
    """`new` as far as the format holds it, where `old` was finite; infinity and NaN were not made here, and stay."""
    most = torch.finfo(new.dtype).max
    return torch.where(old.isfinite(), new.clamp(-most, most), new)


def centred(logits: Logits, temperature: Float[Tensor, "nodes 1"] | None = None) -> Logits:
    """Each row, shifted so that its largest logit is 0 if that logit over the temperature would be infinite.

    A law stays the same when its logits are moved; of one with infinite logits the largest are left. Rows that have no
    law, with NaN or with nothing above -inf, are left alone.
    """
    peak = logits.amax(1, keepdim=True)
    far = (peak if temperature is None else peak / temperature).isinf() & (peak > -math.inf)
    if is_cpu(logits.device) and not far.numpy().any():  # elsewhere it would be waited for
        return logits
    most = torch.finfo(logits.dtype).max
    return torch.where(far, logits.clamp(max=most) - peak.clamp(max=most), logits)


def mask_below(logits: Logits, least: Float[Tensor, "nodes 1"]) -> Logits:
    """-inf for what is smaller than `least`; equals stay, so that ties do not depend on an order."""
    return logits.masked_fill(logits < least, -math.inf)


def kth_largest(logits: Logits, k: Int[Tensor, "nodes 1"], widest: int) -> Float[Tensor, "nodes 1"]:
    """The k-th largest value of each row, -inf where k is 0; no k exceeds `widest`."""
    values = logits.topk(widest, dim=1).values.gather(1, (k - 1).clamp_min(0).clamp_max(widest - 1))
    return torch.where(k > 0, values, -math.inf)


def keep_nucleus(logits: Logits, top_p: Float[Tensor, "nodes 1"]) -> Logits:
    """Mask all but the likeliest tokens that together reach `top_p`: one is kept while those above it do not.

    Tokens as likely as the last one kept are kept too; an infinite `top_p` keeps all.
    """
    probs = softmax(logits)
    off = top_p.isinf()
    # Sorting 150,000 tokens takes 10 ms, the largest 1024 half a millisecond, and they nearly always hold the
    # nucleus. On CPUs the sums over them have the bits of the sums over all (cumsum runs from the left), so that
    # which way was taken, a matter of batch-mates too, does not show.
    large = logits.device.type == "cpu" and logits.shape[1] >= 16 * _PREFIX
    prefix = _PREFIX if large else logits.shape[1]
    ranked = probs.topk(prefix, dim=1).values
    mass = running_sum(ranked)
    if prefix < logits.shape[1] and not (off | (mass[:, -1:] >= top_p)).all():
        ranked = probs.sort(dim=1, descending=True).values
        mass = running_sum(ranked)
    kept = (mass[:, :-1] < top_p).sum(1, keepdim=True)  # the first is kept too, at rank 0
    return logits.masked_fill((probs < ranked.gather(1, kept)) & ~off, -math.inf)


def masks_of(
    rows: Sequence[RowSampling], nodes: Sequence[tuple[int, Sequence[int]]], vocab: int
) -> Int[Tensor, "nodes words"]:
    """What may be drawn after each node, which is a row and the guesses behind its root, -1 after their end; `packed`.

    All bits are set where a row has no grammar.
    """

    def allowed(row: int, path: Sequence[int]) -> Allowed:
        constraint = rows[row].constraint
        if constraint is None:
            return ANYTHING
        return constraint.after((*constraint.behind(rows[row].tokens), *(token for token in path if token >= 0)))

    return packed([allowed(row, path) for row, path in nodes], vocab)
