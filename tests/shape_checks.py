"""Shape annotations are checked at run time, in the first calls that a test makes of a function and in some later ones.

A check costs more than most of the functions that are checked: with a check of every call the suite takes three times
as long. So what a test does thousands of times is checked now and then, and what it does a few times always. Functions
whose annotations hold no shape are left as they are: mypy has checked their calls.
"""

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin
from unittest.mock import patch

import jaxtyping

with patch.object(random, "getrandbits", random.Random(0).getrandbits):  # with this it chooses an item of a collection
    from beartype import beartype

FIRST = 2  # calls of a function in each test that are all checked
EVERY = 61  # of the later calls one in so many: a prime, so that no pattern of calls hides one of its kinds for long

ENDS_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction

by_jaxtyping = jaxtyping.jaxtyped


class Current:
    """What the test that runs has called, by what makes these begin anew; and whether nothing is to be checked."""

    called: ClassVar[list[Callable[[], None]]] = []
    off = False


def install(package: str) -> None:
    """Have the functions and dataclasses of a package that is not imported yet checked."""
    assert jaxtyping.jaxtyped is by_jaxtyping, "the checks are installed twice"
    jaxtyping.jaxtyped = lambda *, typechecker: checked_now_and_then  # type: ignore[assignment]  # as the hook calls it
    jaxtyping.install_import_hook(package, "beartype.beartype")


def next_test() -> None:
    """Count the first calls anew."""
    for begin in Current.called:
        begin()
    Current.called.clear()


def checked_now_and_then(subject: Any) -> Any:
    """The function, or the dataclass with its `__init__`, checked in some of its calls.

    One without shapes is left alone, and so is a function inside another one, which would be compiled anew whenever the
    outer one runs.
    """
    if not inspect.isclass(subject):
        return sampled(subject) if "<locals>" not in subject.__qualname__ and has_shapes(subject) else subject
    if is_dataclass(subject) and "__init__" in vars(subject) and has_shapes(subject.__init__):
        subject.__init__ = sampled(subject.__init__)  # type: ignore[method-assign]
    return subject


def has_shapes(function: Callable[..., Any]) -> bool:
    """Whether an annotation holds a shape, or a name that is not defined yet and may stand for one."""
    function.__annotations__ = resolved_hints(function)
    parts = (part for hint in function.__annotations__.values() for part in parts_of(hint))
    return any(is_shape(part) or isinstance(part, str) for part in parts)


def is_shape(part: Any) -> bool:
    return inspect.isclass(part) and issubclass(part, jaxtyping.AbstractArray)


def sampled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked in its first calls of each test and in one of EVERY later ones."""
    unchecked, num_calls, check = 0, 0, None  # how many calls are not checked before the next one that is

    def begin() -> None:
        nonlocal unchecked, num_calls
        unchecked = num_calls = 0

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal unchecked, num_calls, check
        if unchecked > 0:  # which most calls are: nothing else is looked at
            unchecked -= 1
            return function(*arguments, **named)
        if Current.off:
            return function(*arguments, **named)
        if not num_calls:
            Current.called.append(begin)
        num_calls += 1
        if num_calls >= FIRST:
            unchecked = EVERY - 1
        if check is None:  # not before it is needed: it takes a millisecond
            check = checked_always(function)
        return check(*arguments, **named)

    return call


def checked_always(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked in every call if it has shapes: a letter stands for the same number in all of them.

    A call is then a context of jaxtyping's. Its decorator does the same in twice the time, and is left what is hard.
    """
    function.__annotations__ = resolved_hints(function)  # what was defined further down is defined by now
    parts = [part for hint in function.__annotations__.values() for part in parts_of(hint)]
    shapes = [part.dim_str for part in parts if is_shape(part)]
    unknown = any(isinstance(part, str) for part in parts) or any("{" in shape for shape in shapes)
    if unknown or any(ends_later(function) for ends_later in ENDS_LATER):
        return by_jaxtyping(function, typechecker=beartype)
    if not shapes:
        return function
    check = beartype(function)

    def call(*arguments: Any, **named: Any) -> Any:
        with by_jaxtyping("context"):
            return check(*arguments, **named)

    return call


def parts_of(hint: Any) -> Iterator[Any]:
    """An annotation and all the annotations that it consists of."""
    yield hint
    if get_origin(hint) is not Literal:
        for part in hint if isinstance(hint, list | tuple) else get_args(hint):
            yield from parts_of(part)


def resolved_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """What annotations that are strings stand for here and now, as a test may replace the names later."""
    return {name: resolved(hint, function) for name, hint in function.__annotations__.items()}


def resolved(hint: Any, function: Callable[..., Any]) -> Any:
    try:
        return eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except (NameError, TypeError):  # defined further down, or a form that only type checkers know
        return hint
