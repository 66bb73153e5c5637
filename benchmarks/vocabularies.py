"""Acceptance of a draft model with another vocabulary, compared with one that has the target's vocabulary.

    python -m benchmarks.vocabularies DIR [--target stdlib] [--draft stdlib-draft] [--depth 4] [--tokens 96]

The prompts are those of `forerun bench`'s workload `code`, which no bundled model was trained on. DIR drafts with both
methods, shared tokens and encoding its text again. "of the draft's" is the ratio of accepted / drafted to that of the
draft model with the same vocabulary. Every output is compared with plain decoding. No time is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of

from forerun import LLM, SamplingParams
from forerun.bench.material import shipped
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.draft.vocab.translate import plan_translation, translated
from forerun.draft.vocab.vocabulary import shared_ids, shared_weight
from forerun.models.loading import Blueprint

CACHE_TOKENS = 1 << 15


@dataclass(slots=True)
class Options:
    """The models and the texts."""

    folder: str = option(what="the draft model of another vocabulary", metavar="DIR")
    target: str = option("stdlib", "default: %(default)s")
    draft: str = option("stdlib-draft", "the draft model of the target's vocabulary (default: %(default)s)")
    depth: int = option(4, "draft tokens per round (default %(default)s)")
    tokens: int = option(96, "tokens of each answer (default %(default)s)")
    num_prompts: int = option(8, "prompts (default %(default)s)")
    temperatures: Sequence[float] = option((0.0, 1.0), "default: 0 1", nargs="+")


def main() -> None:
    """Print a line for each temperature and drafter."""
    options = options_of(Options)
    prompts = [str(passage.prompt) for passage in shipped("code")][: options.num_prompts]
    target, foreign = Blueprint.of(options.target), Blueprint.of(options.folder)
    plan = plan_translation(DraftContext(target, target.tokenizer()), foreign)
    if plan is None:
        raise SystemExit(f"{options.folder} has the tokenizer of {options.target}: use a model with another tokenizer")
    shared = shared_ids(plan.target, plan.drafter)
    weight = shared_weight(plan.target, shared)
    print(f"{len(shared)} of {plan.target.num_ids} tokens are shared, of weight {weight:.3f}\n")
    show_header("temperature", "drafter", "accepted / drafted", "of the draft's", "tokens per round", "by depth")
    for temperature in options.temperatures:
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=options.tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        plain: list[tuple[int, ...]] | None = None
        first: float | None = None
        for name in ("plain", "same vocabulary", "shared tokens", "encoded again"):
            drafter: str | Drafter | None = f"model:{options.draft}" if name == "same vocabulary" else None
            if name in ("shared tokens", "encoded again"):
                runner = foreign.load(CACHE_TOKENS)
                drafter = translated(runner, target.config.vocab_size, plan, shared=name == "shared tokens")
            llm = LLM(options.target, drafter, max_num_seqs=len(prompts), speculation=options.depth)
            answers = [tuple(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
            plain = plain or answers
            assert answers == plain, f"{name} changed the output"
            if drafter is None:
                continue
            stats = llm.stats
            rate = stats.acceptance_rate or 0.0
            first = first or rate
            depths = " ".join(f"{rate:.3f}" for rate in stats.acceptance_at_depth)
            ratio, rounds = f"{rate / first:.2f}", f"{stats.tokens_per_round:.3f}"
            show(f"{temperature:g}", name, f"{rate:.3f}", ratio, rounds, depths)


if __name__ == "__main__":
    main()
