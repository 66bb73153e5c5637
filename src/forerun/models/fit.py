"""Whether a tokenizer and a model belong together, as far as numbers can say.

The rule follows what real checkpoints do. Models have rows that no token uses, since vocabularies are padded to round
numbers (Qwen2.5 has 151,665 ids for up to 152,064 rows), and tokenizers have a few added tokens that the model was
never given rows for, such as a padding token. So up to an eighth of the rows, or 128, may differ either way: more rows
than that are warned of, and ids beyond the rows are refused if there are more, or if ordinary tokens are among them.
"""

from __future__ import annotations

import logging
from pathlib import Path

from forerun.errors import TokenizerError
from forerun.models.config import ModelConfig
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def check_fit(tokenizer: Tokenizer, folder: Path, config: ModelConfig, model: str) -> None:
    """Raise TokenizerError for the tokenizer of `folder` if it cannot be this model's; warn where that is unlikely."""
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
    unknown = [i for i in config.eos_ids if tokenizer.surface(i) is None]
    if unknown:
        log.warning(
            "%s names the end-of-sequence ids %s, which %s does not have: they end no answer",
            model,
            ", ".join(map(str, unknown[:3])),
            folder / "tokenizer.json",
        )
