"""The settings of an LLM, its description of itself, and how it is closed."""

import gc
import json
import logging
import shutil
import weakref
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import EngineClosed, InvalidRequest
from forerun.llm import generation_defaults
from forerun.models.spec import ModelSpec
from kit.checkpoints import SMALL, TARGET

PROMPT = "Once upon a time"
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def seeds_of(llm: LLM, num: int = 3) -> list[int]:
    return [result.seed for result in llm.generate([PROMPT] * num, SHORT)]


def test_the_llms_seed_determines_the_seeds_of_requests_without_one() -> None:
    first, again, other = (LLM(str(TARGET), dtype="float32", seed=seed) for seed in (7, 7, -7))
    assert len(set(seeds_of(first))) == 3
    assert [*seeds_of(LLM(str(TARGET), dtype="float32", seed=7)), *seeds_of(first)] == seeds_of(again, 6)
    assert not set(seeds_of(other)) & set(seeds_of(again))
    assert first.generate(PROMPT, SamplingParams(max_tokens=1, seed=5))[0].seed == 5


@pytest.fixture
def with_defaults(tmp_path: Path) -> Path:
    """The checkpoint, with a generation_config.json that sets sampling parameters."""
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    config = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 5, "num_beams": 4, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_requests_without_parameters_follow_the_models_own_file(
    with_defaults: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="forerun"):
        llm = LLM(str(with_defaults), dtype="float32")
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.5, 7, 5)
    assert defaults == SamplingParams(temperature=0.5, top_k=7, max_tokens=5)
    (answer,) = llm.generate(PROMPT)[0].outputs
    assert len(answer.token_ids) <= 5
    assert sum(len(delta.token_ids) for delta in llm.stream(PROMPT)) <= 5
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids) == 9
    messages = {record.levelno: record.getMessage() for record in caplog.records}
    assert "num_beams" in messages[logging.WARNING]
    assert any("temperature=0.5, top_k=7, max_tokens=5" in record.getMessage() for record in caplog.records)


def test_answers_end_at_the_tokenizers_own_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(TARGET, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}), encoding="utf-8")
    llm = LLM(str(folder), dtype="float32")
    assert [record.getMessage().partition("has")[0][-22:-1] for record in caplog.records] == ["tokenizer_config.json"]
    params = SamplingParams(max_tokens=9, logit_bias={2: 300.0})
    conversation = [{"role": "user", "content": "hello"}]
    template = "{{ messages[0]['content'] }}"
    for result in [*llm.generate(PROMPT, params), *llm.chat(conversation, params, chat_template=template)]:
        assert (result.outputs[0].finish_reason, list(result.outputs[0].token_ids)) == ("stop", [2])


@pytest.mark.parametrize("choice", ["none", None, "vllm"])
def test_the_models_own_defaults_can_be_switched_off(with_defaults: Path, choice: str | None) -> None:
    llm = LLM(str(with_defaults), dtype="float32", generation_config=choice)
    assert llm.get_default_sampling_params() == SamplingParams()
    assert not llm.generation_defaults.given


def test_another_folders_defaults_can_be_named(with_defaults: Path) -> None:
    llm = LLM(str(TARGET), dtype="float32", generation_config=str(with_defaults))
    assert llm.get_default_sampling_params().top_k == 7


@pytest.mark.parametrize("choice", ["nowhere", "x" * 5000, "a\0b", "\ud800", 5])
def test_a_generation_config_that_is_no_folder_is_refused(choice: object) -> None:
    with pytest.raises(InvalidRequest, match=r"generation_config: .* must be 'auto'"):
        generation_defaults(choice, TARGET)  # type: ignore[arg-type]


def test_a_draft_spec_and_keywords_are_equivalent() -> None:
    spec = ModelSpec(str(TARGET), dtype="float32", kernels="torch")
    one, other = LLM(spec), LLM(str(TARGET), dtype="float32", kernels="torch")
    assert (one.fingerprint, one.format, one.kernels) == (other.fingerprint, other.format, other.kernels)
    assert LLM(spec, dtype="bfloat16").format == "bfloat16"
    assert LLM(str(SMALL), dtype="float32", kernels="torch").fingerprint != one.fingerprint


@pytest.mark.parametrize("name", ["max_num_seqs", "chunk_tokens", "memory_bytes", "max_model_len", "threads"])
def test_absurd_numbers_are_refused(name: str) -> None:
    for value in (10**400, 2**63, 2**62):
        with pytest.raises(InvalidRequest, match=f"{name}: .*(must be at most|is above)"):
            LLM(str(TARGET), **{name: value})  # type: ignore[arg-type]


def test_repr_names_model_drafter_and_device() -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_model_len=64, max_num_seqs=3)
    shown = f"LLM({str(TARGET)!r}, draft='ngram', format='float32', kernels={llm.kernels!r}"
    assert repr(llm) == f"{shown}, max_model_len=64, max_num_seqs=3)"
    llm.close()
    assert repr(llm) == f"{shown}, max_model_len=64, max_num_seqs=3, closed)"


def test_repr_has_the_batch_size_that_was_set_also_if_fewer_full_contexts_fit() -> None:
    needed = LLM(str(TARGET), dtype="float32", max_model_len=64, max_num_seqs=1).plan.num_bytes
    llm = LLM(str(TARGET), dtype="float32", max_model_len=64, max_num_seqs=3, memory_bytes=needed)
    assert (llm.plan.num_sequences_plain, "max_num_seqs=3" in repr(llm)) == (1, True)


def test_the_start_is_logged_and_silent_by_default(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="forerun"):
        llm = LLM(str(TARGET), dtype="float32", max_model_len=64)
    lines = [record.getMessage() for record in caplog.records if record.name == "forerun.llm"]
    assert lines == [f"{llm!r}, fingerprint {llm.fingerprint}", *llm.plan.lines()]
    assert capfd.readouterr() == ("", "")
    assert not logging.getLogger("forerun").handlers  # Python shows warnings where a program sets up nothing


@pytest.mark.short("model:*")
@pytest.mark.parametrize("draft", [None, f"model:{SMALL}", "suffix"])
def test_closing_frees_models_and_caches(draft: str | None) -> None:
    llm = LLM(str(TARGET), draft, dtype="float32")
    llm.generate(PROMPT, SHORT)
    passes = llm.stats.num_passes
    held = [weakref.ref(llm.engine), weakref.ref(llm.engine.runner), weakref.ref(llm.engine.runner.cache.keys)]
    held += [] if llm.drafter is None else [weakref.ref(llm.drafter)]
    llm.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    llm.close()
    for use in (lambda: llm.generate(PROMPT), lambda: next(llm.stream(PROMPT)), lambda: llm.engine):
        with pytest.raises(EngineClosed, match="this LLM was closed; create a new one"):
            use()
    assert llm.stats.num_passes == passes
    assert llm.get_tokenizer().encode(PROMPT)


@pytest.mark.short("model:*", "early-exit:1")
@pytest.mark.parametrize("draft", [None, "ngram", f"model:{SMALL}", "suffix", "early-exit:1", "mix[ngram,suffix]"])
def test_the_last_reference_frees_models_and_caches_without_the_garbage_collector(draft: str | None) -> None:
    llm = LLM(str(TARGET), draft, dtype="float32", speculation=2)
    llm.generate(PROMPT, SHORT)
    next(llm.stream(PROMPT, SHORT))  # and left in the middle
    held = [weakref.ref(llm.engine), weakref.ref(llm.engine.runner), weakref.ref(llm.engine.runner.cache.keys)]
    held += [weakref.ref(llm.requests)] + ([] if llm.drafter is None else [weakref.ref(llm.drafter)])
    gc.disable()
    try:
        del llm
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_leaving_the_block_closes_and_ends_streams() -> None:
    with LLM(str(TARGET), "ngram", dtype="float32") as llm:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
        next(stream)
    with pytest.raises(EngineClosed):
        list(stream)
    stream.close()  # type: ignore[attr-defined]


def test_a_stored_past_keeps_the_tokens_emitted_before_closing(tmp_path: Path) -> None:
    file = tmp_path / "past.jsonl"
    with LLM(str(TARGET), f"suffix:{file}", dtype="float32") as llm:
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
        emitted = [token for _ in range(6) for token in next(stream).token_ids]
    kept = json.loads(file.read_text(encoding="utf-8").splitlines()[1])["tokens"]
    assert kept[: len(emitted)] == emitted
