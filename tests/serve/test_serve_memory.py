"""When memory runs out the server goes on: requests that fit are answered, and only others get an error."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from forerun.cache.blocks import OutOfBlocks
from forerun.models.decoder import Outputs
from forerun.models.runner import Read, Runner
from kit.servers import Running, drafting, library_answer, running

BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "seed": seed, "max_tokens": 12, "temperature": seed % 2}
    for seed, prompt in enumerate(["Once upon a time", "Lily had a", "Tom and his dog", "One day"])
]
LARGE = {"prompt": [410] * 200, "seed": 9, "max_tokens": 12}
ERRORS: list[Callable[[], Exception]] = [
    MemoryError,
    lambda: torch.OutOfMemoryError("CUDA out of memory."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
    lambda: OutOfBlocks(9, 3),
]


def solo(body: dict[str, Any], **more: Any) -> list[str]:
    """The library's answers to a body, alone and without a drafter."""
    return [sample.text for sample in library_answer(body | more).outputs]


def texts_of(answer: Any) -> list[str]:
    """The texts of an answer's choices."""
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def side_by_side(server: Running, bodies: Seq[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.post("/v1/completions", **body), bodies))


def lacking(monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], wants: Callable[[Read], bool]) -> None:
    """Passes raise this error, their work begun, where any read wants more memory than there is."""
    honest = Runner.read

    def read(runner: Runner, reads: Seq[Read], *args: Any, **kwargs: Any) -> Outputs:
        states = honest(runner, reads, *args, **kwargs)
        if any(map(wants, reads)):
            raise error()
        return states

    monkeypatch.setattr(Runner, "read", read)


@pytest.mark.short("gpu")
@pytest.mark.parametrize("error", ERRORS, ids=["python", "gpu", "cpu", "blocks"])
def test_only_the_request_that_needs_too_much_memory_fails(
    error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting() as llm, running(llm) as server:
        with monkeypatch.context() as patch:
            lacking(patch, error, lambda read: len(read.tokens) > 100)
            *good, bad = side_by_side(server, [*BODIES, LARGE])
            assert [texts_of(each) for each in good] == [solo(body) for body in BODIES]
            assert bad.status_code == 503
            assert bad.json()["error"]["code"] == "out_of_memory"
            assert "Use a shorter prompt" in bad.json()["error"]["message"]
            assert bad.headers["x-should-retry"] == "false"
            with pytest.raises(openai.APIStatusError, match="no memory is left for a round"):
                server.client().completions.create(model="stories", **LARGE, stream=True)
        assert texts_of(server.post("/v1/completions", **LARGE)) == solo(LARGE)
        with server.http() as http:
            assert http.get("/health").status_code == http.get("/ready").status_code == 200


def test_a_body_that_cannot_be_read_for_lack_of_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafting() as llm, running(llm) as server:
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.tokenizer), "encode_within", lambda *_, **__: bytearray(2**62))
            failed = server.post("/v1/completions", **BODIES[0])
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "out_of_memory")
        assert texts_of(server.post("/v1/completions", **BODIES[0])) == solo(BODIES[0])
