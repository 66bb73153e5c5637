"""The drafters that the tests of tests/law run with: a new drafter is one more line in DRAFTERS and gets all of them.

This file decides which drafters these are and how each is built for a target.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from draft.vocabularies import byte_level_copy
from forerun.draft.base import Drafter
from forerun.draft.many.cascade import CascadeDrafter
from forerun.draft.plan import DraftContext
from forerun.draft.text.ngram_table import write_ngrams
from forerun.drafters import plan_drafter
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from heads.adapters import adapter_of
from heads.modules import apart
from heads.trained import block_of, eagle_of, first_eagle_of, heads_of
from kit.checkpoints import DATA, ROOT, SMALL, TARGET
from kit.drafters import FixedLength
from kit.sparse import write_sparse
from kit.texts import story

DTYPES = ("float32", "bfloat16", "float16")
EVERY_DTYPE = [*DTYPES[:2], pytest.param("float16", marks=pytest.mark.full)]
COPIES = TemporaryDirectory()
HEADS = {"markov_rank": 32, "enable_confidence_head": True, "causal": True, "sample_from_anchor": True}
copied = partial(byte_level_copy, SMALL)


def cascade_of_heads() -> str:
    return f"cascade[{spelled('medusa')},model:{SMALL}]"


DRAFTERS: Mapping[str, str | Callable[[], str]] = {  # those that have files write them when they are first asked for
    "ngram": "ngram",
    "ngram:2": "ngram:2",
    "suffix": "suffix",
    "suffix:ngrams": lambda: f"suffix:{ngrams_of(Path(COPIES.name) / 'ngrams')}",
    "model:stories280k": f"model:{SMALL}",
    "model:experts": lambda: f"model:{write_sparse(Path(COPIES.name) / 'experts', 'qwen2_moe')}",
    "model:itself": f"model:{TARGET}",
    "model:shared": lambda: f"model:{copied(Path(COPIES.name) / 'in bytes')}",  # nearly all tokens, under other ids
    "model:encoded-again": lambda: (
        f"model:{copied(Path(COPIES.name) / 'in pieces', dropped=('Ġt', 'he', 'Ġa'))}"
    ),  # too few
    "early-exit:1": "early-exit:1",
    "early-exit:4": "early-exit:4",
    "early-exit:adapted": lambda: f"early-exit:2:{adapter_of(TARGET, Path(COPIES.name) / 'adapter', 2, range(3, 5))}",
    "medusa": lambda: f"medusa:{heads_of(TARGET, Path(COPIES.name) / 'medusa', 4)}",
    "hydra": lambda: f"medusa:{heads_of(TARGET, Path(COPIES.name) / 'hydra', 3, hydra=True)}",
    "eagle": lambda: f"eagle:{eagle_of(TARGET, Path(COPIES.name) / 'eagle')}",
    "eagle-1": lambda: f"eagle:{first_eagle_of(TARGET, Path(COPIES.name) / 'eagle-1')}",
    "p-eagle": lambda: f"eagle:{eagle_of(TARGET, Path(COPIES.name) / 'p-eagle', num_hidden_layers=2, mask_token_id=7)}",
    "block": lambda: f"block:{block_of(TARGET, Path(COPIES.name) / 'block', 400)}",
    "block:heads": lambda: f"block:{block_of(TARGET, Path(COPIES.name) / 'heads', **HEADS)}",
    "mtp": lambda: f"mtp:{apart(TARGET, Path(COPIES.name) / 'mtp', 1, 'qwen')}",
    "mtp-of-3": lambda: f"mtp:{apart(TARGET, Path(COPIES.name) / 'mtp of 3', 3, 'deepseek')}",
    "cascade-of-2": f"cascade[ngram,model:{SMALL}]",
    "cascade-of-3": f"cascade[ngram,model:{SMALL},model:{TARGET}]",
    "cascade-of-heads": cascade_of_heads,
    "cascade-of-exit": f"cascade[early-exit:1,model:{SMALL}]",
    "mix-of-2": f"mix[ngram,model:{SMALL}]",
    "mix-of-3": f"mix[suffix,early-exit:1,model:{SMALL}]",
    "python": f"python:{DATA / 'again.py'}:Again",
    "documented": "",
    "documented:taps": "",
}


@cache
def context(dtype: str = "float32") -> DraftContext:
    """The target and tokenizer that drafters are built for."""
    target = Blueprint.of(str(TARGET), dtype=dtype)
    return DraftContext(target, target.tokenizer())


def ngrams_of(folder: Path) -> Path:
    """A folder with the n-grams of some stories."""
    folder.mkdir(exist_ok=True)
    write_ngrams(folder, [(story(400, seed), 1) for seed in range(3)], context().tokenizer.fingerprint())
    return folder


PAGE = ROOT / "docs" / "write-a-drafter.md"
PHRASES = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys.",
    "Once upon a time, in a big forest, there lived a group of",
    "They were very happy.",
    "The bird was very happy.",
    "The dog saw a big ball.",
    "Don't worry, we can be",
    "came to the park.",
)


@cache
def definitions() -> dict[str, object]:
    """What the page's defining blocks define: what readers copy is what is tested."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "write_a_drafter"}
    for start in ("class PhraseDrafter", "class SimilarPlaceDrafter"):
        (body,) = (block for block in blocks if start in block)
        exec(compile(body, str(PAGE), "exec"), names)
    return names


def documented(name: str, *arguments: object) -> Drafter:
    """A fresh drafter of a class on that page."""
    kind = definitions()[name]
    assert isinstance(kind, type), f"{name} is no class"
    drafter = kind(*arguments)
    assert isinstance(drafter, Drafter), "the page's drafter does not fulfil the protocol"
    return drafter


def phrases() -> Drafter:
    """The documentation's first drafter. It knows phrases of the target's, and pieces of made-up stories."""
    stories = [story(300, seed) for seed in range(4)]
    pieces = [text[start : start + 9] for text in stories for start in range(0, 290, 4)]
    return documented("PhraseDrafter", [context().tokenizer.encode(phrase) for phrase in PHRASES] + pieces)


DOCUMENTED: Mapping[str, Callable[[], Drafter]] = {
    "documented": phrases,
    "documented:taps": partial(documented, "SimilarPlaceDrafter"),
}


@cache
def spelled(name: str) -> str:
    """The drafter as `--draft` takes it."""
    spec = DRAFTERS[name]
    return spec if isinstance(spec, str) else spec()


def as_draft(name: str) -> str | Drafter:
    """The `draft` argument of LLM for a drafter of this name."""
    return DOCUMENTED[name]() if name in DOCUMENTED else spelled(name)


def built(name: str, target: Runner, dtype: str = "float32", num_tokens: int = 2048) -> Drafter:
    """A fresh drafter for a loaded target, with `num_tokens` in each of its own caches."""
    return built_for(context(dtype), name, target, num_tokens)


def built_for(target_context: DraftContext, name: str, target: Runner, num_tokens: int) -> Drafter:
    """A fresh drafter for a target other than that of `context`."""
    if name in DOCUMENTED:
        return DOCUMENTED[name]()
    plan = plan_drafter(spelled(name), target_context)
    drafter = plan.build(dict.fromkeys(plan.models, num_tokens), None, target)
    assert drafter is not None, f"{name} builds no drafter"
    return settled(drafter)


def settled(drafter: Drafter) -> Drafter:
    """Fix the lengths of every cascade: measured lengths depend on history, which changes drafts in rejection modes."""
    member = drafter
    while isinstance(member, CascadeDrafter):
        member.lengths, member = FixedLength(2), member.lower
    return drafter
