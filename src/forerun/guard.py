"""Guard: runs the engine's work and catches every exception that it raises.

A round runs code that is not forerun's: logits processors of requests, drafters of users. It also needs memory that the
machine may not have. A round that raises must end only the request that caused it, and no client may wait forever, so
the engine runs its work through `attempt` and then decides which request ends. Within a round, only the call of a
request's own code (`sampling/transforms.py`) also catches every exception.

Interrupts are not caught. Python raises them in the main thread only, between any two instructions, and they are for
the caller. In other threads there is no caller to receive them, so there they are treated as errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

CPU_ALLOCATOR = "DefaultCPUAllocator"  # named in torch's out-of-memory error on CPUs, which is a RuntimeError


def attempt(work: Callable[[], object]) -> BaseException | None:
    """Run the work and return the error that it raised, or None. Interrupts of the main thread are raised."""
    try:
        work()
    except BaseException as error:
        if not isinstance(error, Exception) and in_main_thread():
            raise
        return error
    return None


def no_interrupt(error: BaseException) -> BaseException:
    """The error itself, unless it may be the user's Ctrl-C, which is raised again."""
    if isinstance(error, KeyboardInterrupt) and in_main_thread():
        raise error
    return error


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory could not be allocated, by Python, by torch on a CPU, or on a GPU."""
    on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's: this file must not import it, which takes long
    return isinstance(error, MemoryError) or on_gpu or CPU_ALLOCATOR in str(error)


def in_main_thread() -> bool:
    """Whether signals, and with them interrupts, are handled in this thread."""
    return threading.current_thread() is threading.main_thread()
