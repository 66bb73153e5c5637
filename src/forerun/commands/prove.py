"""`forerun prove`: tests on the user's model that speculation does not change the output.

This file defines the options and the exit status: 0 if every test passes, else 1. `forerun.prove` runs the tests; for a
server it is `forerun.remote`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from forerun.commands.bench_serve import RemoteOptions
from forerun.commands.running import Result, importing
from forerun.config import DEFAULT_DEPTH, Speculation
from forerun.errors import InvalidRequest
from forerun.options import (
    REQUIRED_DRAFT,
    AdapterOption,
    LoadingOptions,
    MaxModelLenOption,
    ModelOption,
    OutputOptions,
    adapted,
    changed,
    with_options,
)
from forerun.streams import show_note

EXAMPLES = """
forerun prove --model stdlib --draft model:stdlib-draft --prompts prompts.txt
forerun prove --model stdlib --draft ngram --prompts prompts.jsonl --thorough -o proof.json
forerun prove --server http://gpu:8000 --plain http://gpu:8001 --prompts prompts.jsonl
"""


SERVER_OPTIONS = ("prompts", "num_prompts", "max_tokens", "num_texts", "thorough", "seed")


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """Options for the tests and their size."""

    TITLE: ClassVar[str] = "Proof"

    prompts: Annotated[Path, typer.Option(help="File: .jsonl with prompt, messages or turns in each line, or .txt.")]
    model: ModelOption = ""
    draft: Annotated[str | None, REQUIRED_DRAFT] = None
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per run; prompts repeat if there are fewer.")] = 8
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens per request.")] = 48
    depth: Annotated[int, typer.Option(min=1, help="Tokens drafted per round.")] = DEFAULT_DEPTH
    width: Annotated[int, typer.Option(min=2, help="Draft tokens per parent in trees.")] = 2
    num_texts: Annotated[int, typer.Option(min=100, help="Samples in each statistical test.")] = 1500
    thorough: Annotated[bool, typer.Option("--thorough", help="Do about ten times as many tests.")] = False
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same report.")] = 0
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    max_model_len: MaxModelLenOption = None
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))


@dataclass(frozen=True, slots=True)
class ServerProveOptions(RemoteOptions):
    """Server options, and the server to compare with."""

    plain: Annotated[
        str | None, typer.Option(help="With --server: a server of the same model without speculation.")
    ] = None
    plain_model: Annotated[str, typer.Option(help="Model name on that server, if it differs.")] = ""
    chat: Annotated[
        bool, typer.Option("--chat", help="With --server: use chat completions; prompts become messages.")
    ] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="With --server: seconds after which no test starts; default: 300, with --thorough 3000."
        ),
    ] = None


@with_options(EXAMPLES)
def prove(options: ProveOptions, remote: ServerProveOptions, output: OutputOptions) -> None:
    """Test on your own model that speculation does not change the answers.

    With --server it tests any OpenAI-compatible server against the same model without speculation. Exit status 0: all
    tests passed. Exit status 1: a test failed, or answers differ for an unknown reason.
    """
    result = Result.of(output)
    if remote.server is not None:
        holds = prove_remote(options, remote, result)
        raise typer.Exit(0 if holds else 1)
    remote.require_server()
    if not options.model or options.draft is None:
        missing = "draft" if options.model else "model"
        raise InvalidRequest(missing, "it is missing: give --model and --draft, or a server with --server URL.")
    with importing():
        from forerun.bench.material import check_lengths, read_passages, workload_of
        from forerun.llm import LLM
        from forerun.progress import LoadingBar, rounded_duration
        from forerun.prove.proof import prove as run
        from forerun.prove.show import proof_card
        from forerun.prove.workload import ProofPace, ProofWorkload
    workload = ProofWorkload(
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        shapes=(Speculation(options.depth), Speculation(options.depth, options.width)),
        num_texts=options.num_texts,
        seed=options.seed,
    )
    workload = workload.thorough() if options.thorough else workload
    passages = read_passages(options.prompts, most=workload.num_prompts)
    with LoadingBar(lines=True) as bar:
        llm = LLM(
            options.loading.spec(options.model),
            options.draft,
            speculation=max(workload.shapes, key=lambda shape: shape.depth * shape.width),
            max_model_len=options.max_model_len,
            max_num_seqs=2 * max(workload.batches),
            threads=options.loading.threads,
            progress=bar,
        )
        texts = workload_of("prompts", passages, workload.num_prompts, llm.tokenizer)
        check_lengths(texts, 1, llm.requests.max_length)
        prompts = [list(item.prompt) for item in texts.items]
        pace = ProofPace.of(llm, prompts[0], workload.shapes[0])
        if bar.is_shown:
            bar.stop()
            show_note(f"This takes about {rounded_duration(pace.total_s(workload))} here.")
        report = run(llm, prompts, workload, bar)
    result.write(report.as_object(), proof_card(report))
    raise typer.Exit(0 if report.holds else 1)


def prove_remote(options: ProveOptions, remote: ServerProveOptions, result: Result) -> bool:
    """Test a server instead of a loaded model; returns whether all tests passed.

    Raises InvalidRequest for options that apply only to a loaded model.
    """
    remote.refuse(changed(options), SERVER_OPTIONS)
    with importing():
        from forerun.bench.material import read_passages
        from forerun.progress import LoadingBar
        from forerun.prove.workload import ProofWorkload
        from forerun.remote.proof import LIMIT_S, prove_server
        from forerun.remote.proof_show import server_proof_card
        from forerun.traffic.client import require_client
    require_client("forerun prove --server", "prometheus_client")
    workload = ProofWorkload(options.num_prompts, options.max_tokens, num_texts=options.num_texts, seed=options.seed)
    workload = workload.thorough() if options.thorough else workload
    address, plain = remote.addresses(remote.chat, remote.plain, "plain", remote.plain_model)
    prompts = read_passages(options.prompts)
    with LoadingBar(lines=True) as bar:
        limit_s = remote.time_limit or (10 if options.thorough else 1) * LIMIT_S
        proof = asyncio.run(prove_server(address, plain, prompts, workload, bar, limit_s))
    result.write(proof.as_object(), server_proof_card(proof))
    return proof.holds
