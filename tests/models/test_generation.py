"""A model's defaults are read from generation_config.json; values that no request could have are logged and ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.models.generation import HARMLESS, KEYS, ONLY_SAMPLED, SUPPORTED, UNSUPPORTED, GenerationDefaults
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET


def read(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return GenerationDefaults.read(folder)


def test_the_defaults_of_a_chat_model_are_read(tmp_path: Path) -> None:
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
    assert found == GenerationDefaults(wanted)
    assert found.params() == SamplingParams(**wanted)  # type: ignore[arg-type]


def test_a_model_without_defaults_leaves_those_of_requests(tmp_path: Path) -> None:
    assert GenerationDefaults.read(tmp_path) == read(tmp_path) == GenerationDefaults()
    assert GenerationDefaults.read(Blueprint.of(str(TARGET)).folder) == GenerationDefaults()
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


def test_unsupported_defaults_are_reported(tmp_path: Path) -> None:
    found = read(tmp_path, num_beams=4, no_repeat_ngram_size=0, typical_p=1.0, suppress_tokens=[5], use_cache=True)
    assert [problem.split(": ")[1].split()[0] for problem in found.problems] == ["num_beams", "suppress_tokens"]


def test_every_key_of_transformers_has_one_class() -> None:
    """So none is ignored without a decision: a key that a new version of transformers has fails here."""
    import transformers

    keys = set(transformers.GenerationConfig().to_dict())
    classes = [*SUPPORTED, *UNSUPPORTED, *" ".join(HARMLESS.values()).split()]
    assert len(set(classes)) == len(classes)
    assert not keys - set(classes)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_key_that_would_change_answers_is_reported(tmp_path: Path, key: str) -> None:
    value = 100 if key == "max_length" else 0.75  # nothing changes with none of the idle ones
    (problem,) = read(tmp_path, **{key: value}).problems
    assert f": {key} is {value!r}, which forerun does not support" in problem
    for idle in (None, *UNSUPPORTED[key]):
        assert not read(tmp_path, **{key: idle}).problems
    greedy = read(tmp_path, do_sample=False, **{key: value})
    assert len(greedy.problems) == (key not in ONLY_SAMPLED)


def test_defaults_of_transformers_change_nothing_and_are_not_reported(tmp_path: Path) -> None:
    import transformers

    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert not read(tmp_path, **transformers.GenerationConfig().to_dict()).problems
    assert not read(tmp_path, **defaults).problems


def test_a_limit_of_the_whole_context_cuts_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}), encoding="utf-8")
    assert not read(tmp_path, max_length=4096).problems
    assert len(read(tmp_path, max_length=4095).problems) == 1


def test_unknown_keys_are_reported_once(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, chat_format="chatml", max_window_size=6144, use_cache=True).problems
    assert problem.endswith(": forerun does not know chat_format, max_window_size: ignored.")


@pytest.mark.parametrize(("value", "stop"), [("###", ["###"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_strings_are_served(tmp_path: Path, value: Any, stop: list[str]) -> None:
    for do_sample in (True, False):
        found = read(tmp_path, stop_strings=value, do_sample=do_sample)
        assert found.given["stop"] == stop
        assert found.params().stop == tuple(stop)
        assert not found.problems
    assert json.loads(json.dumps(found.given)) == found.given
