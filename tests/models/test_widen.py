"""A widened checkpoint computes its source's function, for every family and way of widening, or is not written.

The oracle is transformers: it loads the widened folder and must give the source's logits. Mutants of the recipe must be
caught by the check before writing and leave no files.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.commands.chat import label_of_widened
from forerun.commands.widening import read_amount
from forerun.drafters import draft_label
from forerun.errors import InvalidRequest, UnsupportedModel, WidenedDiffers
from forerun.llm import LLM
from forerun.models import widen as module
from forerun.models.agreement import Agreement
from forerun.models.config import ModelConfig, amount, read_config
from forerun.models.loading import Blueprint
from forerun.models.projections import count_parameters
from forerun.models.runner import Read
from forerun.models.widen import LayerOrigin, Wider, cached_widened, widen
from forerun.sampling.params import SamplingParams
from kit.checkpoints import DATA, SMALL, TARGET
from kit.command import command, refusal
from models.test_families import CASES, LENGTH, VOCAB, Case, build, our_logits

TOKENS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7))
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
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
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


def test_nan_logits_do_not_count_as_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compare_logits", lambda *_: Agreement(float("nan"), 1.0, 1.0))
    with pytest.raises(WidenedDiffers):
        widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    assert not made_in(tmp_path)


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    wider = Wider(128, 6)
    for name in ("empty", "full", "file"):
        path = tmp_path / name
        path.write_text("mine") if name == "file" else path.mkdir()
        if name == "full":
            (path / "config.json").write_text("{}")
        with pytest.raises(InvalidRequest, match=f"{name} exists and is not this widening: choose another"):
            widen(str(SMALL), path, wider)
    assert (tmp_path / "file").read_text() == "mine"
    assert made_in(tmp_path / "full") == ["config.json"]
    assert not made_in(tmp_path / "empty")
    assert {path.suffix for path in tmp_path.glob(".*")} <= {".lock"}


def test_the_same_widening_is_reused_and_another_is_not(tmp_path: Path) -> None:
    seen: list[str] = []
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert widen(str(SMALL), folder, Wider(128, 6), lambda what, _: seen.append(what)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert not seen
    others: list[tuple[Wider, int]] = [
        (Wider(128, 7), 0),
        (Wider(256, 6), 0),
        (Wider(128, 6, mlp=1000), 0),
        (Wider(128, 6), 1),
    ]
    for wider, seed in others:
        with pytest.raises(InvalidRequest, match=r"out: .* is not this widening"):
            widen(str(SMALL), folder, wider, seed=seed)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_the_cache_knows_weights_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = source_of(tmp_path / "source", TIED)
    first = cached_widened(str(source), Wider(256, 4))
    assert first.parent == tmp_path / "cache" / "forerun" / "widened"
    assert cached_widened(str(source), Wider(256, 4)) == first
    assert cached_widened(str(source), Wider(256, 5)) != first
    file = max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert cached_widened(str(source), Wider(256, 4)) != first
    assert len(made_in(first.parent)) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_widened(str(source), Wider(64, 4)).is_relative_to(tmp_path / "home" / ".cache" / "forerun")


def test_two_concurrent_widenings_write_one_folder(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {"a": [], "b": []}

    def work(name: str) -> None:
        widen(str(SMALL), tmp_path / "wide", Wider(256, 8), lambda what, _: seen[name].append(what))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, seen))
    assert sorted(map(bool, seen.values())) == [False, True]
    assert made_in(tmp_path) == ["wide"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"out: .*file/wide cannot be written .*choose another"):
        widen(str(SMALL), tmp_path / "file" / "wide", Wider(128, 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        InvalidRequest, match=r"^cache: .*file/forerun/widened/.* cannot be written .*set XDG_CACHE_HOME"
    ):
        cached_widened(str(SMALL), Wider(128, 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(InvalidRequest, match=r"^cache: .*0\.0 GB are free: set XDG_CACHE_HOME"):
        cached_widened(str(SMALL), Wider(256, 6))
    with pytest.raises(InvalidRequest, match=r"out: .* are needed there, 0\.0 GB are free: choose another"):
        widen(str(SMALL), tmp_path / "wide", Wider(256, 6))
    assert not (tmp_path / "wide").exists(), "nothing is written before"
    monkeypatch.setattr(module, "cache_folder", lambda kind: (_ for _ in ()).throw(OSError("no home: set HOME")))
    with pytest.raises(InvalidRequest, match="cache: no home: set HOME"):
        cached_widened(str(SMALL), Wider(128, 6))


def test_shards_have_the_requested_size_and_progress_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[str, float]] = []
    monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6), lambda *news: progress.append(news))
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert Blueprint.of(str(folder)).load(64).decoder.config.hidden == 128
    for stage in {what for what, _ in progress}:
        fractions = [done for what, done in progress if what == stage]
        assert fractions == sorted(fractions), stage
        assert 0 < fractions[0] <= fractions[-1] == 1.0, stage
    assert len({what for what, _ in progress}) == 3


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_next_to_the_weights_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in TARGET.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    extra = {
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "generation_config.json": '{"eos_token_id": [2, 3]}',
        "LICENSE": "x",
    }
    (source / "additional_chat_templates").mkdir()
    for name, text in extra.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("what the small model scores")
    folder = widen(str(source), tmp_path / "wide", Wider(128, 6))
    kept = files_of(source) - {"README.md", "model.safetensors"}
    made = {name for name in files_of(folder) if "safetensors" not in name}
    assert kept >= {"tokenizer.json", "config.json", *extra}
    assert made == kept
    for name in kept - {"config.json"}:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert read_config(folder).eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("wider", "message"),
    [
        (Wider(63, 5), "hidden: 63 must be a whole number of at least 64"),
        (Wider(64, 4), "layers: 4 must be a whole number of at least 5"),
        (Wider(64, 5, mlp=10), "mlp: 10 must be"),
        (Wider(64, 5, heads=4), "heads: 4 must be a whole number of at least 8"),
        (Wider(64, 5, heads=9), "heads: 9 must be a multiple of 2"),
        (Wider(65, 5), "heads: 8 must divide hidden, 65"),
        (Wider(64, 5, heads=10), "heads: 10 must divide hidden, 64"),
    ],
)
def test_shapes_that_do_not_fit_are_named(wider: Wider, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        widen(str(TARGET), tmp_path / "wide", wider)
    assert not made_in(tmp_path)


def test_a_widened_checkpoint_is_not_widened_again(tmp_path: Path) -> None:
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    with pytest.raises(UnsupportedModel, match=r"already widened, .* to 1\.\d M parameters\): widen its source"):
        widen(str(folder), tmp_path / "wider", Wider(256, 6))


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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (11_015_040, "11 M"),
        (509_670_912, "0.51 B"),
        (926_336, "0.93 M"),
        (99_600_000, "100 M"),
        (405_000_000_000, "405 B"),
        (5_000, "5 K"),
        (7, "7"),
    ],
)
def test_amounts_have_two_digits(count: int, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(
    ("text", "count"), [("0.5B", 5 * 10**8), ("21M", 21 * 10**6), ("21 m", 21 * 10**6), ("900k", 900_000), ("77", 77)]
)
def test_amounts_are_parsed_in_usual_spellings(text: str, count: int) -> None:
    assert read_amount(text) == count


@pytest.mark.parametrize("text", ["", "B", "1T", "-3M", "1.2.3B"])
def test_an_invalid_amount_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"parameters: .* is not a number of parameters: write it like 21M"):
        read_amount(text)


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    data, out = DATA, tmp_path_factory.mktemp("wide")
    target = widen(str(data / "stories260k"), out / "target", Wider(128, 6))
    return target, widen(str(data / "stories280k"), out / "draft", Wider(256, 8))


def test_every_report_of_a_speed_says_that_the_model_is_widened(wide_pair: tuple[Path, Path]) -> None:
    target, draft = wide_pair
    widened = "stories260k (widened from 0.26 M to 1.2 M parameters)"
    given = ("--model", str(target), "--draft", f"model:{draft}", "-n", "4", "--max-model-len", "64", "-t", "0", "Once")
    card = command("generate", *given)
    assert card.exit_code == 0
    shown = json.loads(command("generate", "--json", *given).stdout)
    config = read_config(draft)
    assert config.widened is not None
    for model, drafter in ((card.stderr, card.stderr), (shown["model"], shown["draft"])):
        assert widened in model
        assert config.widened in drafter
    llm = LLM(str(target), f"model:{draft}", max_model_len=64)
    label = label_of_widened(llm)
    assert llm.name in label
    assert llm.draft_name == f"model:{config.widened}"
    assert llm.draft_name in label
    assert "widened" in llm.name
    plain = TARGET
    assert label_of_widened(LLM(str(plain), "ngram", max_model_len=64)) == ""


def test_nested_drafters_are_named_too(wide_pair: tuple[Path, Path]) -> None:
    label = draft_label(f"cascade[ngram:3,model:{wide_pair[1]},mix[ngram]]")
    assert label == f"cascade[ngram:3,model:{read_config(wide_pair[1]).widened},mix[ngram]]"
    assert draft_label(None) == ""


def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "wide"
    for _ in range(2):
        result = command("widen", "--model", str(SMALL), "--out", str(out), "--parameters", "5M")
        assert result.exit_code == 0, result.stderr
        for words in ("0.28 M parameters: ", "4.9 M parameters: ", "logits  differ by at most ", str(out)):
            assert words in result.stdout
    explicit = command("widen", "-m", str(SMALL), "--out", str(tmp_path / "b"), "--layers", "9", "--mlp", "512")
    assert explicit.exit_code == 0
    assert read_config(tmp_path / "b").layers == 9
    assert read_config(tmp_path / "b").intermediate == 512
    sparse = command("widen", "-m", str(SMALL), "--out", str(tmp_path / "c"), "--experts", "4", "--active", "3")
    assert sparse.exit_code == 0, sparse.stderr
    assert "4 experts of 192, 3 per token" in sparse.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no new size is given: give --parameters 0.5B"),
        (("--parameters", "5M", "--layers", "9"), "give either it or the sizes"),
        (("--parameters", "five"), "'five' is not a number of parameters"),
        (("--parameters", "5K"), "must be at least the model's own"),
        (("--layers", "1"), "layers: 1 must be a whole number of at least"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal("widen", "--model", str(SMALL), "--out", str(tmp_path / "wide"), *arguments)
    assert not (tmp_path / "wide").exists()


def test_a_source_without_an_end_is_widened_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(tmp_path / "source", TIED)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(values | {"eos_token_id": None}))
    widen(str(source), tmp_path / "wide", Wider(256, 4))
    assert not caplog.messages
