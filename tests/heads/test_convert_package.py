"""Drafters of the package `speculators` have the same logits here as in the package, and ours have them there.

`package.py` recorded the package's outputs; if it is installed, they are computed again.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.draft.spec import parse_spec
from forerun.errors import InvalidRequest, ModelError, UnsupportedModel
from forerun.heads.block.drafter import MASKED, BlockBlueprint
from forerun.heads.convert import convert
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.folder import HeadFolder
from forerun.heads.mtp.drafter import MtpBlueprint
from forerun.heads.sizes import StudentSizes
from forerun.heads.vocabulary import id_map_of
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.train.kinds import make_student
from heads.modules import apart
from heads.package import (
    ANCHORS,
    BLOCK_ANCHORS,
    BLOCK_TAPS,
    CHECKPOINTS,
    DEPTHS,
    FOLDER,
    PLACES,
    TAPS,
    load,
    outputs_of,
)
from heads.trained import BLOCK_CONFIG, eagle_of, written_block
from kit.checkpoints import EMBEDDING, TARGET, read_json, rewritten, same_tensors
from kit.unchecked import unchecked

FORMATS = {"eagle3": "eagle", "peagle": "eagle", "mtp": "mtp"}  # else dflash
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}
TEXT = [1, 30, 40]
Outputs = dict[str, Tensor]
no_package = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="the package speculators is not installed"
)


def expected(name: str) -> Outputs:
    """States of a target, tokens, and the package's outputs for them."""
    return load_file(FOLDER / name / "expected.safetensors")


def format_of(name: str) -> str:
    """Our format for a checkpoint of the package."""
    return FORMATS.get(CHECKPOINTS[name][0], "dflash")


def our_outputs(folder: Path, states: Tensor, tokens: Tensor) -> Outputs:
    """Our outputs of a drafter, in the form of `package.outputs_of`."""
    config, target = read_json(folder / "config.json"), Blueprint.of(str(TARGET), dtype="float32")
    found, host = HeadFolder.at(folder, str(folder), target), target.load(64).decoder
    if "dflash_config" in config:
        return our_blocks(BlockBlueprint.of(found), host, states, tokens)
    is_eagle = "architectures" in config or "speculators_model_type" in config
    first, second = our_layer(found, host, states, tokens) if is_eagle else our_module(found, host, states, tokens)
    return {"first": first, "second": second}


def our_module(folder: HeadFolder, host: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a module with these states as input, and then with its own outputs."""
    modules = MtpBlueprint.of(folder).load(512, host)
    found, inputs, text, runner = [], states[:PLACES], tokens.tolist(), Runner.of(modules, 2048)
    for step in range(2):
        inputs = runner.read([Read(step, text[1 + step : 1 + step + PLACES])], inputs=inputs).hidden
        found.append(modules.logits(inputs))
    return found[0], found[1]


def our_layer(folder: HeadFolder, host: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of an EAGLE layer after each position, and after the next token or in masked positions."""
    plan = EagleBlueprint.of(folder)
    decoder, form = plan.load(512, host), plan.tensors.form
    assert form.taps == TAPS
    runner, fused, text, second = Runner.of(decoder, 2048), decoder.fuse(states), tokens.tolist(), []
    first = decoder.logits(runner.read([Read(0, text)], inputs=fused).hidden)
    for place in range(len(text)) if decoder.mask is None else ANCHORS:
        before, inputs = text[: place + 1], fused[: place + 1]
        if decoder.mask is not None:
            masks = decoder.mask.expand(DEPTHS - 1, -1)
            read = Read(1 + place, [*before, *[form.mask_token or 0] * len(masks)])
            hidden = runner.read([read], inputs=torch.cat([inputs, masks])).hidden
            second.append(decoder.logits(hidden[place:])[None])
        else:
            state = runner.read([Read(1 + place, before)], inputs=inputs).hidden[-1:]
            draft = Read(1 + place, [[*text, 0][place + 1]])
            second.append(decoder.logits(runner.read([draft], inputs=state).hidden))
    return first, torch.cat(second)


def our_blocks(plan: BlockBlueprint, host: Any, states: Tensor, tokens: Tensor) -> Outputs:
    """The logits of a block drafter in the drafted positions of its blocks: [anchors, positions, vocab]."""
    decoder, block, text = plan.load(512, host), plan.tensors.config, tokens.tolist()
    assert block.taps == BLOCK_TAPS
    runner, heads = Runner.of(decoder, 2048), decoder
    logits, chances = [], []
    for seq_id, anchor in enumerate(BLOCK_ANCHORS):
        runner.read([Read(seq_id, text[:anchor])], inputs=decoder.fuse(states[:anchor]))
        runner.keep([seq_id], [range(anchor)])
        places = Read(seq_id, [text[anchor], *[MASKED] * (block.block_size - 1)])
        hidden = runner.read([places]).hidden[block.first :]
        before = tokens[anchor : anchor + len(hidden)]
        found = id_map_of(plan.ids, block.layers.vocab_size).target_logits(decoder.logits(hidden))
        found = found if heads.after is None else heads.after(found, decoder.states(hidden), before)
        logits.append(found[:, plan.ids])
        if heads.confidence is not None:
            chances.append(heads.confidence(decoder.states(hidden), before))
    return {"logits": torch.stack(logits)} | ({"confidence": torch.stack(chances)} if chances else {})


def assert_agree(found: Outputs, theirs: Outputs) -> None:
    """Assert that our outputs equal theirs in the drafted positions, of which their blocks may have one more."""
    assert found.keys() == theirs.keys() - {"states", "tokens"}
    for name, ours in found.items():
        torch.testing.assert_close(ours, theirs[name][:, -ours.shape[1] :], **CLOSE)
        assert ours[ours.isfinite()].std() > 0.01, "all outputs are the same"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_the_package_gives_its_logits_once_it_is_converted(name: str, tmp_path: Path) -> None:
    """For EAGLE also without conversion."""
    known, new = expected(name), convert(str(FOLDER / name), format_of(name), tmp_path / "ours", str(TARGET))
    spec = parse_spec(new.draft)
    assert spec.argument == str(tmp_path / "ours")
    for folder in (tmp_path / "ours", *((FOLDER / name,) if spec.name == "eagle" else ())):
        assert_agree(our_outputs(folder, known["states"], known["tokens"]), known)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_converting_there_and_back_gives_the_saved_checkpoint(name: str, tmp_path: Path) -> None:
    layout, target = format_of(name), None if format_of(name) == "eagle" else str(TARGET)
    convert(str(FOLDER / name), layout, tmp_path / "there", target)
    convert(str(tmp_path / "there"), "speculators", tmp_path / "back", target)
    assert same_tensors(FOLDER / name, tmp_path / "back")
    saved, written = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER / name, tmp_path / "back"))
    if target is not None:
        assert written["speculators_config"].pop("verifier")["name_or_path"] == target
        saved["speculators_config"].pop("verifier")
    layers = [config.pop("transformer_layer_config") for config in (saved, written)]
    if layout == "mtp":  # we write only some fields of its layer
        layers = [{key: layer[key] for key in layers[0].keys() & layers[1].keys()} for layer in layers]
        assert layers[0]["num_hidden_layers"] == 5
    for config in (saved, written, *layers):
        for key in ("architectures", "auto_map", "transformers_version"):
            config.pop(key, None)
    assert (written, layers[1]) == (saved, layers[0])


@no_package
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_recorded_logits_are_the_packages(name: str, tmp_path: Path) -> None:
    known = expected(name)
    convert(str(FOLDER / name), format_of(name), tmp_path / "there", str(TARGET))
    convert(str(tmp_path / "there"), "speculators", tmp_path / "back", str(TARGET))
    with unchecked():
        theirs = outputs_of(load(tmp_path / "back"), known["states"], known["tokens"])
    for key, tensor in theirs.items():
        torch.testing.assert_close(tensor, known[key], **CLOSE)


def inside(**keys: object) -> dict[str, object]:
    return {"target_layer_ids": [0, 3], "block_size": 4} | keys


def block(folder: Path, num_ids: int = 0, **keys: object) -> Path:
    """A block drafter with random weights; with `num_ids` it has its own head over that many tokens."""
    of, dice = Blueprint.of(str(TARGET)).config, torch.Generator().manual_seed(1)
    sizes = {"hidden_size": of.hidden, "vocab_size": of.vocab_size, "mask_token_id": 7, "dflash_config": inside()}
    config: dict[str, object] = {**BLOCK_CONFIG, **sizes, **keys}
    tensors: dict[str, Tensor] = {}
    if num_ids:
        config["draft_vocab_size"] = num_ids
        tensors["d2t"] = torch.arange(num_ids) // 4  # the head lacks every fifth token
        tensors["lm_head.weight"] = torch.randn(num_ids, of.hidden, generator=dice)
    written_block(folder, config, tensors, of, dice)
    return folder


def module(folder: Path, count: int = 1, norms: bool = True, **keys: object) -> Path:
    """A module whose layer is qwen3's; with a `count` of 2 its layer is there twice."""
    like = {"model_type": "qwen3", "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    values = {key: value for key, value in read_json(TARGET / "config.json").items() if key != "architectures"} | like
    made, dice = apart(TARGET, folder, 1, "qwen", **(values if norms else {})), torch.Generator().manual_seed(3)
    gains = {f"mtp.layers.0.self_attn.{name}_norm.weight": 1 + 0.2 * torch.randn(8, generator=dice) for name in "qk"}
    tensors = load_file(made / "model.safetensors") | (gains if norms else {})
    more = {n.replace("layers.0", "layers.1"): t.clone() for n, t in tensors.items() if ".0." in n}
    return rewritten(made, tensors | (more if count == 2 else {}), keys)


layer = partial(eagle_of, TARGET, eagle_aux_hidden_state_layer_ids=list(TAPS))
SPARK = {"sample_from_anchor": True, "markov_rank": 8, "enable_confidence_head": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0, "causal": True}
OURS: dict[str, tuple[str, Callable[[Path], Path]]] = {  # name of the recorded inputs, and a drafter of ours
    "eagle-3": ("llama", layer),
    "eagle-3, normed": ("llama", partial(layer, norm_before_fc=True)),
    "eagle-3.1": ("llama", partial(layer, fc_norm=True, norm_output=True)),
    "a block with a head": ("dflash", partial(block, num_ids=400)),
    "a block with a Markov head": ("dflash", partial(block, **SPARK)),  # type: ignore[arg-type]
    "a block with a selector": ("dflash", partial(block, selector_rank=8, selector_top_k=6)),
    "a block with windows": ("dflash", partial(block, **WINDOWS)),  # type: ignore[arg-type]
    "a module": ("mtp", module),
}


@no_package
@pytest.mark.parametrize("case", OURS)
def test_the_package_computes_what_we_compute_with_a_drafter_of_ours(case: str, tmp_path: Path) -> None:
    name, make = OURS[case]
    ours, known = make(tmp_path / "ours"), expected(name)
    convert(str(ours), "speculators", tmp_path / "theirs", str(TARGET))
    found = our_outputs(ours, known["states"], known["tokens"])
    with unchecked():
        assert_agree(found, outputs_of(load(tmp_path / "theirs"), known["states"], known["tokens"]))


def test_a_module_of_ours_comes_back_from_speculators_as_it_was(tmp_path: Path) -> None:
    convert(str(module(tmp_path / "ours")), "speculators", tmp_path / "theirs", str(TARGET))
    convert(str(tmp_path / "theirs"), "mtp", tmp_path / "back", str(TARGET))
    assert same_tensors(tmp_path / "ours", tmp_path / "back")


def read_states(folder: Path) -> tuple[list[int], Tensor]:
    """The layer numbers that speculators uses for a block's states, and the states that it receives here."""
    convert(str(folder), "speculators", folder / "theirs", str(TARGET))
    target = Blueprint.of(str(TARGET), dtype="float32")
    taps = BlockBlueprint.of(HeadFolder.at(folder, str(folder), target)).tensors.config.taps
    found = target.load(64).read([Read(0, TEXT)], taps=taps).taps
    assert found is not None
    return json.loads((folder / "theirs" / "config.json").read_text())["aux_hidden_state_layer_ids"], found


def test_layer_numbers_are_one_higher_in_speculators(tmp_path: Path) -> None:
    """An offset of one would only lower acceptance, so states are compared: the embedding has number 0 there."""
    ids = [0, 3, -1]
    ours = block(tmp_path / "ours", dflash_config=inside(target_layer_ids=ids))
    numbers, states = read_states(ours)
    assert numbers == [1, 4, 0]
    table = load_file(TARGET / "model.safetensors")[EMBEDDING]
    torch.testing.assert_close(states[:, numbers.index(0)], table[TEXT].float())
    back = convert(str(ours / "theirs"), "dflash", tmp_path / "back", str(TARGET)).folder
    assert json.loads((back / "config.json").read_text())["dflash_config"]["target_layer_ids"] == ids


@pytest.mark.full
def test_layer_numbers_are_those_of_inputs_of_transformers_layers(tmp_path: Path) -> None:
    numbers, states = read_states(block(tmp_path, dflash_config=inside(target_layer_ids=[-1, 0, 2, 3])))
    transformers = pytest.importorskip("transformers")
    inputs: list[Tensor] = []
    with unchecked(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        for each in model.model.layers:
            each.register_forward_pre_hook(lambda _layer, read: inputs.append(read[0]))
        model(torch.tensor([TEXT]))
    for place, number in enumerate(numbers):
        torch.testing.assert_close(states[:, place], inputs[number][0], **CLOSE)


@pytest.mark.parametrize(("kind", "format_name"), [("block", "dflash"), ("mtp", "mtp")])
def test_drafters_trained_in_a_portable_form_are_written_for_the_package(
    kind: str, format_name: str, tmp_path: Path
) -> None:
    taps = "1,3" if kind == "block" else None
    for portable in (None, True):
        student = make_student(kind, Blueprint.of(str(TARGET)), StudentSizes(portable=portable, taps=taps), 0)
        folder = tmp_path / f"{portable}"
        folder.mkdir()
        student.write(student.weights, folder)
    with pytest.raises(UnsupportedModel, match="speculators"):
        convert(str(tmp_path / "None"), "speculators", tmp_path / "refused", str(TARGET))
    written = convert(str(tmp_path / "True"), "speculators", tmp_path / "theirs", str(TARGET))
    assert written.as_object()["draft"] is None, "it is for other programs"
    convert(str(tmp_path / "theirs"), format_name, tmp_path / "back", str(TARGET))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("True", "back"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_portable_block_with_a_selector_has_no_confidence_head(tmp_path: Path) -> None:
    target = Blueprint.of(str(TARGET))
    sizes = StudentSizes(taps="1,3", portable=True, selector_rank=8)
    student = make_student("block", target, sizes, 0)
    student.write(student.weights, tmp_path)
    convert(str(tmp_path), "speculators", tmp_path / "theirs", str(TARGET))
    with pytest.raises(InvalidRequest, match="no confidence head next to a selector"):
        make_student("block", target, replace(sizes, confidence=True), 0)


def changed(name: str, folder: Path, keys: dict[str, object]) -> Path:
    """A copy of a checkpoint of the package with changed config fields."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(FOLDER / name / "model.safetensors")
    config = json.loads((FOLDER / name / "config.json").read_text())
    inner = config["transformer_layer_config"]
    of_layer = {key: value for key, value in keys.items() if key in inner and key not in config}
    inner |= of_layer
    (folder / "config.json").write_text(json.dumps(config | {k: v for k, v in keys.items() if k not in of_layer}))
    return folder


MIXED = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
READ_REFUSALS: list[tuple[str, dict[str, object], str]] = [
    ("dflash", {"aux_hidden_state_layer_ids": [1, 5]}, "5 stands for the last layer's output, .* before the target's"),
    ("dflash", {"aux_hidden_state_layer_ids": [1, 6]}, "numbers from 0 to 4"),
    ("dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None; it must be a list"),
    ("dflash", {"mask_token_id": None}, "no tensor mask_embedding"),
    ("dflash", {"hidden_act": "gelu"}, "supported is silu"),
    ("dflash", MIXED, "sliding_window_non_causal is False; layers with windows would be causal"),
    ("llama", {"speculators_model_type": "peagle"}, "mask_token_id is None; peagle needs it"),
    ("llama", {"speculators_model_type": "xpress"}, "as xPress does"),
    ("llama", {"speculators_model_type": "strange"}, "has an unknown layout"),
    ("llama", {"vocab_size": 500}, "different ones of the target's 500 tokens"),
    ("llama", {"target_hidden_size": 128}, "target_hidden_size is 128"),
    ("llama", {"draft_vocab_size": 61}, "d2t is missing or has another size|has shape"),
]


@pytest.mark.parametrize(("name", "keys", "message"), READ_REFUSALS, ids=str)
def test_unsupported_or_unfitting_checkpoints_are_refused_and_nothing_is_written(
    name: str, keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        convert(str(changed(name, tmp_path / "in", keys)), format_of(name), tmp_path / "out", str(TARGET))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_convolutions_that_change_states_are_refused(tmp_path: Path) -> None:
    kernel = "layers.0.mlp_conv.base_kernel"
    twice = load_file(FOLDER / "dflash2" / "model.safetensors")[kernel] * 2
    rewritten(FOLDER / "dflash2", {kernel: twice}, {}, tmp_path / "in")
    with pytest.raises(UnsupportedModel, match=rf"conv_kernel_size is 1; {kernel} is a convolution"):
        convert(str(tmp_path / "in"), "dflash", tmp_path / "out", str(TARGET))


SELECTS = {"selector_rank": 8, "enable_confidence_head": True}
WINDOW = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}
WRITE_REFUSALS: list[tuple[Callable[..., Path], dict[str, Any], str]] = [
    (block, {"mask_token_id": None}, "mask_token_id is None; .* cannot store an own embedding of masked positions"),
    (block, {"causal": True}, "only layers with sliding windows are causal"),
    (block, {"dflash_config": inside(target_layer_ids=[0, 4])}, "one is the last of .* 5 layers"),
    (block, SELECTS, "no confidence head next to a selector"),
    (module, WINDOW, "has no window"),
    (module, {"count": 2}, "the tensor mtp.layers.1.* does not belong to 1 MTP modules"),
    (module, {"hidden_size": 128}, "hidden_size is 128; .* has 64"),
    (module, {"norms": False}, "the layers of speculators are qwen3's"),
]


@pytest.mark.parametrize(("make", "options", "message"), WRITE_REFUSALS)
def test_drafters_that_speculators_cannot_express_are_refused_and_nothing_is_written(
    make: Callable[..., Path], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    ours = make(tmp_path / "ours", **options)
    with pytest.raises(ModelError, match=message):
        convert(str(ours), "speculators", tmp_path / "out", str(TARGET))
    if make is block:
        with pytest.raises(UnsupportedModel, match=r"the target's last layer .* name it with --model"):
            convert(str(ours), "speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stored_embedding_must_equal_the_targets(tmp_path: Path) -> None:
    ours, table = block(tmp_path / "ours"), load_file(TARGET / "model.safetensors")[EMBEDDING]
    names = load_file(ours / "model.safetensors").keys()
    convert(str(rewritten(ours, {"embed_tokens.weight": table}, {})), "speculators", tmp_path / "out", str(TARGET))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names
    rewritten(ours, {"lm_head.weight": table * 2}, {})
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight differs from that of .* which speculators uses"):
        convert(str(ours), "speculators", tmp_path / "other", str(TARGET))


def test_a_layer_without_embedding_and_head_is_written_with_its_targets(tmp_path: Path) -> None:
    ours = rewritten(eagle_of(TARGET, tmp_path / "ours", 512), {"lm_head.weight": None, "d2t": None}, {})
    message = r"uses its target's embed_tokens.weight, lm_head.weight: name the target with --model"
    with pytest.raises(UnsupportedModel, match=message):
        convert(str(ours), "speculators", tmp_path / "out")
    convert(str(ours), "speculators", tmp_path / "out", str(TARGET))
    written, table = load_file(tmp_path / "out" / "model.safetensors"), load_file(TARGET / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], table[EMBEDDING])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert config["verifier"] == {"name_or_path": str(TARGET), "architectures": ["LlamaForCausalLM"]}
