"""vLLM's keywords: what means the same is taken, anything else is answered with what to write, nothing is swallowed."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from forerun import LLM, AsyncLLM, ForerunError, InvalidRequest, SamplingParams, Speculation
from forerun.draft.text.ngram import NgramDrafter
from forerun.ecosystem import REQUEST_WORDS, SPECULATIVE_WORDS, WORDS, drafting_of, memory_of, read_speculative_config
from forerun.errors import UnknownKeyword
from forerun.sampling.params import ALTERNATIVES
from kit.checkpoints import TARGET

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_every_keyword_takes_its_own_values_and_refuses_others() -> None:
    """Truth values are not numbers, so that a slip is not taken for what it happens to equal."""
    for name, word in [*WORDS.items(), *SPECULATIVE_WORDS.items()]:
        assert word.same, name
        assert all(word.accepts(value) for value in word.same), name
        assert not any(word.accepts(value) for value in ("no such value", [1], {"a": 1}, -2, float("nan"))), name
        assert word.amount == word.accepts(7), name
        assert not WORDS["pipeline_parallel_size"].accepts(True)


def test_no_parameter_of_ours_is_in_a_table() -> None:
    """A word that both libraries have is read by the function itself; an entry for it would never be asked."""
    own = set(LLM.__init__.__annotations__)
    assert own & {"max_model_len", "speculative_config"}
    assert not own & set(WORDS)
    assert not (set(LLM.generate.__annotations__) | set(LLM.chat.__annotations__)) & set(REQUEST_WORDS)
    assert not set(SamplingParams.__slots__) & set(ALTERNATIVES)


def test_keywords_of_requests_are_answered_too() -> None:
    """At both front doors: what asks for nothing is taken, anything else is answered by name."""
    llm = LLM(str(TARGET), dtype="float32", max_model_len=64)
    params, chat = SamplingParams(max_tokens=3, seed=1), [{"role": "user", "content": "Hello"}]
    plain = llm.generate("Once", params)[0]
    assert llm.generate("Once", params, lora_request=None, priority=0)[0] == plain
    template = "{{ messages[0].content }}"
    assert llm.chat(chat, params, chat_template=template, chat_template_content_format="auto")[0].finished
    calls: list[Callable[..., object]] = [
        partial(llm.generate, "Once"),
        partial(llm.chat, chat, chat_template=template),
    ]

    async def ask(**words: Any) -> None:
        async with AsyncLLM(llm) as front:
            await front.generate("Once", **words)

    for call in [*calls, lambda **words: asyncio.run(ask(**words))]:
        with pytest.raises(InvalidRequest, match="lora_request: 'mine' is not supported: forerun has no LoRA"):
            call(lora_request="mine")
        with pytest.raises(
            InvalidRequest, match=r'prompt_token_ids: \[1, 2\] is not supported: give {"prompt_token_ids"'
        ):
            call(prompt_token_ids=[1, 2])
        with pytest.raises(UnknownKeyword, match="has no keyword 'samplingparams': did you mean 'sampling_params'"):
            call(samplingparams=params)


@pytest.mark.parametrize("name", sorted(ALTERNATIVES))
def test_fields_of_sampling_that_are_not_here_say_what_to_write(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: it is not supported: "):
        SamplingParams(**dict[str, Any]({name: 1}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size: 2 is not supported: forerun runs a model on one device",
        ),
        ({"quantization": "awq"}, "quantization: 'awq' .*quantize=\"int8\""),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens: 4096 .* use chunk_tokens"),
        ({"swap_space": -1}, "swap_space: -1 .* must be a number"),
        ({"swap_space": float("inf")}, "swap_space: inf .* must be a number"),
        ({"enforce_eager": "x" * 500}, "enforce_eager: .x+...x+. is not supported"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: 0 must be a share above 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: 1.5 must be a share above 0"),
        (
            {"gpu_memory_utilization": 0.5, "memory_bytes": 10**9},
            "gpu_memory_utilization: memory_bytes has the same meaning",
        ),
        ({"speculative_config": NGRAM, "draft": "ngram"}, "speculative_config: it sets drafter and depth"),
        ({"speculative_config": NGRAM, "speculation": 3}, "speculative_config: it sets drafter and depth"),
        ({"speculative_config": NGRAM, "pipeline_parallel_size": 4}, "pipeline_parallel_size: 4"),
        ({"generation_config": "no/such/folder"}, "generation_config: 'no/such/folder' must be 'auto'"),
        ({"seed": 2**64}, "seed: 18446744073709551616 "),
    ],
)
def test_what_asks_for_something_else_is_refused_before_anything_is_loaded(
    words: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.loading.Blueprint.load", None)
    with pytest.raises(InvalidRequest, match=message) as refused:
        LLM(str(TARGET), **words)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_len", "max_model_len"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("drafter", "draft"),
        ("torch_dtype", "dtype"),
        ("zzzz", None),
    ],
)
def test_a_wrong_keyword_is_told_the_right_one(wrong: str, right: str | None) -> None:
    hint = rf": did you mean '{right}'\?" if right else r"; help\(\) lists its keywords"
    with pytest.raises(TypeError, match=rf"LLM\(\) has no keyword '{wrong}'{hint}") as refused:
        LLM(str(TARGET), **{wrong: 64})  # type: ignore[arg-type]
    assert isinstance(refused.value, ForerunError)
    assert isinstance(refused.value, UnknownKeyword)
    assert refused.value.likely == right


CONFIGS: list[tuple[dict[str, Any], object, int]] = [
    (NGRAM, "ngram:5", 3),
    ({**NGRAM, "prompt_lookup_max": 4}, "ngram:4", 3),
    ({**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 1, "draft_tensor_parallel_size": 1}, "ngram:4", 3),
    ({"model": "some/model", "num_speculative_tokens": 5}, "model:some/model", 5),
    ({"model": "a,b", "num_speculative_tokens": 5, "method": "draft_model"}, 'model:"a,b"', 5),
    ({"method": "suffix"}, "suffix", 24),
    ({"method": "suffix", "num_speculative_tokens": 6, "quantization": None}, "suffix", 6),
]


@pytest.mark.parametrize(("config", "draft", "depth"), CONFIGS)
def test_a_speculative_config_is_a_draft_and_a_depth(config: dict[str, Any], draft: object, depth: int) -> None:
    assert read_speculative_config(config) == (draft, Speculation(depth))
    assert drafting_of(None, True, config) == (draft, Speculation(depth))


def test_the_shortest_match_is_kept() -> None:
    drafter, depth = read_speculative_config({**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.min_n, drafter.max_n, depth) == (2, 4, Speculation(3))
    same, _ = read_speculative_config({**NGRAM, "prompt_lookup_min": 2})
    assert isinstance(same, NgramDrafter)
    assert (same.min_n, same.max_n) == (2, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "speculative_config: 'ngram' .* must be a dict"),
        ({}, "speculative_config.method: '' .* use one of draft_model, ngram, suffix"),
        ({"method": "eagle3", "model": "x", "num_speculative_tokens": 2}, "speculative_config.method: 'eagle3' "),
        ({"method": ["ngram"], "num_speculative_tokens": 2}, r"speculative_config.method: \['ngram'\]"),
        ({"method": "ngram"}, "speculative_config.num_speculative_tokens: None .* give the number"),
        ({**NGRAM, "num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens: 0 must be"),
        ({**NGRAM, "num_speculative_tokens": True}, "speculative_config.num_speculative_tokens: True must be"),
        ({**NGRAM, "prompt_lookup_max": "4"}, "speculative_config.prompt_lookup_max: '4' must be"),
        ({**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "speculative_config.prompt_lookup_min: 3 "),
        (
            {**NGRAM, "prompt_lokup_max": 4},
            "speculative_config.prompt_lokup_max: 4 .* did you mean 'prompt_lookup_max'",
        ),
        ({**NGRAM, "model": "x"}, "speculative_config.model: 'x' .* method 'ngram' takes num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "speculative_config.model: None .* name the draft"),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, "speculative_config.draft_tensor_parallel_size: 2 .* rank 0"),
        ({**NGRAM, "rejection_sample_method": "block"}, 'speculative_config.rejection_sample_method: .*verification="'),
    ],
)
def test_what_a_speculative_config_cannot_mean_is_named(config: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_speculative_config(config)


@pytest.mark.parametrize(("wrong", "right"), [("metod", "method"), ("modl", "model"), ("num_speculative_token", "num")])
def test_a_misspelt_key_is_named_before_what_it_leaves_out(wrong: str, right: str) -> None:
    """Without its method a configuration has another fault as well, of which the slip is the cause."""
    with pytest.raises(InvalidRequest, match=rf"speculative_config.{wrong}: .*did you mean '{right}"):
        read_speculative_config({wrong: "ngram"})


def test_a_share_of_the_memory_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.ecosystem.available_bytes", lambda: 1000)
    assert memory_of(None, 0.25, torch.device("cpu")) == 250
    assert memory_of(None, 1, torch.device("cpu")) == 1000
    assert memory_of(7, None, torch.device("cpu")) == 7
    assert memory_of(None, None, torch.device("cpu")) is None
