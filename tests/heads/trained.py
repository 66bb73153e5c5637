"""Drafters for tests that act as trained ones: output matrices are fitted by least squares to the target's texts."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.fields import Fields
from forerun.heads.block.drafter import MASKED, BlockBlueprint
from forerun.heads.block.format import BlockTensors
from forerun.heads.eagle.drafter import EagleBlueprint
from forerun.heads.eagle.format import EagleTensors
from forerun.heads.folder import HeadFolder
from forerun.llm import LLM
from forerun.models.config import ModelConfig
from forerun.models.loading import Blueprint
from forerun.models.projections import Shapes
from forerun.models.runner import Read, Runner
from forerun.sampling.params import SamplingParams
from kit.checkpoints import written
from kit.texts import STARTS


@cache
def texts(source: Path) -> list[list[int]]:
    """Texts of the target."""
    params = [SamplingParams(temperature=t, seed=t, max_tokens=150, ignore_eos=True) for t in (0, 1) for _ in STARTS]
    found = LLM(str(source), dtype="float32").generate([*STARTS, *STARTS], params)
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in found]


@cache
def states(source: Path) -> list[Tensor]:
    """The target's last states in these texts, after the final norm."""
    runner = Blueprint.of(str(source), dtype="float32").load(4096)
    found = []
    for seq_id, text in enumerate(texts(source)):
        taps = runner.read([Read(seq_id, text)], taps=(-1,)).taps
        assert taps is not None
        found.append(taps[:, 0])
        runner.release([seq_id])
    return found


def written_heads(folder: Path, tensors: dict[str, Tensor], num_heads: int, **keys: object) -> Path:
    """Write a folder of heads."""
    return written(folder, {"medusa_num_heads": num_heads, **keys}, tensors)


def heads_of(source: Path, folder: Path, num_heads: int, hydra: bool = False) -> Path:
    """Heads some of whose draft tokens are accepted."""
    target = Blueprint.of(str(source), dtype="float32")
    embedding = target.load(64).decoder.embedding
    hidden, vocab = target.config.hidden, target.config.vocab_size
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        pairs = list(zip(texts(source), states(source), strict=True))
        x = torch.cat([own[: len(text) - 2 - head] for text, own in pairs])
        next_tokens = torch.cat([torch.tensor(text[2 + head :]) for text, _ in pairs])
        if hydra:
            seen = torch.cat([embedding[torch.tensor(text[1 + head : -1])] for text, _ in pairs])
            entry = torch.zeros(hidden, (2 + head) * hidden)
            entry[:, :hidden], entry[:, -hidden:] = torch.eye(hidden), 8 * torch.eye(hidden)  # the last token
            tensors[f"{head}.in.weight"], x = entry, x + 8 * seen
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        sought = 20 * torch.nn.functional.one_hot(next_tokens, vocab).float()
        tensors[f"{head}.1.weight"] = torch.linalg.lstsq(x, sought).solution.T
    return written_heads(folder, tensors, num_heads, hydra=hydra)


def eagle_of(source: Path, folder: Path, num_ids: int = 400, **keys: object) -> Path:
    """An EAGLE-3 layer of random weights, over the most frequent tokens, whose head is fitted to its outputs."""
    target = Blueprint.of(str(source), dtype="float32")
    hidden, vocab = target.config.hidden, target.config.vocab_size
    corpus = torch.tensor([token for text in texts(source) for token in text])
    ids = torch.bincount(corpus, minlength=vocab).argsort(descending=True, stable=True)[:num_ids].sort().values
    config = EAGLE_CONFIG | {"hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": num_ids} | keys
    tensors = {"d2t": ids - torch.arange(num_ids), "lm_head.weight": torch.zeros(num_ids, hidden)}
    written_eagle(folder, config, tensors, target.config)
    blueprint, host = EagleBlueprint.of(HeadFolder.at(folder, str(folder), target)), target.load(4096)
    layers = blueprint.load(512, host.decoder)
    runner = Runner.of(layers, 4096)
    outputs, next_tokens = [], []
    for seq_id, text in enumerate(texts(source)):
        taps = host.read([Read(seq_id, text)], taps=blueprint.tensors.form.taps).taps
        assert taps is not None
        read = runner.read([Read(seq_id, text[1:-1])], inputs=layers.fuse(taps[:-2]))
        outputs.append(layers.head_inputs(read.hidden))
        next_tokens.append(torch.tensor(text[2:]))
        host.release([seq_id])
        runner.release([seq_id])
    sought = 20 * (torch.cat(next_tokens)[:, None] == ids).float()
    tensors["lm_head.weight"] = torch.linalg.lstsq(torch.cat(outputs), sought).solution.T
    return written_eagle(folder, config, tensors, target.config)


def first_eagle_of(source: Path, folder: Path, bias: bool = True, **keys: object) -> Path:
    """An EAGLE-1 layer, whose map is fitted to the target's next state, followed by a random layer of small weights."""
    target = Blueprint.of(str(source), dtype="float32")
    hidden, embedding = target.config.hidden, target.load(64).decoder.embedding
    pairs = list(zip(texts(source), states(source), strict=True))
    tokens = torch.cat([torch.tensor(text[1:]) for text, _ in pairs])
    read = torch.cat([embedding[tokens], torch.cat([own[:-1] for _, own in pairs])], dim=1)
    read = torch.cat([read, torch.ones(len(read), bias)], dim=1)
    fitted = torch.linalg.lstsq(read, torch.cat([own[1:] for _, own in pairs])).solution.T
    tensors = {"fc.weight": fitted[:, : 2 * hidden], "embed_tokens.weight": embedding}
    tensors |= {"layers.0.post_attention_layernorm.weight": torch.ones(hidden)}
    tensors |= {"fc.bias": fitted[:, -1]} if bias else {}
    config = EAGLE_CONFIG | {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "bias": bias}
    config |= {"vocab_size": target.config.vocab_size} | keys
    return written_eagle(folder, config, tensors, target.config, 0.4)


def block_of(source: Path, folder: Path, num_ids: int = 0, **keys: object) -> Path:
    """A block drafter of random layers some of whose draft tokens are accepted: what reads its states is fitted.

    That is the Markov head or the selector, or with `num_ids` its own head over the most frequent tokens.
    """
    target, dice = Blueprint.of(str(source), dtype="float32"), torch.Generator().manual_seed(1)
    config = BLOCK_CONFIG | {"hidden_size": target.config.hidden, "vocab_size": target.config.vocab_size} | keys
    corpus = torch.tensor([token for text in texts(source) for token in text])
    ids = torch.arange(target.config.vocab_size)
    tensors = {"norm.weight": torch.full((target.config.hidden,), 0.2)}
    if num_ids:
        ids = torch.bincount(corpus, minlength=len(ids)).argsort(descending=True, stable=True)[:num_ids].sort().values
        config["draft_vocab_size"] = num_ids
        tensors["d2t"] = ids - torch.arange(num_ids)
        tensors["lm_head.weight"] = torch.zeros(num_ids, target.config.hidden)
    tensors = written_block(folder, config, tensors, target.config, dice)
    states, before, after = seen_blocks(source, folder, target)
    sought = 20 * (after[:, None] == ids).float()
    for name, features in (
        ("lm_head.weight", lambda: states),
        ("markov_head.markov_w2.weight", lambda: tensors["markov_head.markov_w1.weight"][before]),
        ("candidate_selector.successor_codebook", lambda: paired(tensors, states, before)),
    ):
        if name in tensors:
            tensors[name] = torch.linalg.lstsq(features(), sought).solution.T
            break
    written_block(folder, config, tensors, target.config, dice)
    return folder


def paired(tensors: dict[str, Tensor], states: Tensor, before: Tensor) -> Tensor:
    """The vectors that a selector multiplies with the successors' codebook."""
    projected = states @ tensors["candidate_selector.hidden_projection.weight"].T
    return tensors["candidate_selector.predecessor_codebook"][before] * projected


def seen_blocks(source: Path, folder: Path, target: Blueprint) -> tuple[Tensor, Tensor, Tensor]:
    """The states of drafted positions of blocks in the target's texts, and the tokens before and after them."""
    planned, host = BlockBlueprint.of(HeadFolder.at(folder, str(folder), target)), target.load(4096)
    block, decoder = planned.tensors.config, planned.load(512, host.decoder)
    runner = Runner.of(decoder, 4096)
    found, before, after = [], [], []
    for seq_id, text in enumerate(texts(source)):
        taps = host.read([Read(seq_id, text)], taps=block.taps).taps
        assert taps is not None
        for root in range(3, len(text) - block.block_size, 3):
            runner.read([Read(seq_id, text[root - 3 : root])], inputs=decoder.fuse(taps[root - 3 : root]))
            runner.keep([seq_id], [range(3)])
            places = [text[root], *[MASKED] * (block.block_size - 1)]
            states = decoder.states(runner.read([Read(seq_id, places)]).hidden)[block.first :]
            runner.drop([seq_id])
            found.append(states)
            before += text[root : root + len(states)]
            after += text[root + 1 : root + 1 + len(states)]
        host.release([seq_id])
        runner.release([seq_id])
    return torch.cat(found), torch.tensor(before), torch.tensor(after)


SIZES = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}  # fmt: skip
BLOCK_CONFIG = {
    **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, **SIZES},
    "dflash_config": {"target_layer_ids": [0, 2, 4], "block_size": 5},
}
EAGLE_CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, **SIZES}


def drawn(shapes: Shapes, dice: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
    """Random tensors: gains near 1, and matrices whose products are of the size of what they multiply, or `scale`."""
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=dice)
        found[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else scale * noise / shape[-1] ** 0.5
    return found


def written_block(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], of: ModelConfig, dice: torch.Generator
) -> dict[str, Tensor]:
    """Write a folder with these fields; missing tensors are random. Returns all tensors."""
    own = BlockTensors.of(Fields(folder, config), tensors.keys(), of, "the target")
    every = drawn(own.shapes(), dice) | tensors
    written(folder, config, every)
    return every


def written_eagle(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], of: ModelConfig, scale: float = 1.0
) -> Path:
    """Write a folder in the authors' layout, of EAGLE-3 if it has a head; missing tensors are random."""
    stored = [*tensors, *(["norm.weight"] if "lm_head.weight" in tensors else [])]
    own = EagleTensors.of(Fields(folder, config), stored, of, "the target")
    return written(folder, config, drawn(own.shapes(), torch.Generator().manual_seed(0), scale) | tensors)
