"""Medusa heads: what they compute, that the engine asks them at the right places, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config import VERIFICATIONS, Speculation, Verification
from forerun.errors import MissingWeights, ModelError, ModelNotFound, UnknownDrafter, UnsupportedModel
from forerun.heads.folder import HeadFolder
from forerun.heads.medusa.drafter import MedusaBlueprint
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from heads.trained import heads_of, states, texts, written_heads
from kit.assertions import accepted_by_shape, assert_acceptance
from kit.checkpoints import EMBEDDING, TARGET, rewritten

HIDDEN, VOCAB, NUM_HEADS = 64, 512, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["medusa", "hydra"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads_of(TARGET, tmp_path_factory.mktemp("heads") / "fitted", NUM_HEADS, hydra=request.param)


def silent(folder: Path, num_heads: int = 2, **keys: object) -> Path:
    """Heads that add nothing to the state, with the target's output matrix."""
    tensors = {f"{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(num_heads)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(HIDDEN) for head in range(num_heads)}
    return written_heads(folder, tensors, num_heads, **keys)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
def test_heads_of_zeros_say_what_the_target_says(options: dict[str, str], tmp_path: Path) -> None:
    target = Blueprint.of(str(TARGET), **({"dtype": "float32"} | options))
    runner = target.load(1024)
    heads = MedusaBlueprint.of(HeadFolder.of(str(silent(tmp_path)), target)).build(0, runner).heads
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
    heads = MedusaBlueprint.of(HeadFolder.of(str(folder), target)).build(0, target.load(64)).heads
    some, tokens = states(TARGET)[0][:rows], torch.tensor(texts(TARGET)[0])[: rows + 2].unfold(0, 3, 1)
    together = heads.logits(2, some, tokens)
    for i in range(rows):
        assert torch.equal(heads.logits(2, some[i : i + 1], tokens[i : i + 1])[0], together[i])


@pytest.mark.full
def test_an_engines_acceptance_is_that_of_the_heads_at_its_roots(folder: Path) -> None:
    """Guess by guess: the heads' first choices, computed anew from whole texts, at the places where rounds began."""
    llm = LLM(str(TARGET), f"medusa:{folder}", dtype="float32", speculation=Speculation(NUM_HEADS))
    weights, table = load_file(folder / "model.safetensors"), load_file(TARGET / "model.safetensors")[EMBEDDING]

    def guesses(text: list[int], taps: Tensor) -> list[int]:
        drafted: list[int] = []
        for head in range(NUM_HEADS):
            x = taps[-1, 0]
            if f"{head}.in.weight" in weights:
                seen = table[torch.tensor([text[-1], *drafted])].flatten()
                x = weights[f"{head}.in.weight"] @ torch.cat([x, seen])
            drafted.append(int((weights[f"{head}.1.weight"] @ x).argmax()))
        return drafted

    assert assert_acceptance(TARGET, llm, NUM_HEADS, GREEDY, guesses) > 20


@pytest.mark.short("medusa-coupled")
@pytest.mark.parametrize(
    "verification", ["coupled", *(pytest.param(rule, marks=pytest.mark.full) for rule in VERIFICATIONS[1:])]
)
def test_trees_of_any_form_are_plain_and_accepted_more_often(folder: Path, verification: Verification) -> None:
    shapes = {
        "chain": Speculation(NUM_HEADS),
        "tree": Speculation(NUM_HEADS, 3, 12),
        "deeper than heads": Speculation(9, 2, 20),
        "static": Speculation(tree=StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])),
    }
    accepted = accepted_by_shape(TARGET, f"medusa:{folder}", shapes, GREEDY, verification)
    if verification == "coupled":
        assert accepted["tree"] > 1.2 * accepted["chain"] > 0


@pytest.mark.parametrize(
    ("keys", "error", "told"),
    [
        ({"hidden_size": 128}, UnsupportedModel, "hidden_size is 128"),
        ({"vocab_size": 4096}, UnsupportedModel, "vocab_size is 4096"),
        ({"medusa_num_heads": 3}, MissingWeights, "2.0.linear.weight"),
        ({"medusa_num_heads": 1}, UnsupportedModel, "1.0.linear.bias is none of 1 heads"),
        ({"medusa_num_heads": 0}, UnsupportedModel, "medusa_num_heads is 0"),
        ({"hydra": True}, MissingWeights, "0.in.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    keys: dict[str, object], error: type[ModelError], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        LLM(str(TARGET), f"medusa:{rewritten(silent(tmp_path), {}, keys)}", dtype="float32")


def test_what_is_spelt_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        LLM(str(TARGET), f"medusa:{tmp_path / 'nothing'}")
    with pytest.raises(UnknownDrafter, match="cannot judge"):
        LLM(str(TARGET), f"cascade[ngram,medusa:{silent(tmp_path / 'heads')}]")


def test_heads_have_no_cache_in_the_plan_and_may_lie_in_several_files(folder: Path, tmp_path: Path) -> None:
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
        sizes[quantize] = MedusaBlueprint.of(HeadFolder.of(str(tmp_path), quantized)).memory
    assert sizes[None].weights_bytes == 4 * sum(tensor.numel() for tensor in tensors.values())
    assert 4 * sizes["int8"].weights_bytes == sizes[None].weights_bytes > 7 * sizes["int4"].weights_bytes
    llm = LLM(str(TARGET), f"medusa:{tmp_path}", dtype="float32")
    assert not llm.plan.silent_drafters
    assert not llm.plan.drafter_cache_tokens
    assert not any("medusa" in line for line in llm.plan.lines())
    assert llm.fingerprint
