"""Weights in groups: the compiled kernels give the bits of the definition, each row as if it were alone."""

from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.models.backends.native import NativeBackend
from forerun.models.backends.torch_cpu.grouped import FORMS, GroupedLinear, GroupedWeight, fused
from kit.compiled import LEVELS_HERE, compiled_for

forms = st.tuples(st.sampled_from(FORMS), st.booleans(), st.booleans())


@pytest.fixture(scope="module", params=LEVELS_HERE)
def kernels(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(compiled_for(request.param))


def weight_of(form: tuple[tuple[int, int], bool, bool], outputs: int, inputs: int, seed: int) -> GroupedWeight:
    """Random numbers over their whole range; scales that float16 holds, or `wide` ones that it does not."""
    (bits, size), has_least, wide = form
    dice = torch.Generator().manual_seed(seed)
    low, high = (0, 15) if bits == 4 and has_least else (-8, 7) if bits == 4 else (-128, 127)
    numbers = torch.randint(low, high + 1, (outputs, inputs), dtype=torch.int8, generator=dice)
    scales, least = (torch.randn(outputs, inputs // size, generator=dice) * 0.01 for _ in range(2))
    if not wide:
        scales, least = scales.half().float(), least.half().float()
    return GroupedWeight(numbers, scales, least if has_least else None, bits, size)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(forms, st.integers(1, 70), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.integers(0, 2**32))
def test_kernels_give_the_bits_of_the_definition(
    kernels: NativeBackend,
    form: tuple[tuple[int, int], bool, bool],
    outputs: int,
    groups: int,
    rows: int,
    biased: bool,
    seed: int,
) -> None:
    weight = weight_of(form, outputs, 32 * groups, seed)
    dice = torch.Generator().manual_seed(seed)
    bias = torch.randn(outputs, generator=dice) if biased else None
    x = torch.randn(rows, 32 * groups, generator=dice) * 10 ** torch.empty(rows, 1).uniform_(-3, 3, generator=dice)
    x[torch.rand(x.shape, generator=dice) < 0.1] = 0.0
    layer, definition = kernels.grouped(weight, bias), GroupedLinear(weight, bias)
    found = layer(x)
    assert torch.equal(found, definition(x))
    assert torch.equal(found, torch.cat([layer(row[None]) for row in x]))


@settings(max_examples=40, deadline=None)
@given(st.lists(forms, min_size=1, max_size=3), st.integers(0, 2**32))
def test_joined_weights_are_the_same_numbers(parts: list[tuple[tuple[int, int], bool, bool]], seed: int) -> None:
    weights = [weight_of(form, 3 + i, 64, seed + i) for i, form in enumerate(parts)]
    joined = GroupedWeight.joined(weights)
    assert (joined.bits, joined.size) in FORMS
    assert torch.allclose(joined.dense(), torch.cat([each.dense() for each in weights]), rtol=1e-6, atol=1e-7)


def test_a_product_is_near_that_of_dense_weights(kernels: NativeBackend) -> None:
    for form in ((each, least, False) for each in FORMS for least in (False, True)):
        weight = weight_of(form, 50, 320, 3)
        x = torch.randn(20, 320, generator=torch.Generator().manual_seed(1))
        exact = x.double() @ weight.dense().double().T
        assert (kernels.grouped(weight, None)(x) - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_row_alone(kernels: NativeBackend, strange: float) -> None:
    weight, x = weight_of(((4, 32), True, False), 20, 64, 5), torch.randn(3, 64)
    x[1, 40] = strange
    found = kernels.grouped(weight, None)(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**10), 2**10), st.integers(-(2**10), 2**10), st.integers(2**23, 2**24 - 1), st.integers(-40, 40))
def test_a_fused_sum_is_rounded_once(more: int, less: int, addend: int, shift: int) -> None:
    # The product is near half the distance of numbers around `c`, so the sum is near the middle of two of them.
    a, b, c = (2**23 + more) / 2**23, (2**23 - less) / 2**23 * 2.0**shift, addend * 2.0 ** (shift + 1)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    total = fused(*(torch.tensor([each], dtype=torch.float32) for each in (a, b, c)))
    distance = abs(Fraction(total.item()) - exact)
    for towards in (-torch.inf, torch.inf):
        further = abs(Fraction(torch.nextafter(total, torch.tensor([towards])).item()) - exact)
        assert distance < further or (distance == further and total.view(torch.int32).item() % 2 == 0)
