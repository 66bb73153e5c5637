"""Tokenizer endpoints, compatible with vLLM's server and Anthropic's count_tokens."""

from __future__ import annotations

from typing import Any

from forerun.errors import ChatTemplateError
from forerun.limits import shown
from forerun.serve.body import served_fields
from forerun.serve.conversation import ChatBody
from forerun.serve.inputs import message_fields
from forerun.serve.parse import naming_prompt
from forerun.serve.problems import MISSING, missing, refused
from forerun.serve.service import Service


def tokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """POST /tokenize: the token ids of `prompt`, or of `messages` rendered by the chat template."""
    fields = served_fields(body, "tokenize", service.settings.lenient)
    llm, prompt = service.llm, fields.get("prompt")
    if (prompt is None) == ("messages" not in fields):
        raise refused("prompt", "give either a prompt or messages.", MISSING)
    special = fields.get("add_special_tokens", prompt is not None)
    if prompt is None:
        chat = ChatBody.of(fields, llm, service.settings)
        prompt = chat.options.render(llm.tokenizer, chat.messages)
    with naming_prompt("messages" if "messages" in fields else "prompt"):
        tokens = llm.tokenizer.encode_within(prompt, llm.plan.max_model_len, special)
    answer = {"count": len(tokens), "max_model_len": llm.plan.max_model_len, "tokens": tokens}
    if fields.get("return_token_strs"):
        answer["token_strs"] = [service.texts.text_of(token) for token in tokens]
    return answer


def detokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """POST /detokenize: the text of `tokens`."""
    tokens = served_fields(body, "detokenize", service.settings.lenient).get("tokens")
    num_ids = service.llm.requests.num_ids
    if tokens is None:
        raise missing("tokens", "give a list of token ids")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < num_ids:
            raise refused("tokens", f"{shown(token)} is not a token id from 0 to {num_ids - 1}.")
    return {"prompt": service.llm.tokenizer.decode(tokens)}


def counted(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/messages/count_tokens: the number of prompt tokens."""
    fields = message_fields(served_fields(body, "messages", service.settings.lenient))
    chat = ChatBody.of(fields, service.llm, service.settings)
    with naming_prompt("messages"):
        prompt = service.llm.chat_prompt(chat.messages, chat.options)
    return {"input_tokens": len(prompt["prompt_token_ids"])}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """GET /tokenizer_info: special tokens and chat template, for clients that render chats themselves."""
    tokenizer = service.llm.tokenizer
    try:
        template = tokenizer.template().source()
    except ChatTemplateError:
        template = None
    length = service.llm.plan.max_model_len
    return {**tokenizer.named_tokens, "chat_template": template, "model_max_length": length}
