"""A widened checkpoint computes its source's function, for every family and way of widening, or is not written.

The oracle is transformers: it loads the widened folder and must give the source's logits. Mutants of the recipe must be
caught by the check before writing and leave no files.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.errors import InvalidRequest, UnsupportedModel, WidenedDiffers
from forerun.llm import LLM
from forerun.models import widen as module
from forerun.models.config import ModelConfig, read_config
from forerun.models.loading import Blueprint
from forerun.models.projections import count_parameters
from forerun.models.runner import Read
from forerun.models.widen import LayerOrigin, Wider, widen
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET
from models.test_families import CASES, LENGTH, TOKENS, Case, build, our_logits

BY_NAME = {f"{case.family}: {case.name}": case for case in CASES}
TIED, BIASED = BY_NAME["llama: tied, grouped"], BY_NAME["llama: all biases"]
WINDOWS, UPPER = BY_NAME["qwen3: listed windows, biases"], BY_NAME["qwen2: upper windows"]

Grow = Callable[[ModelConfig], Wider]
WAYS: dict[str, Grow] = {
    "hidden": lambda c: Wider(4 * c.hidden, c.layers, c.intermediate, c.heads),
    "hidden, by no power of 4": lambda c: Wider(c.hidden + 24, c.layers, c.intermediate, c.heads),
    "neurons": lambda c: Wider(c.hidden, c.layers, c.intermediate + 33, c.heads),
    "heads": lambda c: Wider(c.hidden, c.layers, c.intermediate, 2 * c.heads),
    "layers": lambda c: Wider(c.hidden, 7, c.intermediate, c.heads),
    "all": lambda c: Wider(4 * c.hidden, 8),
    "all, oddly": lambda c: Wider(c.hidden + 8, 5, c.intermediate + 1, c.heads + 2 * c.group),
}


def made_in(folder: Path) -> list[str]:
    """The names there, but for those of locks."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@torch.inference_mode()
def transformers_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto").eval()
    logits: Tensor = model(TOKENS[None]).logits[0].float()
    return logits


def source_of(folder: Path, case: Case, dtype: torch.dtype = torch.float32) -> Path:
    model: Any = build(case, folder)
    if dtype != torch.float32:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.short("llama: all biases-hidden, by no power of 4", "qwen3: listed windows, biases-all")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [TIED, BIASED, UPPER, WINDOWS], ids=lambda case: f"{case.family}: {case.name}")
def test_every_way_of_growing_keeps_the_function(case: Case, way: str, tmp_path: Path) -> None:
    keeps_the_function(case, WAYS[way], tmp_path)


@pytest.mark.short("llama: theta", "gpt_oss: yarn of its own, no biases")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_widening_keeps_the_function_of_every_family_or_is_refused(case: Case, tmp_path: Path) -> None:
    if read_config(source_of(tmp_path / "unread", case)).is_plain:
        keeps_the_function(case, WAYS["all"], tmp_path)
        return
    with pytest.raises(UnsupportedModel, match="only Llama's layers can be widened"):
        keeps_the_function(case, WAYS["all"], tmp_path)


@pytest.mark.short("llama: all biases-all", "qwen3: listed windows, biases-all, oddly")
@pytest.mark.parametrize("way", ["all", "all, oddly"])
@pytest.mark.parametrize("case", [BIASED, WINDOWS], ids=lambda case: f"{case.family}: {case.name}")
def test_a_large_eps_keeps_its_effect(case: Case, way: str, tmp_path: Path) -> None:
    """In head norms too, whose inputs keep their width."""
    keeps_the_function(with_large_eps(case), WAYS[way], tmp_path)


def with_large_eps(case: Case) -> Case:
    return replace(case, options=case.options | {"rms_norm_eps": 0.5})


def keeps_the_function(case: Case, grow: Grow, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", case)
    config = read_config(source)
    wider = grow(config)
    folder = widen(str(source), tmp_path / "wide", wider)
    found = Blueprint.of(str(folder))
    assert replace(found.config, widened=None) == wider.shape(config)
    assert found.num_bytes == 4 * count_parameters(found.config)
    assert count_parameters(found.config) > count_parameters(config)
    expected = transformers_logits(source)
    assert expected.std() >= 3
    torch.testing.assert_close(transformers_logits(folder), expected, rtol=0, atol=2e-4)
    chunks = [1, 2, 40, 1, LENGTH - 44]
    torch.testing.assert_close(our_logits(found, TOKENS.tolist(), chunks), expected, rtol=0, atol=2e-4)


@pytest.mark.short("torch.float16-llama: all biases-all")
@pytest.mark.parametrize("way", ["all", "all, oddly"])
@pytest.mark.parametrize("case", [TIED, BIASED, WINDOWS], ids=lambda case: f"{case.family}: {case.name}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_stay_16_bits_and_move_logits_no_further_than_they_did(
    case: Case, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = source_of(tmp_path / "source", case, dtype)
    folder = widen(str(source), tmp_path / "wide", WAYS[way](read_config(source)))
    assert read_config(folder).dtype == dtype
    with safe_open(next(folder.glob("*.safetensors")), framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = model(TOKENS[None]).logits[0]
    noise = (transformers_logits(source) - exact).std()
    assert (transformers_logits(folder) - exact).std() < 1.6 * noise


def tensors(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_unused_weights_are_random_with_the_size_of_used_ones(tmp_path: Path) -> None:
    """Zeros are only where something would be added to the stream; the rest looks like its neighbours."""
    source = source_of(tmp_path / "source", BIASED)
    folder = widen(str(source), tmp_path / "wide", Wider(256, 6))
    old, new = tensors(source), tensors(folder)
    real = json.loads((folder / "config.json").read_text())["forerun_widened"]["real_layers"]
    assert real == [1, 3, 5]
    gain = "model.layers.{}.input_layernorm.weight"
    assert torch.equal(2 * new[gain.format(3)][:64], old[gain.format(1)]), "a ratio of 4 loses no bit"
    for name, tensor in new.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        resembled = old[name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer // 2}.")]
        dead = torch.ones_like(tensor, dtype=torch.bool)
        if layer is None or layer in real:
            dead[tuple(slice(n) for n in resembled.shape)] = False
        if any(writer in name for writer in ("o_proj", "down_proj")) or name == "model.embed_tokens.weight":
            assert not tensor[dead].any(), name
        else:
            assert (tensor[dead] != 0).all(), name
            assert 0.4 < tensor[dead].std() / resembled.std() < 1.5, name  # gains shrink by 2
    assert {int(n.split(".")[2]) for n in new if n.startswith("model.layers.")} == set(range(6))


GIVEN = [TIED, BY_NAME["mistral: window"], BY_NAME["qwen3: head norms"]]


@pytest.mark.short("qwen3: head norms")
@pytest.mark.parametrize("case", GIVEN, ids=lambda case: f"{case.family}: {case.name}")
def test_a_dense_source_that_is_given_experts_keeps_its_function(case: Case, tmp_path: Path) -> None:
    """Whichever experts a token takes; and they differ."""
    grow: Grow = lambda c: Wider(4 * c.hidden, 5, 3 * c.intermediate, experts=6, active=3)  # noqa: E731
    keeps_the_function(case, grow, tmp_path)
    found = Blueprint.of(str(tmp_path / "wide"))
    assert found.config.experts is not None
    assert (found.config.experts.count, found.config.experts.active) == (6, 3)
    new = tensors(tmp_path / "wide")
    named = ("w2.weight", "down_proj.weight")
    downs = [tensor for name, tensor in new.items() if "layers.2." in name and name.endswith(named)]
    assert len(downs) == 6
    assert all(not torch.equal(a, b) for i, a in enumerate(downs) for b in downs[:i])
    runner = found.load(256)
    with torch.inference_mode():
        runner.read([Read(0, TOKENS[:40].tolist())])
    assert runner.decoder.num_experts_read > 0.9 * 6 * 5, "tokens take different experts"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (BIASED, "experts: 4 are not possible: mixtral has no biases or windows like those of"),
        (WINDOWS, "experts: 4 are not possible: qwen3_moe has no biases or windows"),
        (UPPER, "experts: 4 are not possible for a model of qwen2: leave it out"),
        (BY_NAME["mixtral: two of eight experts"], "experts: 4 are not possible for a model of mixtral"),
    ],
    ids=lambda value: value.family if isinstance(value, Case) else "",
)
def test_sources_that_cannot_be_given_experts_are_named(case: Case, message: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", case)
    with pytest.raises(InvalidRequest, match=message):
        widen(str(source), tmp_path / "wide", Wider(128, 3, experts=4))


def test_the_seed_determines_the_unused_weights(tmp_path: Path) -> None:
    wider = Wider(128, 6)
    first, again, other = (
        tensors(widen(str(SMALL), tmp_path / name, wider, seed=seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])


PROMPT = "Once upon a time, Lily"


def answers(model: str, draft: str | None = None) -> list[tuple[int, ...]]:
    """Greedy and drawn, in float32."""
    llm = LLM(model, draft, dtype="float32", max_model_len=128)
    asked = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0)]
    return [result.outputs[0].token_ids for result in llm.generate([PROMPT] * 2, asked)]


@pytest.mark.full
def test_texts_are_the_sources(tmp_path: Path) -> None:
    wide = widen(str(TARGET), tmp_path / "target", Wider(256, 7))
    draft = widen(str(SMALL), tmp_path / "draft", Wider(read_config(SMALL).hidden * 4, 7))
    expected = answers(str(TARGET))
    assert answers(str(wide)) == expected
    assert answers(str(wide), f"model:{draft}") == expected


def no_rescaled_eps(wider: Wider, config: ModelConfig) -> ModelConfig:
    return replace(shape_of(wider, config), norm_eps=config.norm_eps)


shape_of, origins_of, shrunk = Wider.shape, Wider.origins, module.shrunk
WRITERS = module.WRITERS
MUTANTS: dict[str, tuple[str, object]] = {
    "gains as they were": ("shrunk", lambda source, plan: source),
    "gains by the ratio, not its root": ("shrunk", lambda source, plan: shrunk(shrunk(source, plan), plan)),
    "random output columns": ("WRITERS", ()),
    "random columns of heads": ("WRITERS", tuple(w for w in WRITERS if w != "o_proj.weight")),
    "random columns of neurons": ("WRITERS", tuple(w for w in WRITERS if w != "down_proj.weight")),
    "random biases of heads": ("WRITERS", tuple(w for w in WRITERS if w != "o_proj.bias")),
    "random biases of neurons": ("WRITERS", tuple(w for w in WRITERS if w != "down_proj.bias")),
    "random channels of the embedding": ("EMBEDDING", "none"),
    "eps of head norms as it was": ("HEAD_NORMED", ()),
    "head norms scaled": ("STREAM_NORMS", ("norm.weight",)),
    "final norm forgotten": ("STREAM_NORMS", module.STREAM_NORMS[:2]),
    "eps as it was": ("Wider.shape", no_rescaled_eps),
    "layers twice": ("Wider.origins", lambda w, c: [replace(o, real=True) for o in origins_of(w, c)]),
    "layers in another order": ("Wider.origins", lambda w, c: origins_of(w, c)[::-1]),
    "a layer lost": ("Wider.origins", lambda w, c: [LayerOrigin(0, False), *origins_of(w, c)[:-1]]),
}


@pytest.mark.short("torch.float32-random columns of heads", "torch.float32-final norm forgotten")
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_recipe_is_caught_and_leaves_no_files(
    mutant: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = with_large_eps(WINDOWS if "head norms" in mutant else BIASED)
    source = source_of(tmp_path / "source", case, dtype)
    (tmp_path / "out").mkdir()
    target, change = MUTANTS[mutant]
    with monkeypatch.context() as patch:
        patch.setattr(f"forerun.models.widen.{target}", change)
        with pytest.raises(WidenedDiffers, match="has logits that differ by up to"):
            widen(str(source), tmp_path / "out" / "wide", Wider(256, 5))
        assert not made_in(tmp_path / "out")
    assert widen(str(source), tmp_path / "out" / "wide", Wider(256, 5)).is_dir()


@given(st.integers(0, 10**11))
@settings(deadline=None)
def test_a_size_is_met_within_half_a_layer_by_an_exact_ratio(asked: int) -> None:
    config = read_config(TARGET)
    if asked < count_parameters(config):
        with pytest.raises(InvalidRequest, match=r"parameters: .* must be at least the model's own 0\.26 M"):
            Wider.of(config, asked)
        return
    wider = Wider.of(config, asked)
    wide = wider.shape(config)
    layer = count_parameters(replace(wider, layers=wider.layers + 1).shape(config)) - count_parameters(wide)
    assert abs(count_parameters(wide) - asked) <= layer / 2
    assert wider.hidden in (64 * 4**k for k in range(10))


@given(st.integers(1, 10), st.integers(0, 30))
def test_real_layers_keep_their_order_and_come_once(count: int, more: int) -> None:
    config = replace(read_config(TARGET), layers=count)
    origins = Wider(64, count + more).origins(config)
    assert [origin.layer for origin in origins if origin.real] == list(range(count))
    assert len(origins) == count + more
    assert origins[-1].real
    places = [i for i, origin in enumerate(origins) if origin.real]
    gaps = [b - a for a, b in zip([-1, *places], places, strict=False)]
    assert max(gaps) - min(gaps) <= 1
