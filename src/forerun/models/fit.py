"""Checks whether a tokenizer fits a model, by the sizes of their vocabularies, and finds the ids that end answers.

In real checkpoints models have unused embedding rows, since vocabularies are padded to round numbers (Qwen2.5 has
151,665 ids and up to 152,064 rows), and tokenizers have a few added tokens without a row, such as a padding token. So a
difference of an eighth of the rows, or of 128, is accepted. More unused rows cause a warning. More ids without a row,
or ordinary tokens among them, are an error.

Many chat checkpoints name `<|endoftext|>` as the model's end id, and `<|im_end|>`, which ends a turn, as the
tokenizer's. Both end an answer here, as in vLLM; transformers uses only the model's.
"""

from __future__ import annotations

import logging
from pathlib import Path

from forerun.errors import TokenizerError
from forerun.limits import shown
from forerun.models.config import ModelConfig, special_sources, token_ids
from forerun.text.files import TOKEN_FILES, read_optional
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def check_fit(tokenizer: Tokenizer, folder: Path, config: ModelConfig, model: str) -> None:
    """Raise TokenizerError if the tokenizer in `folder` does not fit the model; warn if it is unlikely to."""
    rows, ids = config.vocab_size, tokenizer.num_ids
    tolerance = max(rows // 8, 128)
    ordinary = ids > rows and any(i >= rows and i not in tokenizer.added_ids for i in tokenizer.get_vocab().values())
    if ordinary or ids - rows > tolerance:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} has {ids} ids, and {model} has {rows} embedding rows (vocab_size of its "
            "config.json): use the tokenizer that came with the weights"
        )
    if rows - ids > tolerance:
        log.warning(
            "%s has %d ids, far fewer than the %d embedding rows of %s: check that it is this model's tokenizer",
            folder / "tokenizer.json",
            ids,
            rows,
            model,
        )


def find_end_ids(tokenizer: Tokenizer, folder: Path, config: ModelConfig, model: Path) -> tuple[int, ...]:
    """All ids that end an answer: those in the files of folder `model`, and the end id of the tokenizer in `folder`.

    Logs a warning if the tokenizer's end id is not among the model's, if the tokenizer lacks one of the ids, or if no
    id ends an answer.
    """
    sources = special_sources(model)
    source = next((each for each in sources if token_ids(each, "eos_token_id")), sources[-1])
    named, last = token_ids(source, "eos_token_id"), tokenizer.eos_token_id
    ends = config.eos_ids
    if last is not None and last < config.vocab_size and last not in ends:
        origin = next(path for path in map(folder.joinpath, TOKEN_FILES) if read_optional(path).values.get("eos_token"))
        others = ", ".join(shown(tokenizer.surface(i)) for i in ends) or "none"
        message = "%s has the end token %r, and %s has %s: both end an answer"
        log.warning(message, origin, tokenizer.eos_token, source.path, others)
        ends = (*ends, last)
    unknown = [i for i in ends if tokenizer.surface(i) is None]
    if unknown:
        message = "%s has the end ids %s, which %s does not contain: they end no answer"
        log.warning(message, source.path, ", ".join(map(str, unknown[:3])), folder / "tokenizer.json")
    if len(unknown) == len(ends):
        what = f"has eos_token_id {shown(named)} for a vocabulary of {config.vocab_size}" if named else "has no end id"
        log.warning("%s %s: answers end only at max_tokens or a stop string", source.path, what)
    return ends
