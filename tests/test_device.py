"""Devices by name, and the messages about devices that are missing."""

import builtins
from collections.abc import Callable

import numpy as np
import pytest
import torch

from forerun import LLM
from forerun.device import (
    CPU,
    Download,
    PackedTables,
    Placement,
    running_sum,
    softmax,
    upload,
    upload_arrays,
    upload_tensor,
    warn_untested,
    whole_sums,
)
from forerun.errors import DeviceUnavailable, InvalidRequest
from forerun.models.backends.gpu.ops import load_kernels
from forerun.models.backends.torch_cpu.backend import TorchExecutor
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET
from kit.unchecked import unchecked


def test_auto_is_what_the_environment_says_or_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_DEVICE", "cpu")
    assert Placement.of("auto") == CPU
    monkeypatch.delenv("FORERUN_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Placement.of("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Placement.of("auto") == Placement(torch.device("cuda", 0), fixed=True)
    assert Placement.of("cuda:1", one_gemm=True) == Placement(torch.device("cuda", 1), fixed=True, one_gemm=True)


def test_untested_devices_are_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_untested.cache_clear()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Placement.of("mps") == Placement.of("mps:0") == Placement(torch.device("mps", 0), fixed=True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    amd = Placement(torch.device("cuda", 1), fixed=True, one_gemm=True)
    assert Placement.of("rocm:1", one_gemm=True) == Placement.of("hip:1", one_gemm=True) == amd
    messages = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in messages] == ["device mps", "device rocm", "device hip"]
    assert all("was not tested on such devices" in line for line in messages)


def test_torch_devices_are_devices_and_none_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Placement.of(None) == Placement.of(torch.device("cpu")) == Placement.of(torch.device("cpu", 0)) == CPU
    assert Placement.of(torch.device("cuda")) == Placement.of("cuda") == Placement.of("cuda:0")
    assert Placement.of(torch.device("cuda", 1), one_gemm=True) == Placement.of("cuda:1", one_gemm=True)
    assert LLM(str(TARGET), device=None).kernels == LLM(str(TARGET), device=torch.device("cpu")).kernels


WRONG = [
    "tpu",
    "cuda:x",
    "cuda:-1",
    "cuda:1:2",
    "cpu:0",
    "gpu",
    "",
    "cuda:" + "9" * 5000,
    0,
    True,
    1.5,
    ["cpu"],
    b"cpu",
]


@pytest.mark.parametrize("wrong", [*WRONG, torch.device("meta"), torch.float32], ids=lambda wrong: f"{wrong!r:.20}")
def test_an_invalid_device_is_refused_by_name(wrong: object) -> None:
    with unchecked(), pytest.raises(InvalidRequest, match=r"device: .*use auto, cpu, cuda") as caught:
        Placement.of(wrong)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_a_missing_gpu_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"without CUDA.*--device cpu"):
        LLM(str(TARGET), device="cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceUnavailable, match=r"1 GPUs.*CUDA_VISIBLE_DEVICES"):
        LLM(str(TARGET), device="cuda:1")


def test_missing_triton_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., object] = builtins.__import__

    def without_triton(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] == "triton":
            raise ImportError("No module named 'triton'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    monkeypatch.delitem(__import__("sys").modules, "forerun.models.backends.gpu.triton_kernels", raising=False)
    monkeypatch.delattr("forerun.models.backends.gpu.triton_kernels", raising=False)
    with pytest.raises(DeviceUnavailable, match="pip install triton"):
        load_kernels()


def test_fp8_is_for_gpus() -> None:
    with pytest.raises(InvalidRequest, match=r"'fp8' is for GPUs only: use int8 or int4"):
        Blueprint.of(str(TARGET), quantize="fp8")
    assert (
        Blueprint.of(str(TARGET), quantize="fp8", device=Placement(torch.device("cpu"), fixed=True)).quantize == "fp8"
    )


def test_compiled_kernels_are_for_plain_passes_on_cpus() -> None:
    fixed = Placement(torch.device("cpu"), fixed=True)
    with pytest.raises(InvalidRequest, match="kernels"):
        Blueprint.of(str(TARGET), kernels="native", device=fixed)
    there, here = Blueprint.of(str(TARGET), device=fixed), Blueprint.of(str(TARGET))
    assert isinstance(there.load(64).decoder.executor, TorchExecutor)
    assert there.backend_name == f"torch, {fixed.label}"
    assert there.fingerprint() != here.fingerprint()


def test_tensors_go_to_the_device_and_back_unchanged() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = upload([[1, 2], [3, 4]], torch.int64, device)
    assert upload_tensor(torch.tensor([5]), device).device.type == device.type
    download = Download(there)
    there += 1
    assert download.values == [[1, 2], [3, 4]]


def test_tables_of_several_kinds_share_a_buffer_which_one_copy_fills() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dice = np.random.default_rng(0)
    kinds = (np.int64, np.int32, np.float32, np.float64, np.bool_)
    arrays = {f"{kind.__name__}{i}": dice.integers(0, 99, (3, 1 + 2 * i)).astype(kind) for i, kind in enumerate(kinds)}
    packed = PackedTables({name: ((5, *array.shape[1:]), array.dtype) for name, array in arrays.items()}, device)
    for some in (arrays, {name: array[:2] + array[:2] for name, array in arrays.items()}):
        packed.fill(some)
        for name, array in some.items():
            assert np.array_equal(packed.tables[name][: len(array)].cpu().numpy(), array)
    for name, array in arrays.items():
        assert packed.tables[name].untyped_storage().data_ptr() == packed.flat.untyped_storage().data_ptr()
        assert np.array_equal(packed.tables[name][2].cpu().numpy(), array[2]), "what is not filled stays"
        assert np.array_equal(upload_arrays(arrays, device)[name].cpu().numpy(), array)


@pytest.mark.parametrize("columns", [1, 5, 1000, 50_257])
def test_sums_of_integers_are_running_sums_that_no_order_changes(columns: int) -> None:
    law = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns)).mul(4).softmax(1)
    exact = law.double().cumsum(1)
    assert (whole_sums(law) - exact).abs().max() <= 1e-7
    assert (running_sum(law) - exact).abs().max() <= 1e-5
    backwards = law.double().mul(2.0**52).long().flip(1).cumsum(1)[:, -1]
    assert torch.equal(whole_sums(law)[:, -1], (backwards.double() / 2.0**52).float())
    assert torch.equal(whole_sums(2 * law[:, :1]), 2 * law[:, :1])


@pytest.mark.parametrize("vocab", [1, 8, 1001])
@pytest.mark.parametrize("log", [False, True])
def test_padding_a_row_to_whole_vectors_changes_no_softmax(
    vocab: int, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    plain = softmax(logits, log)
    assert torch.equal(plain, logits.log_softmax(1) if log else logits.softmax(1))
    monkeypatch.setattr("forerun.device.is_cpu", lambda device: False)
    assert (softmax(logits, log) - plain).abs().max() <= 1e-6
    assert softmax(logits, log).shape == plain.shape
