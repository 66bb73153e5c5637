"""The OpenAPI document: it names every field, and forbids no body that the server takes."""

from collections.abc import Iterator
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.serve.parse import asked_of
from forerun.serve.problems import ApiError
from forerun.serve.schema import KNOWN, Endpoint, openapi_body
from forerun.serve.settings import ServeSettings
from kit.engines import plain
from kit.servers import needed
from serve.test_serve_tools import HERMES

LEAST: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}], "chat_template": HERMES},
    "responses": {"input": "a", "chat_template": HERMES},
}
TRUSTING = ServeSettings(trust_request_templates=True)
VALUES: list[Any] = [None, True, 1, 0.5, "auto", [], [1], ["a"], {}, {"1": 1}]


def schema_of(endpoint: Endpoint) -> Any:
    found = openapi_body(endpoint)["requestBody"]["content"]["application/json"]["schema"]
    return needed("jsonschema").Draft202012Validator(found)


def taken(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    """Bodies that are taken, each with one field more."""
    typed = {name for name, field in KNOWN[endpoint].items() if field.types}
    for name in typed - {"model"}:  # which the service checks
        for value in VALUES:
            body = {**LEAST[endpoint], name: value}
            try:
                asked_of(body, endpoint, plain(), "", TRUSTING)
            except (ApiError, ForerunError):
                continue
            yield body


@pytest.mark.parametrize("endpoint", LEAST)
def test_what_the_server_takes_is_allowed_by_its_description(endpoint: Endpoint) -> None:
    schema, found = schema_of(endpoint), [*taken(endpoint)]
    assert len(found) > 50
    for body in found:
        schema.validate(body)
    assert not schema.is_valid({})
    assert not schema.is_valid({**LEAST[endpoint], "temperature": "warm"})
