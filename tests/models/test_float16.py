"""float16: weights, keys and values are held in it, and everything is computed in float32, as with wider weights."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.device import Placement
from forerun.models.backends.invariance import cancelling_product
from forerun.models.backends.native import NativeBackend
from forerun.models.backends.native_check import checked
from forerun.models.config import read_config
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.packing import WeightLoader
from forerun.models.runner import Read, Runner
from forerun.models.weights import Checkpoint
from kit.checkpoints import TARGET, rewritten
from kit.compiled import ENDS, HERE, LEVELS, compiled_for, require_compiler

LARGEST = 65504.0


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> NativeBackend:
    return checked(compiled_for(request.param))


def every_number() -> Tensor:
    """All float16 there are."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def test_every_number_is_multiplied_as_what_it_is(kernels: NativeBackend) -> None:
    """Subnormal ones too."""
    numbers = every_number()
    finite = numbers[numbers.isfinite()].view(-1, 1024)
    assert torch.equal(kernels.linear(finite, None)(torch.eye(1024)), finite.float().T)
    others = numbers[~numbers.isfinite()].view(-1, 1)
    assert torch.equal(kernels.linear(others, None)(torch.ones(1, 1)).nan_to_num(7.0), others.float().T.nan_to_num(7.0))


def test_products_have_the_bits_of_the_same_weights_in_float32(kernels: NativeBackend) -> None:
    """With inputs that float16 does not hold."""
    for shape in ((48, 83), (130, 1000)):
        x, weight = cancelling_product(40, *shape, torch.float32)
        x[3] *= 1e6
        weight = weight.half()
        assert torch.equal(kernels.linear(weight, None)(x), kernels.linear(weight.float(), None)(x))


@pytest.mark.parametrize("levels", [sorted(ENDS), pytest.param(HERE, marks=pytest.mark.full)])
def test_every_processor_gives_the_same_bits(levels: list[str]) -> None:
    require_compiler()
    x, weight = cancelling_product(40, 130, 1000, torch.float32)
    each = [checked(compiled_for(name)).linear(weight.half(), None)(x) for name in levels]
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(each))


def read_in(dtype: torch.dtype, kernels: NativeBackend, edit: Callable[[str, Tensor], Tensor]) -> tuple[Runner, Tensor]:
    """A model with edited weights of float16, held in `dtype`, that has read some tokens; and their logits."""
    stored = Checkpoint(TARGET, torch.float16)
    decoder = Decoder(read_config(TARGET), WeightLoader(lambda n, s: edit(n, stored.take(n, s)), dtype, kernels))
    runner = Runner.of(decoder, 256)
    return runner, runner.read([Read(0, list(range(3, 203)), judged=range(200))]).logits


def test_keys_and_values_alone_are_rounded(kernels: NativeBackend) -> None:
    """To the nearest: the first layer's are those of float32, rounded."""
    (narrow, logits), (wide, expected) = (
        read_in(dtype, kernels, lambda _, weight: weight) for dtype in (torch.float16, torch.float32)
    )
    for own, other in ((narrow.cache.keys, wide.cache.keys), (narrow.cache.values, wide.cache.values)):
        assert own.dtype == torch.float16
        assert torch.equal(own[0], other[0].half())
    assert not torch.equal(logits, expected)
    assert (logits - expected).abs().max() < 0.005 * expected.abs().max()


def test_values_beyond_the_range_become_the_largest_number(kernels: NativeBackend) -> None:
    """Infinite ones would make scores, and with them answers, of what is not a number."""

    def edit(name: str, weight: Tensor) -> Tensor:
        return weight * (2e4 if "k_proj" in name or "v_proj" in name else 20.0 if "input_layernorm" in name else 1.0)

    (narrow, logits), (wide, _) = (read_in(dtype, kernels, edit) for dtype in (torch.float16, torch.float32))
    for own, other in ((narrow.cache.keys[0], wide.cache.keys[0]), (narrow.cache.values[0], wide.cache.values[0])):
        assert other.abs().max() > 2 * LARGEST
        assert torch.equal(own, other.clamp(-LARGEST, LARGEST).half())
    assert logits.isfinite().all()


def test_what_is_infinite_is_not_hidden(kernels: NativeBackend) -> None:
    def edit(name: str, weight: Tensor) -> Tensor:
        return weight.index_fill(0, torch.tensor([0]), math.inf) if "layers.0.self_attn.v_proj" in name else weight

    runner, logits = read_in(torch.float16, kernels, edit)
    assert not runner.cache.values[0].isfinite().all()
    assert logits.isnan().all()


def test_a_checkpoint_is_held_in_it(tmp_path: Path) -> None:
    require_compiler()
    halves = {name: tensor.half() for name, tensor in load_file(TARGET / "model.safetensors").items()}
    folder = str(rewritten(TARGET, halves, {"torch_dtype": "float16", "dtype": "float16"}, tmp_path))
    blueprint = Blueprint.of(folder)
    assert (blueprint.format, blueprint.kernels) == ("float16", "native")
    assert blueprint.load(64).decoder.embedding.dtype == torch.float16
    assert Blueprint.of(folder, quantize="int8").format == "float16, int8 weights"
    assert Blueprint.of(folder, kernels="torch").format == "float32"
    assert Blueprint.of(folder, device=Placement(torch.device("cpu"), fixed=True)).format == "bfloat16"
    formats = [Blueprint.of(folder, dtype=dtype).fingerprint() for dtype in ("auto", "bfloat16", "float32")]
    assert len({*formats}) == 3
