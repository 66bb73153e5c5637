"""RequestRecord: what one request was and what became of it, for the log and for traces. It holds no text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from forerun.accept.outcome import Counts

FINISHED, LEFT = "finished", "client_left"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was read, from its arrival to its end.

    `outcome` is "finished", "client_left", or the code of the error that ended it. Seconds count from the arrival;
    None stands for what it did not come to. `traceparent` is the header of that name; `request_id` is the x-request-id
    of the answer.
    """

    id: str
    endpoint: str
    tenant: str
    model: str
    outcome: str
    num_samples: int
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    counts: Counts
    traceparent: str = ""
    request_id: str = ""
    ended_s: float = field(default_factory=time.time)  # since 1970

    @property
    def arrived_s(self) -> float:
        """When it came, in seconds since 1970."""
        return self.ended_s - self.total_s

    def fields(self) -> Mapping[str, Any]:
        """The record as names and numbers."""
        return {
            "id": self.id,
            "endpoint": self.endpoint,
            "tenant": self.tenant,
            "outcome": self.outcome,
            "num_samples": self.num_samples,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "queue_s": rounded(self.queue_s),
            "first_token_s": rounded(self.first_token_s),
            "total_s": rounded(self.total_s),
            "num_drafted": self.counts.num_drafted,
            "num_accepted": self.counts.num_accepted,
            "tokens_per_round": rounded(self.counts.tokens_per_round),
            "gain": rounded(self.counts.gain),
            "request_id": self.request_id,
        }


@runtime_checkable
class RecordSink(Protocol):
    """Takes the records of requests."""

    def take(self, record: RequestRecord) -> None:
        """Take one, at its end. It is called in the event loop, so it must not wait."""
        ...

    def close(self) -> None:
        """Bring what was taken to where it belongs. It may take seconds."""
        ...


def rounded(value: float | None) -> float | None:
    """A number with as many digits as a log needs."""
    return None if value is None else round(value, 6)
