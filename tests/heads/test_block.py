"""Block drafters: against a reference written out from the papers, at the places where the engine's rounds begin."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draft.rounds import Beside, Row, committed, draws_of
from forerun.config import Speculation, Verification
from forerun.draft.base import Budget
from forerun.draft.model.grower import with_first
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import MissingWeights, ModelError, UnsupportedModel, WrongShape
from forerun.heads.block.drafter import BlockBlueprint, BlockDrafter
from forerun.heads.block.network import MASKED
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from heads.trained import block_of
from kit.assertions import accepted_by_shape, assert_acceptance, num_accepted
from kit.checkpoints import EMBEDDING, TARGET, read_json, rewritten
from kit.references import normed, turned

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
KINDS: dict[str, dict[str, object]] = {
    "dflash": {"num_ids": 400},  # a head of its own, over frequent tokens
    "dspark": {"markov_rank": 32, "enable_confidence_head": True, "sample_from_anchor": True},
    "causal": {"num_ids": 512, "causal": True, "sample_from_anchor": True, "mask_token_id": 7},
    "selector": {"selector_rank": 32, "selector_top_k": 200},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each kind, made once."""
    folder, known = tmp_path_factory.mktemp("blocks"), dict[str, Path]()

    def make(kind: str) -> Path:
        if kind not in known:
            known[kind] = block_of(TARGET, folder / kind, **KINDS[kind])  # type: ignore[arg-type]
        return known[kind]

    return make


def reference_states(w: dict[str, Tensor], places: Tensor, taps: Tensor, causal: bool) -> Tensor:
    """The normed states behind a block's places: `places` are embeddings, `taps` the states of all text before it."""
    context = normed(taps.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, root, count = places, len(taps), len(places)
    for layer in range(LAYERS):
        own = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        inner = normed(x, own["input_layernorm.weight"])
        q = (inner @ own["self_attn.q_proj.weight"].T).view(-1, HEADS, HEAD_DIM)
        both = torch.cat([context, inner])
        k, v = ((both @ own[f"self_attn.{name}_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM) for name in "kv")
        q = turned(normed(q, own["self_attn.q_norm.weight"]), root)
        k = turned(normed(k, own["self_attn.k_norm.weight"]), 0)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for t in (k, v))
        scores = q.transpose(0, 1) @ k.mT / math.sqrt(HEAD_DIM)
        if causal:
            scores = scores.masked_fill(torch.ones(count, root + count).triu(root + 1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        inner = normed(x, own["post_attention_layernorm.weight"])
        gate, up = (inner @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
    return normed(x, w["norm.weight"])


def reference_guesses(
    w: dict[str, Tensor], config: dict[str, object], embedding: Tensor, text: list[int], taps: Tensor
) -> tuple[list[int], list[float]]:
    """The likeliest block behind `text`, whose last token the target has not read; and the confidence in each guess."""
    inside = config["dflash_config"]
    assert isinstance(inside, dict)
    fields = config | inside
    mask = w["mask_embedding"] if "mask_embedding" in w else embedding[int(str(fields["mask_token_id"]))]
    places = torch.stack([embedding[text[-1]], *[mask] * (int(fields["block_size"]) - 1)])
    states = reference_states(w, places, taps, bool(fields.get("causal")))
    states = states if fields.get("sample_from_anchor") else states[1:]
    head, ids = w.get("lm_head.weight", embedding), torch.arange(len(embedding))
    if "d2t" in w:
        ids = torch.arange(len(head)) + w["d2t"]
    before, guesses, chances = text[-1], list[int](), list[float]()
    for state in states:
        logits = head @ state
        if "markov_head.markov_w1.weight" in w:
            logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
        if "candidate_selector.predecessor_codebook" in w:
            candidates = logits.topk(int(fields["selector_top_k"])).indices
            weighed = w["candidate_selector.predecessor_codebook"][before] * (
                w["candidate_selector.hidden_projection.weight"] @ state
            )
            pairs = w["candidate_selector.successor_codebook"][candidates] @ weighed
            best = int(candidates[(logits[candidates] + pairs).argmax()])
        else:
            best = int(ids[logits.argmax()])
        if "confidence_head.proj.weight" in w:
            read = torch.cat([state, w["markov_head.markov_w1.weight"][before]])
            chances.append(float((w["confidence_head.proj.weight"] @ read + w["confidence_head.proj.bias"]).sigmoid()))
        guesses.append(best)
        before = best
    return guesses, chances


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_an_engines_acceptance_is_that_of_the_reference_at_its_roots(kind: str, made: Callable[[str], Path]) -> None:
    folder, depth = made(kind), 4
    llm = LLM(str(TARGET), f"block:{folder}", dtype="float32", speculation=Speculation(depth), chunk_tokens=3)
    weights, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    table = load_file(TARGET / "model.safetensors")[EMBEDDING]

    def guesses(text: list[int], taps: Tensor) -> list[int]:
        return reference_guesses(weights, config, table, text, taps)[0]

    assert assert_acceptance(TARGET, llm, depth, GREEDY, guesses) > 25


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_trees_of_any_form_are_plain_and_accepted_more_often_and_nothing_is_left(
    kind: str, verification: Verification, made: Callable[[str], Path]
) -> None:
    shapes = {
        "chain": Speculation(4),
        "tree": Speculation(4, 3, 12),
        "deeper than blocks": Speculation(9, 2, 20),
        "static": Speculation(tree=StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])),
    }
    accepted = accepted_by_shape(TARGET, f"block:{made(kind)}", shapes, GREEDY, verification)
    if verification == "coupled":
        assert accepted["tree"] > 1.1 * accepted["chain"] > 0


def test_survival_of_first_guesses_is_the_product_of_confidences(made: Callable[[str], Path]) -> None:
    folder, target = made("dspark"), Blueprint.of(str(TARGET), dtype="float32")
    runner, text = target.load(1024), [1, 403, 407, 261, 378]
    plan = plan_drafter(f"block:{folder}", DraftContext(target, target.tokenizer()))
    built = plan.build(dict.fromkeys(plan.models, 512), None, runner)
    assert built is not None
    drafter = Beside(runner, built)
    drafter.observe(committed([Row(0, text)]))
    draft = drafter.propose(draws_of([Row(0, text)], 512), [Budget(4, price=1e-9)])
    taps = runner.read([Read(1, text[:-1])], taps=built.taps).taps
    assert taps is not None
    weights, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    guesses, chances = reference_guesses(weights, config, runner.decoder.embedding, text, taps)
    assert draft.tree.tokens[0, 1:].tolist() == guesses[:4]
    assert draft.survival is not None
    torch.testing.assert_close(draft.survival[0], torch.tensor([1.0, *chances[:4]]).cumprod(0), rtol=1e-4, atol=1e-6)
    assert 0.05 < min(chances) < max(chances) < 0.95
    above = chances[0] * chances[1]
    cut = drafter.propose(draws_of([Row(0, text)], 512), [Budget(4, price=0.99 * above)])
    assert int(cut.tree.valid.sum()) - 1 == 2
    wide = drafter.propose(draws_of([Row(0, text)], 512), [Budget(1, 3, 3)])
    assert wide.survival is not None
    assert wide.survival[0, 1] == pytest.approx(chances[0], rel=1e-4)
    assert wide.survival[0, 1:].sum() < 1 + 1e-6


def test_the_other_children_share_what_the_first_leaves() -> None:
    assert with_first([0.5, 0.3, 0.1], 0.8) == pytest.approx([0.8, 0.12, 0.04])
    assert with_first([1.0, 0.0], 0.9) == [0.9, 0.0]


@pytest.mark.short("dspark-options0", "selector-options0")
@pytest.mark.parametrize("options", [{"kernels": "torch"}, {}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("kind", ["dspark", "causal", "selector"])
def test_a_row_does_not_depend_on_the_others_nor_on_chunks(
    kind: str, options: dict[str, str], made: Callable[[str], Path]
) -> None:
    """To the bit: states, logits, and what the heads say."""
    target = Blueprint.of(str(TARGET), **({"dtype": "float32"} | options))
    planned = BlockBlueprint.of(HeadFolder.of(str(made(kind)), target))
    host, dice = target.load(64), torch.Generator().manual_seed(3)
    lengths, block = (4, 9, 40), planned.tensors.config
    features = [torch.randn(n, len(block.taps), target.config.hidden, generator=dice) for n in lengths]
    places = [5, *[MASKED] * (block.block_size - 1)]

    def told(layers: BlockDrafter, seq_ids: list[int], pieces: int) -> None:
        for piece in range(pieces):
            parts = {s: features[s][piece * lengths[s] // pieces : (piece + 1) * lengths[s] // pieces] for s in seq_ids}
            reads = [Read(s, [0] * len(own)) for s, own in parts.items() if len(own)]
            shown = torch.cat([own for own in parts.values() if len(own)])
            layers.runner.read(reads, inputs=layers.decoder.fuse(shown))
            layers.runner.keep([r.seq_id for r in reads], [range(len(r.tokens)) for r in reads])

    found: list[list[Tensor]] = []
    for groups, pieces in (([[0, 1, 2]], 1), ([[2], [0], [1]], 4)):
        layers = planned.build(1024, host)
        heads = layers.decoder.heads
        results: dict[int, list[Tensor]] = {}
        for group in groups:
            told(layers, group, pieces)
            read = layers.runner.read([Read(s, places, judged=range(block.block_size)) for s in group])
            states = layers.decoder.states(read.hidden)
            before = torch.tensor([9, 8, 7, 6, 5] * len(group))
            after = read.logits if heads.after is None else heads.after(read.logits, states, before)
            told_sure = states[:, :1] if heads.confidence is None else heads.confidence(states, before)[:, None]
            for i, s in enumerate(group):
                rows = slice(i * block.block_size, (i + 1) * block.block_size)
                results[s] = [read.hidden[rows], after[rows], told_sure[rows]]
        found.append([tensor for s in sorted(results) for tensor in results[s]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_causal_block_is_read_as_far_as_the_draft_goes_and_another_as_a_whole(made: Callable[[str], Path]) -> None:
    for kind, depth, places in (("causal", 2, 2), ("dspark", 2, 5), ("selector", 2, 5)):
        folder = HeadFolder.of(str(made(kind)), Blueprint.of(str(TARGET), dtype="float32"))
        block = BlockBlueprint.of(folder).tensors.config
        assert block.num_places(depth) == places
        assert block.deepest(places - 1) < depth
        assert [block.deepest(room) for room in (0, 1, 64)] == [0, 1 if kind == "causal" else 0, block.most_depth]


def test_drafts_end_where_positions_do(made: Callable[[str], Path]) -> None:
    """A text up to the last position is plain, and drafted as far as a block fits."""
    params = replace(GREEDY, max_tokens=400)
    for kind in ("causal", "dspark"):
        prompt = [1, *[403, 407, 261, 378] * 120]
        llm = LLM(str(TARGET), f"block:{made(kind)}", dtype="float32", speculation=Speculation(4))
        plain = LLM(str(TARGET), dtype="float32")
        assert llm.generate([prompt], params)[0].outputs == plain.generate([prompt], params)[0].outputs
        assert llm.stats.num_drafted > 0


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "told"),
    [
        ({"vocab_size": 999}, {}, UnsupportedModel, "vocab_size is 999"),
        ({"hidden_size": 128}, {}, UnsupportedModel, "hidden_size is 128"),
        ({"num_hidden_layers": 3}, {}, MissingWeights, "layers.2.input_layernorm"),
        ({"num_hidden_layers": 1}, {}, UnsupportedModel, r"layers.1.*is none of a block drafter"),
        ({"model_type": "llama"}, {}, UnsupportedModel, "k_norm.weight is none of"),
        ({"draft_vocab_size": 300}, {}, UnsupportedModel, "draft_vocab_size is 300"),
        ({"target_layer_ids": None, "dflash_config": {}}, {}, UnsupportedModel, "from -1 to 4"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, {}, UnsupportedModel, "from -1 to 4"),
        ({"dflash_config": {"target_layer_ids": [1, 1]}}, {}, UnsupportedModel, "different layers"),
        ({"dflash_config": {"target_layer_ids": [1]}}, {}, WrongShape, "fc.weight"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4], "block_size": 0}}, {}, UnsupportedModel, "block_size is 0"),
        ({"dflash_config": 5}, {}, UnsupportedModel, "dflash_config is 5"),
        ({"mask_token_id": 7}, {}, UnsupportedModel, "mask_embedding is none of"),
        ({"mask_token_id": 512}, {}, UnsupportedModel, "mask_token_id is 512"),
        ({"markov_rank": 16}, {}, WrongShape, "markov_w1"),
        ({"markov_rank": 0}, {}, WrongShape, "confidence_head.proj.weight"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, {}, UnsupportedModel, "give a markov_rank"),
        (
            {"markov_rank": 0, "enable_confidence_head": False},
            {},
            UnsupportedModel,
            "confidence_head.proj.bias is none",
        ),
        ({"markov_head_type": "gated"}, {}, UnsupportedModel, "markov_head_type is 'gated'"),
        ({"final_logit_softcapping": 20.0}, {}, UnsupportedModel, "final_logit_softcapping is 20"),
        ({"conv_kernel_size": 2}, {}, UnsupportedModel, "conv_kernel_size is 2"),
        ({"selector_rank": 8}, {}, UnsupportedModel, "takes the place of a Markov head"),
        ({}, {"fc.weight": None}, MissingWeights, "fc.weight"),
        ({}, {"markov_head.markov_w2.weight": None}, MissingWeights, "markov_w2"),
        ({}, {"fc.bias": torch.zeros(64)}, UnsupportedModel, "fc.bias is none of"),
        ({}, {"d2t": -torch.arange(512)}, UnsupportedModel, "another one of the target's"),
        (
            {"use_sliding_window": True, "sliding_window": 32, "layer_types": ["sliding_attention"] * 2},
            {},
            UnsupportedModel,
            "causal is None",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    keys: dict[str, object],
    tensors: dict[str, Tensor | None],
    error: type[ModelError],
    told: str,
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=told):
        LLM(str(TARGET), f"block:{rewritten(made('dspark'), tensors, keys, tmp_path)}", dtype="float32")


def test_an_embedding_and_a_head_of_its_own_are_read(made: Callable[[str], Path], tmp_path: Path) -> None:
    table = load_file(TARGET / "model.safetensors")[EMBEDDING]
    other = rewritten(made("dspark"), {"embed_tokens.weight": table, "lm_head.weight": table.clone()}, {}, tmp_path)
    own, same = (num_accepted(TARGET, f"block:{each}", 4, GREEDY) for each in (made("dspark"), other))
    assert own == same
