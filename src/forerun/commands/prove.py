"""`forerun prove`: show on one's own model that speculation does not change what is said.

Decides the options, the card and the exit status: 0 where all holds, 1 where something speaks against it, 2 for a
mistake of the user's. What is run and concluded is decided in `forerun.prove`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forerun.config import DEFAULT_DEPTH, Speculation
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.options import (
    AdapterOption,
    DeviceOption,
    DtypeOption,
    KernelsOption,
    MaxModelLenOption,
    OneGemmOption,
    QuantizeOption,
    ThreadsOption,
    adapted,
    with_options,
)
from forerun.progress import LoadingBar
from forerun.prove.prompts import FilePrompt, read_prompts
from forerun.prove.proof import largest_shape
from forerun.prove.proof import prove as run
from forerun.prove.show import proof_card
from forerun.prove.workload import ProofWorkload
from forerun.request import Request


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """Options that say what is proven, and on how much."""

    model: Annotated[str, typer.Option("--model", "-m", help="Hugging Face folder or hub id of the target.")]
    draft: Annotated[str, typer.Option("--draft", "-d", help="What guesses ahead: ngram, suffix, model:DIR, mix[A,B].")]
    prompts: Annotated[Path, typer.Option(help="A .jsonl with prompt, text or turns in each line, or a .txt.")]
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per run; prompts repeat where there are fewer.")] = 8
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens per request.")] = 48
    depth: Annotated[int, typer.Option(min=1, help="Tokens guessed per round.")] = DEFAULT_DEPTH
    width: Annotated[int, typer.Option(min=2, help="Guesses side by side in trees.")] = 2
    num_texts: Annotated[int, typer.Option(min=100, help="Texts drawn in each test of the law.")] = 1500
    thorough: Annotated[bool, typer.Option("--thorough", help="About ten times the work.")] = False
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same report.")] = 0
    dtype: DtypeOption = "auto"
    quantize: QuantizeOption = None
    kernels: KernelsOption = "auto"
    max_model_len: MaxModelLenOption = None
    threads: ThreadsOption = None
    device: DeviceOption = "cpu"
    one_gemm: OneGemmOption = False
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))

    def workload(self) -> ProofWorkload:
        """The same as numbers to run."""
        workload = ProofWorkload(
            num_prompts=self.num_prompts,
            max_tokens=self.max_tokens,
            shapes=(Speculation(self.depth), Speculation(self.depth, self.width)),
            num_texts=self.num_texts,
            seed=self.seed,
        )
        return workload.thorough() if self.thorough else workload


@with_options
def prove(
    options: ProveOptions,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the card.")] = False,
) -> None:
    """Prove on your own model that speculation does not change the answers. Status 0: all holds; 1: it does not."""
    workload = options.workload()
    prompts = read_prompts(options.prompts, workload.num_prompts)
    errors = Console(stderr=True)
    with LoadingBar(errors) as bar:
        llm = LLM(
            options.model,
            options.draft,
            dtype=options.dtype,
            quantize=options.quantize,
            kernels=options.kernels,
            speculation=largest_shape(workload),
            max_model_len=options.max_model_len,
            max_num_seqs=2 * max(workload.batches),
            threads=options.threads,
            device=options.device,
            one_gemm=options.one_gemm,
            progress=bar,
        )
        check_lengths(llm, prompts)
        report = run(llm, [prompt.text for prompt in prompts], workload, bar)
    if as_json:
        typer.echo(json.dumps(report.as_object()))
    else:
        Console().print(proof_card(report))
    raise typer.Exit(0 if report.holds else 1)


def check_lengths(llm: LLM, prompts: list[FilePrompt]) -> None:
    """Raise InvalidRequest, with file and line, for a prompt that the model cannot be given."""
    for prompt in prompts:
        try:
            llm.requests.prompt_tokens(Request.of(prompt.text))
        except InvalidRequest as error:
            raise InvalidRequest("prompts", f"{prompt.place}: {error}") from error
