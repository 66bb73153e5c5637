"""Any sampling parameters are refused by name, or give finite laws and do not change other requests' laws."""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.config import Speculation
from forerun.draft.base import NO_DRAFT, Budget
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest
from forerun.kernels.sampling import find_sampling_kernels
from forerun.limits import FLOAT32, FLOAT32_LEAST
from forerun.request import Request
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.params import SamplingParams
from kit.unchecked import unchecked
from sampling.logits import SHAPES, logits_of

VOCAB, NUM_IDS, EOS, CONTEXT = 40, 37, 2, 64
TEXT = [1, 5, 5, 9, 5, 3]
KERNELS = find_sampling_kernels()

WHOLE = [sign * size for size in (0, 1, 2, 2**31, 2**63 - 3, 2**63 - 1, 2**63, 2**70, 10**400) for sign in (1, -1)]
REAL = [1e308, -1e308, 1e39, 1e-38, 5e-324, 0.5, FLOAT32, -FLOAT32, FLOAT32_LEAST, math.nan, math.inf, -math.inf]
NUMPY = [np.int64(3), np.uint64(2**64 - 1), np.float32(0.5), np.float64("inf"), np.bool_(True), np.zeros(3)]
OTHER = [None, True, "", "0", "x" * 10**6, b"", b"a", [], (1,), {}, {1}, 1j, Decimal(1), Fraction(1, 2), object()]
ANY = [*WHOLE, *REAL, *NUMPY, *OTHER, 10**5000]


def hostile(field: str) -> Iterator[object]:
    """Values for a field: numbers of all sizes and non-numbers, alone and as items of a list."""
    yield from ANY
    yield from ([value] for value in ANY)
    yield [5, 5, 7]
    yield [[]]
    if field == "logit_bias":
        yield from ({4: value} for value in ANY)
        yield from ({value: 1.0} for value in ANY if isinstance(value, Hashable))


def hostile_logits() -> Tensor:
    """A row of each kind that has a law: usual, huge, tiny, tied, and with infinities of both signs."""
    random = torch.Generator().manual_seed(1)
    kinds = [logits_of(shape, 2, VOCAB, 3)[1:] for shape in SHAPES if shape not in ("NaN", "nothing")]
    signs = torch.randn(1, VOCAB, generator=random).sign()
    sizes = 10 ** (torch.rand(2, VOCAB, generator=random) * 76 - 38)
    most = torch.full((1, VOCAB), FLOAT32)
    one = torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([7]), math.inf)
    return torch.cat([*kinds, most, -most, most * signs, sizes, -sizes, one, one.roll(4, 1).nan_to_num(), -one])


LOGITS = hostile_logits()
HONEST = SamplingParams(temperature=0.8, seed=3)


def row(params: SamplingParams, seq_id: int = 0) -> RowSampling:
    return RowSampling(seq_id, params, 7, 0, TEXT, 2, (EOS,))


def laws(params: list[SamplingParams], rejection: bool) -> tuple[Tensor, Tensor]:
    """The [rows, kinds, vocab] law and [rows, kinds] draw of every kind of logits, after drafts of several lengths."""
    rows = [row(each, i) for i, each in enumerate(params)]
    draws = Draws(rows, VOCAB, rejection=rejection, num_ids=NUM_IDS, kernels=KERNELS)
    count = len(LOGITS)
    drawn = torch.tensor([[5, 9], [4, -1], [-1, -1]]).repeat(count, 1)[:count].repeat(len(params), 1)
    at = PathState(torch.arange(len(params)).repeat_interleave(count), drawn, len(TEXT) + (drawn >= 0).sum(1))
    logits = LOGITS.repeat(len(params), 1)
    children = draws.children(logits, at, 3)
    assert ((children.tokens >= -1) & (children.tokens < NUM_IDS)).all()
    assert children.survival is not None
    assert children.survival.isfinite().all()
    shape = len(params), count
    return draws.probs(logits, at).view(*shape, VOCAB), draws.draw(logits, at).view(shape)


ALONE = {rejection: laws([HONEST], rejection) for rejection in (False, True)}


def check_laws(params: SamplingParams) -> None:
    """Assert that laws are finite, nothing banned is drawn, and another request in the batch keeps its law."""
    minus_inf = {token for token, value in (params.logit_bias or {}).items() if value == -math.inf}
    banned = minus_inf.union(params.banned_tokens)
    if params.min_tokens > 6:
        banned |= {EOS, *params.stop_token_ids}
    for rejection in (False, True):
        law, drawn = laws([params, HONEST], rejection)
        assert law.isfinite().all(), params
        assert torch.allclose(law.sum(2), torch.ones(()), atol=1e-4), params
        assert not law[0, :, NUM_IDS:].any()
        assert not law[0, :, sorted(banned)].any()
        assert ((drawn >= 0) & (drawn < NUM_IDS)).all()
        assert not banned & set(drawn[0].tolist())
        for batched, alone in zip((law, drawn), ALONE[rejection], strict=True):
            assert torch.equal(batched[1:], alone), "an honest row changed"


def is_refused(make: Callable[[], object], field: str) -> bool:
    """Whether a value is refused; if so, asserts that the message is short and names the field."""
    try:
        make()
    except InvalidRequest as error:
        found = error
    else:
        return False
    assert found.field.startswith(field)
    assert str(found).startswith(f"{found.field}: ")
    assert len(str(found)) < 400
    return True


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_a_field_is_refused_by_name_or_gives_finite_laws(field: str) -> None:
    accepted = []

    def make(value: Any) -> None:
        others: dict[str, Any] = {"max_tokens": None} if field == "min_tokens" else {}
        params = SamplingParams(**{field: value, **others})
        params.check_vocabulary(NUM_IDS, (EOS,))
        accepted.append(params)

    refused = sum(is_refused(lambda value=value: make(value), field) for value in hostile(field))
    assert refused > 10
    assert accepted
    with unchecked():
        for params in accepted:
            check_laws(params)


EDGES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.0, 1e30, FLOAT32]),
    top_k=st.sampled_from([0, 1, 5, 2**63 - 1]),
    top_p=st.sampled_from([5e-324, 0.5, 1 - 1e-16, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([FLOAT32_LEAST, 0.8, 1.0, 1.3, FLOAT32]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.dictionaries(
        st.integers(0, NUM_IDS - 1), st.sampled_from([-math.inf, -FLOAT32, 0.0, 1.5, FLOAT32]), max_size=4
    ),
    banned_tokens=st.lists(st.integers(0, NUM_IDS - 1), max_size=4),
    min_tokens=st.sampled_from([0, 5, 2**63 - 1]),
    max_tokens=st.none(),
    stop_token_ids=st.lists(st.integers(0, NUM_IDS - 1), max_size=2),
)


@settings(max_examples=40, deadline=None)
@given(EDGES)
def test_values_at_the_ends_of_all_ranges_give_finite_laws(params: SamplingParams) -> None:
    with unchecked():
        check_laws(params)


def test_infinite_logits_share_the_entire_probability() -> None:
    """Also if only the temperature makes them infinite, of either sign; equal ones share the probability."""
    cases = [
        ([0.0, math.inf, 5.0], 1.0, [0, 1, 0]),
        ([0.0, math.inf, math.inf], 0.5, [0, 0.5, 0.5]),
        ([2e38, 3e38, 1.0], 0.5, [0, 1, 0]),
        ([-3e38, -3e38, -math.inf], 0.5, [0.5, 0.5, 0]),
        ([3e38, -3e38, 3e38], 0.5, [0.5, 0, 0.5]),
    ]
    for logits, temperature, expected in cases:
        draws = Draws([RowSampling(0, SamplingParams(temperature=temperature), 0, 0, [0], 1)], 3)
        assert draws.probs(torch.tensor([logits]), draws.roots()).tolist() == [expected]
    biased = SamplingParams(temperature=0.7, logit_bias={5: FLOAT32})
    for mates in ([biased], [biased, SamplingParams(top_p=0.3)]):
        law, drawn = laws(mates, rejection=True)
        assert law[0, :3, 5].tolist() == [1.0] * 3
        assert drawn[0, :3].tolist() == [5] * 3


def test_a_speculation_is_refused_by_name_or_gives_a_valid_budget() -> None:
    speculations: list[Speculation] = []
    for name, value in itertools.product(("depth", "width", "nodes", "drafter", "tree"), ANY):
        numbers = {"depth": 4, "width": 2, name: value}
        with unchecked():
            is_refused(lambda numbers=numbers: speculations.append(Speculation(**numbers)), f"speculation.{name}")
    assert len(speculations) > 10
    for speculation, room in itertools.product(speculations, (-1, 0, 1, 3, 10**6)):
        budget = Budget.of(speculation, room)
        assert budget == NO_DRAFT or 1 <= budget.depth <= min(room, speculation.depth)
        assert budget.depth <= budget.nodes <= min(512, sum(speculation.width**i for i in range(1, budget.depth + 1)))


@pytest.mark.parametrize(
    ("speculation", "room", "nodes"),
    [
        (Speculation(4, 2, 100_000), 9, 30),
        (Speculation(4, 2, 100_000), 2, 6),
        (Speculation(4, 1, 100_000), 3, 3),
        (Speculation(4, 2), 9, 8),
        (Speculation(256, 256), 256, 512),
        (Speculation(4, 3, 2), 9, 2),
    ],
)
def test_trees_have_no_more_nodes_than_fit_depth_and_width(speculation: Speculation, room: int, nodes: int) -> None:
    assert Budget.of(speculation, room).nodes == nodes


@pytest.mark.parametrize(
    ("numbers", "field"),
    [((400, 100, 3000), "depth"), ((64, 100, 3000), "nodes"), ((4, 257, None), "width"), ((257, 1, None), "depth")],
)
def test_drafts_too_large_to_serve_are_refused(numbers: tuple[int, int, int | None], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Speculation(*numbers)
    assert caught.value.field == f"speculation.{field}"


def test_a_request_is_refused_by_name_or_gives_sequences() -> None:
    made = RequestChecker(None, vocab_size=VOCAB, max_length=CONTEXT, eos_ids=(EOS,), default=Speculation(4))
    calls = [
        *(("prompt", (value, SamplingParams())) for value in hostile("prompt")),
        *(("sampling_params", ([1], value)) for value in ANY),
        *(("speculation", ([1], SamplingParams(), value)) for value in ANY),
        *(("tenant", ([1], SamplingParams(), None, value)) for value in ANY),
    ]
    sequences: dict[str, list[Sequence]] = {}
    with unchecked():
        for field, arguments in calls:
            own = sequences.setdefault(field, [])
            is_refused(lambda own=own, given=arguments: own.extend(made.sequences(Request.of(*given))), field)
    assert {field for field, own in sequences.items() if own} == {"prompt", "sampling_params", "speculation", "tenant"}
    for sequence in itertools.chain(*sequences.values()):
        assert all(type(token) is int and 0 <= token < VOCAB for token in sequence.tokens)
        assert 0 <= sequence.speculation.depth <= 256
