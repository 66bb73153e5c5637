"""`python:FILE.py:CLASS`: a drafter of the user's own, from a class in a Python file.

The file is executed, so only a user may name it, on the command line or as the argument `draft`; `refuse_code` in
`spec.py` is for all other sources of a specification.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from forerun.did_you_mean import nearest
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext, DraftPlan, problem_of, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.errors import DrafterFileError
from forerun.text.tokenizer import Tokenizer

ARGUMENT = "tokenizer"  # the one argument of constructors, for those that have it


def plan_python(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`python:FILE.py:CLASS`: an instance of the class, which gets the target's tokenizer if it has such a parameter.

    Raises DrafterFileError for a file or a class that cannot be used, with the traceback of the user's code.
    """
    refuse_members(spec)
    path, _, name = (spec.argument or "").rpartition(":")
    if not path or not name.isidentifier():
        refuse(spec, "the argument is a Python file and a class in it, as in python:mine.py:MyDrafter")
    try:
        source = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a NUL
        fix = "name the file as seen from the current folder, as in python:mine.py:MyDrafter"
        problem = getattr(error, "strerror", None) or error
        raise DrafterFileError(f"drafter {str(spec)!r}: {path} cannot be read ({problem}): {fix}") from error
    file = Path(path).resolve()
    drafter = instance(spec, file, class_in(spec, loaded(spec, file, source), name), context.tokenizer)
    if problem := problem_of(drafter, context.target.config.layers):
        fix = "docs/write-a-drafter.md lists what a drafter has"
        raise DrafterFileError(f"drafter {str(spec)!r}: {name} is not a drafter: {problem}; {fix}")
    return DraftPlan({}, lambda _tokens, _progress, _target: drafter, sha256(source).hexdigest)


def loaded(spec: DraftSpec, path: Path, source: bytes) -> ModuleType:
    """The module in a file, which is executed once; it is in sys.modules, where dataclasses and pickle look for it.

    The file's folder is added to the end of sys.path, so that it can import its neighbours.
    """
    name = f"forerun_drafter_{sha256(os.fsencode(path) + source).hexdigest()[:16]}"
    if name not in sys.modules:
        if (folder := str(path.parent)) not in sys.path:
            sys.path.append(folder)
        sys.modules[name] = module = ModuleType(name)
        module.__file__ = str(path)
        try:
            exec(compile(source, path, "exec"), module.__dict__)
        except BaseException as error:  # the user's code may raise anything
            del sys.modules[name]
            if not isinstance(error, Exception | SystemExit):
                raise
            fail(spec, path, error, "the file raised")
    return sys.modules[name]


def class_in(spec: DraftSpec, module: ModuleType, name: str) -> type:
    """The class of this name. Raises DrafterFileError with the classes that there are."""
    kind = vars(module).get(name)
    if isinstance(kind, type):
        return kind
    classes = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    classes = [each for each in classes if isinstance(vars(module)[each], type)]
    near = nearest(name, classes)
    there = f"it has {', '.join(classes)}" if classes else "it defines no class"
    meant = f"; did you mean {near}?" if near else ": name a class of the file"
    raise DrafterFileError(f"drafter {str(spec)!r}: {module.__file__} has no class {name}: {there}{meant}")


def instance(spec: DraftSpec, path: Path, kind: type, tokenizer: Tokenizer) -> Drafter:
    """A drafter of the class. Raises DrafterFileError if it needs other arguments than the tokenizer, or raises."""
    parameters: Iterable[inspect.Parameter] = ()
    with suppress(ValueError):  # a class based on a built-in one may have no signature
        parameters = inspect.signature(kind).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in several]
    arguments = {ARGUMENT: tokenizer} if any(each.name == ARGUMENT for each in parameters) else {}
    if missing := ", ".join(name for name in needed if name not in arguments):
        fix = f"give defaults; the only argument is the target's tokenizer, for a parameter called {ARGUMENT}"
        raise DrafterFileError(f"drafter {str(spec)!r}: {kind.__name__}() lacks the arguments {missing}: {fix}")
    try:
        drafter: Drafter = kind(**arguments)
    except (Exception, SystemExit) as error:
        fail(spec, path, error, f"{kind.__name__}() raised")
    return drafter


def fail(spec: DraftSpec, path: Path, error: BaseException, what: str) -> NoReturn:
    """Raise DrafterFileError for an error of the user's code, with its traceback from the first line of the file on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    raise DrafterFileError(f"drafter {str(spec)!r}: {what} {summary}", lines) from error
