"""EAGLE-3: one decoder layer that reads a target's states and guesses the token after the next one (2503.01840).

At a place the layer reads two things: the embedding of the token there, and the target's state after the token before
it, which is three states of different layers, joined and mapped to the layer's width. Where the target has not read
that token yet, as with guesses, the layer's own output there stands for the state. Both are normed and joined; the
state is also the residual stream. A norm and a head follow: a head of its own, over a vocabulary of the most frequent
tokens alone, or the target's.

The file decides what a folder must hold to be such a drafter: the authors' layout, with tensors under `midlayer.` or
`layers.0.`, `fc.weight`, `norm.weight`, `lm_head.weight`, and `d2t`, which gives for every id of the reduced vocabulary
how much larger the target's is. Embeddings or a head that it has no tensor for are the target's own. Linear layers are
those of the target's number format and kernels; attention is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.cache.plan import ModelMemory
from forerun.errors import UnsupportedModel
from forerun.fields import Fields, read_fields
from forerun.models.config import ModelConfig, config_of
from forerun.models.decoder import Decoder, Hidden, TokenBatch, rms_norm
from forerun.models.layer import Attention, Layer, LayerMaker, MakeLinear, linear
from forerun.models.linear import Linear, make_linear, padded_rows
from forerun.models.loading import Blueprint
from forerun.models.mlp import Mlp, pad_rows
from forerun.models.native import find_kernels
from forerun.models.projections import LayerTable
from forerun.models.rope import rope_tables
from forerun.models.runner import Runner
from forerun.models.source import find_heads
from forerun.models.weights import Checkpoint

NUM_TAPS = 3
PLACES = ("midlayer", "layers.0")  # what the layer's tensors are called
EMBEDDING, HEAD, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
IGNORED = ("t2d",)  # says the same as d2t


@dataclass(frozen=True, slots=True)
class EagleTensors:
    """Names and shapes of all tensors of a folder."""

    config: ModelConfig
    place: str
    target_hidden: int
    draft_vocab: int
    own_embedding: bool
    own_head: bool = True

    @property
    def table(self) -> LayerTable:
        """The layer's, whose projections of queries, keys and values read twice the width."""
        table = LayerTable.of(self.config, 0)
        return replace(table, qkv=replace(table.qkv, inputs=2 * self.config.hidden))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All of them but the table of ids."""
        c, table = self.config, self.table
        vectors = {name: (size,) for name, size in table.vectors.items()} | {"hidden_norm.weight": (c.hidden,)}
        inside = vectors | {n: s for p in table.projections() for n, s in (p.weights() | p.biases()).items()}
        outside: dict[str, tuple[int, ...]] = {
            "fc.weight": (c.hidden, NUM_TAPS * self.target_hidden),
            "norm.weight": (c.hidden,),
        }
        if self.own_head:
            outside[HEAD] = (self.draft_vocab, c.hidden)
        if self.own_embedding:
            outside[EMBEDDING] = (c.vocab_size, c.hidden)
        return outside | {f"{self.place}.{name}": shape for name, shape in inside.items()}


class EagleDecoder(Decoder):
    """The layer as a decoder over a cache of its own; it reads embeddings and states side by side."""

    def __init__(self, tensors: EagleTensors, checkpoint: Checkpoint, make: MakeLinear, target: Decoder) -> None:
        shapes, device = tensors.shapes(), target.embedding.device

        def take(name: str) -> Tensor:
            return checkpoint.take(name, shapes[name]).to(device)

        def fetch(name: str, _shape: tuple[int, ...]) -> Tensor:
            return take(f"{tensors.place}.{name}")

        c = self.config = tensors.config
        self.dtype = target.dtype
        self.num_experts_read = 0
        self.native = None
        self.embedding = take(EMBEDDING) if tensors.own_embedding else target.embedding
        self.query_rule = self.ask_query_rule()
        table, maker = tensors.table, LayerMaker(c, self.dtype, make, make)
        norms = {name: take(f"{tensors.place}.{name}") for name in (*table.vectors, "hidden_norm.weight")}
        qk_norm = maker.head_norms(norms.__getitem__) if c.qk_norm else None
        qkv, out = (linear(projection, make, fetch) for projection in (table.qkv, table.out))
        attention = Attention(norms["input_layernorm.weight"], qkv, out, qk_norm, None, c.windows[0])
        mlp = Mlp(norms["post_attention_layernorm.weight"], maker.every(table, fetch), None, ())
        self.layers = [Layer(attention, mlp)]
        self.state_norm = norms["hidden_norm.weight"]
        self.fc: Linear = make(take("fc.weight"))
        self.norm = take("norm.weight")
        self.head = make(take(HEAD)) if tensors.own_head else target.head
        self.rope = rope_tables(c).to(device)

    def fuse(self, states: Float[Tensor, "total taps target_hidden"]) -> Float[Tensor, "total hidden"]:
        """The target's states, as the layer reads them."""
        rows = states.flatten(1).to(self.dtype)
        return self.fc(pad_rows(rows, padded_rows(len(rows))))[: len(rows)]

    def forward(
        self,
        batch: TokenBatch,
        cache: PagedCache,
        *,
        layers: range | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Read the batch from `inputs`, the states; the tokens' embeddings are added here."""
        assert inputs is not None, "it reads states"
        assert layers is None, "there is one layer"
        assert not taps, "nobody reads its states"
        total, eps = len(batch.tokens), self.config.norm_eps
        cos, sin = self.rope.cos[batch.positions][:, None], self.rope.sin[batch.positions][:, None]
        wanted = (inputs, self.embedding[batch.tokens], cos, sin)
        x, embedded, cos, sin = (pad_rows(tensor, padded_rows(total)) for tensor in wanted)
        norm = self.layers[0].attention.norm
        joined = torch.cat([rms_norm(embedded, norm, eps), rms_norm(x, self.state_norm, eps)], dim=1)
        x = self.behind_attention(0, x + self.mix(0, joined, batch, cache, cos, sin), total)
        return Hidden(x[:total], None)


class DraftVocabulary:
    """The ids of a head over some of the target's tokens; the model reads all of them."""

    same = True

    def __init__(self, vocab_size: int, ids: Int[Tensor, " draft_vocab"]) -> None:
        self.vocab_size = vocab_size
        self.num_own = vocab_size
        self.ids = ids

    def spread(self, logits: Float[Tensor, "rows draft_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits over the target's ids, -inf where the head has no such token."""
        if len(logits) == 0:
            return logits.new_empty(0, self.vocab_size)
        return logits.new_full((len(logits), self.vocab_size), -math.inf).index_copy_(1, self.ids, logits)

    def own(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The same tokens."""
        return tokens

    def own_list(self, tokens: Sequence[int]) -> Sequence[int]:
        """The same tokens."""
        return tokens


@dataclass(frozen=True, slots=True)
class EagleBlueprint:
    """A drafter that was checked, but that is not loaded. `taps` are the states that it reads."""

    layer: Blueprint
    tensors: EagleTensors
    taps: tuple[int, ...]
    ids: Int[Tensor, " draft_vocab"]

    @property
    def memory(self) -> ModelMemory:
        """What it takes once loaded; embeddings of its own are never quantised."""
        c, layer = self.tensors.config, self.layer.memory
        table = c.vocab_size * c.hidden * self.layer.dtype.itemsize if self.tensors.own_embedding else 0
        return replace(layer, weights_bytes=layer.weights_bytes + table)

    def load(self, num_tokens: int, max_model_len: int, target: Decoder) -> Runner:
        """The layer with a cache of `num_tokens`, for texts of `max_model_len` at most."""
        own = self.layer
        whole = self.tensors.config
        config = replace(whole, max_positions=min(max_model_len, whole.max_positions))
        kernels = find_kernels(own.kernels, own.dtype)
        make = partial(make_linear, quantize=own.quantize, kernels=kernels)
        tensors = replace(self.tensors, config=config)
        return Runner.of(EagleDecoder(tensors, Checkpoint(own.folder, own.dtype), make, target), num_tokens)


def plan_layer(model: str, target: Blueprint) -> EagleBlueprint:
    """The drafter in the folder `model`. Raises ModelError for a folder that is not there or cannot be used."""
    folder, of = find_heads(model), target.config
    if target.placement.fixed:
        raise UnsupportedModel(f"{model}: EAGLE drafters are computed on CPUs: use device cpu, or another drafter")
    read = read_fields(folder / "config.json")
    kept = {key: value for key, value in read.values.items() if key != "architectures"}
    defaults = {"max_position_embeddings": of.max_positions, "model_type": "llama", "num_hidden_layers": 1}
    fields = replace(read, values=defaults | kept)
    if fields.whole("num_hidden_layers") != 1:
        raise fields.refuse("num_hidden_layers", "an EAGLE-3 drafter has one layer: use its own config.json")
    if fields.values.get("vocab_size") != of.vocab_size:
        raise fields.refuse("vocab_size", f"{target.name} has {of.vocab_size}: name a drafter that was trained for it")
    config, checkpoint = replace(config_of(fields), tied=False), Checkpoint(folder, target.dtype)
    draft_vocab = fields.whole("draft_vocab_size", of.vocab_size, most=of.vocab_size)
    place = next((name for name in PLACES if f"{name}.hidden_norm.weight" in checkpoint), PLACES[0])
    tensors = EagleTensors(config, place, of.hidden, draft_vocab, EMBEDDING in checkpoint, HEAD in checkpoint)
    for name, is_own in ((EMBEDDING, tensors.own_embedding), (HEAD, tensors.own_head)):
        if not is_own and config.hidden != of.hidden:
            raise fields.refuse("hidden_size", f"{target.name} has {of.hidden}, and the folder has no {name}: add it")
    if not tensors.own_head and draft_vocab != of.vocab_size:
        raise fields.refuse("draft_vocab_size", f"the folder has no {HEAD} for so many tokens: add it")
    shapes = tensors.shapes()
    for name, shape in shapes.items():
        checkpoint.find(name, shape)
    unread = sorted(set(checkpoint.stored) - {*shapes, OFFSETS, *IGNORED})
    if unread:
        raise UnsupportedModel(
            f"{folder}: the tensor {unread[0]} is none of an EAGLE-3 drafter: use the config.json that came with the "
            "weights"
        )
    layer = Blueprint(
        spec=target.spec.beside(model),
        name=model,
        folder=folder,
        config=replace(config, vocab_size=0),
        choice=target.choice,
        num_bytes=sum(math.prod(s) for name, s in shapes.items() if name != EMBEDDING) * target.dtype.itemsize,
        placement=target.placement,
    )
    return EagleBlueprint(
        layer, tensors, read_taps(fields, of.layers), read_ids(checkpoint, draft_vocab, of.vocab_size)
    )


def read_taps(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The states that it reads, each named by the layer that it enters; as the authors choose them, unless said."""
    key = "eagle_aux_hidden_state_layer_ids"
    inside = fields.values.get("eagle_config")
    found = fields.values.get(key, inside.get(key) if isinstance(inside, dict) else None)
    if found is None:
        return usual_taps(num_layers)
    if not isinstance(found, list):
        found = [None]
    is_layer = [isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= num_layers for each in found]
    if len(found) != NUM_TAPS or not all(is_layer):
        raise fields.refuse(key, f"it must name {NUM_TAPS} layers, from 0 to {num_layers}")
    return tuple(found)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The states that the authors choose."""
    return (min(2, num_layers), num_layers // 2, max(0, num_layers - 3))


def read_ids(checkpoint: Checkpoint, draft_vocab: int, vocab_size: int) -> Int[Tensor, " draft_vocab"]:
    """The target's id of every token of the head's. Raises UnsupportedModel for ids that are not the target's."""
    own = torch.arange(draft_vocab)
    if OFFSETS not in checkpoint.stored:
        if draft_vocab == vocab_size:
            return own
        raise UnsupportedModel(f"{checkpoint.folder} has no tensor {OFFSETS}, which says whose tokens the head's are")
    ids = own + checkpoint.take_ids(OFFSETS, (draft_vocab,))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < draft_vocab:
        raise UnsupportedModel(
            f"{checkpoint.folder}: {OFFSETS} must give each token of the head another one of the target's "
            f"{vocab_size} tokens: name a drafter that was trained for it"
        )
    return ids
