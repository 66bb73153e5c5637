"""The folder of a block drafter: the fields of its config.json, the names and shapes of its tensors, and conversions.

The layout is that of DFlash's authors (z-lab, 2602.06036), with the heads of DSpark (2607.05147) and the candidate
selector of DFlash 2 as fields that may be absent. All tensors have the target's width and are named without a prefix:

    fc.weight                                   [hidden, taps * hidden]: maps the concatenated target states to one
    hidden_norm.weight, norm.weight             [hidden]: norms after fc and after the last layer
    layers.N.self_attn.{q,k,v,o}_proj.weight    with q_norm.weight and k_norm.weight where the family has them
    layers.N.mlp.{gate,up,down}_proj.weight     with input_layernorm.weight and post_attention_layernorm.weight
    mask_embedding                              [hidden]: embedding of masked positions, without a `mask_token_id`
    markov_head.markov_w1.weight, markov_w2     [vocab, markov_rank]; [draft_vocab, markov_rank]
    confidence_head.proj.weight, .bias          [1, hidden + markov_rank, or hidden]; [1]
    candidate_selector.predecessor_codebook, successor_codebook, hidden_projection.weight
                                                [vocab, selector_rank] twice; [selector_rank, hidden]
    embed_tokens.weight, lm_head.weight, d2t    own embedding, own head, its token ids; the target's if absent

config.json describes the layers as those of a model of the family `model_type`: qwen3 has q_norm and k_norm, llama does
not. The drafter's fields are at the same level or inside `dflash_config`: `target_layer_ids`, the layers whose outputs
it reads, -1 for the embedding; `block_size`; `mask_token_id`; `causal`: the positions of a block see only those before
them; `sample_from_anchor`: the root's position predicts a token too; `markov_rank`, `enable_confidence_head`,
`confidence_head_with_markov`, `selector_rank`, `selector_top_k`. Other fields that would change the computation are
refused by name. `convert.py` describes the layout of `speculators`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forerun.fields import Fields, is_list_of_whole
from forerun.heads.folder import OWN_EMBEDDING, model_fields, refuse_missing_tables, refuse_sizes
from forerun.heads.vocabulary import MASK, OFFSETS
from forerun.models.config import ModelConfig, config_of
from forerun.models.projections import HEAD, Shapes, layer_tensors

MOST_BLOCK = 64
USUAL_BLOCK, USUAL_TOP_K = 16, 16  # defaults
ARCHITECTURE = "DFlashDraftModel"
NESTED, TAP_IDS, MASK_ID = "dflash_config", "target_layer_ids", "mask_token_id"
MAP, MAP_NORM, NORM = "fc.weight", "hidden_norm.weight", "norm.weight"
EMBEDDING, MASK_EMBEDDING = OWN_EMBEDDING, "mask_embedding"
MARKOV_W1, MARKOV_W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
PREDECESSORS, SUCCESSORS = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
SELECTOR = "candidate_selector.hidden_projection.weight"
LAYER = "layers.{}."  # prefix of a layer's tensor names
NEUTRAL = {  # fields that are not supported, with the value at which each has no effect
    "markov_head_type": "vanilla",
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1,
    "use_swa": False,
    "conv_kernel_size": 0,
}
RANKED = (MARKOV_W1, MARKOV_W2, PREDECESSORS, SUCCESSORS)  # matrices whose width is a rank, not the hidden size
LOOKED_UP = (EMBEDDING, HEAD, MARKOV_W1, PREDECESSORS, SUCCESSORS)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The configuration of a block drafter. `layers` is that of its layers; `taps` are as in `Drafter.taps`.

    A head with rank 0 does not exist. Without a `mask_id`, masked positions have their own embedding.
    """

    layers: ModelConfig
    taps: tuple[int, ...]
    block_size: int
    causal: bool
    sample_from_anchor: bool
    mask_id: int | None = None
    markov_rank: int = 0
    selector_rank: int = 0
    top_k: int = USUAL_TOP_K
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def most_depth(self) -> int:
        """The greatest number of draft tokens of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first(self) -> int:
        """The position in a block that predicts the first draft token."""
        return 0 if self.sample_from_anchor else 1

    def num_places(self, depth: int) -> int:
        """The number of positions to read for `depth` draft tokens; a block that is not causal is read entirely."""
        return depth + self.first if self.causal else self.block_size

    def deepest(self, num_positions: int) -> int:
        """The greatest depth for which this number of positions is enough."""
        least = 1 + self.first if self.causal else self.block_size
        return 0 if num_positions < least else min(self.most_depth, num_positions - self.first)


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """Names and shapes of all tensors of a folder except the table of ids, `d2t`."""

    config: BlockConfig
    target_hidden: int
    draft_vocab: int
    own_embedding: bool
    own_head: bool
    title: ClassVar[str] = "a block drafter with these fields"
    idle: ClassVar[Collection[str]] = (OFFSETS, MASK)

    @classmethod
    def of(cls, fields: Fields, stored: Collection[str], target: ModelConfig, target_name: str) -> BlockTensors:
        """The tensors that a folder with these fields must have, for a target of this configuration and name.

        `stored` are the names of those that it has. Raises UnsupportedModel for an unsupported drafter.
        """
        config = read_block(fields, target, target_name)
        draft_vocab = fields.whole("draft_vocab_size", target.vocab_size, most=target.vocab_size)
        tensors = cls(config, target.hidden, draft_vocab, EMBEDDING in stored, HEAD in stored)
        refuse_missing_tables(fields, target, target_name, config.layers.hidden, tensors.shapes())
        return tensors

    @property
    def layers(self) -> ModelConfig:
        return self.config.layers

    def for_length(self, max_model_len: int) -> BlockTensors:
        layers = self.layers.within(max_model_len + self.config.block_size)
        return replace(self, config=replace(self.config, layers=layers))

    @property
    def tables(self) -> Collection[str]:
        """The lookup tables and heads, which are not quantized like layers."""
        return [name for name in self.shapes() if name in LOOKED_UP]

    def shapes(self) -> Shapes:
        c, hidden = self.config, self.config.layers.hidden
        vocab = c.layers.vocab_size
        shapes: Shapes = {MAP: (hidden, len(c.taps) * self.target_hidden)}
        shapes |= {MAP_NORM: (hidden,), NORM: (hidden,)}
        for layer in range(c.layers.layers):
            shapes |= {LAYER.format(layer) + name: shape for name, shape in layer_tensors(c.layers, layer).items()}
        if c.mask_id is None:
            shapes[MASK_EMBEDDING] = (hidden,)
        if c.markov_rank:
            shapes |= {MARKOV_W1: (vocab, c.markov_rank), MARKOV_W2: (self.draft_vocab, c.markov_rank)}
        if c.selector_rank:
            shapes |= dict.fromkeys((PREDECESSORS, SUCCESSORS), (vocab, c.selector_rank))
            shapes[SELECTOR] = (c.selector_rank, hidden)
        if c.confidence:
            width = hidden + (c.markov_rank if c.confidence_with_markov else 0)
            shapes |= {CONFIDENCE: (1, width), CONFIDENCE_BIAS: (1,)}
        if self.own_embedding:
            shapes[EMBEDDING] = (vocab, hidden)
        if self.own_head:
            shapes[HEAD] = (self.draft_vocab, hidden)
        return shapes


def read_block(read: Fields, target: ModelConfig, target_name: str) -> BlockConfig:
    """The configuration in these fields, for this target. Raises UnsupportedModel."""
    usual = {"max_position_embeddings": target.max_positions, "model_type": "qwen3", "vocab_size": target.vocab_size}
    fields = model_fields(replace(read, values={**read.values, **read.inside(NESTED).values}), usual)
    for key, neutral in NEUTRAL.items():
        if fields.values.get(key) not in (None, neutral):
            raise fields.refuse(key, f"only {neutral!r} is supported: use another drafter")
    refuse_sizes(fields, target_name, vocab_size=target.vocab_size)
    layers = replace(config_of(fields), tied=False)
    if layers.experts or layers.sinks:
        problem = "only dense layers without attention sinks are supported: use another drafter"
        raise fields.refuse("model_type", problem)
    has_mask = fields.values.get(MASK_ID) is not None
    mask_id = fields.whole(MASK_ID, least=0, most=target.vocab_size - 1) if has_mask else None
    markov_rank, selector_rank = (fields.whole(key, 0, least=0) for key in ("markov_rank", "selector_rank"))
    if markov_rank and selector_rank:
        problem = "it excludes a Markov head: set markov_rank or selector_rank to 0"
        raise fields.refuse("selector_rank", problem)
    confidence = fields.flag("enable_confidence_head")
    with_markov = confidence and fields.flag("confidence_head_with_markov", bool(markov_rank))
    if with_markov and not markov_rank:
        raise fields.refuse("confidence_head_with_markov", "it needs a Markov head's embedding: set markov_rank")
    from_anchor = fields.flag("sample_from_anchor")
    return BlockConfig(
        layers=layers,
        taps=read_taps(fields, target.layers),
        block_size=fields.whole("block_size", USUAL_BLOCK, least=1 if from_anchor else 2, most=MOST_BLOCK),
        causal=read_causal(fields, layers),
        sample_from_anchor=from_anchor,
        mask_id=mask_id,
        markov_rank=markov_rank,
        selector_rank=selector_rank,
        top_k=min(target.vocab_size, fields.whole("selector_top_k", USUAL_TOP_K)),
        confidence=confidence,
        confidence_with_markov=with_markov,
    )


def read_causal(fields: Fields, layers: ModelConfig) -> bool:
    """Whether the positions of a block see only those before them; the authors have used two names for this field.

    Its default depends on sliding windows, so a folder whose layers have such windows must have the field.
    """
    key = "causal" if fields.values.get("causal") is not None else "is_causal"
    if fields.values.get(key) is None and any(layers.windows):
        raise fields.refuse("causal", "it is required for layers with sliding windows: set it to true or false")
    return fields.flag(key)


def read_taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The taps, given as indices of layers by their outputs; the last layer's output is read after the final norm."""
    ids: Any = fields.values.get(TAP_IDS)
    if not is_list_of_whole(ids, -1, num_layers - 1) or not ids or len(set(ids)) < len(ids):
        raise fields.refuse(TAP_IDS, f"it must be a list of different layers, from -1 to {num_layers - 1}")
    return tuple(-1 if each == num_layers - 1 else each + 1 for each in ids)


def layer_ids(taps: tuple[int, ...], num_layers: int) -> list[int]:
    """The indices of the layers whose outputs these taps are."""
    return [num_layers - 1 if tap == -1 else tap - 1 for tap in taps]
