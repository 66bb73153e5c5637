"""The keywords of vLLM, translated to forerun's.

For every keyword of vLLM's `LLM`, `generate` and `chat`, and of its `speculative_config`, the tables list the values
that match forerun's behaviour. These are accepted; any other value raises an error that says what to write instead.
Keywords that both libraries share are parameters of forerun's functions and not handled here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forerun.config import Speculation, require_whole
from forerun.device import free_bytes
from forerun.did_you_mean import nearest
from forerun.draft.base import Drafter
from forerun.draft.spec import DraftSpec
from forerun.draft.text.ngram import NgramDrafter
from forerun.errors import InvalidRequest, UnknownKeyword
from forerun.limits import shown
from forerun.machine import available_bytes

YES_OR_NO = (True, False, None)


@dataclass(frozen=True, slots=True)
class Word:
    """A keyword of vLLM. `same` are the values that match forerun's behaviour; `answer` is the error for others.

    With `amount`, any number of at least 0 is accepted: it is a limit of something that forerun does not use.
    """

    same: tuple[object, ...]
    answer: str
    amount: bool = False

    def accepts(self, value: object) -> bool:
        """Whether the value matches forerun's behaviour."""
        if any(type(value) is type(accepted) and value == accepted for accepted in self.same):
            return True
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return self.amount and number and 0 <= value < math.inf  # type: ignore[operator]


ONE_DEVICE = "forerun runs a model on one device; leave it out"
TEXT_ONLY = "forerun reads text only; leave it out"
OWN_GRAPHS = "forerun captures its own graphs on a GPU; leave it out"
NO_REMOTE_CODE = "forerun never runs code that comes with a checkpoint; leave it out"
WORDS: Mapping[str, Word] = {
    "async_scheduling": Word(YES_OR_NO, "it must be True or False"),
    "attention_backend": Word((None, "auto", "AUTO"), "the device decides; leave it out"),
    "block_size": Word((None,), "cache blocks have a fixed size here; leave it out"),
    "code_revision": Word((None,), NO_REMOTE_CODE),
    "compilation_config": Word((None,), OWN_GRAPHS),
    "config_format": Word(("auto", "hf"), "forerun reads the files of Hugging Face; use 'auto'"),
    "convert": Word(("auto", "none"), "forerun generates text; use 'auto'"),
    "cpu_offload_gb": Word((0, 0.0, None), "weights stay on their device; lower max_model_len or use quantize='int4'"),
    "data_parallel_size": Word((1,), ONE_DEVICE),
    "disable_async_output_proc": Word(YES_OR_NO, "it must be True or False"),
    "disable_custom_all_reduce": Word(YES_OR_NO, "it must be True or False"),
    "disable_log_stats": Word(YES_OR_NO, "it must be True or False; counters are in llm.stats and in each result"),
    "distributed_executor_backend": Word((None, "mp", "uni"), ONE_DEVICE),
    "download_dir": Word((None,), "set the environment variable HF_HOME instead"),
    "enable_chunked_prefill": Word((True, None), "prompts are always read in chunks; chunk_tokens says how large"),
    "enable_expert_parallel": Word((False,), ONE_DEVICE),
    "enable_lora": Word((False, None), "forerun has no LoRA adapters; merge the adapter into the checkpoint"),
    "enable_prefix_caching": Word((True, None), "use prefix_cache=False, with the same effect"),
    "enable_sleep_mode": Word((False,), "use llm.close() to free the memory"),
    "enforce_eager": Word(YES_OR_NO, "it must be True or False"),
    "guided_decoding_backend": Word((None, "auto"), "grammars are compiled by llguidance; leave it out"),
    "hf_overrides": Word((None,), "change config.json in a copy of the checkpoint"),
    "hf_token": Word((None,), "set the environment variable HF_TOKEN instead"),
    "kv_cache_dtype": Word(("auto",), "the KV cache has the data type of the model; use 'auto'"),
    "kv_cache_memory_bytes": Word((None,), "use memory_bytes, which counts weights and caches together"),
    "limit_mm_per_prompt": Word((None,), TEXT_ONLY),
    "load_format": Word(("auto", "safetensors"), "forerun reads safetensors; use 'auto'"),
    "logits_processors": Word((None,), "give them with a request, in SamplingParams"),
    "logprobs_mode": Word(("raw_logprobs",), "log-probabilities are those of the raw logits; use 'raw_logprobs'"),
    "max_logprobs": Word((None, -1), "it must be a whole number; use logprobs in SamplingParams", amount=True),
    "max_num_batched_tokens": Word((None,), "use chunk_tokens, the most prompt tokens that one pass reads"),
    "max_seq_len_to_capture": Word((None,), OWN_GRAPHS, amount=True),
    "mm_processor_kwargs": Word((None,), TEXT_ONLY),
    "model_impl": Word(("auto",), "forerun has implementations of its own; use 'auto'"),
    "ngram_prompt_lookup_max": Word((None,), 'use draft="ngram:N"'),
    "ngram_prompt_lookup_min": Word((None,), 'use draft="ngram:N"'),
    "num_scheduler_steps": Word((1,), "every round is scheduled by itself; use 1"),
    "num_speculative_tokens": Word((None,), "use speculation, the depth of drafts"),
    "override_generation_config": Word((None,), "give SamplingParams with a request"),
    "pipeline_parallel_size": Word((1,), ONE_DEVICE),
    "pooler_config": Word((None,), "forerun generates text; leave it out"),
    "quantization": Word((None,), 'leave it out for a quantized checkpoint; for others use quantize="int8" or "int4"'),
    "runner": Word(("auto", "generate"), "forerun generates text; use 'generate'"),
    "scheduling_policy": Word(("fcfs",), "requests are served first come, first served; use 'fcfs'"),
    "served_model_name": Word((None,), "a model has the name with which it was loaded; leave it out"),
    "skip_tokenizer_init": Word((False,), "prompts may be token ids in any case; use False"),
    "speculative_model": Word((None,), 'use draft="ngram" or draft="model:DIR"'),
    "structured_outputs_config": Word((None,), "use grammar in SamplingParams; leave it out"),
    "swap_space": Word((None,), "it must be a number; forerun never swaps", amount=True),
    "task": Word(("auto", "generate"), "forerun generates text; use 'generate'"),
    "tokenizer_mode": Word(("auto", "hf"), "forerun reads tokenizer.json; use 'auto'"),
    "tokenizer_revision": Word((None,), "use tokenizer with a folder of that revision"),
    "trust_remote_code": Word(YES_OR_NO, NO_REMOTE_CODE),
    "use_v2_block_manager": Word(YES_OR_NO, "it must be True or False"),
}
REQUEST_WORDS: Mapping[str, Word] = {  # of `generate` and `chat`
    "chat_template_content_format": Word(("auto", "string"), "contents are rendered as text; use 'string'"),
    "guided_options_request": Word((None,), "use grammar in SamplingParams; leave it out"),
    "lora_request": Word((None,), "forerun has no LoRA adapters; merge the adapter into the checkpoint"),
    "mm_processor_kwargs": Word((None,), TEXT_ONLY),
    "priority": Word((None, 0), "requests are served first come, first served; leave it out"),
    "prompt_adapter_request": Word((None,), "forerun has no prompt adapters; leave it out"),
    "prompt_token_ids": Word((None,), 'give {"prompt_token_ids": ids} as the prompt'),
    "tokenization_kwargs": Word((None,), "give token ids as the prompt"),
}
ONE_RANK = "the drafter runs on rank 0 only; use 1"
SAME_DRAFTER = "the drafter is loaded like the target; leave it out"
SPECULATIVE_WORDS: Mapping[str, Word] = {
    "disable_by_batch_size": Word((None,), "use speculation=False for requests that should not be drafted"),
    "disable_padded_drafter_batch": Word((False,), "forerun does not pad drafts; leave it out"),
    "draft_sample_method": Word((None,), "draft tokens are sampled with the target's noise; leave it out"),
    "draft_tensor_parallel_size": Word((1, None), ONE_RANK),
    "enforce_eager": Word(YES_OR_NO, "it must be True or False"),
    "max_model_len": Word((None,), "the drafter has the target's context length; leave it out"),
    "parallel_drafting": Word((False, None), "each kind of drafter decides this itself; leave it out"),
    "quantization": Word((None,), SAME_DRAFTER),
    "rejection_sample_method": Word((None,), 'use verification="token" or "block"'),
    "revision": Word((None,), "use a folder of that revision as the model"),
    "suffix_decoding_max_cached_requests": Word((None,), "memory_bytes limits the stored answers; leave it out"),
    "suffix_decoding_max_spec_factor": Word((None,), "the depth is chosen by measured gain; leave it out"),
    "suffix_decoding_max_tree_depth": Word((None, 24), "contexts have up to 24 tokens; leave it out"),
    "suffix_decoding_min_token_prob": Word((None,), "the depth is chosen by measured gain; leave it out"),
    "tensor_parallel_size": Word((1, None), ONE_RANK),
}
METHODS = {  # of speculative_config, and the keys of each method
    "draft_model": ("model", "num_speculative_tokens"),
    "ngram": ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "suffix": ("num_speculative_tokens",),
}
NGRAM_LENGTH = 5  # vLLM's default prompt_lookup_max
SUFFIX_DEPTH = 24  # vLLM's default num_speculative_tokens for suffix decoding


def check_words(
    words: Mapping[str, object], function: Callable[..., object], table: Mapping[str, Word] = WORDS
) -> None:
    """Check the keywords of vLLM that were passed to `function`.

    Raises UnknownKeyword, with the likely name, for a keyword that neither library has, and InvalidRequest, with what
    to write instead, for a value that does not match forerun's behaviour.
    """
    for name, value in words.items():
        word = table.get(name)
        if word is None:
            parameters = inspect.signature(function).parameters.values()
            names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
            raise UnknownKeyword(function.__name__, name, nearest(name, [*names, *table]))
        if not word.accepts(value):
            raise InvalidRequest(name, f"{shown(value)} is not supported: {word.answer}.")


def memory_of(memory_bytes: int | None, share: object, device: torch.device) -> int | None:
    """The memory budget in bytes: as given, or from `share`, the share of free memory; None if neither is given."""
    if share is None:
        return memory_bytes
    if memory_bytes is not None:
        raise InvalidRequest("gpu_memory_utilization", "memory_bytes has the same meaning: give one of them.")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidRequest("gpu_memory_utilization", f"{shown(share)} must be a share above 0 and at most 1.")
    return int(share * (available_bytes() if device.type == "cpu" else free_bytes(device)))


def drafting_of(
    draft: str | Drafter | None, speculation: bool | int | str | Speculation, config: object
) -> tuple[str | Drafter | None, Speculation]:
    """The drafter and the speculation, as given or from a `speculative_config` in vLLM's form."""
    if config is None:
        return draft, Speculation.of(speculation, Speculation())
    if draft is not None or speculation is not True:
        raise InvalidRequest("speculative_config", "it sets drafter and depth: leave out draft and speculation.")
    return read_speculative_config(config)


def read_speculative_config(config: object) -> tuple[str | Drafter, Speculation]:
    """The drafter and the speculation of a `speculative_config`. Raises InvalidRequest, naming the key."""
    if not isinstance(config, Mapping):
        raise _refused("", config, 'it must be a dict such as {"method": "ngram", "num_speculative_tokens": 4}')
    fields = {key: value for key, value in config.items() if value is not None}
    known = ["method", *(key for keys in METHODS.values() for key in keys), *SPECULATIVE_WORDS]
    for key, value in fields.items():
        if key not in known and (likely := nearest(key, known)):
            raise _refused(key, value, f"did you mean {likely!r}")
    method = fields.pop("method", None) or ("draft_model" if "model" in fields else "")
    if not isinstance(method, str) or method not in METHODS:
        raise _refused("method", method, f"use one of {', '.join(METHODS)}, or `draft` for forerun's other drafters")
    values = {key: fields.pop(key) for key in METHODS[method] if key in fields}
    for key, value in fields.items():
        word = SPECULATIVE_WORDS.get(key)
        if word is None or not word.accepts(value):
            options = f"method {method!r} takes {', '.join(METHODS[method])}"
            raise _refused(key, value, options if word is None else word.answer)
    depth = values.get("num_speculative_tokens", SUFFIX_DEPTH if method == "suffix" else None)
    if depth is None:
        raise _refused("num_speculative_tokens", None, "give the number of tokens to draft per round")
    require_whole("speculative_config.num_speculative_tokens", depth, 1)
    return draft_of(method, values), Speculation(depth)


def draft_of(method: str, values: Mapping[str, Any]) -> str | Drafter:
    """The drafter of a method."""
    if method == "suffix":
        return "suffix"
    if method == "draft_model":
        model = values.get("model")
        if not isinstance(model, str) or not model:
            raise _refused("model", model, "name the draft model: a folder or a hub id")
        return str(DraftSpec("model", model))
    longest, shortest = values.get("prompt_lookup_max"), values.get("prompt_lookup_min")
    for key, value in (("prompt_lookup_max", longest), ("prompt_lookup_min", shortest)):
        if value is not None:
            require_whole(f"speculative_config.{key}", value, 1)
    longest = longest or shortest or NGRAM_LENGTH
    if shortest is None or shortest == 1:
        return f"ngram:{longest}"
    if shortest > longest:
        raise _refused("prompt_lookup_min", shortest, f"it must be at most prompt_lookup_max, {longest}")
    return NgramDrafter(max_n=longest, min_n=shortest)


def _refused(key: str, value: object, answer: str) -> InvalidRequest:
    field = f"speculative_config.{key}" if key else "speculative_config"
    return InvalidRequest(field, f"{shown(value)} is not supported: {answer}.")
