"""Did you mean: suggests a name for one that does not exist: a synonym in other programs, or a similar spelling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator

SYNONYMS = {  # names in other programs, or other routes, that are not spelled similarly
    "alias": ("served_model_name",),
    "assistant_model": ("draft",),
    "bad_words_ids": ("banned_tokens",),
    "batch_size": ("max_num_seqs",),
    "chat_template_file": ("tokenizer",),
    "chunked_prefill_size": ("chunk_tokens",),
    "context_length": ("max_model_len",),
    "ctx_size": ("max_model_len",),
    "depth": ("speculation",),
    "draft_max": ("depth",),
    "draft_model": ("draft",),
    "drafter": ("draft",),
    "eos_token_id": ("stop_token_ids",),
    "gpu_memory_utilization": ("memory_bytes",),
    "input": ("prompt", "messages"),
    "instructions": ("system",),
    "load_in_4bit": ("quantize",),
    "load_in_8bit": ("quantize",),
    "max_batch": ("max_num_seqs",),
    "max_batch_size": ("max_num_seqs",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_length": ("max_model_len",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_num_batched_tokens": ("chunk_tokens",),
    "max_running_requests": ("max_num_seqs",),
    "max_seq_len": ("max_model_len",),
    "max_tokens": ("max_output_tokens",),
    "mem_fraction_static": ("memory_bytes",),
    "messages": ("input", "prompt"),
    "model_draft": ("draft",),
    "model_path": ("model",),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "num_return_sequences": ("n",),
    "num_speculative_tokens": ("depth",),
    "parallel": ("max_num_seqs",),
    "predict": ("max_tokens", "max_output_tokens"),
    "prompt": ("messages", "input"),
    "response_format": ("text", "output_config"),
    "spec_draft_n_max": ("depth",),
    "spec_type": ("draft",),
    "speculative_config": ("draft",),
    "speculative_draft_model_path": ("draft",),
    "speculative_num_draft_tokens": ("depth",),
    "speculative_num_steps": ("depth",),
    "ssl_cert_file": ("tls_cert",),
    "ssl_certfile": ("tls_cert",),
    "ssl_key_file": ("tls_key",),
    "ssl_keyfile": ("tls_key",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "system": ("instructions",),
    "timeout": ("request_s",),
    "top_logprobs": ("logprobs",),
    "torch_dtype": ("dtype",),
    "ubatch_size": ("chunk_tokens",),
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
