"""Answers of a real server to OpenAI's client equal the library's: whole, streamed and under load."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from forerun.llm import LLM
from forerun.output import CompletionOutput, RequestOutput
from forerun.request import ChatOptions, Prompt
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.engines import plain
from kit.servers import TEMPLATE, Running, assert_valid, events_of, library_answer, running, serving

PROMPT = "Once upon a time"
EXTRA = "extra_body"
BODIES: list[dict[str, Any]] = [  # of completions, with what is an extension in extra_body
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.9, "seed": 11, "max_tokens": 24, "logprobs": 3},
    {"temperature": 1.3, "top_p": 0.9, "seed": 12, "n": 3, "max_tokens": 16},
    {"seed": 13, "stop": [" the", "Lily"], "max_tokens": 60, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 14, "logit_bias": {"403": 5.0, "410": -100}, "max_tokens": 20, "logprobs": 0},
    {
        "seed": 15,
        "max_tokens": 20,
        EXTRA: {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2, "speculation": False},
    },
    {"seed": 16, "max_tokens": 30, EXTRA: {"ignore_eos": True, "min_tokens": 5, "speculation": 7}},
    {"seed": 17, "stop": "a", "max_tokens": 30, EXTRA: {"include_stop_str_in_output": True, "bad_words": ["was"]}},
    {"seed": 2**62, "max_tokens": 18, EXTRA: {"speculation": {"depth": 3, "width": 2}, "stop_token_ids": [410]}},
    {"seed": -5, "max_tokens": 12, EXTRA: {"banned_tokens": [261, 378], "skip_special_tokens": False}},
]
server = serving()


@cache
def alone(number: int) -> RequestOutput:
    """The library's answer to a body, decoded plainly and alone in the batch."""
    values = {"prompt": PROMPT, **BODIES[number], **BODIES[number].get(EXTRA, {})}
    values.pop(EXTRA, None)
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return library_answer(values)


def body(number: int, **more: Any) -> dict[str, Any]:
    """A body that also asks for token ids."""
    own = {**BODIES[number], "model": "stories", "prompt": PROMPT, **more}
    return own | {EXTRA: {**own.get(EXTRA, {}), "return_token_ids": True}}


def assert_same(choice: Any, sample: CompletionOutput) -> None:
    assert tuple(choice.token_ids) == sample.token_ids
    assert choice.text == sample.text
    assert choice.finish_reason == sample.finish_reason
    if sample.logprobs:
        assert choice.logprobs.token_logprobs == [each.logprob for each in sample.logprobs]
        for top, each in zip(choice.logprobs.top_logprobs, sample.logprobs, strict=True):
            assert set(top.values()) == {*each.top_logprobs, each.logprob}
    else:
        assert choice.logprobs is None


def collected(stream: Any, num_choices: int) -> tuple[list[dict[str, Any]], Any]:
    """The choices of a stream put together, and its usage."""
    found: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "logprobs": [], "end": None} for _ in range(num_choices)
    ]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            own = found[choice.index]
            assert own["end"] is None, "nothing follows a finish reason"
            own["text"] += choice.text
            own["token_ids"] += choice.token_ids
            own["logprobs"] += choice.logprobs.token_logprobs if choice.logprobs else []
            own["end"] = choice.finish_reason
    return found, usage


@pytest.mark.short("0", "1", "2", "3", "4")
@pytest.mark.parametrize("number", range(len(BODIES)))
def test_an_answer_is_the_same_whole_streamed_and_from_the_library(server: Running, number: int) -> None:
    expected, client = alone(number), server.client()
    whole = client.completions.create(**body(number))
    for choice, sample in zip(whole.choices, expected.outputs, strict=True):
        assert_same(choice, sample)
    assert whole.system_fingerprint == expected.fingerprint
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == sum(len(sample.token_ids) for sample in expected.outputs)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    found, usage = collected(client.completions.create(**body(number, **options)), len(expected.outputs))
    for own, sample in zip(found, expected.outputs, strict=True):
        assert (own["text"], tuple(own["token_ids"]), own["end"]) == (
            sample.text,
            sample.token_ids,
            sample.finish_reason,
        )
        assert own["logprobs"] == [each.logprob for each in sample.logprobs]
    assert usage.completion_tokens == whole.usage.completion_tokens
    drafted = BODIES[number].get(EXTRA, {}).get("speculation") is not False
    assert bool(usage.speculation["num_drafted"]) == drafted
    assert usage.speculation["num_accepted"] == sum(usage.speculation["accepted_at_depth"])
    assert drafted or usage.speculation["gain"] is None


def test_answers_under_load_are_those_of_requests_alone(server: Running) -> None:
    """More requests at once than the batch holds, whole and streamed, with clients that disconnect."""
    client = server.client()

    def ask(turn: int) -> None:
        number = turn % len(BODIES)
        expected = alone(number).outputs
        if turn % 7 == 3:
            stream = client.completions.create(**body(number, stream=True, n=1, max_tokens=400, stop=None))
            next(iter(stream))
            stream.close()
        elif turn % 2:
            found, _ = collected(client.completions.create(**body(number, stream=True)), len(expected))
            assert [tuple(own["token_ids"]) for own in found] == [sample.token_ids for sample in expected]
        else:
            whole = client.completions.create(**body(number))
            for choice, sample in zip(whole.choices, expected, strict=True):
                assert_same(choice, sample)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(40)))


def test_a_drawn_seed_is_reported_and_reproduces_the_answer(server: Running) -> None:
    client = server.client()
    first = client.completions.create(model="stories", prompt=["Lily", "Tom"], temperature=1.5, max_tokens=12, n=2)
    assert 0 <= first.seed < 2**53
    again = client.completions.create(
        model="stories", prompt=["Lily", "Tom"], temperature=1.5, max_tokens=12, n=2, seed=first.seed
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in first.choices]
    assert len({choice.text for choice in first.choices}) == 4
    other = client.completions.create(model="stories", prompt="Lily", temperature=1.5, max_tokens=12)
    assert other.choices[0].text != first.choices[0].text


@pytest.mark.parametrize("prompt", ["Lily", "", ["Lily", "", "Tom and"], [410, 403], [[410, 403], [403]]])
def test_every_form_of_a_prompt(server: Running, prompt: Any) -> None:
    params = SamplingParams(seed=5, max_tokens=8, n=2)
    forms: list[Prompt] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = plain().generate(forms, params, use_tqdm=False)
    found = server.client().completions.create(model="stories", prompt=prompt, seed=5, max_tokens=8, n=2)
    assert [choice.text for choice in found.choices] == [sample.text for each in expected for sample in each.outputs]
    assert [choice.index for choice in found.choices] == list(range(2 * len(forms)))


def test_every_prompt_and_sample_counts_and_has_offsets_of_its_own(server: Running) -> None:
    prompts = [f"{name} and her dog went to the park, and they played there until it was dark. " * 4 for name in "AB"]
    asked = {"max_tokens": 3, "logprobs": 1, "n": 2, "seed": 3}
    for prompt in prompts:
        server.post("/v1/completions", prompt=prompt, **asked)
    singly = [server.post("/v1/completions", prompt=prompt, **asked).json() for prompt in prompts]
    together = server.post("/v1/completions", prompt=prompts, **asked).json()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (*singly, together)]
    assert cached[0] + cached[1] == cached[2] > cached[0] > 0
    for choice in together["choices"]:
        lists = choice["logprobs"]
        lengths = [len(token) for token in lists["tokens"]]
        assert lists["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
        assert "".join(lists["tokens"]) == choice["text"]


def test_without_special_tokens_and_with_log_probabilities_of_the_prompt(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    monkeypatch.setattr(server.llm.tokenizer._backend, "post_processor", begun)  # the model's own adds none
    usual = server.post("/v1/completions", prompt=PROMPT, max_tokens=1, return_token_ids=True).json()["choices"][0]
    found = server.post(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        add_special_tokens=False,
        prompt_logprobs=2,
        return_token_ids=True,
    ).json()["choices"][0]
    ids = plain().tokenizer.encode(PROMPT, add_special_tokens=False)
    expected = plain().generate([ids], SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2), use_tqdm=False)[
        0
    ]
    assert tuple(found["prompt_token_ids"]) == expected.prompt_token_ids == tuple(ids)
    assert usual["prompt_token_ids"] == [1, *ids]
    assert found["text"] == expected.outputs[0].text
    assert found["prompt_logprobs"][0] is None
    for entry, each in zip(found["prompt_logprobs"][1:], expected.prompt_logprobs, strict=True):
        assert entry[str(each.token_id)]["logprob"] == each.logprob
        assert entry[str(each.token_id)]["rank"] == each.rank


def test_a_conversation_whole_streamed_and_by_the_library(server: Running) -> None:
    messages = [{"role": "user", "content": "Lily had a cat."}, {"role": "assistant", "content": "It was big."}]
    params = SamplingParams(seed=3, max_tokens=20, logprobs=2, n=2)
    options = ChatOptions(chat_template=TEMPLATE, chat_template_kwargs={"opening": "Then"})
    expected = plain().generate(plain().chat_prompt(messages, options), params, use_tqdm=False)[0]
    asked: dict[str, Any] = {
        "model": "stories", "messages": messages, "seed": 3, "max_completion_tokens": 20, "logprobs": True,
        "top_logprobs": 2, "n": 2,
        EXTRA: {"chat_template": TEMPLATE, "chat_template_kwargs": {"opening": "Then"}, "return_token_ids": True},
    }  # fmt: skip
    client = server.client()
    whole = client.chat.completions.create(**asked)
    assert tuple(whole.prompt_token_ids) == expected.prompt_token_ids
    for choice, sample in zip(whole.choices, expected.outputs, strict=True):
        assert choice.message.content == sample.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == sample.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for entry, each in zip(choice.logprobs.content, sample.logprobs, strict=True):
            assert entry.logprob == each.logprob
            assert [top.logprob for top in entry.top_logprobs] == list(each.top_logprobs)
        spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert spelled.decode().startswith(sample.text)
    texts, entries, roles = ["", ""], [[], []], [0, 0]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
            entries[part.index] += (part.logprobs.content or []) if part.logprobs else []
            roles[part.index] += part.delta.role == "assistant"
    assert texts == [sample.text for sample in expected.outputs]
    assert entries == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
    assert roles == [1, 1]


def test_the_models_template_and_a_continued_answer(tmp_path: Path) -> None:
    for file in TARGET.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(str(tmp_path), dtype="float32") as llm, running(llm) as server:
        messages = [{"role": "user", "content": "Tom had a dog"}]
        found = server.post(
            "/v1/chat/completions", messages=messages, temperature=0, max_tokens=8, continue_final_message=True
        ).json()
        ids = server.post("/tokenize", messages=messages, add_generation_prompt=False).json()
    expected = plain().generate(
        {"prompt_token_ids": plain().tokenizer.encode("Tom had a dog", add_special_tokens=False)},
        SamplingParams(temperature=0, max_tokens=8),
        use_tqdm=False,
    )[0]
    assert found["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert ids["count"] == len(ids["tokens"]) == len(plain().tokenizer.encode("Tom had a dog ", False))


def test_tokenize_and_detokenize_are_each_other_s_reverse(server: Running) -> None:
    found = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert found["tokens"] == plain().tokenizer.encode(PROMPT)
    assert found["max_model_len"] == server.llm.plan.max_model_len
    assert "".join(found["token_strs"]).strip() == PROMPT
    assert server.post("/detokenize", tokens=found["tokens"]).json()["prompt"].strip() == PROMPT


def test_a_completion_without_max_tokens_has_16_tokens(server: Running) -> None:
    found = server.client().completions.create(model="stories", prompt=PROMPT, temperature=0)
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    assert found.choices[0].finish_reason == "length"


def test_models(server: Running) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == "stories"
    assert client.models.retrieve("stories") == model


def test_answer_bodies_are_valid_by_the_specification(server: Running) -> None:
    completion = server.post("/v1/completions", prompt=PROMPT, max_tokens=6, logprobs=2, n=2, seed=1).json()
    assert_valid(completion, "CreateCompletionResponse")
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template": TEMPLATE,
        "max_tokens": 6,
        "logprobs": True,
    }
    whole = server.post("/v1/chat/completions", **chat, top_logprobs=3).json()
    assert_valid(whole, "CreateChatCompletionResponse")
    for path, own in (("/v1/completions", {"prompt": PROMPT, "max_tokens": 6}), ("/v1/chat/completions", chat)):
        streamed = server.post(path, **own, stream=True, stream_options={"include_usage": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        chunks = events_of(streamed.text)
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 6)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for chunk in chunks if own is chat else ():
            assert_valid(chunk, "CreateChatCompletionStreamResponse")
    with server.http() as http:
        assert_valid(http.get("/v1/models").json(), "ListModelsResponse")
        assert_valid(http.get("/nowhere").json(), "ErrorResponse")
    assert_valid(server.post("/v1/completions", prompt=PROMPT, n=0).json(), "ErrorResponse")
