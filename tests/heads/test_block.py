"""Block drafters: confidence, independence of rows, and the number of positions of a block that are read."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun.config import Speculation
from forerun.draft.base import Budget
from forerun.draft.model.grower import with_first
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.heads.block.drafter import MASKED, BlockBlueprint, BlockDrafter
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from heads.references import FORMS, GREEDY, block_draft
from kit.checkpoints import TARGET, read_json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of a form, made once."""
    folder = tmp_path_factory.mktemp("blocks")
    return cache(lambda form: FORMS[form].make(folder / form))


def test_survival_along_first_children_is_the_product_of_confidences(made: Callable[[str], Path]) -> None:
    folder, target = made("dspark"), Blueprint.of(str(TARGET), dtype="float32")
    runner, text = target.load(1024), [1, 403, 407, 261, 378]
    plan = plan_drafter(f"block:{folder}", DraftContext(target, target.tokenizer()))
    built = plan.build(dict.fromkeys(plan.models, 512), None, runner)
    assert built is not None
    drafter = DrafterWithTarget(runner, built)
    drafter.observe(committed([Row(0, text)]))
    draft = drafter.propose(draws_of([Row(0, text)], 512), [Budget(4, min_survival=1e-9)])
    taps = runner.read([Read(1, text[:-1])], taps=built.taps).taps
    assert taps is not None
    weights, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    draft_tokens, chances = block_draft(weights, config, runner.decoder.embedding, text, taps)
    assert draft.tree.tokens[0, 1:].tolist() == draft_tokens[:4]
    assert draft.survival is not None
    torch.testing.assert_close(draft.survival[0], torch.tensor([1.0, *chances[:4]]).cumprod(0), rtol=1e-4, atol=1e-6)
    assert 0.05 < min(chances) < max(chances) < 0.95
    above = chances[0] * chances[1]
    cut = drafter.propose(draws_of([Row(0, text)], 512), [Budget(4, min_survival=0.99 * above)])
    assert int(cut.tree.valid.sum()) - 1 == 2
    wide = drafter.propose(draws_of([Row(0, text)], 512), [Budget(1, 3, 3)])
    assert wide.survival is not None
    assert wide.survival[0, 1] == pytest.approx(chances[0], rel=1e-4)
    assert wide.survival[0, 1:].sum() < 1 + 1e-6


def test_other_children_share_the_survival_that_the_first_leaves() -> None:
    assert with_first([0.5, 0.3, 0.1], 0.8) == pytest.approx([0.8, 0.12, 0.04])
    assert with_first([1.0, 0.0], 0.9) == [0.9, 0.0]


@pytest.mark.short("dspark-options0", "selector-options0")
@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("kind", ["dspark", "causal", "selector"])
def test_a_row_does_not_depend_on_the_others_nor_on_chunks(
    kind: str, options: dict[str, str], made: Callable[[str], Path]
) -> None:
    """To the bit: states, logits, and the outputs of the heads."""
    settings: dict[str, Any] = {"dtype": "float32"} | options
    target = Blueprint.of(str(TARGET), **settings)
    planned = BlockBlueprint.of(HeadFolder.at(made(kind), str(made(kind)), target))
    host, dice = target.load(64), torch.Generator().manual_seed(3)
    lengths, block = (4, 9, 40), planned.tensors.config
    features = [torch.randn(n, len(block.taps), target.config.hidden, generator=dice) for n in lengths]
    places = [5, *[MASKED] * (block.block_size - 1)]

    def observe(layers: BlockDrafter, seq_ids: list[int], pieces: int) -> None:
        for piece in range(pieces):
            parts = {s: features[s][piece * lengths[s] // pieces : (piece + 1) * lengths[s] // pieces] for s in seq_ids}
            reads = [Read(s, [0] * len(part)) for s, part in parts.items() if len(part)]
            shown = torch.cat([part for part in parts.values() if len(part)])
            layers.runner.read(reads, inputs=layers.decoder.fuse(shown))
            layers.runner.keep([r.seq_id for r in reads], [range(len(r.tokens)) for r in reads])

    found: list[list[Tensor]] = []
    for groups, pieces in (([[0, 1, 2]], 1), ([[2], [0], [1]], 4)):
        layers = planned.build(1024, host)
        assert isinstance(layers, BlockDrafter)
        heads = layers.decoder
        results: dict[int, list[Tensor]] = {}
        for group in groups:
            observe(layers, group, pieces)
            read = layers.runner.read([Read(s, places, judged=range(block.block_size)) for s in group])
            states = layers.decoder.states(read.hidden)
            before = torch.tensor([9, 8, 7, 6, 5] * len(group))
            after = read.logits if heads.after is None else heads.after(read.logits, states, before)
            confidence = states[:, :1] if heads.confidence is None else heads.confidence(states, before)[:, None]
            for i, s in enumerate(group):
                rows = slice(i * block.block_size, (i + 1) * block.block_size)
                results[s] = [read.hidden[rows], after[rows], confidence[rows]]
        found.append([tensor for s in sorted(results) for tensor in results[s]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_states_stored_by_a_backend_are_those_that_its_passes_write(kernels: str, made: Callable[[str], Path]) -> None:
    """To the bit: the keys and values that each layer's attention reads."""
    target = Blueprint.of(str(TARGET), dtype="float32", kernels=kernels)
    planned = BlockBlueprint.of(HeadFolder.at(made("dspark"), "dspark", target))
    decoder, found = planned.load(64, target.load(64).decoder), []
    context = torch.randn(7, decoder.config.hidden, generator=torch.Generator().manual_seed(1))
    for remembers in (False, True):
        runner = Runner.of(decoder, 64)
        runner.cache.reserve([0], [len(context)])
        batch = runner.pack([Read(0, [0] * len(context))])
        if remembers:
            decoder.executor.write_kv(context, batch, runner.cache)
        for layer in () if remembers else range(decoder.config.layers):
            decoder.executor.run(range(layer, layer + 1), torch.zeros_like(context), batch, runner.cache, context)
        found.append([stored[:, :, batch.slots] for stored in (runner.cache.keys, runner.cache.values)])
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*found, strict=True))


def test_a_causal_block_is_read_up_to_the_draft_depth_and_others_in_full(made: Callable[[str], Path]) -> None:
    for kind, depth, places in (("causal", 2, 2), ("dspark", 2, 5), ("selector", 2, 5)):
        folder = HeadFolder.at(made(kind), str(made(kind)), Blueprint.of(str(TARGET), dtype="float32"))
        block = BlockBlueprint.of(folder).tensors.config
        assert block.num_places(depth) == places
        assert block.deepest(places - 1) < depth
        assert [block.deepest(room) for room in (0, 1, 64)] == [0, 1 if kind == "causal" else 0, block.most_depth]


def test_drafts_end_at_the_last_position(made: Callable[[str], Path]) -> None:
    """Text at the last position is decoded plainly, and before that drafted as far as a block fits."""
    params = replace(GREEDY, max_tokens=400)
    for kind in ("causal", "dspark"):
        prompt = [1, *[403, 407, 261, 378] * 120]
        llm = LLM(str(TARGET), f"block:{made(kind)}", dtype="float32", speculation=Speculation(4))
        plain = LLM(str(TARGET), dtype="float32")
        assert llm.generate([prompt], params)[0].outputs == plain.generate([prompt], params)[0].outputs
        assert llm.stats.num_drafted > 0
