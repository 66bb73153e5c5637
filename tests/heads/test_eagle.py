"""EAGLE drafters: against a reference written out from the paper, at the places where the engine's rounds begin."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from draft.rounds import Row, committed
from forerun.config import Speculation
from forerun.errors import MissingWeights, ModelError, UnknownDrafter, UnsupportedModel, WrongTarget
from forerun.heads.eagle.drafter import EagleBlueprint, EagleDrafter
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams
from heads.trained import PROMPTS, eagle_of, first_eagle_of

TARGET = Path(__file__).parents[1] / "data" / "stories260k"
HEADS, KV_HEADS, HEAD_DIM, DEPTH = 4, 2, 16, 4
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "fitted")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "first")


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def turned(x: Tensor) -> Tensor:
    """Rotated by position: [places, heads, head_dim]."""
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def mixed(w: dict[str, Tensor], place: str, x: Tensor) -> Tensor:
    """What attention adds, over a whole text, with a causal mask."""
    q, k, v = (x @ w[f"{place}.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k = turned(q.view(-1, HEADS, HEAD_DIM)), turned(k.view(-1, KV_HEADS, HEAD_DIM))
    v = v.view(-1, KV_HEADS, HEAD_DIM)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
    found = functional.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
    return found.transpose(0, 1).flatten(1) @ w[f"{place}.self_attn.o_proj.weight"].T


def with_mlp(w: dict[str, Tensor], place: str, x: Tensor) -> Tensor:
    """The stream with what the MLP adds."""
    inner = normed(x, w[f"{place}.post_attention_layernorm.weight"])
    gate, up = (inner @ w[f"{place}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ w[f"{place}.mlp.down_proj.weight"].T


class Reference:
    """EAGLE-3 over a whole text, as the paper and the options of `speculators` define it."""

    def __init__(self, folder: Path, target: Decoder) -> None:
        self.w, self.embedding = load_file(folder / "model.safetensors"), target.embedding
        config = json.loads((folder / "config.json").read_text())
        self.options = {name for name in OPTIONS if config.get(name)}

    def fused(self, taps: Tensor) -> Tensor:
        """The target's states as one."""
        if "fc_norm" in self.options:
            gains = torch.stack([self.w[f"fc_norm.{tap}.weight"] for tap in range(3)])
            taps = normed(taps, gains)
        joined = taps.flatten(1)
        joined = normed(joined, self.w["input_norm.weight"]) if "norm_before_fc" in self.options else joined
        return joined @ self.w["fc.weight"].T

    def output(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What later guesses read."""
        own = normed(states, self.w["midlayer.hidden_norm.weight"])
        read = torch.cat([normed(embedded, self.w["midlayer.input_layernorm.weight"]), own], -1)
        residual = own if "norm_before_residual" in self.options else states
        x = with_mlp(self.w, "midlayer", residual + mixed(self.w, "midlayer", read))
        return normed(x, self.w["norm.weight"]) if "norm_output" in self.options else x

    def token(self, output: Tensor) -> int:
        """The likeliest."""
        x = output if "norm_output" in self.options else normed(output, self.w["norm.weight"])
        best = int((self.w["lm_head.weight"] @ x).argmax())
        return best + int(self.w["d2t"][best])

    def guesses(self, text: list[int], taps: Tensor, depth: int) -> list[int]:
        """The likeliest chain behind `text`, whose last token the target has not read; `taps` are behind the others."""
        states, tokens, found = self.fused(taps), text[1:], list[int]()
        for _ in range(depth):
            out = self.output(self.embedding[torch.tensor(tokens)], states)[-1]
            found.append(self.token(out))
            tokens, states = [*tokens, found[-1]], torch.cat([states, out[None]])
        return found


class FirstReference(Reference):
    """EAGLE-1 and EAGLE-2: embedding and state through one map, no norm before attention, the target's head."""

    def __init__(self, folder: Path, target: Decoder) -> None:
        super().__init__(folder, target)
        head = load_file(TARGET / "model.safetensors")
        self.head = head.get("lm_head.weight", head["model.embed_tokens.weight"])

    def fused(self, taps: Tensor) -> Tensor:
        return taps[:, 0]

    def output(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = torch.cat([embedded, states], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1))
        return with_mlp(self.w, "layers.0", x + mixed(self.w, "layers.0", x))

    def token(self, output: Tensor) -> int:
        return int((self.head @ output).argmax())


FORMS: dict[str, tuple[Callable[[Path], Path], type[Reference], int]] = {  # and the least that is accepted
    "eagle-3": (partial(eagle_of, TARGET), Reference, 40),
    "normed": (partial(eagle_of, TARGET, norm_before_residual=True, norm_before_fc=True), Reference, 20),
    "eagle-3.1": (partial(eagle_of, TARGET, fc_norm=True, norm_output=True), Reference, 20),
    "eagle-1": (partial(first_eagle_of, TARGET), FirstReference, 20),
    "eagle-1 without bias": (partial(first_eagle_of, TARGET, bias=False), FirstReference, 20),
}


@pytest.mark.full
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "chunk_tokens"), [(form, 64) for form in FORMS] + [("eagle-3", 3), ("eagle-1", 3)])
def test_an_engines_acceptance_is_that_of_the_reference_at_its_roots(
    form: str, chunk_tokens: int, tmp_path: Path
) -> None:
    make, reference_of, least = FORMS[form]
    folder = make(tmp_path / "layer")
    options = {"dtype": "float32", "speculation": Speculation(DEPTH), "chunk_tokens": chunk_tokens}
    llm = LLM(str(TARGET), f"eagle:{folder}", **options)  # type: ignore[arg-type]
    target = Blueprint.of(str(TARGET), dtype="float32")
    runner, offered, right = target.load(1024), [0] * DEPTH, [0] * DEPTH
    reference = reference_of(folder, runner.decoder)
    assert isinstance(llm.drafter, EagleDrafter)
    for seq_id, prompt in enumerate(PROMPTS):
        result = llm.generate(prompt, GREEDY)[0]
        text, root = [*result.prompt_token_ids, *result.outputs[0].token_ids], len(result.prompt_token_ids)
        taps = runner.read([Read(seq_id, text)], taps=llm.drafter.taps).taps
        assert taps is not None
        while root < len(text) - 1:
            depth = min(DEPTH, len(text) - root - 2)
            guesses = reference.guesses(text[: root + 1], taps[:root], depth)
            pairs = zip(guesses, text[root + 1 :], strict=False)
            accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for place in range(min(len(guesses), accepted + 1)):
                offered[place] += 1
                right[place] += place < accepted
            root += 1 + accepted
    found = llm.stats.offered_at_depth, llm.stats.accepted_at_depth
    assert found == (offered[: len(found[0])], right[: len(found[1])])
    assert sum(right) == sum(found[1]) > least


def test_trees_are_plain_and_accepted_more_often_and_nothing_is_left(folder: Path) -> None:
    plain = [r.outputs[0].token_ids for r in LLM(str(TARGET), dtype="float32").generate(list(PROMPTS), GREEDY)]
    accepted = []
    for shape in (Speculation(DEPTH), Speculation(DEPTH, 3, 12)):
        llm = LLM(str(TARGET), f"eagle:{folder}", dtype="float32", speculation=shape)
        assert [r.outputs[0].token_ids for r in llm.generate(list(PROMPTS), GREEDY)] == plain
        accepted.append(llm.stats.num_accepted)
        assert isinstance(llm.drafter, EagleDrafter)
        assert not llm.drafter.sequences
        assert not llm.drafter.outputs
        assert llm.drafter.runner.cache.num_rows == 0
        llm.drafter.runner.cache.check()
    assert accepted[1] > 1.1 * accepted[0] > 0


def changed(folder: Path, new: Path, keys: dict[str, object], tensors: dict[str, Tensor | None]) -> Path:
    """A copy with other fields and tensors."""
    new.mkdir(exist_ok=True)
    config, found = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (new / "config.json").write_text(json.dumps(config | keys))
    kept = {name: tensor for name, tensor in (found | tensors).items() if tensor is not None}
    save_file(kept, new / "model.safetensors")
    return new


def test_embeddings_of_its_own_and_another_name_of_the_layer_are_read(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items() if name.startswith("mid")}
    gone: dict[str, Tensor | None] = {name: None for name in weights if name.startswith("mid")}
    ids = torch.arange(400) + weights["d2t"]
    mask = torch.zeros(512, dtype=torch.bool).index_fill_(0, ids, True)
    other = changed(folder, tmp_path, {}, gone | renamed | {"embed_tokens.weight": embedding, "t2d": mask})
    found = []
    for each in (folder, other):
        llm = LLM(str(TARGET), f"eagle:{each}", dtype="float32", speculation=Speculation(DEPTH))
        llm.generate(list(PROMPTS), GREEDY)
        found.append((llm.stats.num_drafted, llm.stats.num_accepted))
    assert found[0] == found[1]


def test_a_folder_without_a_head_uses_the_targets(folder: Path, tmp_path: Path) -> None:
    head = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    whole: dict[str, object] = {"draft_vocab_size": 512}
    copied = changed(folder, tmp_path / "copied", whole, {"lm_head.weight": head, "d2t": torch.zeros(512).long()})
    shared = changed(copied, tmp_path / "shared", whole, {"lm_head.weight": None, "d2t": None})
    found = []
    for each in (copied, shared):
        llm = LLM(str(TARGET), f"eagle:{each}", dtype="float32", speculation=Speculation(DEPTH))
        llm.generate(list(PROMPTS), GREEDY)
        found.append((llm.stats.num_drafted, llm.stats.num_accepted))
    assert found[0] == found[1]


def test_the_first_token_may_be_that_of_masked_places(tmp_path: Path) -> None:
    plan = EagleBlueprint.of(
        HeadFolder.of(str(eagle_of(TARGET, tmp_path, mask_token_id=0)), Blueprint.of(str(TARGET), dtype="float32"))
    )
    assert plan.tensors.form.mask_token == 0


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "told"),
    [
        ({"num_hidden_layers": 2}, {}, MissingWeights, "layers.1"),
        ({"mask_token_id": 7}, {}, MissingWeights, "mask_hidden"),
        ({"mask_token_id": 512}, {}, UnsupportedModel, "mask_token_id is 512"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 192)}, UnsupportedModel, "mask_hidden is none of"),
        ({"norm_before_fc": True}, {}, MissingWeights, "input_norm.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, UnsupportedModel, "only one of them"),
        ({}, {"input_norm.weight": torch.ones(192)}, UnsupportedModel, "input_norm.weight is none of"),
        ({"vocab_size": 999}, {}, UnsupportedModel, "vocab_size is 999"),
        ({"hidden_size": 128}, {}, UnsupportedModel, "hidden_size is 128"),
        ({"draft_vocab_size": 300}, {}, ModelError, "promises"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, UnsupportedModel, "from 0 to 5.*trained for this target"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, {}, UnsupportedModel, "from 0 to 5"),
        ({}, {"lm_head.weight": None}, UnsupportedModel, "no lm_head.weight for so many tokens"),
        ({}, {"fc.weight": None}, MissingWeights, "fc.weight"),
        ({}, {"fc.bias": torch.zeros(64)}, UnsupportedModel, "fc.bias is none of"),
        ({}, {"d2t": None}, UnsupportedModel, "no tensor d2t"),
        ({}, {"d2t": torch.zeros(400)}, UnsupportedModel, "whole numbers"),
        ({}, {"d2t": -torch.arange(400)}, UnsupportedModel, "another one of the target's"),
    ],
)
def test_what_does_not_fit_is_refused(
    keys: dict[str, object],
    tensors: dict[str, Tensor | None],
    error: type[ModelError],
    told: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=told):
        LLM(str(TARGET), f"eagle:{changed(folder, tmp_path, keys, tensors)}", dtype="float32")


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "told"),
    [
        ({"bias": False}, {}, UnsupportedModel, "fc.bias is none of"),
        ({}, {"fc.bias": None}, MissingWeights, "fc.bias"),
        ({}, {"d2t": torch.zeros(400, dtype=torch.long)}, UnsupportedModel, "d2t is none of"),
        ({}, {"layers.0.input_layernorm.weight": torch.ones(64)}, UnsupportedModel, "input_layernorm.weight is none"),
        ({"hidden_size": 128}, {}, UnsupportedModel, "no lm_head.weight: name a drafter that was trained for it"),
        ({"qkv_bias": True}, {}, MissingWeights, "q_proj.bias"),
    ],
)
def test_what_does_not_fit_eagle_1_is_refused(
    keys: dict[str, object],
    tensors: dict[str, Tensor | None],
    error: type[ModelError],
    told: str,
    first: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=told):
        EagleBlueprint.of(
            HeadFolder.of(str(changed(first, tmp_path, keys, tensors)), Blueprint.of(str(TARGET), dtype="float32"))
        )


def test_a_folder_must_be_named_and_text_must_come_with_states(folder: Path) -> None:
    with pytest.raises(UnknownDrafter, match="eagle:DIR"):
        LLM(str(TARGET), "eagle")
    llm = LLM(str(TARGET), f"eagle:{folder}", dtype="float32", speculation=Speculation(2))
    assert llm.drafter is not None
    with pytest.raises(WrongTarget, match="told text without them"):
        llm.drafter.observe(committed([Row(0, [1, 5, 9])]))
