"""The forms of a prompt: all spellings of one prompt are the same request, and what is no prompt is named."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun import InvalidRequest, Request, SamplingParams
from forerun.request import ChatOptions, requests_of
from kit.unchecked import unchecked

IDS = (1, 5, 6)
SPELLINGS: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda ids: np.array(ids, dtype=np.int32),
    "numpy numbers": lambda ids: [np.int64(i) for i in ids],
    "torch": torch.tensor,
    "torch numbers": lambda ids: [torch.tensor(i) for i in ids],
    "dict": lambda ids: {"prompt_token_ids": list(ids)},
    "dict of numpy": lambda ids: {"prompt_token_ids": np.array(ids), "prompt": None},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_token_ids_in_any_form_are_one_prompt(spelling: str) -> None:
    spelled = SPELLINGS[spelling]
    expected = Request(None, None, None, "", IDS)
    with unchecked():
        assert Request.of(spelled(IDS)) == expected
        assert requests_of(spelled(IDS), None) == [expected]
        assert requests_of([spelled(IDS), "text", spelled(IDS)], None) == [expected, Request("text"), expected]
        ids = Request.of(spelled(IDS)).prompt_token_ids
    assert ids is not None
    assert {type(i) for i in ids} == {int}


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_batch_keeps_its_order(prompts: list[list[int]]) -> None:
    found = requests_of(prompts, [SamplingParams(seed=i) for i in range(len(prompts))], 3, "me")
    assert [r.prompt_token_ids for r in found] == [tuple(ids) for ids in prompts]
    assert [r.sampling_params.seed for r in found if r.sampling_params] == list(range(len(prompts)))
    assert {(r.speculation, r.tenant) for r in found} == {(3, "me")}


def test_a_matrix_of_ids_is_many_prompts() -> None:
    found = requests_of(np.array([[1, 2], [3, 4]]), None)
    assert [r.prompt_token_ids for r in found] == [(1, 2), (3, 4)]


def test_text_is_text_however_it_is_named() -> None:
    for prompt in ("a", np.str_("a"), {"prompt": "a"}, {"prompt": "a", "prompt_token_ids": None}):
        assert Request.of(prompt) == Request("a")
    both = Request.of({"prompt": "a", "prompt_token_ids": [1, 2]})
    assert (both.prompt, both.prompt_token_ids) == ("a", (1, 2))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "prompt: 5 is not a prompt; use text"),
        (None, "prompt: None is not a prompt"),
        (b"text", "prompt: b'text' is not a prompt"),
        ([1, "a"], "prompt: 'a' is not a token id"),
        ([1, True], "prompt: True is not a token id"),
        ([1, 2.0], "prompt: 2.0 is not a token id"),
        (np.array([1.5]), "prompt: 1.5 is not a token id"),
        (np.array([True, False]), "prompt: True is not a token id"),
        ({}, "prompt: {} has no prompt"),
        ({"prompt": None}, "prompt: .* has no prompt"),
        ({"prompt": 7}, "prompt: .* has no prompt"),
        ({"prompt_token_ids": "abc"}, "prompt: 'abc' is not a prompt"),
        ({"text": "a"}, "prompt: the key 'text' is not supported"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompt: the key 'multi_modal_data' is not supported"),
        (torch.empty(3, device="meta", dtype=torch.long), "prompt: .*has no list of values"),
        (torch.eye(2).to_sparse(), "prompt: .*has no list of values"),
        (["x" * 10_000, 1.5], r"prompt: 'x+\.\.\.x+' is not a token id"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, message: str) -> None:
    with unchecked(), pytest.raises(InvalidRequest, match=message) as refused:
        Request.of(prompt)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("options", [{"tokenize": True}, {"messages": []}, {"chat_template": "x"}, {5: 1}, ["a"], "a"])
def test_options_of_a_template_that_have_arguments_of_their_own_are_refused(options: Any) -> None:
    with unchecked(), pytest.raises(InvalidRequest, match=r"chat_template_kwargs: .* cannot be served; use"):
        ChatOptions(chat_template_kwargs=options)


def test_one_set_of_parameters_or_one_for_each() -> None:
    params = SamplingParams(seed=1)
    assert [r.sampling_params for r in requests_of(["a", "b"], params)] == [params, params]
    assert [r.sampling_params for r in requests_of(["a", "b"], [params, params])] == [params, params]
    assert [r.sampling_params for r in requests_of(["a", "b"], None)] == [None, None]
    with pytest.raises(InvalidRequest, match="sampling_params: 1 sets of parameters for 2 prompts"):
        requests_of(["a", "b"], [params])
