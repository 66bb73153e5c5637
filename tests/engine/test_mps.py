"""Requests on Apple's GPUs, as far as can be tested without one: only operators that torch has on MPS are called.

torchgen's list of operators, from which torch is built, says which these are.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.config import Verification
from forerun.device import whole_sums
from forerun.errors import DeviceUnavailable, InvalidRequest, OperatorMissing
from kit.card import imagined_mps, submit
from kit.checkpoints import SMALL, TARGET

PROMPTS = ["Once upon a time", "The cat sat on the", "One day"]
HELD = ("MPS", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
ENTRY = re.compile(r"^- func: ([\w.]+)\((.*?)(?=^- func: |\Z)", re.MULTILINE | re.DOTALL)
EVERYTHING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
}


@cache
def operators() -> dict[str, str]:
    """The entry of every operator in the list, by name."""
    found = find_spec("torchgen")
    assert found, "torchgen comes with torch"
    path = Path(found.origin or "").parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    return dict(ENTRY.findall(path.read_text()))


@cache
def is_there(name: str) -> bool:
    """Whether MPS has an operator: a kernel of its own, or one that is made of other operators."""
    entry = operators()[name]
    if delegate := re.search(r"structured_delegate: ([\w.]+)", entry):
        return is_there(delegate[1])
    dispatch = re.findall(r"^    ([\w, ]+): \w+", entry.partition("  dispatch:\n")[2], re.MULTILINE)
    return not dispatch or any(key in HELD for keys in dispatch for key in keys.split(", "))


def refuse_missing(func: Any, given: Sequence[Tensor]) -> None:
    """Raise as torch does on MPS if it lacks the operator."""
    if any(x.dtype in (torch.float64, torch.complex128) for x in given):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    name = "" if func is None else func._schema.name.removeprefix("aten::")
    overload = "" if func is None or func._overloadname == "default" else f".{func._overloadname}"
    if func is not None and not is_there(name + overload):
        raise NotImplementedError(
            f"The operator 'aten::{name}{overload}' is not currently implemented for the MPS device."
        )


def answers(llm: LLM, params: SamplingParams) -> list[Any]:
    """The answer or error of each request."""
    submit(llm, PROMPTS, params)
    ends: dict[int, Any] = {}
    texts: dict[int, list[int]] = {}
    for _ in range(200):
        if not llm.engine.has_work:
            break
        for delta in llm.engine.step():
            texts.setdefault(delta.seq_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ends[delta.seq_id] = delta.error or texts[delta.seq_id]
    assert not llm.engine.has_work
    return [ends[seq_id] for seq_id in sorted(ends)]


def make(device: str, draft: str | None, rule: Verification = "coupled") -> LLM:
    return LLM(str(TARGET), draft, dtype="float32", device=device, max_model_len=128, verification=rule, speculation=4)


@pytest.mark.short("temperature-model", "filters-ngram", "logprobs-plain")
@pytest.mark.parametrize("draft", [None, "ngram", f"model:{SMALL}"], ids=["plain", "ngram", "model"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_answers_are_those_of_the_cpu(name: str, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=3, max_tokens=8, **EVERYTHING[name])
    with imagined_mps(monkeypatch, refuse_missing), torch.inference_mode():
        found = answers(make("mps", draft), params)
    assert found == answers(make("cpu", None), params)


@pytest.mark.short("block")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_rejection_rules_call_only_operators_of_mps(rule: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    with imagined_mps(monkeypatch, refuse_missing), torch.inference_mode():
        found = answers(make("mps", f"model:{SMALL}", rule), SamplingParams(seed=3, max_tokens=8, top_p=0.9))
    assert [len(tokens) for tokens in found] == [8] * len(PROMPTS)


def lacking(operator: str) -> Callable[[Any, Sequence[Tensor]], None]:
    """MPS without this operator, in torch's words."""

    def refuse(func: Any, given: Sequence[Tensor]) -> None:
        if func is not None and func._schema.name == operator:
            raise NotImplementedError(f"The operator '{operator}' is not currently implemented for the MPS device.")

    return refuse


def test_a_pass_that_lacks_an_operator_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    named = r"no aten::index_copy_ for this device.* PYTORCH_ENABLE_MPS_FALLBACK=1.* --device cpu"
    with imagined_mps(monkeypatch, lacking("aten::index_copy_")), pytest.raises(OperatorMissing, match=named):
        make("mps", None)


@pytest.mark.short("ngram")
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_requests_that_need_a_missing_operator_fail_with_its_name_and_others_go_on(
    draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, filtered = SamplingParams(temperature=0.8, seed=3, max_tokens=8), SamplingParams(top_p=0.9, max_tokens=8)
    with imagined_mps(monkeypatch, lacking("aten::cumsum")), torch.inference_mode():
        llm = make("mps", draft)
        submit(llm, PROMPTS[:1], plain)
        found = answers(llm, filtered)
    assert found[:1] == answers(make("cpu", None), plain)[:1]
    assert len(found) == 1 + len(PROMPTS)
    assert [(type(each), each.operator) for each in found[1:]] == [(OperatorMissing, "aten::cumsum")] * len(PROMPTS)


def test_options_that_mps_lacks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceUnavailable, match=r"'mps'.*use --device cpu"):
        LLM(str(TARGET), device="mps")
    with pytest.raises(DeviceUnavailable, match=r"'rocm'.*without ROCm.*use --device cpu"):
        LLM(str(TARGET), device="rocm")
    with imagined_mps(monkeypatch, refuse_missing):
        for field, options in (("one_gemm", {"one_gemm": True}), ("quantize", {"quantize": "int8"})):
            with pytest.raises(InvalidRequest, match=f"^{field}: .*leave it out"):
                LLM(str(TARGET), device="mps", **options)


def test_operators_that_mps_lacks_are_refused_by_the_list() -> None:
    assert [name for name in ("cumsum", "argmax", "sort.stable", "softmax.int") if not is_there(name)] == []
    assert not any(is_there(name) for name in ("_cudnn_rnn", "linalg_eig", "geqrf"))


def test_sums_of_integers_are_exact_in_any_format() -> None:
    """In float32 too: what is scaled by a power of two, and rounded once, is what float64 would give."""
    noise = torch.Generator().manual_seed(0)
    parts = torch.rand(50, 3000, generator=noise) ** 20
    parts = parts / parts.sum(1, keepdim=True)
    wide = ((parts.double() * 2.0**52).long().cumsum(1).double() / 2.0**52).float()
    assert torch.equal(whole_sums(parts), wide)
