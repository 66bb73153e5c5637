"""The options of the command line as frozen values, and the decorator that gives them to a command.

This file decides names, defaults and help of the options that commands share; each dataclass is a group of options.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, cast, get_type_hints, runtime_checkable

import typer

from forerun.config import AUTO, MOST_THREADS, KernelChoice, Quantization, Speculation, Verification
from forerun.did_you_mean import complete_from
from forerun.draft.spec import parse_spec, refuse_code
from forerun.errors import ForerunError, UnknownDrafter
from forerun.guard import out_of_memory
from forerun.heads.kinds import HEADS
from forerun.limits import is_whole
from forerun.models.bundled import BUNDLED, BUNDLED_NAMES
from forerun.models.spec import ModelSpec
from forerun.settings_file import read_settings
from forerun.shape import StaticTree
from forerun.streams import MISTAKE, show_error

INTERRUPTED = 130
NO_MEMORY = "not enough memory: choose a smaller model, --quantize or a smaller --max-model-len, or end other programs"
HEADS_SPELLED = (kind.syntax for kind in HEADS.values())
SPELLED = ("auto", "ngram", "suffix", "model:DIR", *HEADS_SPELLED, "python:FILE:CLASS", "cascade[A,B]")
DRAFTERS = f"{', '.join(SPELLED)} or mix[A,B]"
DRAFTER_BEGINNINGS = (
    *(re.split(r"(?<=[:[])|,", spelled)[0] for spelled in (*SPELLED, "mix[A,B]")),
    *(f"model:{name}" for name in BUNDLED),
)


def complete_model(incomplete: str) -> Iterator[str]:
    """Shell completion: bundled names and folders that start with this text."""
    yield from (name for name in BUNDLED if name.startswith(incomplete))
    yield from (f"{path}/" for path in Path().glob(f"{incomplete}*") if path.is_dir())


def auto_or_whole(least: int) -> Callable[[str], str]:
    """A parser of an option whose value is auto or a whole number of at least `least`."""

    def parse(text: str) -> str:
        if text != AUTO and not (is_whole(text) and int(text) >= least):
            raise typer.BadParameter(f"{text!r} is neither auto nor a whole number of at least {least}.")
        return text

    return parse


MODEL, ANSWER, OUTPUT = "Model", "Answer", "Output"  # titles of groups
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=f"Target: a Hugging Face folder, a GGUF file, a hub id, or a bundled model ({BUNDLED_NAMES}).",
        autocompletion=complete_model,
        rich_help_panel=MODEL,
    ),
]
REQUIRED_DRAFT = typer.Option(
    "--draft",
    "-d",
    help=f"Drafter: {DRAFTERS}.",
    autocompletion=complete_from(*DRAFTER_BEGINNINGS),
    rich_help_panel=MODEL,
)
DRAFT = copy(REQUIRED_DRAFT)
DRAFT.help = f"{DRAFT.help} Without one, decoding is plain."
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(min=1, help="Context length; default: what the model and memory allow.", rich_help_panel=MODEL),
]
MemoryBytesOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Memory for weights and caches, in bytes; default: 80% of the free memory.", rich_help_panel=MODEL
    ),
]
TreeOption = Annotated[
    Path | None,
    typer.Option(
        help="Shape of the draft tree: a JSON file with paths of ranks, as in [[0], [1], [0, 0]].",
        rich_help_panel=MODEL,
    ),
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        help="Trained adapter of --draft early-exit:E: a folder; the same as early-exit:E:DIR.", rich_help_panel=MODEL
    ),
]


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """Options for the form in which a model is loaded and where it runs, for all commands that load a model."""

    TITLE: ClassVar[str] = MODEL

    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of weights and activations: auto, float32, float16 or bfloat16.",
            autocompletion=complete_from("auto", "float32", "float16", "bfloat16"),
        ),
    ] = "auto"
    quantize: Annotated[
        Quantization | None,
        typer.Option(help="Quantize the weights of target and draft model to 8 or 4 bits; fp8 is for GPUs."),
    ] = None
    kernels: Annotated[
        KernelChoice,
        typer.Option(help="native: compiled kernels; torch: torch's operators; auto: native if available."),
    ] = "auto"
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; default: torch's choice.")
    ] = None
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, rocm, mps, or auto (cuda or cpu).")] = "cpu"
    one_gemm: Annotated[
        bool, typer.Option("--one-gemm", help="On a GPU, one GEMM for all batch sizes, for the same bits.")
    ] = False
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel",
            "--tensor-parallel-size",
            min=1,
            help="Processes (ranks) that split every layer; on CPUs only.",
        ),
    ] = 1

    def spec(self, model: str) -> ModelSpec:
        """The ModelSpec of a model with these options."""
        return ModelSpec(model, **{name: value for name, value in asdict(self).items() if name != "threads"})


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options for the model and the drafter."""

    TITLE: ClassVar[str] = MODEL

    model: ModelOption
    draft: Annotated[str | None, DRAFT] = None
    depth: Annotated[
        str,
        typer.Option(help="Tokens drafted per round; auto: forerun chooses, by measurement.", parser=auto_or_whole(0)),
    ] = AUTO
    verification: Annotated[
        Verification,
        typer.Option(
            help="Acceptance rule: coupled keeps the tokens of plain decoding, token and block the distribution."
        ),
    ] = "coupled"
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    max_model_len: MaxModelLenOption = None
    memory_bytes: MemoryBytesOption = None
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV cache of common prompt prefixes.")] = True
    tree: TreeOption = None
    adapter: AdapterOption = None
    generation_config: Annotated[
        str,
        typer.Option(
            help="Defaults of --temperature and the other sampling options: auto (the model's file), none, or a folder."
        ),
    ] = "auto"
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id of another tokenizer and chat template.")] = (
        None
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", adapted(self.draft, self.adapter))

    @property
    def spec(self) -> ModelSpec:
        """The ModelSpec of the model."""
        return replace(self.loading.spec(self.model), tokenizer=self.tokenizer)

    def speculation(self, width: int = 1) -> Speculation:
        """The speculation: by depth and width, or with the tree in the file of --tree."""
        tree = None if self.tree is None else StaticTree.load(self.tree)
        if self.depth == AUTO:
            return Speculation(width=width, tree=tree)
        return Speculation(int(self.depth), width, tree=tree)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options for sampling an answer, for its end, and for showing it."""

    TITLE: ClassVar[str] = ANSWER

    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="0: greedy; default: the model's or 1.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling: probability of the nucleus.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this fraction of the top one.")] = None
    seed: Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same answer.")] = None
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Maximum new tokens; default: the model's, or 256.")
    ] = None
    stop: Annotated[list[str], typer.Option(help="Stop at this string; repeatable.")] = field(default_factory=list)
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.")] = False
    raw: Annotated[bool, typer.Option("--raw", help="No colours, like NO_COLOR.")] = False

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were set, by name; the others are the model's defaults."""
        return {name: value for name, value in asdict(self).items() if name != "raw" and value not in (None, [])}


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options for answering a file of prompts."""

    TITLE: ClassVar[str] = "Many prompts"

    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            help='Answer each line of a file: a .jsonl with "prompt" or "messages" (and "id"), or a .txt.',
        ),
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to every prompt of the file.")] = False
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum batch size (sequences generated at once).")] = 16
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the output file, and start over.")] = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options for the destination of figures, the same in every command."""

    TITLE: ClassVar[str] = OUTPUT

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write that JSON object to a file.")] = None


def adapted(draft: str | None, adapter: Path | None) -> str | None:
    """The specification of --draft with the folder of --adapter. Raises UnknownDrafter unless it is an early exit."""
    if adapter is None:
        return draft
    spec = None if draft is None else parse_spec(draft)
    if spec is None or spec.name != "early-exit" or not (spec.argument or "").isdecimal():
        raise UnknownDrafter(
            f"--adapter {adapter} needs --draft early-exit:E, but the drafter is {draft or 'none'!r}: write "
            f"--draft early-exit:E, or put the folder into the specification, as in early-exit:E:{adapter}"
        )
    return str(replace(spec, argument=f"{spec.argument}:{adapter}"))


def read_config(ctx: Any, path: Path | None) -> Path | None:
    """Use the values of a settings file as defaults of options that are not given on the command line."""
    if path is not None:
        options = [param for param in ctx.command.params if param.param_type_name == "option"]
        known = {name.lstrip("-").replace("-", "_"): param for param in options for name in param.opts}
        others = {option.name for group in (ModelOptions, AnswerOptions) for option in parameters_of(group)}
        try:
            settings = read_settings(path, set(known) - {CONFIG, "help"}, others)
            for name in DRAFT_OPTIONS & settings.keys():
                refuse_code(parse_spec(settings[name]), str(path), f"leave it out there, and write it after --{name}")
        except ForerunError as error:
            show_error(error)
            raise typer.Exit(MISTAKE) from error
        ctx.default_map = {
            str(known[name].name): [value] if getattr(known[name], "multiple", False) else value
            for name, value in settings.items()
        }
    return path


CONFIG = "config"
DRAFT_OPTIONS = frozenset({"draft", "drafts"})
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=read_config,
        is_eager=True,
        help="TOML file with defaults for these options, such as the forerun.toml that forerun tune writes.",
        rich_help_panel=MODEL,
    ),
]
CommandBody = Callable[..., None]


@runtime_checkable
class Command(Protocol):
    """A command of the command line: its name, which may have several words, and examples for its help."""

    name: str
    examples: str

    def __call__(self, **values: Any) -> None:
        """Run the command with the values of its options."""
        ...


def with_options(examples: str) -> Callable[[CommandBody], Command]:
    """A decorator that makes a command of a function; the fields of its dataclass parameters become options.

    `examples` are for its help. A ForerunError and lack of memory become one red line and status 2, Ctrl-C status 130.
    """
    return functools.partial(_with_options, examples=examples)


def _with_options(run: CommandBody, examples: str) -> Command:
    hints = get_type_hints(run, include_extras=True)
    declared = inspect.signature(run).parameters.values()
    groups = {p.name: hints[p.name] for p in declared if is_dataclass(hints[p.name])}
    parameters = [parameter for group in groups.values() for parameter in parameters_of(group)]
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters += [p.replace(annotation=hints[p.name], kind=by_name) for p in declared if p.name not in groups]
    if any(parameter.name == "model" for parameter in parameters):
        parameters.append(inspect.Parameter(CONFIG, by_name, default=None, annotation=ConfigOption))

    @functools.wraps(run)
    def entry(**values: Any) -> None:
        values.pop(CONFIG, None)  # its callback has set the defaults
        try:
            gathered = {name: group_from(group, values) for name, group in groups.items()}
            run(**values, **gathered)
        except ForerunError as error:
            show_error(error)
            raise typer.Exit(MISTAKE) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            show_error(f"{NO_MEMORY} ({str(error).split(chr(10))[0] or type(error).__name__})")
            raise typer.Exit(MISTAKE) from error

    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    entry.name = run.__name__.replace("_", " ")  # type: ignore[attr-defined]
    entry.examples = examples  # type: ignore[attr-defined]
    return cast(Command, entry)


def parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """The fields of a group as parameters with options under its title; nested groups are replaced by their fields."""
    kinds = get_type_hints(group, include_extras=True)
    for option in fields(group):
        kind = kinds[option.name]
        if is_dataclass(kind):
            yield from parameters_of(kind)
            continue
        default = option.default if option.default_factory is MISSING else option.default_factory()
        default = inspect.Parameter.empty if default is MISSING else default
        (info,) = kind.__metadata__
        titled = copy(info)
        titled.rich_help_panel = info.rich_help_panel or group.TITLE
        yield inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind.__origin__, titled]
        )


def changed(group: Any) -> Iterator[str]:
    """The names of a group's options, nested groups included, that do not have their default value."""
    for option in fields(group):
        value = getattr(group, option.name)
        if is_dataclass(value):
            yield from changed(value)
        elif value != (option.default if option.default_factory is MISSING else option.default_factory()):
            yield option.name


def group_from(group: Any, values: dict[str, Any]) -> Any:
    """A group and its nested groups, from `values`, which are removed from there."""
    kinds, arguments = get_type_hints(group), {}
    for option in fields(group):
        kind = kinds[option.name]
        arguments[option.name] = group_from(kind, values) if is_dataclass(kind) else values.pop(option.name)
    return group(**arguments)
