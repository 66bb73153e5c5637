"""A model's backend is chosen by the times of its layers: the fastest trusted one, and the same at each start."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.config import CPU_QUANTIZATIONS
from forerun.models import choice
from forerun.models.backends.native import NativeExecutor
from forerun.models.backends.native_check import find_kernels
from forerun.models.choice import BackendChoice, BackendKind, choose_backend, fastest
from forerun.models.config import ModelConfig, read_config
from forerun.models.loading import Blueprint
from forerun.models.projections import products
from forerun.models.weights import candidate_dtypes
from kit.checkpoints import TARGET

NATIVE = pytest.mark.skipif(find_kernels("auto", torch.float32) is None, reason="there are no compiled kernels here")
BACKENDS = [BackendKind(by, dtype) for by in ("native", "torch") for dtype in (torch.bfloat16, torch.float32)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of times, and the file it would be."""
    monkeypatch.setattr(choice, "times_file", lambda: tmp_path / "times" / "layers.json")
    monkeypatch.setattr(choice, "SMALL_BYTES", 0)
    monkeypatch.setattr(choice, "SAMPLE_WEIGHTS", 1 << 12)
    return tmp_path / "times" / "layers.json"


@pytest.fixture
def config() -> ModelConfig:
    return replace(read_config(TARGET), dtype=torch.bfloat16)


@pytest.mark.parametrize("trusted", [True, False])
def test_the_first_backend_is_kept_unless_a_trusted_one_is_clearly_faster(trusted: bool) -> None:
    """Of every order of four times that are far apart, and of two that are close."""
    for order in itertools.permutations([1.0, 2.0, 4.0, 8.0]):
        times = dict(zip(BACKENDS, order, strict=True))
        found = fastest(times, lambda _: trusted)
        best = min(times, key=times.__getitem__) if trusted else BACKENDS[0]
        assert found.backend == best
        if found.advantage is not None:
            assert found.other is not None
            assert math.isclose(found.advantage, times[found.other] / times[best])
    close = fastest(dict(zip(BACKENDS, [1.0, 0.95, 0.92, 1.5], strict=True)), lambda _: True)
    assert close == BackendChoice(BACKENDS[0], BACKENDS[2], 0.92)


@NATIVE
def test_times_are_measured_once_for_every_layer(
    cache: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is reported; stored times are used again, and a damaged file is measured again."""
    progress: list[str] = []
    dtypes = candidate_dtypes("auto", config)
    first = choose_backend("auto", dtypes, None, config, lambda what, done: progress.append(f"{what} {0 <= done <= 1}"))
    assert first.advantage is not None
    assert set(progress) == {"measuring kernels, once on this machine True"}
    assert len(choice.read_times()) >= 2 * len(progress)
    monkeypatch.setattr(choice, "measure", lambda *_: pytest.fail("measured a second time"))
    assert choose_backend("auto", dtypes, None, config) == first
    assert "times as fast as" in str(first)
    monkeypatch.undo()
    monkeypatch.setattr(choice, "times_file", lambda: cache)
    wrong = ('"x"', "null", "true", "1", "-0.1", "0.0", "Infinity", "NaN", "0.1, 0.1")  # in the place of a first time
    numbers = [re.sub(r"\[[^,]+", f"[{number}", cache.read_text()) for number in wrong]
    for damage in ("", "[]", '{"a": 1}', "[" * 100_000, *numbers):
        cache.write_text(damage)
        assert choice.read_times() == {}


@NATIVE
@pytest.mark.parametrize("by", ["native", "torch"])
def test_the_faster_backend_is_loaded(by: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever that is: the blueprint, the decoder and the fingerprint are of it, and drafts may differ from it."""
    monkeypatch.setattr(choice, "measure", lambda found, *_: {b: [0.1 if b.kernels == by else 1.0] * 4 for b in found})
    monkeypatch.setattr(choice, "is_packed", lambda *_: True)
    blueprint, forced = Blueprint.of(str(TARGET)), Blueprint.of(str(TARGET), kernels=by)
    assert blueprint.kernels == forced.kernels == by
    assert isinstance(blueprint.load(64).decoder.executor, NativeExecutor) == (by == "native")
    assert blueprint.fingerprint() == forced.fingerprint()
    assert blueprint.backend_name == forced.backend_name
    assert blueprint.sampling_kernels() is not None


@NATIVE
def test_an_explicit_choice_is_not_measured(cache: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "measure", lambda *_: pytest.fail("measured"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert choose_backend("native", (dtype,), None, config) == BackendChoice(BackendKind("native", dtype))
        assert choose_backend("torch", (dtype,), None, config) == BackendChoice(BackendKind("torch", dtype))
    assert choose_backend("auto", (torch.float16,), None, config).backend == BackendKind("native", torch.float16)
    monkeypatch.setattr(choice, "SMALL_BYTES", 1 << 40)
    for dtype in (torch.bfloat16, torch.float16):
        of_dtype = replace(config, dtype=dtype)
        found = choose_backend("auto", candidate_dtypes("auto", of_dtype), None, of_dtype)
        assert found.backend == BackendKind("native", dtype)


@NATIVE
def test_float16_competes_with_float32(cache: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    of_half, seen = replace(config, dtype=torch.float16), set()

    def measured(backends: list[BackendKind], *_: object) -> dict[BackendKind, list[float]]:
        seen.update(backends)
        return {backend: [1.0 if backend.dtype == torch.float16 else 0.1] * 4 for backend in backends}

    monkeypatch.setattr(choice, "measure", measured)
    found = choose_backend("auto", candidate_dtypes("auto", of_half), None, of_half)
    assert found.backend == BackendKind("native", torch.float32)
    assert BackendKind("native", torch.float16) in seen
    assert not {each for each in seen if each.dtype == torch.bfloat16 or each == BackendKind("torch", torch.float16)}


@pytest.mark.parametrize("half", [True, False])
def test_torch_computes_in_16_bits_where_it_has_packed_operators(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    monkeypatch.setattr(choice, "has_bfloat16_linears", lambda: half)
    monkeypatch.setattr(choice, "find_kernels", lambda *_: None)
    found = choose_backend("auto", candidate_dtypes("auto", config), None, config)
    assert found == BackendChoice(BackendKind("torch", torch.bfloat16 if half else torch.float32))
    of_half = replace(config, dtype=torch.float16)
    wide = choose_backend("auto", candidate_dtypes("auto", of_half), None, of_half)
    assert wide == BackendChoice(BackendKind("torch", torch.float32))


@NATIVE
def test_a_format_is_measured_only_if_torch_has_operators_for_it(cache: Path, config: ModelConfig) -> None:
    """Packing bfloat16 raises on AVX2. Of whole numbers the kernels are always faster."""
    found = choose_backend("auto", [torch.bfloat16], None, config)
    assert found.other is None or choice.has_bfloat16_linears()
    for quantize in CPU_QUANTIZATIONS:
        kept = choose_backend("auto", [torch.float32], quantize, config)
        assert kept == BackendChoice(BackendKind("native", torch.float32))


def test_packed_bfloat16_linears_run_if_torch_claims_to_have_them() -> None:
    if not choice.has_bfloat16_linears():
        pytest.skip("this CPU or build of torch has none")
    weight = torch.ones(32, 32, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    product = torch.ops.mkldnn._linear_pointwise(weight[:2], packed, None, "none", [], "")
    assert torch.equal(product, torch.full((2, 32), 32.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["stdlib", "stdlib-draft"])
def test_the_timed_layers_are_all_linear_layers_of_a_pass(name: str) -> None:
    blueprint = Blueprint.of(name)
    weights = sum(math.prod(shape) * count for shape, count in products(blueprint.config).items())
    others = (2 * blueprint.config.layers + 1) * blueprint.config.hidden
    assert 0 <= blueprint.pass_bytes // blueprint.dtype.itemsize - weights <= 2 * others
