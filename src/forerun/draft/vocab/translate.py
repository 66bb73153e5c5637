"""TranslatingDrafter: a draft model with another tokenizer; and the plan of every draft model (`model:DIR`).

A model with another tokenizer drafts in one of two ways (Timor et al., ICML 2025, arXiv 2502.05202). If the
vocabularies share enough tokens (TLI, token-level intersection), it is an ordinary draft model restricted to shared
tokens, which are sampled as the target's ids: with the target's noise, as trees, with declared distributions. Otherwise
(SLEM, string-level exact match) it continues the text in its own tokens, and the new text is encoded in the target's:
deterministic chains, which `follow` verifies. In both cases the model reads the text in its own tokens, through a
transcript.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forerun.annotations import ProgressCallback
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Drafter, Outlook
from forerun.draft.model.drafted_text import Revision
from forerun.draft.model.model import ModelDrafter
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.draft.vocab.transcript import Transcriber, Transcript
from forerun.draft.vocab.vocabulary import LEAST_SHARED_WEIGHT, SharedTokens, Vocabulary, shared_ids, shared_weight
from forerun.errors import TokenizerError, VocabularyMismatch
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree

# Without the target's noise a draft token is accepted with the target's probability for it, so the likeliest is best.
LIKELIEST = SamplingParams(temperature=0.0)
STRETCH = 2  # cache positions per target token for a drafter with its own tokens, which may be shorter


class TranslatingDrafter:
    """Drafts with `model`, which reads and generates the tokens of `transcriber.drafter`.

    With `model.shared` it drafts shared tokens. Otherwise the model's logits are over its own vocabulary, and the text
    that it generates is encoded in the target's tokens.
    """

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("model",)

    def __init__(self, model: ModelDrafter, transcriber: Transcriber) -> None:
        self.model = model
        self.transcriber = transcriber
        self.transcripts: dict[int, Transcript] = {}

    def observe(self, committed: Committed) -> None:
        """Pass the final tokens to the model in its tokens; the last tokens of its earlier text may change."""
        self.model.revise([self.extended(seq_id, tokens, root) for seq_id, tokens, root in committed.rows()])

    def extended(self, seq_id: int, tokens: Sequence[int], root: int) -> Revision:
        """Append these tokens and their root to the transcript; returns the model's text after the closed pieces."""
        known = seq_id in self.transcripts
        transcript = self.transcripts.setdefault(seq_id, Transcript())
        first = transcript.num_closed
        new_tokens = [*tokens, root][1:] if known else [*tokens, root]  # tokens[0] is the old root
        closed = self.transcriber.extend(transcript, new_tokens)
        return Revision(seq_id, first, closed + self.transcriber.ending(transcript))

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A draft of shared tokens or of encoded text. The `tail` is appended to the model's text, then removed."""
        rows = [] if tail is None else [row for row in tail.rows() if row[0] in self.transcripts]
        before = {seq_id: self.transcripts[seq_id] for seq_id, _, _ in rows}
        endings = [Revision(s, t.num_closed, self.model.sequences[s].tokens(t.num_closed)) for s, t in before.items()]
        self.transcripts |= {seq_id: replace(transcript) for seq_id, transcript in before.items()}
        try:
            self.model.revise([self.extended(*row) for row in rows])
            return self.draft_text(draws, budgets) if self.model.shared is None else self.model.propose(draws, budgets)
        finally:
            self.transcripts |= before
            self.model.revise(endings)

    def draft_text(self, draws: Draws, budgets: Sequence[Budget]) -> Draft:
        """Chains of the target's tokens for the model's greedy continuations."""
        roots = [self.root(seq_id) for seq_id in draws.seq_ids]
        rows = [RowSampling(s, LIKELIEST, 0, 0, [root], 1) for s, root in zip(draws.seq_ids, roots, strict=True)]
        num_ids = self.transcriber.drafter.num_ids
        own_draws = Draws(rows, self.model.vocab_size, device=draws.device, num_ids=num_ids, kernels=draws.kernels)
        depths = [self.depth(*pair) for pair in zip(draws.seq_ids, budgets, strict=True)]
        own_budgets = [self.own_budget(*pair) for pair in zip(draws.seq_ids, depths, strict=True)]
        draft = self.model.propose(own_draws, own_budgets)
        texts = [
            [row.tokens[-1], *self.target_tokens(row.seq_id, chain[1:], depth)]
            for row, chain, depth in zip(draws.rows, draft.tree.tokens.tolist(), depths, strict=True)
        ]
        return Draft(DraftTree.of_texts(texts), pass_s=draft.pass_s)

    def root(self, seq_id: int) -> int:
        """The last token of the model's text; 0 for an empty text."""
        drafted = self.model.sequences.get(seq_id)
        return 0 if drafted is None or drafted.root is None else drafted.root

    def depth(self, seq_id: int, budget: Budget) -> int:
        """The number of target tokens to draft."""
        return min(budget.depth, *self.model.outlook([seq_id]).limit)

    def own_budget(self, seq_id: int, depth: int) -> Budget:
        """A budget for as many of the model's tokens as `depth` + 1 target tokens need, estimated from the text."""
        if depth == 0:
            return NO_DRAFT
        drafted = self.model.sequences[seq_id]
        rate = (len(drafted.text) + 1) / self.transcripts[seq_id].num_target
        return Budget(math.ceil((depth + 1) * rate))

    def target_tokens(self, seq_id: int, draft_tokens: Sequence[int], depth: int) -> list[int]:
        """The first `depth` target tokens of the model's continuation, up to its first special token.

        Unless a special token follows, the last target token is left out, since further text might change it.
        """
        vocabulary, target = self.transcriber.drafter, self.transcriber.target
        written = [token for token in draft_tokens if token >= 0]
        length = next((i for i, token in enumerate(written) if vocabulary.token_bytes[token] is None), len(written))
        tokens = self.transcriber.continuation(self.transcripts[seq_id], written[:length]) if length else []
        if length == len(written):
            tokens = tokens[:-1]
        elif written[length] == vocabulary.end and target.end is not None:
            tokens = [*tokens, target.end]
        return tokens[:depth]

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The model's outlook, counted in its own tokens."""
        return self.model.outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop texts and cache of these sequences; unknown ids are ignored."""
        self.model.forget(seq_ids)
        for seq_id in seq_ids:
            self.transcripts.pop(seq_id, None)


def plan_model(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`model:DIR`: a draft model with its own KV cache, translated if its tokenizer is not the target's."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "the argument is a folder with a checkpoint or a hub id, as in model:DIR")
    name, drafter = context.unused(str(spec)), Blueprint.of(context.target.spec.derive(spec.argument), context.progress)
    drafter = replace(drafter, passes=context.target.passes.of_drafter())
    translation = plan_translation(context, drafter)
    stretch = 1 if translation is None else STRETCH
    vocab_size, memory = context.target.config.vocab_size, replace(drafter.memory, stretch=stretch)

    def load(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Runner:
        return drafter.load(cache_tokens[name], progress, memory.positions(target.decoder.config.max_positions))

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> ModelDrafter:
        return ModelDrafter(load(cache_tokens, progress, target), vocab_size)

    untranslated = DraftPlan({name: memory}, build, drafter.fingerprint, build)
    if translation is None:
        return untranslated

    def build_translated(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter:
        return translated(load(cache_tokens, progress, target), vocab_size, translation)

    return replace(untranslated, build=build_translated, build_judge=None)


def plan_translation(context: DraftContext, drafter: Blueprint) -> Transcriber | None:
    """The transcriber between the two vocabularies; None if both models have the same tokenizer.

    The widths of the models' logits may differ by padding all the same. Raises VocabularyMismatch for a drafter without
    a tokenizer, or if the tokens of either tokenizer have no bytes.
    """
    pair = f"the drafter {drafter.folder} cannot draft for the target {context.target.folder}"
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
                f"{pair}: their tokenizers differ, and the bytes of the tokens of {blueprint.folder} are unknown "
                f"(its decoder is neither ByteLevel nor one with ByteFallback). {fix}"
            )
        vocabularies.append(Vocabulary(read, c.vocab_size, c.eos_ids))
    return Transcriber(*vocabularies)


def translated(runner: Runner, vocab_size: int, how: Transcriber, shared: bool | None = None) -> TranslatingDrafter:
    """A drafter with another vocabulary. `shared`: whether it drafts shared tokens; by default if there are enough."""
    if shared is None:
        shared = shared_weight(how.target, shared_ids(how.target, how.drafter)) >= LEAST_SHARED_WEIGHT
    num_model_ids, device = runner.vocab_size, runner.device
    if not shared:
        return TranslatingDrafter(ModelDrafter(runner, num_model_ids), how)
    tokens = SharedTokens.of(how.target, how.drafter, vocab_size, num_model_ids, device)
    return TranslatingDrafter(ModelDrafter(runner, vocab_size, tokens), how)
