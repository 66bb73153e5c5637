"""forerun inside vLLM: a custom proposer with drafters that copy text, and forerun's depth controller.

vLLM imports `Proposer` by name; this file imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.config import Speculation
from forerun.draft.base import Drafter
from forerun.draft.many.mix import MixDrafter, member_names
from forerun.draft.spec import DraftSpec, parse_spec, refuse_code
from forerun.draft.text.ngram import NgramDrafter, longest_match
from forerun.draft.text.suffix import SuffixDrafter, files_of
from forerun.draft.text.suffix_past import PastAnswers
from forerun.errors import InvalidRequest, UnknownDrafter
from forerun.inside.chain_rounds import ChainRounds
from forerun.inside.row_texts import EngineRow
from forerun.limits import shown
from forerun.models.source import find_tokenizer
from forerun.text.tokenizer import Tokenizer

SECTION = "forerun"  # of vLLM's additional_config
DRAFT = "mix[ngram,suffix]"
TEXT_DRAFTERS = ("ngram", "suffix", "mix")


class Proposer:
    """For `speculative_config={"method": "custom_class", "model": "forerun.inside.vllm.Proposer", ...}`.

    `num_speculative_tokens` is the maximum depth. `additional_config={"forerun": {...}}` may have `draft` (as in
    `--draft`: ngram, suffix, or a mix of them), `speculation` (a depth, or "auto" to choose it from measured times),
    and `share_answers` (whether drafts may use answers to other requests). Only the constructor raises InvalidRequest
    and UnknownDrafter.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = options_of(vllm_config.additional_config)
        depth = vllm_config.speculative_config.num_speculative_tokens
        model, most = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
        self.rounds = ChainRounds(
            drafter=text_drafter(str(options["draft"]), str(model.tokenizer or model.model)),
            depth=depth,
            vocab_size=model.get_vocab_size(),
            max_length=model.max_model_len,
            max_num_rows=most,
            speculation=Speculation.of(options["speculation"], Speculation()),
            tenant="" if options["share_answers"] else None,
        )

    def load_model(self, *_: object, **__: object) -> None:
        """No effect: drafters that copy text have no model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: object
    ) -> list[list[int]]:
        """The draft tokens of each row of vLLM's batch.

        Row i has the text `token_ids_cpu[i, :num_tokens_no_spec[i]]`, of which `sampled_token_ids[i]` are new; rows
        without new tokens are in prefill, and get no draft.
        """
        rows = {
            number: EngineRow(token_ids_cpu[number, : num_tokens_no_spec[number]], len(new))
            for number, new in enumerate(sampled_token_ids)
            if len(new)
        }
        drafts = self.rounds.propose(rows, prefill=len(rows) < len(sampled_token_ids))
        return [drafts.get(number, []) for number in range(len(sampled_token_ids))]


def options_of(additional: Any) -> dict[str, Any]:
    """The options in vLLM's additional_config; a string is the drafter. Raises InvalidRequest."""
    section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
    section = {"draft": section} if isinstance(section, str) else section
    options: dict[str, Any] = {"draft": DRAFT, "speculation": "auto", "share_answers": True}
    if not isinstance(section, Mapping) or section.keys() - options.keys():
        raise InvalidRequest(SECTION, f"{shown(section)} must be a drafter, or an object with {', '.join(options)}.")
    options |= section
    if not isinstance(options["share_answers"], bool):
        raise InvalidRequest(f"{SECTION}.share_answers", f"{shown(options['share_answers'])}: use true or false.")
    return options


def text_drafter(text: str, tokenizer: str) -> Drafter:
    """Build a drafter that copies text; its files must have this tokenizer. Raises UnknownDrafter for others."""
    spec = parse_spec(text)
    refuse_code(spec, "additional_config", "use a drafter of forerun's")
    if not copies_text(spec):
        fix = f"use {', '.join(TEXT_DRAFTERS[:2])} or a mix of them; heads go to vLLM's own methods (forerun convert)"
        raise UnknownDrafter(
            f"drafter {text!r}: drafters that use a model's states do not run inside another engine: {fix}"
        )
    return drafter_of(spec, lambda: Tokenizer.load(find_tokenizer(tokenizer)).fingerprint())


def copies_text(spec: DraftSpec) -> bool:
    """Whether a drafter and all its members need nothing but the text."""
    return spec.name in TEXT_DRAFTERS and all(map(copies_text, spec.members))


def drafter_of(spec: DraftSpec, vocabulary: Callable[[], str]) -> Drafter:
    """Build a drafter that copies text; `vocabulary` gives the tokenizer's fingerprint. Raises UnknownDrafter."""
    if spec.name == "mix":
        names = member_names(spec)
        return MixDrafter([drafter_of(member, vocabulary) for member in spec.members], names)
    if spec.name == "suffix":
        file, table = files_of(spec, vocabulary)
        return SuffixDrafter(PastAnswers(file=file), table)
    return NgramDrafter(longest_match(spec))
