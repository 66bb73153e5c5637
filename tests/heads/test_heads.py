"""Laws of all kinds of heads: drafts as their papers define them, trees with more accepted tokens, folders that fit."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from forerun.config import Speculation
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import MissingWeights, ModelError, ModelNotFound, UnsupportedModel, WrongShape
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.shape import StaticTree
from heads.references import FORMS, GREEDY
from heads.trained import eagle_of
from kit.assertions import accepted_by_shape, assert_acceptance, num_accepted
from kit.checkpoints import EMBEDDING, TARGET, read_json, rewritten
from kit.gguf_files import ADD, by_turns, finish, metadata_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of a form, made once."""
    folder = tmp_path_factory.mktemp("heads")
    return cache(lambda form: FORMS[form].make(folder / form))


@pytest.mark.short("eagle-1-3")
@pytest.mark.parametrize(
    ("form", "chunk_tokens"), [(form, 3) for form in FORMS if FORMS[form].reference] + [("eagle-3", 64), ("medusa", 64)]
)
def test_an_engines_acceptance_is_that_of_the_reference_at_its_roots(
    form: str, chunk_tokens: int, made: Callable[[str], Path]
) -> None:
    own, folder = FORMS[form], made(form)
    draft, shape = own.spelled.format(folder), Speculation(own.depth)
    llm = LLM(str(TARGET), draft, dtype="float32", speculation=shape, chunk_tokens=chunk_tokens)
    assert own.reference is not None
    assert assert_acceptance(TARGET, llm, own.depth, GREEDY, own.reference(folder)) > own.least


IN_GGUF = {  # names of an EAGLE-3 layer's tensors by llama.cpp's converter
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "blk.0.attn_norm",
    "hidden_norm": "blk.0.attn_norm_2",
    "self_attn.q_proj": "blk.0.attn_q",
    "self_attn.k_proj": "blk.0.attn_k",
    "self_attn.v_proj": "blk.0.attn_v",
    "self_attn.o_proj": "blk.0.attn_output",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "mlp.gate_proj": "blk.0.ffn_gate",
    "mlp.up_proj": "blk.0.ffn_up",
    "mlp.down_proj": "blk.0.ffn_down",
}


USUAL = {  # defaults of fields that a folder lacks
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def write_eagle_gguf(folder: Path, path: Path) -> Path:
    """Write a folder's EAGLE-3 layer as a GGUF file: head ids are the target's, and rotary pairs are neighbours."""
    config: dict[str, Any] = read_json(folder / "config.json")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    writer = GGUFWriter(path, "eagle3")
    writer.add_array("eagle3.target_layers", list(EagleBlueprint.of(opened(folder)).tensors.form.taps))
    writer.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
    writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
    for key, value in metadata_of(USUAL | config).items():
        getattr(writer, ADD[type(value)])(key.format("eagle3"), value)
    writer.add_vocab_size(config["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "d2t":
            writer.add_tensor(name, (tensor + torch.arange(len(tensor))).numpy())
            continue
        stem = name.removesuffix(".weight").removeprefix("midlayer.").removeprefix("layers.0.")
        turned = heads.get(stem.removeprefix("self_attn.").removesuffix("_proj"))
        numbers = tensor.float() if turned is None else by_turns(tensor.float(), turned)
        writer.add_tensor(f"{IN_GGUF[stem]}.weight", numbers.contiguous().numpy())
    finish(writer)
    return path


def opened(folder: Path) -> HeadFolder:
    return HeadFolder.at(folder, str(folder), Blueprint.of(str(TARGET), dtype="float32"))


def test_an_eagle_3_layer_in_a_gguf_file_drafts_as_in_its_folder(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = made("eagle-3")
    file = write_eagle_gguf(folder, tmp_path / "eagle.gguf")
    found = [num_accepted(TARGET, f"eagle:{each}", 4, GREEDY) for each in (folder, file)]
    assert found[0] == found[1]
    assert found[0][1] > 0
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLMEagle3"):
        Blueprint.of(str(file))


@pytest.mark.short("medusa", "eagle-3")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "adapter"])
def test_trees_change_no_token_have_more_accepted_and_leave_no_state(form: str, made: Callable[[str], Path]) -> None:
    depth = FORMS[form].depth
    shapes = {
        "chain": Speculation(depth),
        "tree": Speculation(depth, 3, 12),
        "deep": Speculation(9, 2, 20),
        "static": Speculation(tree=StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])),
    }
    accepted = accepted_by_shape(TARGET, FORMS[form].spelled.format(made(form)), shapes, GREEDY)
    assert accepted["tree"] > 1.1 * accepted["chain"] > 0


def with_tables(tensors: dict[str, Tensor], table: Tensor) -> dict[str, Tensor | None]:
    """The target's embedding and head, as tensors of the folder."""
    return {"embed_tokens.weight": table, "lm_head.weight": table.clone()}


def with_another_place(tensors: dict[str, Tensor], table: Tensor) -> dict[str, Tensor | None]:
    """The layer under another name, an embedding, and the table of ids for other programs."""
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("mid")}
    moved = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layer.items()}
    mask = torch.zeros(512, dtype=torch.bool).index_fill_(0, torch.arange(400) + tensors["d2t"], True)
    return {**dict.fromkeys(layer), **moved, "embed_tokens.weight": table, "t2d": mask}


@pytest.mark.parametrize(("form", "change"), [("dspark", with_tables), ("eagle-3", with_another_place)])
def test_tables_of_the_target_and_other_names_in_a_folder_change_nothing(
    form: str,
    change: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor | None]],
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    table = load_file(TARGET / "model.safetensors")[EMBEDDING]
    other = rewritten(made(form), change(load_file(made(form) / "model.safetensors"), table), {}, tmp_path)
    own, same = (num_accepted(TARGET, FORMS[form].spelled.format(each), 4, GREEDY) for each in (made(form), other))
    assert own == same


@pytest.mark.parametrize("num_ids", [512, 200, -512])
def test_a_layer_without_a_head_uses_the_targets(num_ids: int, made: Callable[[str], Path], tmp_path: Path) -> None:
    """The target's entire head, or its rows for the tokens in `d2t`, which may be all in another order."""
    ids, in_order = torch.arange(512)[-abs(num_ids) :], num_ids > 0
    ids, num_ids = (ids, num_ids) if in_order else (ids.flip(0), -num_ids)
    head, offsets = load_file(TARGET / "model.safetensors")[EMBEDDING][ids], ids - torch.arange(num_ids)
    sizes: dict[str, object] = {"draft_vocab_size": num_ids}
    copied = rewritten(made("eagle-3"), {"lm_head.weight": head, "d2t": offsets}, sizes, tmp_path / "copied")
    table = None if num_ids == 512 and in_order else offsets
    shared = rewritten(copied, {"lm_head.weight": None, "d2t": table}, sizes, tmp_path / "shared")
    own, same = (num_accepted(TARGET, f"eagle:{each}", 4, GREEDY) for each in (copied, shared))
    assert own == same


def test_token_0_may_be_the_mask_token(tmp_path: Path) -> None:
    folder = HeadFolder.at(
        eagle_of(TARGET, tmp_path, mask_token_id=0), "masked", Blueprint.of(str(TARGET), dtype="float32")
    )
    assert EagleBlueprint.of(folder).tensors.form.mask_token == 0


TAPS = [0, 2, 4]  # of block drafters in tests
MASK: dict[str, Tensor | None] = {"mask_hidden": torch.zeros(1, 1, 192)}
WINDOWS = {"use_sliding_window": True, "sliding_window": 32, "layer_types": ["sliding_attention"] * 2}
NO_MARKOV: dict[str, object] = {"markov_rank": 0}
REFUSALS: list[tuple[str, dict[str, object], dict[str, Tensor | None], type[ModelError], str]] = [
    ("medusa", {"hidden_size": 128}, {}, UnsupportedModel, "hidden_size is 128"),
    ("medusa", {"vocab_size": 4096}, {}, UnsupportedModel, "vocab_size is 4096"),
    ("medusa", {"medusa_num_heads": 4}, {}, MissingWeights, "3.0.linear.weight"),
    ("medusa", {"medusa_num_heads": 2}, {}, UnsupportedModel, "2.0.linear.bias does not belong to 2 heads"),
    ("medusa", {"medusa_num_layers": 10**9}, {}, UnsupportedModel, "medusa_num_layers is 1000000000; .* at most 10000"),
    ("medusa", {"medusa_num_heads": 0}, {}, UnsupportedModel, "medusa_num_heads is 0"),
    ("medusa", {"hydra": True}, {}, MissingWeights, "0.in.weight"),
    ("eagle-3", {"num_hidden_layers": 2}, {}, MissingWeights, "layers.1"),
    ("eagle-3", {"mask_token_id": 7}, {}, MissingWeights, "mask_hidden"),
    ("eagle-3", {"mask_token_id": 512}, {}, UnsupportedModel, "mask_token_id is 512"),
    ("eagle-3", {}, MASK, UnsupportedModel, "mask_hidden does not belong to"),
    ("eagle-3", {"norm_before_fc": True}, {}, MissingWeights, "input_norm.weight"),
    ("eagle-3", {"fc_norm": True, "norm_before_fc": True}, {}, UnsupportedModel, "it excludes norm_before_fc"),
    ("eagle-3", {}, {"input_norm.weight": torch.ones(192)}, UnsupportedModel, "input_norm.weight does not belong to"),
    ("eagle-3", {"vocab_size": 999}, {}, UnsupportedModel, "vocab_size is 999"),
    ("eagle-3", {"hidden_size": 128}, {}, UnsupportedModel, "hidden_size is 128"),
    ("eagle-3", {"draft_vocab_size": 300}, {}, ModelError, "config.json needs"),
    ("eagle-3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, UnsupportedModel, "from 0 to 5.*for this target"),
    ("eagle-3", {"eagle_aux_hidden_state_layer_ids": 5}, {}, UnsupportedModel, "from 0 to 5"),
    ("eagle-3", {}, {"lm_head.weight": None, "d2t": None}, UnsupportedModel, "no tensor d2t"),
    ("eagle-3", {}, {"fc.weight": None}, MissingWeights, "fc.weight"),
    ("eagle-3", {}, {"fc.bias": torch.zeros(64)}, UnsupportedModel, "fc.bias does not belong to"),
    ("eagle-3", {}, {"d2t": None}, UnsupportedModel, "no tensor d2t"),
    ("eagle-3", {}, {"d2t": torch.zeros(400)}, UnsupportedModel, "integers of shape"),
    ("eagle-3", {}, {"d2t": -torch.arange(400)}, UnsupportedModel, "different ones of the target's"),
    ("eagle-1", {"bias": False}, {}, UnsupportedModel, "fc.bias does not belong to"),
    ("eagle-1", {}, {"fc.bias": None}, MissingWeights, "fc.bias"),
    ("eagle-1", {}, {"d2t": torch.zeros(400).long()}, UnsupportedModel, "d2t does not belong to"),
    (
        "eagle-1",
        {},
        {"layers.0.input_layernorm.weight": torch.ones(64)},
        UnsupportedModel,
        "layernorm.weight does not belong",
    ),
    ("eagle-1", {"hidden_size": 128}, {}, UnsupportedModel, "no lm_head.weight: name a drafter that was trained"),
    ("eagle-1", {"qkv_bias": True}, {}, MissingWeights, "q_proj.bias"),
    ("dspark", {"vocab_size": 999}, {}, UnsupportedModel, "vocab_size is 999"),
    ("dspark", {"hidden_size": 128}, {}, UnsupportedModel, "hidden_size is 128"),
    ("dspark", {"num_hidden_layers": 3}, {}, MissingWeights, "layers.2.input_layernorm"),
    ("dspark", {"num_hidden_layers": 1}, {}, UnsupportedModel, r"layers.1.*does not belong to a block drafter"),
    ("dspark", {"model_type": "llama"}, {}, UnsupportedModel, "k_norm.weight does not belong to"),
    ("dspark", {"draft_vocab_size": 300}, {}, WrongShape, "markov_w2"),
    ("dspark", {"target_layer_ids": None, "dflash_config": {}}, {}, UnsupportedModel, "from -1 to 4"),
    ("dspark", {"dflash_config": {"target_layer_ids": [1, 5]}}, {}, UnsupportedModel, "from -1 to 4"),
    ("dspark", {"dflash_config": {"target_layer_ids": [1, 1]}}, {}, UnsupportedModel, "different layers"),
    ("dspark", {"dflash_config": {"target_layer_ids": [1]}}, {}, WrongShape, "fc.weight"),
    ("dspark", {"dflash_config": {"target_layer_ids": TAPS, "block_size": 0}}, {}, UnsupportedModel, "size is 0"),
    ("dspark", {"dflash_config": 5}, {}, UnsupportedModel, "dflash_config is 5"),
    ("dspark", {"mask_token_id": 7}, {}, UnsupportedModel, "mask_embedding does not belong to"),
    ("dspark", {"mask_token_id": 512}, {}, UnsupportedModel, "mask_token_id is 512"),
    ("dspark", {"markov_rank": 16}, {}, WrongShape, "markov_w1"),
    ("dspark", NO_MARKOV, {}, WrongShape, "confidence_head.proj.weight"),
    ("dspark", NO_MARKOV | {"confidence_head_with_markov": True}, {}, UnsupportedModel, "set markov_rank"),
    (
        "dspark",
        NO_MARKOV | {"enable_confidence_head": False},
        {},
        UnsupportedModel,
        "confidence_head.proj.bias does not belong",
    ),
    ("dspark", {"markov_head_type": "gated"}, {}, UnsupportedModel, "markov_head_type is 'gated'"),
    ("dspark", {"final_logit_softcapping": 20.0}, {}, UnsupportedModel, "final_logit_softcapping is 20"),
    ("dspark", {"conv_kernel_size": 2}, {}, UnsupportedModel, "conv_kernel_size is 2"),
    ("dspark", {"selector_rank": 8}, {}, UnsupportedModel, "excludes a Markov head"),
    ("dspark", {}, {"fc.weight": None}, MissingWeights, "fc.weight"),
    ("dspark", {}, {"markov_head.markov_w2.weight": None}, MissingWeights, "markov_w2"),
    ("dspark", {}, {"fc.bias": torch.zeros(64)}, UnsupportedModel, "fc.bias does not belong to"),
    ("dspark", {}, {"d2t": -torch.arange(512)}, UnsupportedModel, "different ones of the target's"),
    ("dspark", WINDOWS, {}, UnsupportedModel, "causal is None"),
    ("adapter", {"hidden_size": 32}, {}, UnsupportedModel, r"hidden_size is 32; .*has 64: name a drafter"),
    ("adapter", {"exit_layer": 3}, {}, UnsupportedModel, r"exit_layer is 3; .* write early-exit:3:.*, or name"),
    ("adapter", {"exit_layer": None}, {}, ModelNotFound, r"its config\.json has no exit_layer: name the folder"),
    ("adapter", {"num_hidden_layers": 2}, {}, MissingWeights, r"no tensor model\.layers\.1\.input_layernorm\.weight"),
    ("adapter", {"num_attention_heads": 4}, {}, WrongShape, r"q_proj\.weight has shape \[96, 64\], .* \[64, 64\]"),
    ("adapter", {"architectures": ["T5Model"]}, {}, UnsupportedModel, r"architectures is \['T5Model'\]; supported are"),
]


@pytest.mark.parametrize(("form", "keys", "tensors", "error", "message"), REFUSALS)
def test_folders_that_do_not_fit_the_target_are_refused(
    form: str,
    keys: dict[str, object],
    tensors: dict[str, Tensor | None],
    error: type[ModelError],
    message: str,
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    target = Blueprint.of(str(TARGET), dtype="float32")
    draft = FORMS[form].spelled.format(rewritten(made(form), tensors, keys, tmp_path))
    with pytest.raises(error, match=message):
        plan_drafter(draft, DraftContext(target, target.tokenizer()))
