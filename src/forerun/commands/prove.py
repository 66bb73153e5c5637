"""`forerun prove`: shows on the user's model that speculation does not change the output.

This file decides the options and the exit status: 0 where every check holds, 1 where one fails. `forerun.prove` decides
what is run and concluded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from forerun.commands.destination import Result
from forerun.commands.interrupt import importing
from forerun.config import DEFAULT_DEPTH, Speculation
from forerun.options import (
    REQUIRED_DRAFT,
    AdapterOption,
    LoadingOptions,
    MaxModelLenOption,
    ModelOption,
    OutputOptions,
    adapted,
    with_options,
)
from forerun.streams import show_note

EXAMPLES = """
forerun prove --model stdlib --draft model:stdlib-draft --prompts prompts.txt
forerun prove --model stdlib --draft ngram --prompts prompts.jsonl --thorough -o proof.json
"""


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """Options that say what is proven, and on how much."""

    TITLE: ClassVar[str] = "Proof"

    model: ModelOption
    draft: Annotated[str, REQUIRED_DRAFT]
    prompts: Annotated[Path, typer.Option(help="A .jsonl with prompt, text or turns in each line, or a .txt.")]
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per run; prompts repeat where there are fewer.")] = 8
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="New tokens per request.")] = 48
    depth: Annotated[int, typer.Option(min=1, help="Tokens drafted per round.")] = DEFAULT_DEPTH
    width: Annotated[int, typer.Option(min=2, help="Drafted tokens side by side in trees.")] = 2
    num_texts: Annotated[int, typer.Option(min=100, help="Texts drawn in each test of the law.")] = 1500
    thorough: Annotated[bool, typer.Option("--thorough", help="About ten times the work.")] = False
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same report.")] = 0
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    max_model_len: MaxModelLenOption = None
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))


@with_options(EXAMPLES)
def prove(options: ProveOptions, output: OutputOptions) -> None:
    """Prove on your own model that speculation does not change the answers.

    Status 0: everything holds. Status 1: something does not.
    """
    result = Result.of(output)
    with importing():
        from rich.console import Console

        from forerun.llm import LLM
        from forerun.progress import LoadingBar
        from forerun.prove.prompts import check_lengths, read_prompts
        from forerun.prove.proof import prove as run
        from forerun.prove.show import proof_card
        from forerun.prove.workload import ProofPace, ProofWorkload, spoken
        from forerun.request import Request
    workload = ProofWorkload(
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        shapes=(Speculation(options.depth), Speculation(options.depth, options.width)),
        num_texts=options.num_texts,
        seed=options.seed,
    )
    workload = workload.thorough() if options.thorough else workload
    prompts = read_prompts(options.prompts, workload.num_prompts)
    errors = Console(stderr=True)
    with LoadingBar(errors) as bar:
        llm = LLM(
            options.loading.spec(options.model),
            options.draft,
            speculation=workload.largest_shape,
            max_model_len=options.max_model_len,
            max_num_seqs=2 * max(workload.batches),
            threads=options.loading.threads,
            progress=bar,
        )
        check_lengths(llm.requests.prompt_tokens, prompts)
        pace = ProofPace.of(llm, llm.requests.prompt_tokens(Request.of(prompts[0].text)), workload.shapes[0])
        if errors.is_terminal:
            bar.stop()
            show_note(f"This takes about {spoken(pace.total_s(workload))} here.")
        report = run(llm, [prompt.text for prompt in prompts], workload, bar)
    if not result.as_json:
        Console().print(proof_card(report))
    result.tell(report.as_object())
    raise typer.Exit(0 if report.holds else 1)
