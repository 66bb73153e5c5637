"""Chat templates with calls as each family of models writes them, and functions that parse the calls."""

import json
from collections.abc import Iterable
from typing import Any

from forerun.serve.calls import FORMS, CallForm
from forerun.serve.parts import AnswerForm, AnswerPart, AnswerSplitter
from forerun.text.tokenizer import Tokenizer

SHOWN = "{% for tool in tools or [] %}Use {{ tool.function.name }}. {% endfor %}"
EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
OPENED = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES = (
    f"{SHOWN}For a call write <tool_call> around JSON.{EACH}{CALLS}\n<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>" + OPENED
)
LLAMA = (
    f"{SHOWN}{EACH}{CALLS}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% endfor %}<|end|>" + OPENED
)
QWEN_CODER = (
    f"{SHOWN}{EACH}{CALLS}\n<tool_call>\n<function={{{{ f.name }}}}>\n"
    "{% for key, value in f.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|end|>" + OPENED
)
GLM = (
    f"{SHOWN}{EACH}{CALLS}\n<tool_call>{{{{ f.name }}}}\n"
    "{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}<|end|>" + OPENED
)
MISTRAL = (
    f"{SHOWN}{EACH}{CALLS}"
    "{% if call.id | length != 9 %}{{ raise_exception('an id has 9 letters') }}{% endif %}"
    "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>" + OPENED
)
MISTRAL_LIST = (
    f"{SHOWN}{EACH}"
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% set f = call.function %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}</s>" + OPENED
)
NEMOTRON = (
    f"{SHOWN}{EACH}"
    "{% if m.tool_calls %}<TOOLCALL>[{% for call in m.tool_calls %}{% set f = call.function %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]</TOOLCALL>{% endif %}<|end|>" + OPENED
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>" + SHOWN + "<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.thinking or (m.tool_calls and m.content) %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking or m.content }}<|end|>{% endif %}"
    "{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {
    "Hermes": HERMES, "Qwen3-Coder": QWEN_CODER, "GLM-4.5": GLM, "Mistral": MISTRAL, "Mistral's list": MISTRAL_LIST,
    "Nemotron Nano 2": NEMOTRON, "Harmony": HARMONY, "Llama 3": LLAMA,
}  # fmt: skip
NAMED = {form.name: form for form in FORMS}


def written(tokenizer: Tokenizer, name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """An answer of calls, by their functions and arguments, as the template of a form writes it."""
    made = [
        {"id": "a1b2c3d4e", "type": "function", "function": {"name": function, "arguments": arguments}}
        for function, arguments in calls
    ]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    text = tokenizer.apply_chat_template([message], tokenize=False, chat_template=TEMPLATES[name])
    return text.rpartition("<|assistant|>")[2].removesuffix("<|end|>").removesuffix("</s>")


def answer(form: CallForm | str, functions: dict[str, Any], **options: Any) -> AnswerForm:
    """Answers that call these functions in a form, by its name or itself."""
    calls = NAMED[form] if isinstance(form, str) else form
    begun = "<|start|>assistant" if calls.kind == "harmony" else None
    usual: dict[str, Any] = {"calls": calls, "functions": functions, "begun": begun}
    return AnswerForm(**usual | options)


def parts(form: AnswerForm, pieces: Iterable[str]) -> list[tuple[str, Any]]:
    """The parts of an answer in pieces: texts of a kind joined, calls with their names and arguments."""
    splitter = AnswerSplitter(form)
    return joined([part for piece in pieces for part in splitter.feed(piece)] + splitter.close())


def joined(found: list[AnswerPart]) -> list[tuple[str, Any]]:
    """Parts with neighbours of a kind joined."""
    merged: list[tuple[str, Any]] = []
    for part in found:
        if part.call is not None:
            merged.append(("call", (part.call.name, json.loads(part.call.arguments))))
        elif merged and merged[-1][0] == part.kind:
            merged[-1] = part.kind, merged[-1][1] + part.text
        else:
            merged.append((part.kind, part.text))
    return merged
