"""The options of a benchmark: one dataclass, whose fields are the arguments of its command line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def option(default: Any = MISSING, what: str | None = None, **how: Any) -> Any:
    """A field that is an option, or without a default an argument; `how` goes to argparse.

    A default is written as a user would write it: "1,4" for several values.
    """
    return field(default=default, metadata={"help": what, **how})


def options_of(kind: type[Options], arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line, by default of this process. A ValueError of the dataclass ends it with a message.

    The values of a field that is a Sequence are separated by commas, unless its `how` has nargs or action.
    """
    module, hints = sys.modules[kind.__module__], get_type_hints(kind)
    assert module.__spec__ is not None, "a benchmark is run as a module"
    program = f"python -m {module.__spec__.name.removesuffix('.__main__')}"
    parser = ArgumentParser(program, description=module.__doc__, formatter_class=RawDescriptionHelpFormatter)
    for each in fields(kind):  # type: ignore[arg-type]
        how, hint = dict(each.metadata), hints[each.name]
        if hint is bool:
            how["action"] = "store_true"
        elif "type" not in how:
            single = next((part for part in get_args(hint) if part is not NoneType), hint)
            in_one = get_origin(hint) is Sequence and not how.keys() & {"nargs", "action"}
            how["type"] = several(single) if in_one else single
        if each.default is MISSING and "required" not in how:
            parser.add_argument(each.name, **how)
        else:
            default = None if each.default is MISSING else each.default
            parser.add_argument(f"--{each.name.replace('_', '-')}", default=default, **how)
    try:
        return kind(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of values that are separated by commas."""

    def read(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",") if part]
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: write whole numbers, as in 1,4,16") from None

    return read
