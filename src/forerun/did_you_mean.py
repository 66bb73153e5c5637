"""Did you mean: suggests a name for one that does not exist: a synonym in other libraries, or a similar spelling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator

SYNONYMS = {  # names in other libraries, or other routes, that are not spelled similarly
    "assistant_model": ("draft",),
    "bad_words_ids": ("banned_tokens",),
    "batch_size": ("max_num_seqs",),
    "depth": ("speculation",),
    "draft_model": ("draft",),
    "drafter": ("draft",),
    "eos_token_id": ("stop_token_ids",),
    "input": ("prompt", "messages"),
    "instructions": ("system",),
    "load_in_4bit": ("quantize",),
    "load_in_8bit": ("quantize",),
    "max_batch": ("max_num_seqs",),
    "max_batch_size": ("max_num_seqs",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_length": ("max_model_len",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_seq_len": ("max_model_len",),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input", "prompt"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "num_return_sequences": ("n",),
    "prompt": ("messages", "input"),
    "response_format": ("text", "output_config"),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "system": ("instructions",),
    "top_logprobs": ("logprobs",),
    "torch_dtype": ("dtype",),
}


LONGEST = 64  # longer names get no suggestion, since comparing takes time that grows with the length


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant by `name`; None if no name is similar."""
    if (synonym := next((each for each in SYNONYMS.get(name, ()) if each in known), None)) is not None:
        return synonym
    if len(name) > LONGEST:
        return None
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def complete_from(*names: str) -> Callable[[str], Iterator[str]]:
    """A shell completion for an option that takes one of these names."""
    return lambda incomplete: (name for name in names if name.startswith(incomplete))
