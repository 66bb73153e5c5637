"""Errors, also copied or sent to another process, and the objects that refuse this."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from forerun import LLM, AsyncLLM, ForerunError, InvalidRequest, errors
from kit.checkpoints import TARGET

ERRORS = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, ForerunError)]
VALUES = {"seq_id": 3, "cause": ValueError("the reason"), "known": ["draft", "model"]}


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", ERRORS)
def test_a_copied_error_has_the_same_message_and_attributes(
    kind: type[ForerunError], duplicate: Callable[[Any], Any]
) -> None:
    init = kind.__init__
    names = list(inspect.signature(init).parameters)[1:] if inspect.isfunction(init) else ["message"]
    error = kind(*(VALUES.get(name, f"the {name}") for name in names))
    again = duplicate(error)
    assert (type(again), str(again), again.__dict__) == (kind, str(error), error.__dict__)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_an_llm_refuses_to_be_copied_and_says_why(duplicate: Callable[[Any], Any]) -> None:
    llm = LLM(str(TARGET), dtype="float32", max_model_len=64)
    with pytest.raises(TypeError, match="an LLM can be neither copied nor pickled: create one in each process"):
        duplicate(llm)
    front = AsyncLLM(llm)
    with pytest.raises(TypeError, match="an AsyncLLM can be neither copied nor pickled: create one in each process"):
        duplicate(front)
    front.close()


def test_several_prompts_in_place_of_one_are_recognized() -> None:
    llm = LLM(str(TARGET), dtype="float32", max_model_len=64)
    with pytest.raises(InvalidRequest, match=r"'a' is not a token id: .*one of several prompts, pass each alone"):
        next(llm.stream(["a", "b"]))  # type: ignore[list-item]
