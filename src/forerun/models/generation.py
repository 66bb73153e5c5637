"""GenerationDefaults: the default sampling parameters of a model, from its generation_config.json.

Invalid values, unknown keys, and keys that would change answers but are not supported are ignored and reported in
`problems`; the model loads nevertheless. Special ids are read with the model's configuration, since they are properties
of the model, not defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.fields import read_fields, short
from forerun.limits import shown
from forerun.sampling.params import SamplingParams

FILE = "generation_config.json"
KEYS = {  # supported keys, and the parameter that each sets
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
COUNTS, GREEDY_TOO = ("top_k", "max_tokens"), ("repetition_penalty", "max_tokens", "stop")
SUPPORTED = (*KEYS, "do_sample", "bos_token_id", "eos_token_id")
CHANGING: tuple[tuple[tuple[Any, ...], str], ...] = (  # unsupported keys, with the values that have no effect
    ((), "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id max_time"),
    ((), "watermarking_config"),
    ((0,), "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length min_new_tokens"),
    ((0,), "no_repeat_ngram_size penalty_alpha"),
    ((1,), "assistant_ensemble_weight encoder_repetition_penalty guidance_scale num_beam_groups num_beams"),
    ((1,), "num_return_sequences top_h typical_p"),
    ((20,), "max_length"),  # the default of transformers, which many files contain
    ((False,), "remove_invalid_values token_healing"),
    (([], {}), "bad_words_ids begin_suppress_tokens constraints force_words_ids sequence_bias suppress_tokens"),
)
UNSUPPORTED = {key: harmless for harmless, keys in CHANGING for key in keys.split()}
ONLY_SAMPLED = ("epsilon_cutoff", "eta_cutoff", "top_h", "typical_p")  # unsupported, but without effect when greedy
HARMLESS = {  # keys that do not change answers, by topic
    "how beams are searched, which num_beams asks for": "early_stopping length_penalty low_memory",
    "how tokens are drafted": "assistant_confidence_threshold assistant_early_exit assistant_lookbehind is_assistant "
    "max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens "
    "speculation_type target_lookbehind use_mtp",
    "how it is computed": "cache_config cache_implementation compile_config continuous_batching_config "
    "disable_compile max_cache_len prefill_chunk_size renormalize_logits use_cache",
    "what is returned": "output_attentions output_hidden_states output_logits output_scores return_dict_in_generate",
    "encoders and batches": "decoder_start_token_id pad_token_id",
    "the file itself": "_commit_hash _from_model_config transformers_version trust_remote_code",
}
KNOWN = {*SUPPORTED, *UNSUPPORTED, *" ".join(HARMLESS.values()).split()}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's defaults for requests: `given` are JSON values by fields of SamplingParams.

    `problems` are warnings for the user, in full sentences.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> GenerationDefaults:
        """The defaults in a checkpoint's folder; none without the file. Raises ModelError for damaged JSON.

        `do_sample: false` means temperature 0, and filters such as top_p are then ignored, as in transformers.
        """
        path = folder / FILE
        if not path.exists():
            return cls()
        values, problems = read_fields(path).values, []
        defaults: dict[str, Any] = {}
        for key, name in KEYS.items():
            value = values.get(key)
            if value is None:
                continue
            try:
                checked = getattr(SamplingParams(**{name: value}), name)
                defaults[name] = [*checked] if name == "stop" else checked if name in COUNTS else float(value)
            except (InvalidRequest, OverflowError) as error:
                problems.append(f"{path}: {key} is not used as a default ({short(error)}).")
        if values.get("do_sample") is False:
            defaults = {name: defaults[name] for name in GREEDY_TOO if name in defaults} | {"temperature": 0.0}
        context = read_fields(folder / "config.json").values if (folder / "config.json").exists() else {}
        problems += [
            f"{path}: {key} is {shown(values[key])}, which forerun does not support: it is ignored."
            for key in UNSUPPORTED
            if has_effect(key, values, context.get("max_position_embeddings"))
        ]
        unknown = [short(key) for key in values if key not in KNOWN]
        if unknown:
            problems.append(f"{path}: forerun does not know {', '.join(unknown[:5])}: ignored.")
        return cls(defaults, tuple(problems))

    def params(self) -> SamplingParams:
        """The sampling parameters of a request that sets none."""
        return SamplingParams(**self.given)


def format_params(given: Mapping[str, Any], between: str) -> str:
    """Parameters as text for users, with `between` between name and value."""
    return ", ".join(f"{name}{between}{shown(v) if name == 'stop' else f'{v:g}'}" for name, v in given.items())


def has_effect(key: str, values: Mapping[str, Any], positions: object) -> bool:
    """Whether an unsupported key would change the answers of a model with this many positions."""
    value = values.get(key)
    if value is None or any(value == harmless for harmless in UNSUPPORTED[key]):
        return False
    if key == "max_length" and isinstance(value, int) and isinstance(positions, int):
        return value < positions
    return key not in ONLY_SAMPLED or values.get("do_sample") is not False
