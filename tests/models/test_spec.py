"""ModelSpec accepts every spelling of the loading options, stores one form of each, and refuses the rest by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.device import CPU, Placement
from forerun.errors import InvalidRequest
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from kit.checkpoints import SRC, TARGET
from kit.command import apart

FIXED = Placement(torch.device("cpu"), fixed=True)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *((each, "float16") for each in (torch.float16, "float16", "fp16", "half")),
        *((each, "bfloat16") for each in (torch.bfloat16, "bfloat16", "bf16")),
        *((each, "float32") for each in (torch.float32, "float32", "fp32", "float", "torch.float32")),
        ("auto", "auto"),
    ],
)
def test_a_number_format_is_stored_under_one_name(given: Any, kept: str) -> None:
    assert ModelSpec("stdlib", dtype=given) == ModelSpec("stdlib", dtype=kept)
    assert ModelSpec("stdlib", dtype=given).dtype == kept


def test_a_path_is_kept_as_text() -> None:
    spec: Any = ModelSpec
    assert spec(TARGET, tokenizer=TARGET) == ModelSpec(str(TARGET), tokenizer=str(TARGET))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", value) for value in (None, 5, b"stdlib", ["stdlib"], "a\0b", True)),
        *(("tokenizer", value) for value in (5, ["stdlib"], b"x")),
        *(("revision", value) for value in (5, "", ["main"])),
        *(("dtype", value) for value in (None, 5, "int8", "float64", torch.int8, [], "x" * 10_000)),
        *(("quantize", value) for value in ("int3", 8, True, [])),
        *(("kernels", value) for value in ("fast", None, 5, {})),
        *(("one_gemm", value) for value in (1, None, "yes")),
    ],
)
def test_unsupported_options_are_refused_by_name(field: str, value: Any) -> None:
    options: Any = {"model": "stdlib"} | {field: value}
    with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
        ModelSpec(**options)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_a_blueprint_is_made_of_it() -> None:
    spec = ModelSpec(str(TARGET), dtype="half", kernels="torch", device=FIXED)
    blueprint = Blueprint.of(spec)
    assert (blueprint.spec, blueprint.dtype, blueprint.kernels, blueprint.placement) == (
        spec,
        torch.float16,
        "torch",
        FIXED,
    )
    assert Blueprint.of(str(TARGET), dtype=torch.float16, kernels="torch", device=FIXED) == blueprint
    assert Blueprint.of(spec, device=CPU) == Blueprint.of(replace(spec, device=CPU))
    with pytest.raises(TypeError, match="dtpye"):
        Blueprint.of(str(TARGET), dtpye="half")


def test_a_draft_model_takes_all_but_tokenizer_and_revision_from_its_target() -> None:
    target = ModelSpec(
        "a/b", tokenizer="c/d", revision="v1", dtype="half", quantize="int8", kernels="torch", one_gemm=True
    )
    assert target.derive("e/f") == replace(target, model="e/f", tokenizer=None, revision=None)


def test_the_tokenizer_may_be_anothers(tmp_path: Path) -> None:
    own = Blueprint.of("stdlib-draft").tokenizer().fingerprint()
    other = Blueprint.of("stdlib-draft", tokenizer="stdlib-draft-1024").tokenizer().fingerprint()
    assert own != other == Blueprint.of("stdlib-draft-1024").tokenizer().fingerprint()


def test_options_come_without_torch() -> None:
    code = "import sys; forerun = sys.modules['forerun'] = type(sys)('forerun'); forerun.__path__ = [sys.argv[1]]; "
    code += "from forerun.models.spec import ModelSpec; ModelSpec('x'); sys.exit('torch' in sys.modules)"
    assert apart("-c", code, str(SRC / "forerun")).returncode == 0
