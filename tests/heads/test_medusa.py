"""Medusa heads: independence of rows, heads that add nothing, and their memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.heads.folder import HeadFolder
from forerun.heads.medusa.drafter import MedusaBlueprint
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams
from heads.trained import heads_of, states, texts, written_heads
from kit.checkpoints import TARGET

HIDDEN, VOCAB, NUM_HEADS = 64, 512, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["medusa", "hydra"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads_of(TARGET, tmp_path_factory.mktemp("heads") / "fitted", NUM_HEADS, hydra=request.param)


def silent(folder: Path, num_heads: int = 2, **keys: object) -> Path:
    """Heads that add nothing to the state and have the target's output matrix."""
    tensors = {f"{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(num_heads)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(HIDDEN) for head in range(num_heads)}
    return written_heads(folder, tensors, num_heads, **keys)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
def test_heads_of_zeros_have_the_targets_logits(options: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32"} | options
    target = Blueprint.of(str(TARGET), **settings)
    runner = target.load(1024)
    heads = MedusaBlueprint.of(HeadFolder.at(silent(tmp_path), "silent", target)).build(0, runner).heads
    text = texts(TARGET)[0][:50]
    read = runner.read([Read(0, text, judged=range(50))], taps=(-1,))
    assert read.taps is not None
    for head in range(2):
        found = heads.logits(head, read.taps[:, 0], torch.zeros(50, 1, dtype=torch.long))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, read.logits, rtol=2e-2 if options.get("dtype") else 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 40])
def test_a_row_does_not_depend_on_the_others(folder: Path, rows: int) -> None:
    target = Blueprint.of(str(TARGET), dtype="float32")
    heads = MedusaBlueprint.of(HeadFolder.at(folder, str(folder), target)).build(0, target.load(64)).heads
    some, tokens = states(TARGET)[0][:rows], torch.tensor(texts(TARGET)[0])[: rows + 2].unfold(0, 3, 1)
    together = heads.logits(2, some, tokens)
    for i in range(rows):
        assert torch.equal(heads.logits(2, some[i : i + 1], tokens[i : i + 1])[0], together[i])


def test_heads_need_no_cache_and_may_be_stored_in_several_files(folder: Path, tmp_path: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    names = sorted(tensors)
    for file, part in (("a.safetensors", names[:2]), ("b.safetensors", names[2:])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    places = {name: "a.safetensors" if name in names[:2] else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    target = Blueprint.of(str(TARGET), dtype="float32")
    sizes = {}
    for quantize in (None, "int8", "int4"):
        quantized = replace(target, spec=replace(target.spec, quantize=quantize))
        sizes[quantize] = MedusaBlueprint.of(HeadFolder.at(tmp_path, str(tmp_path), quantized)).memory
    assert sizes[None].weights_bytes == 4 * sum(tensor.numel() for tensor in tensors.values())
    assert 4 * sizes["int8"].weights_bytes == sizes[None].weights_bytes > 7 * sizes["int4"].weights_bytes
    llm = LLM(str(TARGET), f"medusa:{tmp_path}", dtype="float32")
    assert not llm.plan.silent_drafters
    assert not llm.plan.drafter_cache_tokens
    assert not any("medusa" in line for line in llm.plan.lines())
    assert llm.fingerprint
