"""What a body of Anthropic's /v1/messages is to be answered to: its messages and tools as those of a chat.

This file decides how blocks of content become messages: results of tools are messages of their own, neighbours of one
role are one message, and an answer goes on from the text of a last message that is the assistant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from forerun.limits import shown
from forerun.serve.problems import MISSING, refused

ROLES = ("user", "assistant", "system")
NOT_OF_CHATS = ("messages", "system", "tools", "tool_choice", "stop_sequences")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat that stand for those of a body. Raises the ApiError for 400, naming the field at fault."""
    chat = {name: value for name, value in given.items() if name not in NOT_OF_CHATS}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    chat["messages"] = messages = [*system_message(given.get("system")), *conversation(given.get("messages"))]
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    thinking, options = given.get("thinking", {"type": "disabled"}), given.get("chat_template_kwargs", {})
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "adaptive", "disabled"):
        raise refused("thinking", f'thinking: {shown(thinking)} is not served: use the type "adaptive" or "disabled".')
    if thinking["type"] != "disabled" and isinstance(options, dict):
        chat["chat_template_kwargs"] = {"enable_thinking": True} | options
    if thinking.get("display") == "omitted":
        chat["include_reasoning"] = False
    return chat | chat_tools(given)


def system_message(system: object) -> list[dict[str, Any]]:
    """The message of the system, if there is one."""
    return [] if system is None else [{"role": "system", "content": text_of(system, "system")}]


def conversation(messages: object) -> list[dict[str, Any]]:
    """The messages of a chat."""
    if not isinstance(messages, list) or not messages:
        raise refused(
            "messages",
            f"messages: {shown(messages)} is no list of messages.",
            MISSING if messages is None else "invalid_value",
        )
    chat: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise refused("messages", f"messages[{place}]: {shown(message)} has none of the roles {', '.join(ROLES)}.")
        for part in chat_messages(role, message.get("content"), f"messages[{place}].content"):
            add(chat, part)
    return [whole(message) for message in chat]


def chat_messages(role: str, content: object, name: str) -> list[dict[str, Any]]:
    """The messages that the content of one message stands for, each of one block, with one call at most."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise refused("messages", f"{name}: {shown(content)} is no text and no list of blocks.")
    return [block_message(role, block, f"{name}[{place}]") for place, block in enumerate(content)]


def block_message(role: str, block: Any, name: str) -> dict[str, Any]:
    """The message of one block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"role": role, "content": text_of([block], name)}
    if kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
        return {"role": role, "content": "", "reasoning_content": block["thinking"]}
    if kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
        function = {"name": block["name"], "arguments": block.get("input", {})}
        return {
            "role": role,
            "content": "",
            "tool_calls": {"id": block.get("id"), "type": "function", "function": function},
        }
    if kind == "tool_result" and role == "user":
        result = text_of(block.get("content", ""), f"{name}.content")
        return {"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}
    kinds = "text, tool_result" if role == "user" else "text, thinking, tool_use"
    problem = f"{name}: {shown(block)} is not served in a message of the {role}: it has blocks of the types {kinds}."
    raise refused("messages", problem, "unsupported_parameter")


def add(chat: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message to a chat, as a part of the last one where that is of the same role; results stay apart.

    Contents are lists of texts until all are known, so that the work does not grow with what is there already.
    """
    message = {name: value if name in ("role", "tool_call_id") else [value] for name, value in message.items()}
    last = chat[-1] if chat else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        chat.append(message)
        return
    for name in ("content", "reasoning_content", "tool_calls"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def whole(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts are all known."""
    texts = {"content": "\n".join(filter(None, message["content"]))}
    if "reasoning_content" in message:
        texts["reasoning_content"] = "\n".join(message["reasoning_content"])
    return message | texts


def chat_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of a chat, and which of them may be called."""
    fields: dict[str, Any] = {}
    tools, choice = given.get("tools"), given.get("tool_choice", {})
    if isinstance(tools, list):
        fields["tools"] = [chat_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    elif tools is not None:
        fields["tools"] = tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        fields["tool_choice"] = CHOICES[kind]
    elif choice != {}:
        problem = f"tool_choice: {shown(choice)} has none of the types {', '.join((*CHOICES, 'tool'))}."
        raise refused("tool_choice", problem)
    one = choice.get("disable_parallel_tool_use")
    if not isinstance(one, bool | None):
        name = "tool_choice.disable_parallel_tool_use"
        raise refused(name, f"{name}: {shown(one)} must be true or false.")
    return fields | ({"parallel_tool_calls": False} if one else {})


def chat_tool(tool: Any, name: str) -> dict[str, Any]:
    """One tool of a chat."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        problem = f"{name}: {shown(tool)} is no tool of the caller's: give a name, a description and an input_schema"
        raise refused("tools", f"{problem}; the server has no tools of its own.", "unsupported_parameter")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def text_of(content: object, name: str) -> str:
    """Content that has to be text: itself, or blocks of the type text."""
    if isinstance(content, str):
        return content
    blocks: Seq[Any] = content if isinstance(content, list) else [content]
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise refused(name.partition("[")[0], f"{name}: {shown(block)} is not text, which is all that is read.")
    return "\n".join(block["text"] for block in blocks)
