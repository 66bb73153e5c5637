"""Problems: errors as HTTP responses in OpenAI's format.

This file maps every error of the package to a status and a code. The text of an unexpected error is logged and not sent
to the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from forerun.errors import (
    ChatTemplateError,
    EngineClosed,
    ForerunError,
    InvalidRequest,
    OutOfMemory,
    PromptTooLong,
    ReplicaLost,
    RequestFailed,
    TokenizerError,
    UnknownKeyword,
)
from forerun.fields import short
from forerun.limits import shown

TOO_LONG = "took_too_long"
OUT_OF_MEMORY = "out_of_memory"
MISSING, UNSERVED = "missing_required_parameter", "unsupported_parameter"
TOO_MANY_TOKENS = "context_length_exceeded"
OTHERS = "Other requests are not affected."
NO_MEMORY = "the server has not enough memory for this request: request fewer tokens, samples or prompts at once."
CLOSED = "the server is shutting down or its engine has stopped, so the answer is incomplete."
ERRORS: Mapping[type[BaseException], tuple[int, str, str]] = {  # status, code, message; the first that fits counts
    ChatTemplateError: (400, "invalid_value", "{}"),
    UnknownKeyword: (400, "invalid_value", "{}"),
    TokenizerError: (400, "invalid_value", "{}"),
    RecursionError: (400, "invalid_value", "the body is nested too deeply."),  # it can be parsed but not encoded again
    OutOfMemory: (503, OUT_OF_MEMORY, "{} " + OTHERS),
    MemoryError: (503, OUT_OF_MEMORY, f"{NO_MEMORY} {OTHERS}"),
    RequestFailed: (500, "round_failed", f"the engine failed in a round of this request. {OTHERS} {{}}"),
    ReplicaLost: (503, "replica_lost", "{}"),
    EngineClosed: (503, "engine_closed", CLOSED),
    ForerunError: (500, "engine_error", "{}"),
    BaseException: (500, "internal_error", f"an unexpected error occurred; the server's log has the details. {OTHERS}"),
}


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """An error response.

    `param`: the invalid field; `kind`: its type, by default that of the status; `retry_s`: seconds until a retry makes
    sense; `allow`: the methods of the route.
    """

    status: int
    message: str
    _: KW_ONLY
    code: str
    param: str | None = None
    kind: str = ""
    retry_s: int | None = None
    allow: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.param = None if self.param is None else short(self.param)
        self.kind = self.kind or ("invalid_request_error" if self.status < 500 else "server_error")

    @property
    def logged(self) -> dict[str, str | None]:
        """Its code, and the outermost field that it names unless the client made up that name: for the access log."""
        param = self.param.partition(".")[0] if self.param and self.code != "unknown_parameter" else None
        return {"code": self.code, "param": param}

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The response headers of the error."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.code in (TOO_LONG, OUT_OF_MEMORY):
            headers["x-should-retry"] = "false"  # OpenAI's clients would repeat the request
        return headers if self.retry_s is None else {**headers, "Retry-After": str(self.retry_s)}


def refused(place: str, problem: str, code: str = "invalid_value", param: str | None = None) -> ApiError:
    """The ApiError 400 for an invalid value at a place such as `tools[0]`; `param` is by default its field."""
    return ApiError(400, f"{place}: {problem}", code=code, param=param or place.partition("[")[0])


def missing(place: str, fix: str) -> ApiError:
    """The ApiError 400 for a missing field."""
    return refused(place, f"it is missing: {fix}.", MISSING)


def unserved(place: str, value: object, answer: str, param: str | None = None) -> ApiError:
    """The ApiError 400 for a value that has no effect here; `answer`: what to do instead."""
    return refused(place, f"{shown(value)} is not served here: {answer}.", UNSERVED, param)


def renamed(error: InvalidRequest, field: str) -> ApiError:
    """The library's error for a value, as an ApiError 400 that names the body's field with that value."""
    code = TOO_MANY_TOKENS if isinstance(error, PromptTooLong) else "invalid_value"
    return ApiError(400, str(error).replace(error.field, field, 1), code=code, param=field)


def problem_of(error: BaseException) -> ApiError:
    """Convert any exception to an ApiError."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return renamed(error, error.field)
    status, code, message = next(row for kind, row in ERRORS.items() if isinstance(error, kind))
    param = "chat_template" if isinstance(error, ChatTemplateError) else None
    text = error.for_clients if isinstance(error, ChatTemplateError) else error
    return ApiError(status, message.format(text), code=code, param=param)
