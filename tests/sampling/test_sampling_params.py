"""SamplingParams: every field's range, contradictions, and messages that name field, value and fix."""

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forerun.errors import InvalidRequest, UnknownKeyword
from forerun.sampling.params import SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = [
    *[("temperature", v) for v in (-0.1, NAN, INF, "1", True, None, 1e39, 10**400)],
    *[("top_k", v) for v in (-2, 1.5, True, None, 2**63)],
    *[("top_p", v) for v in (0.0, -0.1, 1.1, NAN, True, None)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN, True)],
    *[("repetition_penalty", v) for v in (0.0, -1.0, NAN, INF, False, 1e-38, 1e39)],
    *[(name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, NAN, "0")],
    *[
        ("logit_bias", v)
        for v in ([1], {-1: 1.0}, {"1": 1.0}, {1: NAN}, {1: INF}, {1: "2"}, {True: 1.0}, {1: False}, {1: -1e308})
    ],
    *[(name, v) for name in ("banned_tokens", "stop_token_ids") for v in ([-1], [1.0], "12", 3, [True])],
    *[("min_tokens", v) for v in (-1, 1.0, True, None, 257, 2**63)],
    *[("max_tokens", v) for v in (0, -1, 1.0, True, 2**70)],
    *[("stop", v) for v in ("", ["a", ""], [1], 3, b"", b"a", ["a"] * 65, "a" * 1025)],
    *[("seed", v) for v in (2**64, -(2**63) - 1, 1.0, True, "1")],
    *[("n", v) for v in (0, -1, 1.0, True, None, 1025)],
    *[(name, v) for name in ("logprobs", "prompt_logprobs") for v in (-1, 1.0, True, 129)],
    *[(name, v) for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens") for v in (0, None)],
    *[("logits_processors", v) for v in ([1], 3, print)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_out_of_range_values_are_refused_by_name_and_change_nothing(name: str, value: Any) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=256)
    for make in (lambda: SamplingParams(**{name: value}), lambda: setattr(params, name, value)):
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name}: ")
        assert ";" in str(caught.value), "no fix is given"
    assert params == SamplingParams(temperature=0.5, max_tokens=256)


ACCEPTED = [
    *[("temperature", v) for v in (0, 0.0, 1e-9, 100.0)],
    *[("top_k", v) for v in (-1, 0, 1, 10**9)],
    *[("top_p", v) for v in (1, 1.0, 1e-9)],
    *[("min_p", v) for v in (0, 1, 0.5)],
    *[("repetition_penalty", v) for v in (0.01, 1, 50.0)],
    *[("presence_penalty", v) for v in (-2, 2.0)],
    ("logit_bias", {0: -INF, 5: 3, 6: -100.0}),
    *[("max_tokens", v) for v in (None, 1)],
    *[("seed", v) for v in (None, 0, -(2**63), 2**64 - 1)],
    *[("logprobs", v) for v in (None, 0, 128)],
    *[("stop", v) for v in (("a",) * 64, ("a" * 1024,))],
    ("n", 1024),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_values_at_the_ends_of_ranges_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_values_in_messages_are_written_as_in_python_and_cut() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("temperature", "0", "temperature: '0' cannot be served; use 0"),
        ("stop", "a" * 10**6, "stop: 'aaaaa"),
        ("n", 10**5000, "n: an integer of thousands of digits cannot"),
        ("banned_tokens", [-1] * 10**6, "banned_tokens: [-1, -1, "),
    ]
    for name, value, shown in cases:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(shown)
        assert len(str(caught.value)) < 300


def test_none_is_an_empty_list() -> None:
    none: Any = None
    params = SamplingParams(stop=none, stop_token_ids=none, banned_tokens=none, logits_processors=none)
    assert params == SamplingParams()


def test_sequences_are_kept_as_tuples() -> None:
    given = [3, 4]
    params = SamplingParams(stop="end", banned_tokens=given, stop_token_ids=given, logits_processors=[lambda _, x: x])
    given.append(5)
    assert (params.stop, params.banned_tokens, params.stop_token_ids) == (("end",), (3, 4), (3, 4))
    assert isinstance(params.logits_processors, tuple)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_logit_bias_is_copied() -> None:
    bias: dict[int, float] = {1: 2}
    params = SamplingParams(logit_bias=bias)
    bias[1] = NAN
    assert params.logit_bias == {1: 2.0}
    assert pickle.loads(pickle.dumps(params)) == params


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens, 3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=1000, max_tokens=None).max_tokens is None


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_seeds_have_64_bits() -> None:
    assert SamplingParams(seed=-1).resolve_seed() == 2**64 - 1
    assert SamplingParams(seed=7).resolve_seed() == 7
    fresh = {SamplingParams().resolve_seed() for _ in range(4)}
    assert len(fresh) == 4
    assert all(0 <= seed < 2**64 for seed in fresh)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={8: 1.0}), "logit_bias"),
        (SamplingParams(banned_tokens=[8]), "banned_tokens"),
        (SamplingParams(stop_token_ids=[9]), "stop_token_ids"),
        (SamplingParams(logprobs=9), "logprobs"),
        (SamplingParams(prompt_logprobs=9), "prompt_logprobs"),
        (SamplingParams(banned_tokens=range(8)), "banned_tokens"),
        (SamplingParams(banned_tokens=range(7), logit_bias={7: -INF}), "banned_tokens"),
        (SamplingParams(banned_tokens=range(6), stop_token_ids=[6], min_tokens=1), "min_tokens"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params.check_vocabulary(8, eos_ids=(7,))
    assert caught.value.field == field


def test_numpy_numbers_become_python_numbers() -> None:
    fields: dict[str, Any] = {"stop": "end", "temperature": np.float32(0.5), "top_p": Fraction(1, 2)}
    fields["logit_bias"] = {np.int64(3): 1}
    fields["banned_tokens"] = [*np.arange(2), np.uint8(7)]
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    assert repr(params) == repr(SamplingParams(**fields))
    made = SamplingParams(stop="end", temperature=0.5, top_p=0.5, logit_bias={3: 1.0}, banned_tokens=[0, 1, 7])
    assert params == made
    assert repr(params) == repr(made)
    assert pickle.loads(pickle.dumps(params)) == made


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("num_return_sequences", "n"), ("topk", "top_k")],
)
def test_the_message_for_an_unknown_name_suggests_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(UnknownKeyword, match=rf"SamplingParams\(\) has no keyword '{wrong}': did you mean '{right}'\?"):
        SamplingParams(**dict[str, Any]({wrong: 1}))
    with pytest.raises(UnknownKeyword, match=f"did you mean '{right}'"):
        setattr(SamplingParams(), wrong, 1)
