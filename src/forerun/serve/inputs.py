"""Inputs: converts bodies of /v1/responses and of Anthropic's /v1/messages to the fields of a chat completion.

For /v1/responses, the reasoning, text and call items of one assistant turn become one message. For /v1/messages, tool
results become separate messages, adjacent other blocks of one role become one message, and if the last message is the
assistant's, the answer continues its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from forerun.limits import shown, whole
from forerun.serve.calls import arguments_of
from forerun.serve.problems import MISSING, UNSERVED, missing, refused, unserved
from forerun.serve.schema import Endpoint

JsonObject = Mapping[str, Any]
MOST_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
IGNORED_INCLUDES = ("reasoning.encrypted_content",)  # reasoning is returned as plain text here
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}  # of items
FUNCTION_FIELDS = ("name", "description", "parameters")
TOOL_FIELDS = ("type", "strict")
PARTS = {  # of items: the field of the text, by type
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
TEXTS = ("content", "reasoning_content")  # fields of a message that may come in several parts
BLOCKS = {"text": "text"}  # of Anthropic's messages: the field of the text, by type
REPLACED_FIELDS = ("messages", "system", "tools", "tool_choice", "stop_sequences")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "disabled")


def text_of(content: Any, name: str, kinds: Mapping[str, str]) -> str:
    """Text content: a string, or parts of these types. Raises ApiError for anything else."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
        if not isinstance(text, str):
            problem = f"{shown(part)} is not text, and other content is not supported"
            raise refused(name, f"{problem}: give text, or parts of the types {', '.join(kinds)}.")
        texts.append(text)
    return "\n".join(texts)


def merged(
    messages: Iterable[dict[str, Any]], belongs: Callable[[JsonObject, JsonObject], bool]
) -> list[dict[str, Any]]:
    """Merge each message into the one before it if both have the same role and `belongs(last, message)`.

    Contents are collected in lists and joined at the end, so that the work is linear.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        parts = {name: [value] if name in TEXTS else value for name, value in message.items()}
        last = chat[-1] if chat else {}
        if last.get("role") != message["role"] or not belongs(last, message):
            chat.append(parts)
            continue
        for name in (*TEXTS, "tool_calls"):
            if name in parts:
                last.setdefault(name, []).extend(parts[name])
    for message in chat:
        message["content"] = "\n".join(filter(None, message.get("content", ())))
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return chat


def chat_fields(body: JsonObject, endpoint: Endpoint) -> JsonObject:
    """The fields of a chat completion for those of a response or a message; the fields of others are unchanged.

    Raises ApiError 400, naming the invalid field.
    """
    if endpoint == "responses":
        return {**body, "messages": input_messages(body), **input_tools(body), **input_logprobs(body)}
    if endpoint == "messages":
        if "max_tokens" not in body:
            raise missing("max_tokens", "give the maximum number of tokens of the answer")
        return message_fields(body)
    return body


def input_messages(body: JsonObject) -> list[dict[str, Any]]:
    """The messages from `instructions` and `input`. Raises ApiError 400, naming the invalid field."""
    items = body.get("input")
    if items is None:
        raise missing("input", "give text, or a list of items")
    messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise refused("input", "it is an empty list: give text, or a list of items.")
    return messages + merged(
        (item_message(item, f"input[{i}]") for i, item in enumerate(items)),
        lambda last, item: item["role"] == "assistant" and ("content" not in last or "tool_calls" in item),
    )


def item_message(item: Any, name: str) -> dict[str, Any]:
    """One input item as a message, to be merged with its neighbours."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in ITEMS:
        what = f"the type {shown(kind)}" if isinstance(item, dict) else shown(item)
        problem = f"{what} is not served here: give items of the types {', '.join(ITEMS)}."
        raise refused(name, problem, UNSERVED if isinstance(kind, str) else "invalid_value")
    return ITEMS[kind](item, name)


def message_item(item: JsonObject, name: str) -> dict[str, Any]:
    """A message item of the input."""
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(name, f"the role {shown(role)} must be one of {', '.join(ROLES)}.")
    return {"role": ROLES[role], "content": text_of(item.get("content"), name, PARTS)}


def reasoning_item(item: JsonObject, name: str) -> dict[str, Any]:
    """A reasoning item of an earlier answer; the chat template decides whether it is shown to the model."""
    content = item.get("content")
    return {"role": "assistant", "reasoning_content": text_of([] if content is None else content, name, PARTS)}


def call_item(item: JsonObject, name: str) -> dict[str, Any]:
    """A function call of an earlier answer."""
    function, arguments = item.get("name"), item.get("arguments")
    if not isinstance(function, str):
        raise refused(name, "a function_call must have a name, which is text.")
    try:
        values = arguments_of(arguments)
    except ValueError as error:
        raise refused(name, f"the arguments {shown(arguments)} are not a JSON object as text.") from error
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": function, "arguments": values}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_item(item: JsonObject, name: str) -> dict[str, Any]:
    """The result of a function call."""
    return {"role": "tool", "content": text_of(item.get("output"), name, PARTS), "tool_call_id": item.get("call_id")}


ITEMS: Mapping[str, Callable[[JsonObject, str], dict[str, Any]]] = {
    "message": message_item,
    "reasoning": reasoning_item,
    "function_call": call_item,
    "function_call_output": result_item,
}


def input_tools(body: JsonObject) -> dict[str, Any]:
    """`tools` and `tool_choice` of /v1/responses in the nested form of chat completions."""
    tools: dict[str, Any] = {}
    choice: Any = body.get("tool_choice")
    if "tools" in body:
        tools["tools"] = [response_tool(tool, f"tools[{i}]") for i, tool in enumerate(body["tools"])]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        tools["tool_choice"] = {"type": kind, kind: {"name": choice.get("name")}}
    elif kind == "allowed_tools":
        listed = choice.get("tools")
        names = [{"type": "function", "function": each} for each in listed] if isinstance(listed, list) else listed
        tools["tool_choice"] = {"type": kind, kind: {"mode": choice.get("mode"), "tools": names}}
    return tools


def response_tool(tool: JsonObject, name: str) -> dict[str, Any]:
    """One tool in the form of chat completions. Fields that would change its use are refused, not dropped."""
    if tool.get("type") != "function":
        problem = f'{shown(tool)} is not a function: give {{"type": "function", "name": ..., "parameters": ...}}'
        raise refused(name, f"{problem}; other kinds are not served here.", UNSERVED)
    for key, value in tool.items():
        if key not in (*FUNCTION_FIELDS, *TOOL_FIELDS) and value is not None and value is not False:
            raise unserved(name, key, f"a function has {', '.join(FUNCTION_FIELDS)}")
    strict = {"strict": tool["strict"]} if tool.get("strict") not in (None, False) else {}
    return {"type": "function", "function": {k: tool[k] for k in FUNCTION_FIELDS if tool.get(k) is not None} | strict}


def input_logprobs(body: JsonObject) -> dict[str, Any]:
    """`logprobs` and `top_logprobs` in the form of chat completions; {} for no log-probabilities."""
    include, top = body.get("include", []), body.get("top_logprobs")
    for each in include:
        if each not in (LOGPROBS, *IGNORED_INCLUDES):
            raise unserved("include", each, f"{LOGPROBS} is")
    if top is None and LOGPROBS not in include:
        return {}
    if body.get("tools") and body.get("tool_choice") != "none":
        name, problem = "include" if top is None else "top_logprobs", "responses with tools have no log-probabilities"
        raise refused(name, f"{problem}: leave this or the tools out, or use /v1/chat/completions.", UNSERVED)
    top = 0 if top is None else top
    most = MOST_TOP_LOGPROBS
    return {"logprobs": True, "top_logprobs": whole("top_logprobs", top, f"use a number up to {most}", 0, most)}


def message_fields(body: JsonObject) -> dict[str, Any]:
    """The chat completion fields for a body of /v1/messages. Raises ApiError 400, naming the invalid field."""
    chat = {name: value for name, value in body.items() if name not in REPLACED_FIELDS}
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    chat["messages"] = messages = merged(
        block_messages(body.get("messages")), lambda _, message: message["role"] != "tool"
    )
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    if "system" in body:
        messages.insert(0, {"role": "system", "content": text_of(body["system"], "system", BLOCKS)})
    thinking = body.get("thinking", {"type": "disabled"})
    if thinking.get("type") not in THINKING:
        raise refused("thinking", f'{shown(thinking)} is not served: use the type "adaptive" or "disabled".')
    if thinking["type"] != "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": True} | body.get("chat_template_kwargs", {})
    if thinking.get("display") == "omitted":
        chat["include_reasoning"] = False
    return chat | message_tools(body)


def block_messages(messages: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """The messages of a conversation, one for each block."""
    if not messages:
        code = MISSING if messages is None else "invalid_value"
        raise refused("messages", "give at least one message.", code)
    for i, message in enumerate(messages):
        role, content, name = message.get("role"), message.get("content"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise refused(name, f"{shown(message)} has none of the roles user, assistant, system.")
        if not isinstance(content, str | list):
            raise refused(f"{name}.content", f"{shown(content)} must be text or a list of blocks.")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        else:
            yield from (block_message(role, block, f"{name}.content[{at}]") for at, block in enumerate(content))


def block_message(role: str, block: Any, name: str) -> dict[str, Any]:
    """One content block as a message."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"role": role, "content": text_of([block], name, BLOCKS)}
    if kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
        return {"role": role, "content": "", "reasoning_content": block["thinking"]}
    if kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
        function = {"name": block["name"], "arguments": block.get("input", {})}
        call = {"id": block.get("id"), "type": "function", "function": function}
        return {"role": role, "content": "", "tool_calls": [call]}
    if kind == "tool_result" and role == "user":
        result = text_of(block.get("content", ""), f"{name}.content", BLOCKS)
        return {"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}
    kinds = "text, tool_result" if role == "user" else "text, thinking, tool_use"
    problem = f"{shown(block)} is not served in a message of the {role}: use blocks of the types {kinds}."
    raise refused(name, problem, UNSERVED)


def message_tools(body: JsonObject) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` in the form of chat completions."""
    fields: dict[str, Any] = {}
    choice = body.get("tool_choice", {})
    if "tools" in body:
        fields["tools"] = [message_tool(tool, f"tools[{i}]") for i, tool in enumerate(body["tools"])]
    kind = choice.get("type")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        fields["tool_choice"] = TOOL_CHOICES[kind]
    elif choice:
        raise refused("tool_choice", f"{shown(choice)} has none of the types {', '.join((*TOOL_CHOICES, 'tool'))}.")
    return fields | ({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {})


def message_tool(tool: JsonObject, name: str) -> dict[str, Any]:
    """One tool in the form of chat completions."""
    if tool.get("type") not in (None, "custom"):
        problem = f"{shown(tool)} is not a custom tool: give a name, a description and an input_schema"
        raise refused(name, f"{problem}; the server has no built-in tools.", UNSERVED)
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}
