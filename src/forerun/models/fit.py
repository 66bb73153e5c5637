"""Checks whether a tokenizer fits a model, by the sizes of their vocabularies, and finds the ids that end answers.

The rule follows real checkpoints. Models have unused rows, since vocabularies are padded to round numbers (Qwen2.5 has
151,665 ids for up to 152,064 rows), and tokenizers have a few added tokens without rows in the model, such as a padding
token. So up to an eighth of the rows, or 128, may differ either way: more unused rows cause a warning; ids beyond the
rows are refused if there are more, or if ordinary tokens are among them.

Many chat checkpoints have `<|endoftext|>` as the model's end id and `<|im_end|>`, which ends a turn, as the
tokenizer's. Both end an answer, as in vLLM; transformers uses the model's only.
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
    """Raise TokenizerError if the tokenizer of `folder` cannot be this model's; warn if that is unlikely."""
    rows, ids = config.vocab_size, tokenizer.num_ids
    usual = max(rows // 8, 128)
    ordinary = ids > rows and any(i >= rows and i not in tokenizer.added_ids for i in tokenizer.get_vocab().values())
    if ordinary or ids - rows > usual:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} has {ids} ids, and {model} has rows for {rows} (vocab_size of its "
            "config.json): use the tokenizer that came with the weights"
        )
    if rows - ids > usual:
        log.warning(
            "%s has %d ids for the %d rows of %s, fewer than a vocabulary that is only padded: is it this model's?",
            folder / "tokenizer.json",
            ids,
            rows,
            model,
        )


def ends_of(tokenizer: Tokenizer, folder: Path, config: ModelConfig, model: Path) -> tuple[int, ...]:
    """All ids that end an answer: those in the files of folder `model`, and the end id of the tokenizer in `folder`.

    Logs if the tokenizer's end is not among the model's, if the tokenizer lacks an end id, and if there are none.
    """
    sources = special_sources(model)
    source = next((each for each in sources if token_ids(each, "eos_token_id")), sources[-1])
    named, last = token_ids(source, "eos_token_id"), tokenizer.eos_token_id
    ends = config.eos_ids
    if last is not None and last < config.vocab_size and last not in ends:
        origin = next(path for path in map(folder.joinpath, TOKEN_FILES) if read_optional(path).values.get("eos_token"))
        others = ", ".join(shown(tokenizer.surface(i)) for i in ends) or "none"
        message = "%s names the end %r, and %s names %s: answers end at either"
        log.warning(message, origin, tokenizer.eos_token, source.path, others)
        ends = (*ends, last)
    unknown = [i for i in ends if tokenizer.surface(i) is None]
    if unknown:
        message = "%s names the end-of-sequence ids %s, which %s does not have: they end no answer"
        log.warning(message, source.path, ", ".join(map(str, unknown[:3])), folder / "tokenizer.json")
    if len(unknown) == len(ends):
        what = f"gives eos_token_id {shown(named)} for a vocabulary of {config.vocab_size}" if named else "names no end"
        log.warning("%s %s: generation ends only at max_tokens or a stop string", source.path, what)
    return ends
