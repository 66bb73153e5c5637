"""GenerationDefaults: what a model's own generation_config.json asks of requests that do not say otherwise.

The file decides which keys are read and what a key means here. A value that no request could have is left out and
reported in `problems`; it does not keep the model from loading. End-of-sequence ids are read with the model's
configuration, because they are facts about the model and not defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.fields import read_fields, short
from forerun.sampling.params import SamplingParams

FILE = "generation_config.json"
KEYS = {  # of the file, and the parameter that each one sets
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
COUNTS = ("top_k", "max_tokens")
UNSERVED: dict[str, tuple[Any, ...]] = {  # keys that would change answers, and the values that change nothing
    "num_beams": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's own defaults for requests, None where it has none. `problems` are full sentences for the user."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> GenerationDefaults:
        """The defaults in the folder of a checkpoint; none without the file. Raises ModelError for damaged JSON.

        `do_sample: false` is temperature 0, as in transformers, where the filters then have no effect.
        """
        path = folder / FILE
        if not path.exists():
            return cls()
        values, problems = read_fields(path).values, []
        found: dict[str, float | int] = {}
        for key, name in KEYS.items():
            value = values.get(key)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
                found[name] = value if name in COUNTS else float(value)
            except (InvalidRequest, OverflowError) as error:
                problems.append(f"{path}: {key} is not used as a default ({short(error)}).")
        if values.get("do_sample") is False:
            found = {name: found[name] for name in ("repetition_penalty", "max_tokens") if name in found}
            found["temperature"] = 0.0
        problems += [
            f"{path}: {key} asks for something that forerun does not do, and is ignored."
            for key, idle in UNSERVED.items()
            if values.get(key) is not None and not any(values[key] == value for value in idle)
        ]
        return cls(**found, problems=tuple(problems))  # type: ignore[arg-type]

    @property
    def given(self) -> Mapping[str, float | int]:
        """The parameters that the model sets, by the names of SamplingParams."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "problems"}
        return {name: value for name, value in values.items() if value is not None}

    def params(self) -> SamplingParams:
        """The parameters of a request without any."""
        values: Mapping[str, Any] = self.given
        return SamplingParams(**values)
