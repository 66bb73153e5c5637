"""Transforms: raw logits to transformed logits, per node of every sequence's tree.

This file decides what each sampling parameter does to logits, and in which order (the order of vLLM's sampler): banned
tokens, minimum length, bias, bad words, custom processors, grammar, penalties; then, except for greedy rows,
temperature, min-p, top-k, top-p. Everything is row-wise and elementwise, so a row's result does not depend on the other
rows of the batch. A transform that no row uses is skipped; one that some row uses leaves other rows unchanged (plus 0,
times 1).

With parameters that `SamplingParams` accepts, finite logits never become NaN or infinite, except that banned and
filtered tokens become -inf: sums and products are limited to the largest float32 number. A row whose logits are too
large for its temperature, or infinite, is shifted so that its largest is 0 (`centred`); its law is then that of its
largest logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.device import is_cpu, running_sum, softmax, upload_arrays, upload_tensor
from forerun.errors import InvalidRequest, RequestFailed
from forerun.guard import no_interrupt
from forerun.sampling.constraint import ANYTHING, Allowed, constrained, packed
from forerun.sampling.tables import ANY, NUMBERS, RoundTables, RowSampling, Steps


@dataclass(frozen=True, slots=True)
class PathState:
    """Packed nodes after each of which a token is sampled. Immutable; `Draws.advance` makes new ones.

    `row` is the sequence's index in the batch, `drawn` the draft tokens from below the root down to the node (-1 after
    its end), `position` the absolute position of the token that is sampled after the node. `known` is the row and the
    draft tokens of each node, if the host knows them; `masks` are the masks of grammars, if they are computed already.
    """

    row: Int[Tensor, " nodes"]
    drawn: Int[Tensor, "nodes depth"]
    position: Int[Tensor, " nodes"]
    known: Sequence[tuple[int, Sequence[int]]] | None = None
    masks: Int[Tensor, "nodes words"] | None = None

    def host(self) -> Sequence[tuple[int, Sequence[int]]]:
        """The row and the draft tokens of each node; waits for the device if the host does not know them."""
        return self.known or list(zip(self.row.tolist(), self.drawn.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Children:
    """A drafter's draft tokens after some nodes: distinct tokens in draw order, then -1.

    `survival` is the drafter's probability that the target chooses this child if the parent is accepted; 0 for missing
    children; None if it was not requested. `law` is the distribution that the children were sampled from without
    replacement (rejection modes only; children of greedy rows are not sampled, so their DraftLaw.row must be -1).
    """

    tokens: Int[Tensor, "nodes width"]
    survival: Float[Tensor, "nodes width"] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None


@dataclass(frozen=True, slots=True)
class HostChildren:
    """`Children` on the host: the tokens and survival of each node; the law stays on the device."""

    tokens: Sequence[Sequence[int]]
    survival: Sequence[Sequence[float]] | None = None
    law: Float[Tensor, "nodes vocab"] | None = None


Logits = Float[Tensor, "nodes vocab"]
_PREFIX = 1024


class Transforms:
    """The transforms of a round: `steps` lists them, `tables` (RoundTables.arrays) has their parameters by row.

    Nothing waits for the device, except processors and grammars whose masks are not in the nodes' state.
    """

    def __init__(
        self, steps: Steps, tables: Callable[[], Mapping[str, Tensor]], vocab: int, num_ids: int,
        rows: Sequence[RowSampling] = (),
    ) -> None:  # fmt: skip
        self.steps, self.vocab, self.num_ids, self.rows = steps, vocab, num_ids, rows
        self._tables = tables

    @classmethod
    def of(cls, host: RoundTables, num_ids: int, device: torch.device) -> Transforms:
        """The transforms of these rows; the tables are copied to the device at first use, in one copy."""
        return cls(host.steps, lambda: upload_arrays(host.arrays(host.steps), device), host.vocab, num_ids, host.rows)

    @cached_property
    def tables(self) -> Mapping[str, Tensor]:
        """The tables on the device."""
        return self._tables()

    @property
    def all_greedy(self) -> bool:
        return not self.steps.sampled

    def edit(self, logits: Logits, at: PathState, *, drafting: bool = False) -> Logits:
        """Apply all transforms before temperature to a copy of the logits, in float32 (float64 stays).

        When `drafting`, grammars are left out if the host would have to wait for draft tokens on a device.
        """
        steps, original = self.steps, logits
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.to(torch.float32)
        if logits is original and (self.num_ids < self.vocab or steps.fixed or steps.ends or steps.words):
            logits = logits.clone()
        if self.num_ids < self.vocab:
            logits[:, self.num_ids :] = -math.inf
        if steps.fixed:
            self._bias(logits, at)
        if steps.ends:
            ends_from, ids = self.tables["ends_from"][at.row], self.tables["ends"][at.row]
            too_short = at.position[:, None] < ends_from
            logits.scatter_(1, ids, torch.where(too_short, -math.inf, logits.gather(1, ids)))
        if steps.words:
            self._ban_words(logits, at)
        if steps.processors:
            logits = self._process(logits, at)
        unseen = drafting and at.known is None and not is_cpu(logits.device)
        if steps.masks and not unseen:
            masks = masks_of(self.rows, at.host(), logits.shape[1]) if at.masks is None else at.masks
            logits = constrained(logits, upload_tensor(masks, logits.device))
        if steps.repeats:
            logits = self._penalise_repeats(logits, at)
        if steps.counts:
            logits = self._penalise_counts(logits, at)
        return logits

    def filter(self, logits: Logits, at: PathState) -> Logits:
        """Apply temperature, min-p, top-k and top-p to the result of `edit`."""
        steps = self.steps
        if steps.heat:
            temperature = self._number("temperature", at, logits.dtype)
            logits = centred(logits, temperature) / temperature
        else:
            logits = centred(logits)
        if steps.min_p:
            logits = mask_below(logits, logits.amax(1, keepdim=True) + self._number("min_p", at, logits.dtype))
        if steps.top_k:
            logits = mask_below(logits, kth_largest(logits, self._number("top_k", at, torch.int64), steps.top_k))
        if steps.top_p:
            logits = keep_nucleus(logits, self._number("top_p", at, logits.dtype))
        return logits

    def greedy_nodes(self, at: PathState) -> Bool[Tensor, "nodes 1"]:
        """Which nodes belong to greedy sequences."""
        return self._number("greedy", at, torch.bool)

    def _number(self, name: str, at: PathState, dtype: torch.dtype) -> Tensor:
        """One of the parameters in NUMBERS of each node's row, [nodes, 1]."""
        column = NUMBERS.index(name)
        return self.tables["numbers"][:, column : column + 1][at.row].to(dtype)

    def _bias(self, logits: Logits, at: PathState) -> None:
        """Add biases and ban ids, in place."""
        ids, values = self.tables["fixed"][at.row], self.tables["added"][at.row]
        old = logits.gather(1, ids)
        logits.scatter_(1, ids, torch.where(values.isneginf(), values, bounded(old + values, old)).to(logits.dtype))

    def _ban_words(self, logits: Logits, at: PathState) -> None:
        """Ban, in place, the last token of each bad word if the answer ends with the word's other tokens."""
        heads, lasts, endings = (self.tables[name][at.row] for name in ("heads", "lasts", "endings"))
        text = torch.cat([endings, at.drawn], dim=1)
        offsets = torch.arange(endings.shape[1], device=text.device)
        ending = text.gather(1, (at.drawn >= 0).sum(1, keepdim=True) + offsets)
        matches = ((heads == ending[:, None]) | (heads == ANY)).all(2)
        # Several words may have the same last token, so the minimum is taken.
        logits.scatter_reduce_(1, lasts, torch.where(matches, -math.inf, math.inf).to(logits.dtype), "amin")

    def _process(self, logits: Logits, at: PathState) -> Logits:
        """Run each row's processors node by node, on the host, since they are user code."""
        processed = list(logits.unbind(0))
        for node, (index, drawn) in enumerate(at.host()):
            row = self.rows[index]
            if row.params.logits_processors:
                text = [*row.tokens, *(token for token in drawn if token >= 0)]
                try:
                    processed[node] = _run_processors(row, text, logits[node], self.num_ids)
                except BaseException as error:  # even if a request's code calls exit(), only this request must end
                    raise RequestFailed(row.seq_id) from no_interrupt(error)
        return torch.stack(processed)

    def _penalise_repeats(self, logits: Logits, at: PathState) -> Logits:
        ids, times = self._counted(at)
        ids, seen = _with_path(ids, (times >= 0).float(), at)
        by = self._number("repetition", at, logits.dtype)
        old = logits.gather(1, ids)
        new = torch.where(seen > 0, torch.where(old > 0, old / by, old * by), old)
        return logits.scatter(1, ids, bounded(new, old))

    def _penalise_counts(self, logits: Logits, at: PathState) -> Logits:
        ids, times = self._counted(at)
        ids, counts = _with_path(ids, times.clamp_min(0).float(), at)
        frequency, presence = (self._number(name, at, logits.dtype) for name in ("frequency", "presence"))
        return logits.scatter(1, ids, logits.gather(1, ids) - frequency * counts - presence * (counts > 0))

    def _counted(self, at: PathState) -> tuple[Int[Tensor, "nodes ids"], Int[Tensor, "nodes ids"]]:
        """(the distinct ids of each node's text, how often each occurs in the answer)."""
        return self.tables["counted"][at.row].long(), self.tables["times"][at.row]


def _run_processors(
    row: RowSampling, text: list[int], logits: Float[Tensor, " vocab"], num_ids: int
) -> Float[Tensor, " vocab"]:
    """Run one node's processors in order; their results for padding ids (from `num_ids` on) are ignored.

    If they leave no possible token, the end token is the only one: draft tokens may lead to such states although the
    target's own text never does, so the request must not fail. Raises InvalidRequest if a result is not valid logits.
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
        problem = f"they exclude every token after {len(text)} tokens, and the model has no end token"
        raise InvalidRequest(field, f"{problem}: allow at least one token")
    return logits.index_fill(0, torch.tensor(row.eos_ids[0], device=logits.device), 0.0)


def _with_path(
    ids: Int[Tensor, "nodes texts"], counts: Float[Tensor, "nodes texts"], at: PathState
) -> tuple[Int[Tensor, "nodes ids"], Float[Tensor, "nodes ids"]]:
    """All ids of each node's text and path, and how often each occurs; an id may be listed twice."""
    path = at.drawn.clamp_min(0)
    before = ((path[:, :, None] == ids[:, None]) * counts[:, None]).amax(2)
    ids, counts = torch.cat([ids, path], dim=1), torch.cat([counts, before], dim=1)
    return ids, counts + (ids[:, :, None] == at.drawn[:, None]).sum(2)


def bounded(new: Logits, old: Logits) -> Logits:
    """`new`, limited to the finite range of its dtype wherever `old` was finite."""
    most = torch.finfo(new.dtype).max
    return torch.where(old.isfinite(), new.clamp(-most, most), new)


def centred(logits: Logits, temperature: Float[Tensor, "nodes 1"] | None = None) -> Logits:
    """Shift each row whose largest logit over the temperature would be infinite, so that its largest logit is 0.

    A shift does not change the law; of infinite logits the largest get all probability. Rows without a law (with NaN,
    or nothing above -inf) do not change.
    """
    peak = logits.amax(1, keepdim=True)
    too_large = (peak if temperature is None else peak / temperature).isinf() & (peak > -math.inf)
    if is_cpu(logits.device) and not too_large.numpy().any():  # on a GPU this would wait for it
        return logits
    most = torch.finfo(logits.dtype).max
    return torch.where(too_large, logits.clamp(max=most) - peak.clamp(max=most), logits)


def mask_below(logits: Logits, least: Float[Tensor, "nodes 1"]) -> Logits:
    """Set logits below `least` to -inf; equal logits stay, so that the result does not depend on an order of ties."""
    return logits.masked_fill(logits < least, -math.inf)


def kth_largest(logits: Logits, k: Int[Tensor, "nodes 1"], widest: int) -> Float[Tensor, "nodes 1"]:
    """The k-th largest value of each row, -inf if k is 0; `widest` is the largest k."""
    values = logits.topk(widest, dim=1).values.gather(1, (k - 1).clamp_min(0).clamp_max(widest - 1))
    return torch.where(k > 0, values, -math.inf)


def keep_nucleus(logits: Logits, top_p: Float[Tensor, "nodes 1"]) -> Logits:
    """Keep the most likely tokens whose probabilities together reach `top_p`, and set all others to -inf.

    Tokens as likely as the last one kept are kept too; an infinite `top_p` keeps all.
    """
    probs = softmax(logits)
    off = top_p.isinf()
    # Sorting 150,000 tokens takes 10 ms, finding the largest 1024 half a millisecond, and these nearly always include
    # the nucleus. On CPUs their cumulative sums have the same bits as those of a full sort (cumsum runs from the left),
    # so the result does not depend on the method, which depends on the other rows.
    large = logits.device.type == "cpu" and logits.shape[1] >= 16 * _PREFIX
    prefix = _PREFIX if large else logits.shape[1]
    ranked = probs.topk(prefix, dim=1).values if large else probs.sort(dim=1, descending=True).values
    mass = running_sum(ranked)
    if large and not (off | (mass[:, -1:] >= top_p)).all():
        ranked = probs.sort(dim=1, descending=True).values
        mass = running_sum(ranked)
    last_kept = (mass[:, :-1] < top_p).sum(1, keepdim=True)
    return logits.masked_fill((probs < ranked.gather(1, last_kept)) & ~off, -math.inf)


def masks_of(
    rows: Sequence[RowSampling], nodes: Sequence[tuple[int, Sequence[int]]], vocab: int
) -> Int[Tensor, "nodes words"]:
    """The packed grammar mask after each node, given as its row and draft tokens (-1 after their end).

    All bits are set for rows without a grammar.
    """

    def allowed(row: int, path: Sequence[int]) -> Allowed:
        constraint = rows[row].constraint
        if constraint is None:
            return ANYTHING
        drafted = (token for token in path if token >= 0)
        return constraint.after((*constraint.suffix(rows[row].tokens), *drafted))

    return packed([allowed(row, path) for row, path in nodes], vocab)
