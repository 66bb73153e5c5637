"""Texts: what the tokenizer does for clients, in the words of vLLM's server and of Anthropic's count_tokens."""

from __future__ import annotations

from typing import Any

from forerun.errors import ChatTemplateError
from forerun.limits import shown
from forerun.serve.asking import prompt_named
from forerun.serve.body import served_fields, switch
from forerun.serve.conversation import ChatBody
from forerun.serve.message_input import chat_fields
from forerun.serve.problems import MISSING, refused
from forerun.serve.service import Service


def tokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """The token ids of `prompt`, or of `messages` in the chat template; their number, and the limit."""
    given = served_fields(body, "tokenize", service.settings.lenient)
    llm, prompt = service.llm, given.get("prompt")
    if (prompt is None) == ("messages" not in given):
        raise refused("prompt", "prompt: give either a prompt or messages.", MISSING)
    text, special = prompt, switch(given, "add_special_tokens", prompt is not None)
    if prompt is None:
        chat = ChatBody.of(given, llm, service.settings)
        text = chat.options.render(llm.tokenizer, chat.messages)
    if not isinstance(text, str):
        raise refused("prompt", f"prompt: {shown(text)} is no text.")
    with prompt_named("messages" if prompt is None else "prompt"):
        tokens = llm.tokenizer.encode_within(text, llm.plan.max_model_len, special)
    own = {"count": len(tokens), "max_model_len": llm.plan.max_model_len, "tokens": tokens}
    if switch(given, "return_token_strs"):
        own["token_strs"] = [service.texts.text_of(token) for token in tokens]
    return own


def detokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """The text of `tokens`."""
    tokens = served_fields(body, "detokenize", service.settings.lenient).get("tokens")
    num_ids = service.llm.requests.num_ids
    if tokens is None:
        raise refused("tokens", "tokens: there are none: give a list of token ids.", MISSING)
    if not isinstance(tokens, list):
        raise refused("tokens", f"tokens: {shown(tokens)} is no list of token ids.")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < num_ids:
            raise refused("tokens", f"tokens: {shown(token)} is not a token id from 0 to {num_ids - 1}.")
    return {"prompt": service.llm.tokenizer.decode(tokens)}


def counted(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """How many tokens the prompt of a body of /v1/messages has."""
    chat = ChatBody.of(
        chat_fields(served_fields(body, "messages", service.settings.lenient)), service.llm, service.settings
    )
    with prompt_named("messages"):
        prompt = chat.request(service.llm)
    return {"input_tokens": len(prompt.prompt_token_ids or ())}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """The special tokens by name and the chat template, as a client needs them that renders chats by itself."""
    tokenizer = service.llm.tokenizer
    try:
        template = tokenizer.template().source()
    except ChatTemplateError:
        template = None
    length = service.llm.plan.max_model_len
    return {**tokenizer.named_tokens, "chat_template": template, "model_max_length": length}
