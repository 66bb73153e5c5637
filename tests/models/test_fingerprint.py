"""The fingerprint: everything that the last bits of an answer depend on, and nothing else."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun import machine
from forerun.config import KernelChoice
from forerun.models import loading
from forerun.models.backends.native_check import find_kernels
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET
from kit.compiled import require_compiler

Change = Callable[[pytest.MonkeyPatch], None]


def instructions(patch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for another processor."""
    found = find_kernels("native", torch.float32)
    assert found is not None
    patch.setattr(found, "instructions", "AVX9")


def variable(name: str, value: str) -> Change:
    return lambda patch: patch.setenv(name, value)


def value(owner: object, name: str, found: object) -> Change:
    return lambda patch: patch.setattr(owner, name, found)


ALWAYS: dict[str, Change] = {
    "forerun's version": value(loading, "__version__", "9.9"),
    "torch's version": value(torch, "__version__", "2.99.0"),
    "the instructions of torch's row-wise functions": value(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9"),
}
LIBRARIES: dict[str, Change] = {
    "the processor": value(machine, "processor", lambda: "another"),
    "its instructions": value(machine, "vector_instructions", lambda: ("avx9",)),
    "the number of threads": value(torch, "get_num_threads", lambda: 99),
    "what oneDNN may use": variable("ONEDNN_MAX_CPU_ISA", "SSE41"),
    "how oneDNN rounds": variable("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
    "what MKL may use": variable("MKL_CBWR", "COMPATIBLE"),
}
NEVER: dict[str, Change] = {
    "where kernels are kept": variable("XDG_CACHE_HOME", "/nowhere"),
    "another library's variable": variable("MKL_VERBOSE", "0"),
    "the number of cores": value(os, "cpu_count", lambda: 99),
}


def changes(kernels: KernelChoice, change: Change, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the fingerprint is another one afterwards; without the change it is the same again."""
    blueprint = Blueprint.of(str(TARGET), dtype="float32", kernels=kernels)
    before = blueprint.fingerprint()
    with monkeypatch.context() as patch:
        change(patch)
        return blueprint.fingerprint() != before


@pytest.mark.parametrize("what", [*ALWAYS, *LIBRARIES, *NEVER])
def test_torchs_operators_are_known_by_all_that_libraries_look_at(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = (ALWAYS | LIBRARIES | NEVER)[what]
    assert changes("torch", change, monkeypatch) == (what not in NEVER)


@pytest.mark.parametrize("what", ["the kernels' instructions", *ALWAYS, *LIBRARIES, *NEVER])
def test_compiled_kernels_are_known_by_their_instructions(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums have one order, for any number of threads and whatever the processor is called."""
    require_compiler()
    always = ALWAYS | {"the kernels' instructions": instructions}
    change = (always | LIBRARIES | NEVER)[what]
    assert changes("native", change, monkeypatch) == (what in always)


def test_options_that_change_the_numbers_change_it_and_others_do_not() -> None:
    def of(**options: Any) -> str:
        return Blueprint.of(str(TARGET), **options).fingerprint()

    require_compiler()
    quantized = [{"dtype": "float32", "quantize": quantize} for quantize in ("int8", "int4")]
    numbers = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, *quantized]
    found = [of(**each, kernels=kernels) for each in numbers for kernels in ("native", "torch")]
    assert len(set(found)) == 10
    assert of(dtype="float32", kernels="auto", device="cpu", one_gemm=True) == found[0]
