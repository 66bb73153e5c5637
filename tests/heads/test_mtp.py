"""MTP drafters, token by token: compared with a reference from the papers, and with transformers' modules."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from forerun.config import Speculation
from forerun.draft.auto import resolve_auto
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.spec import DraftSpec
from forerun.errors import MissingWeights, ModelError, UnknownDrafter, UnsupportedModel, WrongShape
from forerun.heads.mtp.drafter import MtpDecoder, MtpDrafter
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from heads.modules import NAMES, apart, shipped_with
from kit.assertions import num_accepted, tokens_of
from kit.checkpoints import TARGET, read_json, rewritten
from kit.gguf_files import metadata_of, vocabulary, write_gguf
from kit.references import attention, rms_norm, with_mlp
from kit.sparse import write_architecture, write_sparse
from kit.texts import STARTS

LAYERS, HEADS, KV_HEADS, DEPTH = 5, 8, 4, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
Proposals = list[tuple[list[int], list[int]]]  # a text up to its root, and the chain drafted after it


def layer_output(w: dict[str, Tensor], place: str, x: Tensor) -> Tensor:
    """A decoder layer over an entire text."""
    inner = rms_norm(x, w[f"{place}input_layernorm.weight"])
    return with_mlp(w, place, x + attention(w, place, inner, HEADS, KV_HEADS))


def reference_chain(
    w: dict[str, Tensor], naming: str, count: int, text: Sequence[int], states: Tensor, depth: int
) -> list[int]:
    """The likeliest chain after `text`; `states` are the target's states of all its tokens but the last.

    Module k reads, at every position, the token k + 1 positions further on and the output of the module before.
    """
    whole, places, table = list(text), len(text) - 1, w["model.embed_tokens.weight"]
    for step in range(depth):
        module = min(step, count - 1)
        names = {key: n.format(module + LAYERS * (naming == "deepseek")) for key, n in NAMES[naming].items()}
        tokens = torch.tensor(whole[1 + module : 1 + module + places + step - module])
        embedded = rms_norm(w.get(names.get("table", ""), table)[tokens], w[names["e"]])
        pair = [embedded, rms_norm(states, w[names["h"]])]
        x = torch.cat(pair[::-1] if naming == "mimo" else pair, dim=1) @ w[names["projection"]].T
        outputs = rms_norm(layer_output(w, names["layer"], x), w[names["norm"]])
        whole.append(int((outputs[-1] @ w.get(names.get("head", ""), w.get("lm_head.weight", table)).T).argmax()))
        states = outputs if step < count - 1 else torch.cat([states, outputs[-1:]])
    return whole[len(text) :]


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """A list to which the chain drafter's proposals are appended."""
    found: Proposals = []
    assert isinstance(llm.drafter, MtpDrafter)
    plain = llm.drafter.propose

    def proposing(draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        draft = plain(draws, budgets, tail)
        for row, chain in zip(draws.rows, draft.tree.tokens.tolist(), strict=True):
            found.append((list(row.tokens), [token for token in chain[1:] if token >= 0]))
        return draft

    monkeypatch.setattr(llm.drafter, "propose", proposing)
    return found


CASES = [
    ("deepseek", 1, False),
    ("mimo", 1, False),
    ("qwen", 2, False),
    ("deepseek", 3, True),
]


@pytest.mark.short("deepseek-3-True-auto")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("naming", "count", "own_tables"), CASES)
def test_every_chain_is_that_of_the_reference(
    naming: str, count: int, own_tables: bool, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds of an engine, from any root, also deeper than there are modules, and near a text's start."""
    folder = shipped_with(TARGET, tmp_path / "target", count, naming)
    if own_tables:  # embeddings and heads that are no copies of the target's
        stored = load_file(folder / "model.safetensors")
        tables = ("head.head.weight", f"{LAYERS + 1}.embed_tokens.weight")
        ours = {n: t for n, t in stored.items() if n.endswith(tables)}
        rewritten(folder, {n: t + 0.3 * t.roll(1, 0) for n, t in ours.items()}, {})
    options: dict[str, Any] = {"dtype": "float32", "kernels": kernels, "speculation": Speculation(DEPTH)}
    llm = LLM(str(folder), "mtp", chunk_tokens=5, **options)
    prompts: list[str | list[int]] = [*STARTS[:3], [1]]
    found, weights, num_drafted = watched(llm, monkeypatch), load_file(folder / "model.safetensors"), 0
    answers = llm.generate(prompts, GREEDY)
    runner, states = Blueprint.of(str(TARGET), dtype="float32").load(1024), {}
    for number, answer in enumerate(answers):
        text = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        taps = runner.read([Read(number, text)], taps=(-1,)).taps
        assert taps is not None
        states[tuple(text)] = taps[:, 0]
    for text, chain in found:
        states_of_text = next(s for whole, s in states.items() if list(whole[: len(text)]) == text)
        assert chain == reference_chain(weights, naming, count, text, states_of_text[: len(text) - 1], len(chain))
        num_drafted += len(chain)
    assert num_drafted > 200
    assert llm.stats.num_accepted > 0.15 * llm.stats.num_drafted / DEPTH
    llm.close()


FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32, "tie_word_embeddings": True}}
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def random_target(family: str, count: int, naming: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MtpModel:
    """A checkpoint with random modules, written by transformers, and these as transformers loads them from it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    config.num_mtp_layers, config.mtp_layer_types = count, ["full_attention"] * count
    model = AutoModelForCausalLM.from_config(config).eval()
    modules = MtpModel(model, count)
    with torch.no_grad():
        for tensor in {*model.parameters(), *modules.parameters()}:
            tensor.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    stored = {}
    for name, tensor in modules.state_dict().items():
        if name.startswith("layers."):
            _, number, inside = name.split(".", 2)
            inside = inside.removeprefix("mtp_block.")
            renamed = {
                "deepseek": lambda n, i: f"model.layers.{n + 2}." + i.replace("post_norm", "shared_head.norm"),
                "qwen": lambda n, i: "mtp." + QWEN.get(i, f"layers.{n}.{i}"),
            }[naming](int(number), inside)
            stored[renamed] = tensor.detach()
    rewritten(folder, stored, {"num_nextn_predict_layers": count})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder)
    patterns = [rf"layers\.{2 + module}\." for module in range(count)] if naming == "deepseek" else [r"^mtp\."]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", patterns)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.config.num_mtp_layers, loaded.config.mtp_layer_types = count, ["full_attention"] * count
    return MtpModel.from_pretrained(loaded).eval()


QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "post_norm.weight": "norm.weight",
}


@pytest.mark.parametrize(
    ("family", "count", "naming"),
    [
        ("llama", 3, "deepseek"),
        ("qwen2", 1, "qwen"),
        pytest.param("llama", 1, "deepseek", marks=pytest.mark.full),
        pytest.param("qwen3", 2, "deepseek", marks=pytest.mark.full),
    ],
)
def test_chains_and_logits_are_those_of_transformers_modules(
    family: str, count: int, naming: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are modules: transformers does not go on beyond their number."""
    theirs = random_target(family, count, naming, tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    llm = LLM(str(tmp_path), "mtp", dtype="float32", speculation=Speculation(count), max_model_len=128)
    found, judged = watched(llm, monkeypatch), list[Tensor]()
    plain = MtpDecoder.logits
    monkeypatch.setattr(Runner, "draw_chains", lambda *_, **__: None)  # step by step, so that logits are recorded

    def judging(decoder: MtpDecoder, hidden: Tensor) -> Tensor:
        judged.append(plain(decoder, hidden))
        return judged[-1]

    monkeypatch.setattr(MtpDecoder, "logits", judging)
    llm.generate([[7, 300, 12, 45, 9, 400, 33]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    llm.close()
    ours = iter(judged)
    for text, chain in found:
        with torch.no_grad():
            states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
            expected, logits, _ = theirs(
                torch.tensor([text[1:]]),
                states,
                attention_mask=None,
                position_ids=torch.arange(1, len(text))[None],
                mtp_cache=MtpCache(config=theirs.config),
            )
        assert chain == expected[0, : len(chain)].tolist()
        for depth in range(len(chain)):
            assert torch.allclose(next(ours)[0], logits[0, depth], atol=2e-3)
    assert sum(len(chain) for _, chain in found) > 15 * count


@pytest.mark.parametrize("naming", NAMES)
def test_a_target_with_modules_loads_as_the_same_one_without(
    naming: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, found = shipped_with(TARGET, tmp_path / "target", 2, naming), []
    for each in (TARGET, folder):
        runner = Blueprint.of(str(each), dtype="float32").load(128)
        found.append(runner.read([Read(0, [1, 5, 9, 44], judged=(0, 3))]).logits)
    assert torch.equal(*found)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_unused_layers_that_are_no_modules_are_still_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shipped_with(TARGET, tmp_path / "target", 1, "deepseek")
    rewritten(folder, {f"model.layers.{LAYERS}.eh_proj.weight": None}, {})
    Blueprint.of(str(folder), dtype="float32")
    assert "are not used" in caplog.text
    with pytest.raises(UnsupportedModel, match="promises 1: a conversion dropped them"):
        LLM(str(folder), "mtp", dtype="float32")


NORM = torch.ones(64)
MATRIX, WIDE = torch.zeros(64, 64), torch.zeros(128, 64)
Q_PROJ, NUM = "self_attn.q_proj", "num_nextn_predict_layers"
BEHIND = f"model.layers.{LAYERS}.{Q_PROJ}"
FAULTS: list[tuple[str, dict[str, Tensor | None], dict[str, object], type[ModelError], str]] = [
    ("qwen", {"mtp.pre_fc_norm_hidden.weight": None}, {}, MissingWeights, "pre_fc_norm_hidden"),
    ("mimo", {f"model.mtp_layers.1.{Q_PROJ}.weight": None}, {}, MissingWeights, "mtp_layers.1.self_attn.q_proj"),
    ("mimo", {}, {NUM: 3}, MissingWeights, "mtp_layers.2"),
    ("mimo", {}, {NUM: 1}, UnsupportedModel, "mtp_layers.1.final_layern"),
    ("qwen", {}, {"mtp_num_hidden_layers": "two"}, UnsupportedModel, "mtp_num_hidden_layers is 'two'"),
    ("qwen", {}, {"mtp_num_hidden_layers": 10**9}, UnsupportedModel, "is 1000000000; .* at most 10000"),
    ("mimo", {}, {NUM: 10**9}, UnsupportedModel, "num_nextn_predict_layers is 1000000000; .* at most 10000"),
    ("qwen", {"mtp.fc.weight": MATRIX}, {}, WrongShape, "mtp.fc.weight has shape"),
    ("qwen", {"mtp.hc_head.weight": NORM}, {}, UnsupportedModel, "mtp.hc_head.weight does not belong"),
    ("qwen", {f"mtp.layers.0.{Q_PROJ}.weight": WIDE}, {}, WrongShape, "q_proj"),  # with gates, which no module supports
    ("deepseek", {f"{BEHIND}.bias": NORM}, {}, UnsupportedModel, "q_proj.bias does not belong"),
    ("", {"mtp.0.e_proj.weight": MATRIX}, {NUM: 2}, MissingWeights, "no tensor mtp.fc.weight"),  # DeepSeek-V4's
    ("", {}, {NUM: 0}, UnsupportedModel, "ships no MTP modules"),
]


@pytest.mark.parametrize(("naming", "tensors", "keys", "error", "message"), FAULTS)
def test_modules_that_do_not_fit_are_refused_by_name(
    naming: str,
    tensors: dict[str, Tensor | None],
    keys: dict[str, object],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
) -> None:
    place = tmp_path / "target"
    folder = shipped_with(TARGET, place, 2, naming) if naming else Path(shutil.copytree(TARGET, place))
    with pytest.raises(error, match=message):
        LLM(str(rewritten(folder, tensors, keys)), "mtp", dtype="float32")


def test_a_folder_of_modules_drafts_as_those_in_the_target_and_must_fit_it(tmp_path: Path) -> None:
    counts = []
    for number, naming in enumerate(NAMES):
        inside = shipped_with(TARGET, tmp_path / f"{number}", 2, naming)
        alone = apart(TARGET, tmp_path / f"{number} alone", 2, naming)
        for model, draft in ((inside, "mtp"), (TARGET, f"mtp:{alone}")):
            counts.append(num_accepted(model, draft, 3, GREEDY))
    assert len(set(counts)) == 1, "the layouts hold the same modules"
    rewritten(alone, {}, {"hidden_size": 128, "intermediate_size": 172, "num_attention_heads": 8})
    with pytest.raises(UnsupportedModel, match="hidden_size is 128"):
        LLM(str(TARGET), f"mtp:{alone}", dtype="float32")
    with pytest.raises(UnsupportedModel, match="no tensors of MTP modules"):
        LLM(str(TARGET), f"mtp:{TARGET}", dtype="float32")
    with pytest.raises(UnknownDrafter, match="takes no list"):
        LLM(str(TARGET), "mtp[ngram]")


@pytest.mark.short("qwen3-*")
@pytest.mark.parametrize(("architecture", "family", "count"), [("glm4", "Glm4", 1), ("qwen3", "Qwen3", 2)])
def test_modules_in_a_gguf_file_draft_as_in_the_folder_and_are_chosen_by_auto(
    architecture: str, family: str, count: int, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4} | ({"partial_rotary_factor": 0.5} if count == 1 else {})
    sizes = {"num_hidden_layers": 5, "intermediate_size": 96, "model_type": architecture, "rope_parameters": rope}
    source = write_architecture(tmp_path / "source", f"{family}ForCausalLM", num_experts=None, **sizes)
    folder = shipped_with(source, tmp_path / "folder", count, "deepseek")
    metadata = metadata_of(read_json(folder / "config.json")) | vocabulary(TARGET)
    file = write_gguf(folder, tmp_path / "model.gguf", architecture, metadata)
    found = [num_accepted(model, "mtp", 3, GREEDY) for model in (folder, file)]
    assert found[0] == found[1]
    assert found[0][1] > 0
    spec = resolve_auto(DraftSpec("auto"), Blueprint.of(str(file)))
    assert spec == DraftSpec("mtp")
    q_proj = "model.layers.5.self_attn.q_proj.weight"
    gated = rewritten(folder, {q_proj: torch.zeros(2 * HEADS * 16, 64)}, {})
    assert resolve_auto(DraftSpec("auto"), Blueprint.of(str(gated))) == DraftSpec("suffix")


@pytest.mark.full
def test_modules_of_a_sparse_target_have_experts(tmp_path: Path) -> None:
    sparse = write_sparse(tmp_path / "sparse", "qwen2_moe")
    folder = shipped_with(sparse, tmp_path / "target", 1, "qwen")
    plain = LLM(str(folder), dtype="float32").generate(list(STARTS), GREEDY)
    llm = LLM(str(folder), "mtp", dtype="float32", speculation=Speculation(2))
    found = llm.generate(list(STARTS), GREEDY)
    assert tokens_of(found) == tokens_of(plain)
    assert isinstance(llm.drafter, MtpDrafter)
    assert llm.drafter.runner.decoder.layers[0].mlp.experts
