"""Bodies that are meant to hurt: none is answered by 5xx, and none takes the time or the memory of others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from forerun.serve.asking import prepared
from forerun.serve.problems import problem_of
from forerun.serve.settings import ServeSettings
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from serve.servers import TEMPLATE, plain

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": TEMPLATE}
SETTINGS = ServeSettings(trust_request_templates=True)
PARAMETERS = {
    name
    for method in (ChatTemplate.render, Tokenizer.apply_chat_template)
    for name in inspect.signature(method).parameters
}


@pytest.mark.parametrize("name", sorted(PARAMETERS | {"", "a b", "__class__", "context", "loop", "None", "\ud800"}))
def test_options_of_a_template_may_have_any_name(name: str) -> None:
    """Also that of a parameter of ours: it is refused, or the template's own."""
    body: dict[str, Any] = {**CHAT, "chat_template_kwargs": {name: "x"}}
    try:
        prepared(body, "chat", plain(), "", SETTINGS)
    except Exception as error:
        problem = problem_of(error)
        assert problem.status == 400, error
        assert "chat_template_kwargs" in problem.message
