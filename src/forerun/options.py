"""The options of the command line, as frozen values, and how a command takes them.

Decides names, defaults and help of options; one dataclass is one group, shared by commands. It knows nothing of what
commands do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from forerun.card import show_error
from forerun.config import DEFAULT_DEPTH, KernelChoice, Quantization, Speculation, Verification
from forerun.draft.spec import parse_spec
from forerun.errors import ForerunError, UnknownDrafter
from forerun.models.bundled import BUNDLED_NAMES
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree

DtypeOption = Annotated[str, typer.Option(help="Number format: auto, float32, bfloat16.")]
QuantizeOption = Annotated[
    Quantization | None, typer.Option(help="Hold the weights of target and draft model in 8 bits: int8.")
]
KernelsOption = Annotated[
    KernelChoice, typer.Option(help="What computes: compiled kernels where there is a C++ compiler, or torch.")
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=1, help="Context in tokens; default: what the model allows.")
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]
TreeOption = Annotated[
    Path | None, typer.Option(help="Guess trees of this shape: a file with paths of ranks, as in [[0], [1], [0, 0]].")
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(help="With --draft early-exit:E, layers trained for that exit: a folder; short for early-exit:E:DIR."),
]
DeviceOption = Annotated[str, typer.Option(help="Where to run: cpu, cuda, or auto: a GPU where there is one.")]
OneGemmOption = Annotated[
    bool, typer.Option("--one-gemm", help="On a GPU: one matrix product for any number of rows; the same bits.")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options that say what answers."""

    model: Annotated[
        str, typer.Option("--model", "-m", help=f"Hugging Face folder, hub id, or bundled: {BUNDLED_NAMES}.")
    ]
    draft: Annotated[
        str | None,
        typer.Option("--draft", "-d", help="What guesses ahead: ngram, suffix, model:DIR, mix[A,B]. None: plain."),
    ] = None
    depth: Annotated[int, typer.Option(min=0, help="Tokens guessed per round.")] = DEFAULT_DEPTH
    verification: Annotated[Verification, typer.Option(help="How guesses are judged.")] = "coupled"
    dtype: DtypeOption = "auto"
    quantize: QuantizeOption = None
    kernels: KernelsOption = "auto"
    max_model_len: MaxModelLenOption = None
    threads: ThreadsOption = None
    device: DeviceOption = "cpu"
    one_gemm: OneGemmOption = False
    tree: TreeOption = None
    adapter: AdapterOption = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))

    def speculation(self, width: int = 1) -> Speculation:
        """How far to draft: as deep and wide as asked, or in the shape of a file."""
        if self.tree is None:
            return Speculation(self.depth, width)
        return Speculation(self.depth, width, tree=StaticTree.load(self.tree))


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options that say how to draw an answer, when to stop, and how to show it."""

    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 0
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 256
    stop: Annotated[list[str], typer.Option(help="End where the text holds this; repeatable.")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="No colours.")] = False

    def params(self) -> SamplingParams:
        """The same as sampling parameters, with a seed drawn where none was given, so that it can be reported."""
        shown = {name: value for name, value in asdict(self).items() if name != "raw"}
        seed = SamplingParams(**shown).resolve_seed()
        return SamplingParams(**shown | {"seed": seed})


def adapted(draft: str | None, adapter: Path | None) -> str | None:
    """The draft that both options spell together. Raises UnknownDrafter where there is no exit to adapt."""
    if adapter is None:
        return draft
    spec = None if draft is None else parse_spec(draft)
    if spec is None or spec.name != "early-exit" or not (spec.argument or "").isdecimal():
        raise UnknownDrafter(
            f"--adapter {adapter} goes with --draft early-exit:E alone, not with {draft or 'none'!r}: write "
            f"--draft early-exit:E, or name the folder where the exit is named, as in early-exit:E:{adapter}"
        )
    return str(replace(spec, argument=f"{spec.argument}:{adapter}"))


Command = Callable[..., None]


def with_options(run: Command) -> Command:
    """A command whose dataclass parameters stand for the options that are their fields.

    A ForerunError becomes one red line and status 2, Ctrl-C status 130.
    """
    hints = get_type_hints(run, include_extras=True)
    own = inspect.signature(run).parameters.values()
    groups = {p.name: hints[p.name] for p in own if hasattr(hints[p.name], "__dataclass_fields__")}
    parameters = [p.replace(annotation=hints[p.name]) for p in own if p.name not in groups]
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        parameters += [_parameter(option, types[option.name]) for option in fields(group)]

    @functools.wraps(run)
    def entry(**values: Any) -> None:
        try:
            gathered = {
                name: group(**{option.name: values.pop(option.name) for option in fields(group)})
                for name, group in groups.items()
            }
            run(**values, **gathered)
        except ForerunError as error:
            show_error(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return entry


def _parameter(option: Field[Any], kind: Any) -> inspect.Parameter:
    default = option.default if option.default_factory is MISSING else option.default_factory()
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
