"""The OpenAPI document names every field, allows every body that the server accepts, and the server refuses others."""

import itertools
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from forerun.errors import ForerunError
from forerun.serve.body import served_fields
from forerun.serve.parse import prepare
from forerun.serve.problems import ApiError
from forerun.serve.schema import KNOWN, OBJECTS, Endpoint, openapi_body
from forerun.serve.settings import ServeSettings
from kit.engines import plain
from serve.call_templates import HERMES

LEAST: dict[Endpoint, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}], "chat_template": HERMES},
    "responses": {"input": "a", "chat_template": HERMES},
}
TRUSTING = ServeSettings(trust_request_templates=True)
VALUES: list[Any] = [None, True, 1, 0.5, "auto", [], [1], ["a"], {}, {"1": 1}]


def schema_of(endpoint: Endpoint) -> Any:
    found = openapi_body(endpoint)["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator(found)


def accepted_bodies(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    """Bodies that the server accepts, each with one more field."""
    typed = {name for name, field in KNOWN[endpoint].items() if field.types}
    for name in typed - {"model"}:  # which the service checks
        for value in VALUES:
            body = {**LEAST[endpoint], name: value}
            try:
                prepare(body, endpoint, plain(), "", TRUSTING)
            except (ApiError, ForerunError):
                continue
            yield body


@pytest.mark.parametrize("endpoint", LEAST)
def test_bodies_that_the_server_accepts_are_valid_by_its_description(endpoint: Endpoint) -> None:
    schema, found = schema_of(endpoint), [*accepted_bodies(endpoint)]
    assert len(found) > 50
    for body in found:
        schema.validate(body)
    assert not schema.is_valid({})
    assert not schema.is_valid({**LEAST[endpoint], "temperature": "warm"})


@pytest.mark.parametrize("endpoint", KNOWN)
def test_a_value_that_its_description_forbids_is_refused_by_name(endpoint: Endpoint) -> None:
    """Numbers are refused by whoever knows their bounds."""
    fields = [(name, field) for name, field in KNOWN[endpoint].items() if {*field.types} - {"integer", "number"}]
    validator, num_refused = jsonschema.Draft202012Validator, 0
    for (name, field), value in itertools.product(fields, [*VALUES, [1, {}]]):
        if not validator(field.description()).is_valid(value) or (field.types == (OBJECTS,) and value):
            with pytest.raises(ApiError, match=f"^{name}: .* must be ") as refusal:
                served_fields({name: value}, endpoint)
            assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, name, "invalid_value")
            num_refused += 1
    assert num_refused >= 4 * len(fields)
