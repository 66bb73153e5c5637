"""Echo: a completion that begins with its prompt, and log-probabilities of the prompt's tokens."""

from typing import Any

import pytest

from forerun.sampling.params import SamplingParams
from kit.engines import plain
from kit.servers import Running, assert_valid, serving

TEXTS = ["Once upon a time", "Él dijo: ¡hola! ☃ x", "a", " two  blanks"]
server = serving()


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_log_probabilities_of_a_prompt_are_those_of_the_library(server: Running, text: str, max_tokens: int) -> None:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 3}
    answer = server.post("/v1/completions", **body).json()
    params = SamplingParams(temperature=0, max_tokens=max(1, max_tokens), logprobs=3, prompt_logprobs=3)
    (result,) = plain().generate([text], params)
    (choice,) = answer["choices"]
    continuation = result.outputs[0].text if max_tokens else ""
    assert choice["text"] == text + continuation
    assert choice["finish_reason"] == "length"
    lists, entries = choice["logprobs"], [*result.prompt_logprobs, *(result.outputs[0].logprobs if max_tokens else ())]
    assert lists["token_logprobs"] == [None, *(each.logprob for each in entries)]
    assert lists["top_logprobs"][0] is None
    assert all(
        max(top.values()) == each.top_logprobs[0] for top, each in zip(lists["top_logprobs"][1:], entries, strict=True)
    )
    assert len({len(values) for values in lists.values()}) == 1
    num_prompt = len(result.prompt_token_ids)
    offsets = lists["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[num_prompt:][:1] in ([], [len(text)])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, max_tokens)
    assert_valid({**answer, "choices": [{**choice, "logprobs": None}]}, "CreateCompletionResponse")


def test_token_ids_are_echoed_as_text_and_every_sample_begins_with_its_prompt(server: Running) -> None:
    ids = [plain().get_tokenizer().encode(text) for text in TEXTS[:2]]
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 3, "seed": 5, "n": 2}
    alone, echoed = (server.post("/v1/completions", **body, echo=echo).json() for echo in (False, True))
    for number, (without, choice) in enumerate(zip(alone["choices"], echoed["choices"], strict=True)):
        prompt = plain().get_tokenizer().decode(ids[number // 2], skip_special_tokens=True)
        assert choice == {**without, "text": prompt + without["text"]}
    assert echoed["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_is_the_whole_answer(server: Running, max_tokens: int) -> None:
    body: dict[str, Any] = {"model": "stories", "prompt": TEXTS[:2], "max_tokens": max_tokens, "seed": 1, "echo": True}
    whole = server.client().completions.create(**body)
    texts = ["", ""]
    for chunk in server.client().completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_usage_in_every_chunk_grows_to_that_of_the_answer(server: Running) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    body: dict[str, Any] = {"model": "stories", "prompt": "Once", "max_tokens": 9, "seed": 1, "stream": True}
    chunks = list(server.client().completions.create(**body, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [9, 9]
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens for chunk in chunks
    )


@pytest.mark.parametrize(
    "fields",
    [{"n": 2, "best_of": 2}, {"best_of": 1}, {"suffix": ""}, {"echo": None}, {"stream_options": None}],
    ids=str,
)
def test_fields_with_default_values_change_nothing(server: Running, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 3, "seed": 1, "n": fields.get("n", 1)}
    with_them, without = (server.post("/v1/completions", **body | each).json() for each in (fields, {}))
    assert with_them["choices"] == without["choices"]
