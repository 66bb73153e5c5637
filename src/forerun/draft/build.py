"""From a draft specification to a drafter, in two steps: plan what it needs, then load it.

This module decides which names exist (one table, `PLANNERS`), what their arguments mean, and whether a drafter's tokens
have to be translated. Memory is planned between the steps, so planning loads no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from forerun.annotations import ProgressCallback
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Drafter
from forerun.draft.cascade import CascadeDrafter
from forerun.draft.early_exit import EarlyExitDrafter
from forerun.draft.judge import Judge
from forerun.draft.mix import MixDrafter
from forerun.draft.model import ModelDrafter
from forerun.draft.ngram import NgramDrafter
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.draft.suffix import SuffixDrafter
from forerun.draft.suffix_file import PastFile
from forerun.draft.suffix_past import MAX_BYTES, Past
from forerun.draft.transcript import Transcriber
from forerun.draft.translate import TranslatingDrafter
from forerun.draft.vocab import ENOUGH, SharedTokens, Vocabulary, shared_ids, shared_weight
from forerun.errors import TokenizerError, UnknownDrafter, VocabularyMismatch
from forerun.models.adapter import plan_adapter
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.near import nearest
from forerun.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The target and its tokenizer, for which drafters are planned with the target's options."""

    target: Blueprint
    tokenizer: Tokenizer
    progress: ProgressCallback | None = None


CacheTokens = Mapping[str, int]
PAST = "past answers"
OWN_TOKENS = 2  # positions for each of the target's where a drafter reads the text in tokens of its own, often shorter
Build = Callable[[CacheTokens, ProgressCallback | None, Runner], Drafter | None]
BuildJudge = Callable[[CacheTokens, ProgressCallback | None, Runner], Judge]
ORDER = "name the cheapest first, then models from small to large, as in cascade[ngram,model:SMALL,model:MIDDLE]"


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter that was found and checked but not loaded, with the facts that planning memory needs.

    `models` has an entry for every model that it loads, by the name of the model's cache. `build` loads them, given the
    tokens that each of these caches may hold, and the loaded target, whose weights and cache it may share, and whose
    positions are the longest text: the drafter is then for engines on that runner alone. A cache of 0 tokens gives a
    drafter that never drafts. `fingerprint` tells its weights apart from others; nothing for a drafter without any.
    `build_judge` loads it as one that can judge others in a cascade; None where it cannot. `remembered_bytes` is what
    it wants to remember at most in host memory, by name; `build` gets what is granted, together with the tokens.
    `num_members` is how many drafters may share one tree.
    """

    models: Mapping[str, ModelMemory]
    build: Build
    fingerprint: Callable[[], str] = str
    build_judge: BuildJudge | None = None
    remembered_bytes: Mapping[str, int] = field(default_factory=dict)
    num_members: int = 1

    def renamed(self, taken: Collection[str]) -> DraftPlan:
        """The same plan, with unused names for its caches, because one checkpoint may serve twice."""
        names = {name: free_name(name, taken) for name in self.kept()}

        def own(cache_tokens: CacheTokens) -> CacheTokens:
            return {name: cache_tokens[new] for name, new in names.items() if new in cache_tokens}

        build_judge = self.build_judge
        return replace(
            self,
            models={names[name]: model for name, model in self.models.items()},
            build=lambda tokens, progress, target: self.build(own(tokens), progress, target),
            build_judge=build_judge and (lambda tokens, progress, target: build_judge(own(tokens), progress, target)),
            remembered_bytes={names[name]: most for name, most in self.remembered_bytes.items()},
        )

    def kept(self) -> Sequence[str]:
        """The names of its caches and of what it remembers."""
        return (*self.models, *self.remembered_bytes)


def plan_drafter(text: str, context: DraftContext) -> DraftPlan:
    """The drafter that the specification `text` spells.

    Raises UnknownDrafter for what does not parse, exist or fit together, VocabularyMismatch for a drafter whose
    tokens cannot be compared with the target's, and ModelError for a checkpoint that cannot be used.
    """
    return plan(parse_spec(text), context)


def plan(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """The same for a parsed specification."""
    planner = PLANNERS.get(spec.name)
    if planner is None:
        near = nearest(spec.name, PLANNERS)
        meant = f"did you mean {near}? Otherwise " if near else ""
        raise UnknownDrafter(f"there is no drafter {spec.name!r}: {meant}choose one of {', '.join(sorted(PLANNERS))}")
    return planner(spec, context)


def plan_ngram(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`ngram[:N]`: prompt lookup with matches of up to N tokens. Needs hardly any memory."""
    refuse_members(spec)
    if spec.argument is None:
        return DraftPlan({}, lambda _tokens, _progress, _target: NgramDrafter())
    if not spec.argument.isdecimal() or int(spec.argument) < 1:
        refuse(spec, "the argument is the longest match in tokens, a whole number of at least 1, as in ngram:5")
    longest = int(spec.argument)
    return DraftPlan({}, lambda _tokens, _progress, _target: NgramDrafter(max_n=longest))


def plan_model(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`model:DIR`: a checkpoint and a cache of its own. Where its tokenizer is not the target's it is translated."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "name a folder with a checkpoint or a hub id, as in model:DIR")
    name, drafter = str(spec), Blueprint.of(context.target.spec.beside(spec.argument), context.progress)
    translation = plan_translation(context, drafter)
    stretch = 1 if translation is None else OWN_TOKENS
    vocab_size, memory = context.target.config.vocab_size, replace(drafter.memory, stretch=stretch)

    def load(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Runner:
        return drafter.load(cache_tokens[name], progress, memory.positions(target.decoder.config.max_positions))

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> ModelDrafter:
        return ModelDrafter(load(cache_tokens, progress, target), vocab_size)

    own = DraftPlan({name: memory}, build, drafter.fingerprint, build)
    if translation is None:
        return own

    def build_translated(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter:
        return translated(load(cache_tokens, progress, target), vocab_size, translation)

    return replace(own, build=build_translated, build_judge=None)


def plan_cascade(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`cascade[A,B,...]`: each drafter's guesses are verified by the next, the cheapest first."""
    if len(spec.members) < 2:
        refuse(spec, f"a cascade has two members or more: {ORDER}")
    if spec.members[0].name == "mix":
        refuse(spec, "a mix is chosen from by what rounds of the target give: put the cascade into the mix instead")
    first = plan(spec.members[0], context)
    plans, judges = [first], list[BuildJudge]()
    for member in spec.members[1:]:
        own = plan(member, context).renamed([name for other in plans for name in other.kept()])
        if own.build_judge is None:
            refuse(
                spec,
                f"{str(member)!r} cannot judge the guesses of the drafter before it; only models with the target's "
                f"tokenizer can: {ORDER}",
            )
        plans.append(own)
        judges.append(own.build_judge)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter | None:
        lower = first.build(cache_tokens, progress, target)
        for build_judge in judges:
            assert lower is not None, "a member is a drafter"
            if lower.taps:
                refuse(spec, f"{str(spec.members[0])!r} reads the target's states, and guesses have none: {ORDER}")
            lower = CascadeDrafter(lower, build_judge(cache_tokens, progress, target))
        return lower

    return joined(plans, build)


def plan_mix(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`mix[A,B,...]`: several drafters at once, of which each round and sequence takes one, or all of them merged."""
    if len(spec.members) < 2:
        refuse(spec, "a mix has two members or more, as in mix[ngram,model:DIR]")
    if any(member.name == spec.name for member in spec.members):
        flat = [own for member in spec.members for own in (member.members if member.name == spec.name else (member,))]
        refuse(spec, f"a mix in a mix is one mix: write {replace(spec, members=tuple(flat))}")
    plans, names = list[DraftPlan](), list[str]()
    for member in spec.members:
        plans.append(plan(member, context).renamed([name for other in plans for name in other.kept()]))
        names.append(free_name(str(member), names))

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter:
        members = [own.build(cache_tokens, progress, target) for own in plans]
        return MixDrafter([member for member in members if member is not None], names)

    return replace(joined(plans, build), num_members=len(plans))


def joined(plans: Sequence[DraftPlan], build: Build) -> DraftPlan:
    """The joint plan of several drafters."""
    return DraftPlan(
        models={name: model for own in plans for name, model in own.models.items()},
        build=build,
        fingerprint=lambda: " ".join(filter(None, (own.fingerprint() for own in plans))),
        remembered_bytes={name: most for own in plans for name, most in own.remembered_bytes.items()},
    )


def plan_early_exit(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`early-exit:E[:DIR]`: the target's first E layers, its norm and its head; between them the adapter in DIR."""
    refuse_members(spec)
    layers = context.target.config.layers
    if layers < 2:
        refuse(spec, "the target has a single layer, which leaves nothing to exit from; use another drafter")
    exit_layer, colon, folder = (spec.argument or "").partition(":")
    if not exit_layer.isdecimal() or not 1 <= int(exit_layer) < layers:
        refuse(
            spec,
            f"the argument is the number of layers that guess: at least 1 and at most {layers - 1}, as the target has "
            f"{layers}, for instance early-exit:{max(1, layers // 4)}",
        )
    layer = int(exit_layer)
    if not colon:
        return DraftPlan({}, lambda _tokens, _progress, target: EarlyExitDrafter(target, layer))
    if not folder:
        refuse(spec, f"name the adapter's folder after the second colon, as in early-exit:{layer}:DIR, or leave it out")
    name, adapter = str(spec), plan_adapter(folder, context.target, layer)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> EarlyExitDrafter:
        above = adapter.load(cache_tokens[name], progress, target.decoder.config.max_positions, target.decoder)
        return EarlyExitDrafter(target, layer, above)

    return DraftPlan({name: adapter.memory}, build, adapter.fingerprint)


def plan_suffix(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`suffix[:FILE]`: contexts of this text and of past answers, which FILE stores; created if missing."""
    refuse_members(spec)
    file = None if spec.argument is None else PastFile(spec.argument, context.tokenizer.fingerprint())

    def build(granted: CacheTokens, _progress: ProgressCallback | None, _target: Runner) -> SuffixDrafter:
        return SuffixDrafter(Past(max_bytes=granted.get(PAST, MAX_BYTES), file=file))

    return DraftPlan({}, build, remembered_bytes={PAST: MAX_BYTES})


PLANNERS: Mapping[str, Callable[[DraftSpec, DraftContext], DraftPlan]] = {
    "cascade": plan_cascade,
    "early-exit": plan_early_exit,
    "mix": plan_mix,
    "model": plan_model,
    "ngram": plan_ngram,
    "suffix": plan_suffix,
}


def plan_translation(context: DraftContext, drafter: Blueprint) -> Transcriber | None:
    """How the drafter's tokens become the target's; None where both tokenizers give every id the same token.

    The widths of the models' logits may differ all the same: both may be padded. Raises
    VocabularyMismatch for a drafter without a tokenizer, or where the tokens of either are no bytes.
    """
    pair = f"the drafter {drafter.folder} cannot guess for the target {context.target.folder}"
    fix = "Use a drafter of the same model family, or ngram, which needs no vocabulary"
    try:
        tokenizer = drafter.tokenizer()
    except TokenizerError as error:
        raise VocabularyMismatch(f"{pair}: {error}. {fix}") from error
    if tokenizer.fingerprint() == context.tokenizer.fingerprint():
        return None
    vocabularies = []
    for blueprint, read in ((context.target, context.tokenizer), (drafter, tokenizer)):
        c = blueprint.config
        if read.byte_table() is None:
            raise VocabularyMismatch(
                f"{pair}: their tokens differ, and those of {blueprint.folder} cannot be turned into bytes to compare "
                f"them by (its decoder is neither ByteLevel nor one with ByteFallback). {fix}"
            )
        vocabularies.append(Vocabulary(read, c.vocab_size, c.eos_ids))
    return Transcriber(*vocabularies)


def translated(runner: Runner, vocab_size: int, how: Transcriber, shared: bool | None = None) -> TranslatingDrafter:
    """A drafter of another vocabulary; whether it guesses `shared` tokens is decided by how many there are."""
    if shared is None:
        shared = shared_weight(how.target, shared_ids(how.target, how.own)) >= ENOUGH
    num_own, device = runner.decoder.config.vocab_size, runner.cache.keys.device
    if not shared:
        return TranslatingDrafter(ModelDrafter(runner, num_own), how)
    tokens = SharedTokens.of(how.target, how.own, vocab_size, num_own, device)
    return TranslatingDrafter(ModelDrafter(runner, vocab_size, tokens), how)


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, numbered where it is taken."""
    numbered = (f"{name} ({i})" for i in itertools.count(2))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def refuse_members(spec: DraftSpec) -> None:
    """For drafters that are not made of others."""
    if spec.members:
        refuse(spec, f"it takes no list of drafters; write {spec.name} alone")


def refuse(spec: DraftSpec, fix: str) -> NoReturn:
    """The error for a drafter's argument, with the form that it should have."""
    raise UnknownDrafter(f"drafter {str(spec)!r}: {fix}")
