"""Block drafters of `speculators` compute here what the package computes, and ours are read by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ModelError, UnsupportedModel
from forerun.heads.block.drafter import BlockBlueprint
from forerun.heads.block.network import MASKED
from forerun.heads.convert import convert
from forerun.heads.folder import HeadFolder
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from heads.conversions import CLOSE, assert_comes_back, changed, expected, no_package
from heads.package import load
from heads.package_block import ANCHORS, CHECKPOINTS, FOLDER, TAPS, TARGET, said
from heads.trained import BLOCK_CONFIG, written_block
from kit.checkpoints import read_json
from kit.unchecked import unchecked

NAMES = list(CHECKPOINTS)
TEXT = [1, 30, 40]
TABLE = "model.embed_tokens.weight"


def own(folder: Path, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What a drafter says here in the guessing places of the blocks; [anchors, places, tokens]."""
    target = Blueprint.of(str(TARGET), dtype="float32")
    plan = BlockBlueprint.of(HeadFolder.of(str(folder), target))
    decoder = plan.load(512, target.load(64).decoder)
    runner, heads = Runner.of(decoder, 2048), decoder.heads
    block, text = plan.tensors.config, tokens.tolist()
    assert block.taps == TAPS
    ids = torch.arange(block.layers.vocab_size) if plan.ids.head_ids is None else plan.ids.head_ids
    logits, chances = [], []
    for seq_id, anchor in enumerate(ANCHORS):
        runner.read([Read(seq_id, text[:anchor])], inputs=decoder.fuse(states[:anchor]))
        runner.keep([seq_id], [range(anchor)])
        hidden = runner.read([Read(seq_id, [text[anchor], *[MASKED] * (block.block_size - 1)])]).hidden[block.first :]
        before = tokens[anchor : anchor + len(hidden)]
        found = plan.ids.spread(decoder.logits(hidden))
        found = found if heads.after is None else heads.after(found, decoder.states(hidden), before)
        logits.append(found[:, ids])
        if heads.confidence is not None:
            chances.append(heads.confidence(decoder.states(hidden), before))
    return {"logits": torch.stack(logits)} | ({"confidence": torch.stack(chances)} if chances else {})


def assert_the_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """In the guessing places."""
    for name, ours in found.items():
        theirs = wanted[name][:, -ours.shape[1] :]
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert ours[ours.isfinite()].std() > 0.01, "it says nothing"


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_package_gives_its_logits_once_it_is_converted(name: str, tmp_path: Path) -> None:
    known = expected(name)
    new = convert(str(FOLDER / name), "dflash", tmp_path / "authors", str(TARGET))
    assert new.draft == f"block:{tmp_path / 'authors'}"
    found = own(tmp_path / "authors", known["states"], known["tokens"])
    assert found.keys() == known.keys() - {"states", "tokens"}
    assert_the_same(found, known)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_it_is_what_the_package_saved(name: str, tmp_path: Path) -> None:
    assert_comes_back(name, "dflash", tmp_path, str(TARGET))


def read_states(folder: Path) -> tuple[list[int], Tensor]:
    """The numbers that speculators would give a drafter's states, and the states that it is given here."""
    convert(str(folder), "speculators", folder / "theirs", str(TARGET))
    target = Blueprint.of(str(TARGET), dtype="float32")
    taps = BlockBlueprint.of(HeadFolder.of(str(folder), target)).tensors.config.taps
    found = target.load(64).read([Read(0, TEXT)], taps=taps).taps
    assert found is not None
    return read_json(folder / "theirs" / "config.json")["aux_hidden_state_layer_ids"], found


def test_numbers_of_layers_are_one_more_in_speculators(tmp_path: Path) -> None:
    """One off would only show in fewer accepted guesses, so states are compared: that of the embedding is 0 there."""
    ids = [0, 3, -1]
    ours = made(tmp_path / "ours", dflash_config=inside(target_layer_ids=ids), mask_token_id=7)
    told, states = read_states(ours)
    assert told == [1, 4, 0]
    table = load_file(TARGET / "model.safetensors")[TABLE]
    torch.testing.assert_close(states[:, told.index(0)], table[TEXT].float())
    convert(str(ours / "theirs"), "dflash", tmp_path / "back", str(TARGET))
    assert read_json(tmp_path / "back" / "config.json")["dflash_config"]["target_layer_ids"] == ids


@pytest.mark.full
def test_they_number_what_enters_a_layer_of_transformers(tmp_path: Path) -> None:
    ours = made(tmp_path, dflash_config=inside(target_layer_ids=[-1, 0, 2, 3]), mask_token_id=7)
    told, states = read_states(ours)
    transformers = pytest.importorskip("transformers")
    inputs: list[Tensor] = []
    with unchecked(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _layer, read: inputs.append(read[0]))
        model(torch.tensor([TEXT]))
    for place, each in enumerate(told):
        torch.testing.assert_close(states[:, place], inputs[each][0], **CLOSE)


def made(folder: Path, num_ids: int = 0, **keys: object) -> Path:
    """A drafter of ours with random weights; with `num_ids` it has a head of its own over so many tokens."""
    of, dice = Blueprint.of(str(TARGET)).config, torch.Generator().manual_seed(1)
    config: dict[str, object] = {**BLOCK_CONFIG, "hidden_size": of.hidden, "vocab_size": of.vocab_size, **keys}
    tensors: dict[str, Tensor] = {}
    if num_ids:
        config["draft_vocab_size"] = num_ids
        tensors["d2t"] = torch.arange(num_ids) // 4  # every fifth token is not the head's
        tensors["lm_head.weight"] = torch.randn(num_ids, of.hidden, generator=dice)
    written_block(folder, config, tensors, of, dice)
    return folder


def inside(**keys: object) -> dict[str, object]:
    return {"target_layer_ids": [0, 3], "block_size": 4} | keys


@no_package
@pytest.mark.parametrize(
    "options",
    [
        {"num_ids": 400},
        {"sample_from_anchor": True, "markov_rank": 8, "enable_confidence_head": True},
        {"selector_rank": 8, "selector_top_k": 6},
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0, "causal": True},
    ],
    ids=str,
)
def test_the_package_computes_what_we_compute_with_a_drafter_of_ours(options: dict[str, Any], tmp_path: Path) -> None:
    ours = made(tmp_path / "ours", **options, dflash_config=inside(), mask_token_id=7)
    convert(str(ours), "speculators", tmp_path / "theirs", str(TARGET))
    known = expected("dflash")
    found = own(ours, known["states"], known["tokens"])
    with unchecked():
        theirs = said(load(tmp_path / "theirs"), known["states"], known["tokens"])
    assert_the_same(found, theirs)


@no_package
@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_logits_are_the_packages(name: str, tmp_path: Path) -> None:
    known = expected(name)
    convert(str(FOLDER / name), "dflash", tmp_path / "there", str(TARGET))
    convert(str(tmp_path / "there"), "speculators", tmp_path / "back", str(TARGET))
    with unchecked():
        theirs = said(load(tmp_path / "back"), known["states"], known["tokens"])
    for key, tensor in theirs.items():
        torch.testing.assert_close(tensor, known[key], **CLOSE)


MIXED = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"aux_hidden_state_layer_ids": [1, 5]}, "5 is the last layer's output, .* before the target's final norm"),
        ({"aux_hidden_state_layer_ids": [1, 6]}, "numbers from 0 to 4"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None; it must be a list"),
        ({"aux_hidden_state_layer_ids": [1, 2, 4]}, "fc.weight has shape"),
        ({"mask_token_id": None}, "no tensor mask_embedding"),
        ({"speculators_model_type": "dspark", "markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"speculators_model_type": "xpress"}, "xPress combines"),
        ({"num_hidden_layers": 1, "layer_types": None}, "layers.1.* is none of a block drafter"),
        ({"vocab_size": 999}, "vocab_size is 999; .* has 512"),
        ({"hidden_act": "gelu"}, "supported is silu"),
        (MIXED, "sliding_window_non_causal is False; so layers with windows are causal"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name_and_nothing_is_written(
    keys: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=told):
        convert(str(changed("dflash", tmp_path / "in", **keys)), "dflash", tmp_path / "out", str(TARGET))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_convolutions_that_change_states_are_refused(tmp_path: Path) -> None:
    folder = changed("dflash2", tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.mlp_conv.base_kernel"] *= 2
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"conv_kernel_size is 1; layers.0.mlp_conv.base_kernel is a convolution"
    ):
        convert(str(folder), "dflash", tmp_path / "out", str(TARGET))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "mask_token_id is None; speculators has no embedding of its own for masked places"),
        ({"mask_token_id": 7, "causal": True}, "only layers with sliding windows are causal"),
        ({"mask_token_id": 7, "dflash_config": inside(target_layer_ids=[0, 4])}, "one is the last of .* 5 layers"),
        (
            {"mask_token_id": 7, "selector_rank": 8, "enable_confidence_head": True},
            "no confidence head beside a selector",
        ),
    ],
    ids=str,
)
def test_what_speculators_cannot_say_is_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    ours = made(tmp_path / "ours", **{"dflash_config": inside(), **options})
    with pytest.raises(UnsupportedModel, match=told):
        convert(str(ours), "speculators", tmp_path / "out", str(TARGET))
    with pytest.raises(UnsupportedModel, match=r"the last of the target's layers .* name the target with --model"):
        convert(str(ours), "speculators", tmp_path / "out")


def test_an_embedding_of_its_own_must_be_the_targets(tmp_path: Path) -> None:
    ours = made(tmp_path / "ours", dflash_config=inside(), mask_token_id=7)
    tensors, table = load_file(ours / "model.safetensors"), load_file(TARGET / "model.safetensors")[TABLE]
    save_file({**tensors, "embed_tokens.weight": table}, ours / "model.safetensors")
    convert(str(ours), "speculators", tmp_path / "out", str(TARGET))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    save_file({**tensors, "lm_head.weight": table * 2}, ours / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight differs from the one of .* which speculators takes"):
        convert(str(ours), "speculators", tmp_path / "other", str(TARGET))
