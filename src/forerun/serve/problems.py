"""Problems: errors as HTTP responses in OpenAI's format.

This file maps every error of the package to a status and a code. The text of an unexpected error goes to the log, not
to the client.
"""

from __future__ import annotations

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

MISTAKE_OF_CALLER, FAULT_OF_SERVER = "invalid_request_error", "server_error"
INTERNAL = "the server met an unexpected error, which is in its log. Other requests go on."

CLOSED = "the server is shutting down or its engine has stopped, so this request is not answered to its end."

NO_MEMORY = "the server has no memory left for this request: ask for less at once."

TOO_LONG = "took_too_long"
OUT_OF_MEMORY = "out_of_memory"
MISSING, UNSERVED = "missing_required_parameter", "unsupported_parameter"
TOO_MANY_TOKENS = "context_length_exceeded"


class ApiError(Exception):
    """An error response.

    `param`: the invalid field; `retry_s`: seconds until a retry makes sense; `allow`: the methods of the route.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = MISTAKE_OF_CALLER,
        retry_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = None if param is None else short(param)
        self.kind = kind
        self.retry_s = retry_s
        self.allow = allow

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
    """The ApiError 400 for an invalid value at a place such as `tools[0]`; `param` is by default the field it is in."""
    return ApiError(400, f"{place}: {problem}", code=code, param=param or place.partition("[")[0])


def missing(place: str, fix: str) -> ApiError:
    """The ApiError 400 for a missing field."""
    return refused(place, f"it is missing: {fix}.", MISSING)


def unserved(place: str, value: object, answer: str, param: str | None = None) -> ApiError:
    """The ApiError 400 for a value that has no effect here; `answer`: what to do instead."""
    return refused(place, f"{shown(value)} is not served here: {answer}.", UNSERVED, param)


def renamed(error: InvalidRequest, field: str, code: str = "invalid_value") -> ApiError:
    """The library's error for a value as the ApiError 400 of the field that has it in a body."""
    return ApiError(400, str(error).replace(error.field, field, 1), code=code, param=field)


def problem_of(error: BaseException) -> ApiError:
    """Convert any exception to an ApiError."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return renamed(error, error.field, TOO_MANY_TOKENS)
    if isinstance(error, InvalidRequest):
        return renamed(error, error.field)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), code="invalid_value", param="chat_template")
    if isinstance(error, UnknownKeyword | TokenizerError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RecursionError):  # a body that was parsed may still be too deep to encode again
        return ApiError(400, "the body is nested too deep.", code="invalid_value")
    if isinstance(error, OutOfMemory | MemoryError):
        message = f"{error if isinstance(error, OutOfMemory) else NO_MEMORY} Other requests go on."
        return ApiError(503, message, code=OUT_OF_MEMORY, kind=FAULT_OF_SERVER)
    if isinstance(error, RequestFailed):
        message = f"the engine failed at this request and has ended it; others go on. {error}"
        return ApiError(500, message, code="round_failed", kind=FAULT_OF_SERVER)
    if isinstance(error, ReplicaLost):
        return ApiError(503, str(error), code="replica_lost", kind=FAULT_OF_SERVER)
    if isinstance(error, EngineClosed):
        return ApiError(503, CLOSED, code="engine_closed", kind=FAULT_OF_SERVER)
    if isinstance(error, ForerunError):
        return ApiError(500, str(error), code="engine_error", kind=FAULT_OF_SERVER)
    return ApiError(500, INTERNAL, code="internal_error", kind=FAULT_OF_SERVER)
