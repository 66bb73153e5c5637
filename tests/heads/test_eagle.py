"""EAGLE drafters: against a reference written out from the paper, at the places where the engine's rounds begin."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.config import Speculation
from forerun.errors import MissingWeights, ModelError, UnsupportedModel
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from heads.trained import eagle_of, first_eagle_of
from kit.assertions import accepted_by_shape, assert_acceptance, num_accepted
from kit.checkpoints import EMBEDDING, TARGET, read_json, rewritten
from kit.references import attention, normed, with_mlp

HEADS, KV_HEADS, DEPTH = 4, 2, 4
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "fitted")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "first")


class Reference:
    """EAGLE-3 over a whole text, as the paper and the options of `speculators` define it."""

    def __init__(self, folder: Path) -> None:
        self.w, self.table = load_file(folder / "model.safetensors"), load_file(TARGET / "model.safetensors")[EMBEDDING]
        config = read_json(folder / "config.json")
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
        x = with_mlp(self.w, "midlayer.", residual + attention(self.w, "midlayer.", read, HEADS, KV_HEADS))
        return normed(x, self.w["norm.weight"]) if "norm_output" in self.options else x

    def token(self, output: Tensor) -> int:
        """The likeliest."""
        x = output if "norm_output" in self.options else normed(output, self.w["norm.weight"])
        best = int((self.w["lm_head.weight"] @ x).argmax())
        return best + int(self.w["d2t"][best])

    def guesses(self, text: list[int], taps: Tensor) -> list[int]:
        """The likeliest chain behind `text`, whose last token the target has not read; `taps` are behind the others."""
        states, tokens, found = self.fused(taps), text[1:], list[int]()
        for _ in range(DEPTH):
            out = self.output(self.table[torch.tensor(tokens)], states)[-1]
            found.append(self.token(out))
            tokens, states = [*tokens, found[-1]], torch.cat([states, out[None]])
        return found


class FirstReference(Reference):
    """EAGLE-1 and EAGLE-2: embedding and state through one map, no norm before attention, the target's head."""

    def fused(self, taps: Tensor) -> Tensor:
        return taps[:, 0]

    def output(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = torch.cat([embedded, states], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1))
        return with_mlp(self.w, "layers.0.", x + attention(self.w, "layers.0.", x, HEADS, KV_HEADS))

    def token(self, output: Tensor) -> int:
        return int((self.table @ output).argmax())


FORMS: dict[str, tuple[Callable[[Path], Path], type[Reference], int]] = {  # and the least that is accepted
    "eagle-3": (partial(eagle_of, TARGET), Reference, 40),
    "normed": (partial(eagle_of, TARGET, norm_before_residual=True, norm_before_fc=True), Reference, 20),
    "eagle-3.1": (partial(eagle_of, TARGET, fc_norm=True, norm_output=True), Reference, 20),
    "eagle-1": (partial(first_eagle_of, TARGET), FirstReference, 20),
    "eagle-1 without bias": (partial(first_eagle_of, TARGET, bias=False), FirstReference, 20),
}


@pytest.mark.full
@pytest.mark.parametrize(("form", "chunk_tokens"), [(form, 64) for form in FORMS] + [("eagle-3", 3), ("eagle-1", 3)])
def test_an_engines_acceptance_is_that_of_the_reference_at_its_roots(
    form: str, chunk_tokens: int, tmp_path: Path
) -> None:
    make, reference_of, least = FORMS[form]
    folder, shape = make(tmp_path / "layer"), Speculation(DEPTH)
    llm = LLM(str(TARGET), f"eagle:{folder}", dtype="float32", speculation=shape, chunk_tokens=chunk_tokens)
    assert assert_acceptance(TARGET, llm, DEPTH, GREEDY, reference_of(folder).guesses) > least


def test_trees_are_plain_and_accepted_more_often_and_nothing_is_left(folder: Path) -> None:
    shapes = {"chain": Speculation(DEPTH), "tree": Speculation(DEPTH, 3, 12)}
    accepted = accepted_by_shape(TARGET, f"eagle:{folder}", shapes, GREEDY)
    assert accepted["tree"] > 1.1 * accepted["chain"] > 0


def test_embeddings_of_its_own_and_another_name_of_the_layer_are_read(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    embedding = load_file(TARGET / "model.safetensors")[EMBEDDING]
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items() if name.startswith("mid")}
    gone: dict[str, Tensor | None] = {name: None for name in weights if name.startswith("mid")}
    ids = torch.arange(400) + weights["d2t"]
    mask = torch.zeros(512, dtype=torch.bool).index_fill_(0, ids, True)
    other = rewritten(folder, gone | renamed | {"embed_tokens.weight": embedding, "t2d": mask}, {}, tmp_path)
    own, same = (num_accepted(TARGET, f"eagle:{each}", DEPTH, GREEDY) for each in (folder, other))
    assert own == same


def test_a_folder_without_a_head_uses_the_targets(folder: Path, tmp_path: Path) -> None:
    head = load_file(TARGET / "model.safetensors")[EMBEDDING]
    whole: dict[str, object] = {"draft_vocab_size": 512}
    copied = rewritten(folder, {"lm_head.weight": head, "d2t": torch.zeros(512).long()}, whole, tmp_path / "copied")
    shared = rewritten(copied, {"lm_head.weight": None, "d2t": None}, whole, tmp_path / "shared")
    own, same = (num_accepted(TARGET, f"eagle:{each}", DEPTH, GREEDY) for each in (copied, shared))
    assert own == same


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
        LLM(str(TARGET), f"eagle:{rewritten(folder, tensors, keys, tmp_path)}", dtype="float32")


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
            HeadFolder.of(str(rewritten(first, tensors, keys, tmp_path)), Blueprint.of(str(TARGET), dtype="float32"))
        )
