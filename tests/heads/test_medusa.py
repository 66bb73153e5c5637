"""Medusa heads: what they compute, that the engine asks them at the right places, and what is refused."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft.rounds import Row, committed
from forerun.config import VERIFICATIONS, Speculation, Verification
from forerun.errors import MissingWeights, ModelError, ModelNotFound, UnknownDrafter, UnsupportedModel, WrongTarget
from forerun.heads.folder import HeadFolder
from forerun.heads.medusa.drafter import MedusaBlueprint, MedusaDrafter
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from heads.trained import PROMPTS, heads_of, states, texts, written_heads

TARGET = Path(__file__).parents[1] / "data" / "stories260k"
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
    heads = MedusaBlueprint.of(HeadFolder.of(str(silent(tmp_path)), target)).load(runner.decoder)
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
    heads = MedusaBlueprint.of(HeadFolder.of(str(folder), target)).load(target.load(64).decoder)
    some, tokens = states(TARGET)[0][:rows], torch.tensor(texts(TARGET)[0])[: rows + 2].unfold(0, 3, 1)
    together = heads.logits(2, some, tokens)
    for i in range(rows):
        assert torch.equal(heads.logits(2, some[i : i + 1], tokens[i : i + 1])[0], together[i])


@pytest.mark.full
def test_an_engines_acceptance_is_that_of_the_heads_at_its_roots(folder: Path) -> None:
    """Guess by guess: the heads' first choices, computed anew from whole texts, at the places where rounds began."""
    llm = LLM(str(TARGET), f"medusa:{folder}", dtype="float32", speculation=Speculation(NUM_HEADS))
    weights, target = load_file(folder / "model.safetensors"), Blueprint.of(str(TARGET), dtype="float32")
    runner, offered, right = target.load(1024), [0] * NUM_HEADS, [0] * NUM_HEADS
    for seq_id, prompt in enumerate(PROMPTS):
        result = llm.generate(prompt, GREEDY)[0]
        text, root = [*result.prompt_token_ids, *result.outputs[0].token_ids], len(result.prompt_token_ids)
        taps = runner.read([Read(seq_id, text)], taps=(-1,)).taps
        assert taps is not None
        while root < len(text) - 1:  # the first token of an answer comes with the prompt, and is the first root
            guesses: list[int] = []
            for head in range(min(NUM_HEADS, len(text) - root - 2)):
                x = taps[root - 1, 0]
                if f"{head}.in.weight" in weights:
                    seen = runner.decoder.embedding[torch.tensor([text[root], *guesses])].flatten()
                    x = weights[f"{head}.in.weight"] @ torch.cat([x, seen])
                guesses.append(int((weights[f"{head}.1.weight"] @ x).argmax()))
            pairs = zip(guesses, text[root + 1 :], strict=False)
            accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for depth in range(min(len(guesses), accepted + 1)):
                offered[depth] += 1
                right[depth] += depth < accepted
            root += 1 + accepted
    assert sum(right) > 20
    assert (llm.stats.offered_at_depth, llm.stats.accepted_at_depth) == (offered, right)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "verification", ["coupled", *(pytest.param(rule, marks=pytest.mark.full) for rule in VERIFICATIONS[1:])]
)
def test_trees_of_any_form_are_plain_and_accepted_more_often(folder: Path, verification: Verification) -> None:
    plain = [r.outputs[0].token_ids for r in LLM(str(TARGET), dtype="float32").generate(list(PROMPTS), GREEDY)]
    accepted = {}
    shapes = {
        "chain": Speculation(NUM_HEADS),
        "tree": Speculation(NUM_HEADS, 3, 12),
        "deeper than heads": Speculation(9, 2, 20),
        "static": Speculation(tree=StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])),
    }
    for name, shape in shapes.items():
        llm = LLM(str(TARGET), f"medusa:{folder}", dtype="float32", speculation=shape, verification=verification)
        assert [r.outputs[0].token_ids for r in llm.generate(list(PROMPTS), GREEDY)] == plain
        accepted[name] = llm.stats.num_accepted
        assert llm.stats.num_drafted <= llm.stats.num_rounds * 20
        assert isinstance(llm.drafter, MedusaDrafter)
        assert not llm.drafter.states
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
    silent(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    written_heads(tmp_path, tensors, 2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(error, match=told):
        LLM(str(TARGET), f"medusa:{tmp_path}", dtype="float32")


def test_what_is_spelt_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownDrafter, match="medusa:DIR"):
        LLM(str(TARGET), "medusa")
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


def test_text_without_states_is_refused(folder: Path) -> None:
    target = Blueprint.of(str(TARGET), dtype="float32")
    drafter = MedusaDrafter(MedusaBlueprint.of(HeadFolder.of(str(folder), target)).load(target.load(64).decoder))
    with pytest.raises(WrongTarget, match="told text without them"):
        drafter.observe(committed([Row(0, [1, 5, 9])]))
