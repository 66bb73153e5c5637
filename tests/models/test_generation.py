"""A model's own defaults are read from generation_config.json; what no request could have is reported, not obeyed."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ModelError
from forerun.models.generation import KEYS, GenerationDefaults
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams


def read(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return GenerationDefaults.read(folder)


def test_what_a_chat_model_ships_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        eos_token_id=[3, 4],
        pad_token_id=3,
        transformers_version="4.37.0",
    )
    wanted = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 2048}
    assert found == GenerationDefaults(**wanted)  # type: ignore[arg-type]
    assert found.given == wanted
    assert found.params() == SamplingParams(**wanted)  # type: ignore[arg-type]


def test_a_model_without_defaults_leaves_those_of_requests(tmp_path: Path, target_dir: Path) -> None:
    assert GenerationDefaults.read(tmp_path) == read(tmp_path) == GenerationDefaults()
    assert Blueprint.of(str(target_dir)).generation_defaults() == GenerationDefaults()
    assert GenerationDefaults().params() == SamplingParams()


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    found = read(tmp_path, do_sample=False, temperature=0.7, top_k=50, repetition_penalty=1.1)
    assert found.given == {"temperature": 0.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "value", ["hot", -3, float("nan"), float("inf"), 10**400, [1], {}, True, False, 2**70], ids=lambda v: str(v)[:9]
)
def test_a_value_that_no_request_could_have_is_reported_by_name_and_left_out(
    tmp_path: Path, key: str, value: Any
) -> None:
    found = read(tmp_path, **{key: value, "top_p" if key != "top_p" else "min_p": 0.5})
    assert len(found.given) == 1 + (not found.problems)
    found.params()
    assert len(found.problems) <= 1
    for problem in found.problems:
        assert problem.startswith(f"{tmp_path / 'generation_config.json'}: {key} is not used as a default (")
        assert len(problem) < 500 + len(str(tmp_path))


def test_what_is_asked_for_and_not_served_is_reported(tmp_path: Path) -> None:
    found = read(tmp_path, num_beams=4, no_repeat_ngram_size=0, typical_p=1.0, suppress_tokens=[5], use_cache=True)
    assert [problem.split(": ")[1].split()[0] for problem in found.problems] == ["num_beams", "suppress_tokens"]


@pytest.mark.parametrize("text", ["{", "[]", "5", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        GenerationDefaults.read(tmp_path)
