"""LiteLLM: chats and completions of an OpenAI-compatible server, and its own kinds of errors."""

import litellm
from checks import (
    FORMAT,
    KEY,
    MESSAGES,
    MODEL,
    PROMPT,
    SAMPLING,
    TOO_LONG,
    TOOL,
    URL,
    check,
    equal,
    is_forecast,
    plain_chat,
    plain_completion,
    raises,
    run_checks,
)

SERVED = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}


def chat(**options):
    return litellm.completion(**{**SERVED, "messages": MESSAGES, **SAMPLING, **options})


@check("chat: the text of a plain request, with usage")
def chats():
    answer = chat()
    equal(answer.choices[0].message.content, plain_chat())
    assert answer.usage.completion_tokens > 0, answer


@check("chat: a stream with usage")
def streams():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), plain_chat())
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    equal(built.usage.completion_tokens, chat().usage.completion_tokens)


@check("chat: asynchronous, n, logprobs, stop")
async def several():
    answer = await litellm.acompletion(
        **SERVED, messages=MESSAGES, **SAMPLING, n=2, logprobs=True, top_logprobs=2, stop=["\n\n\n"]
    )
    equal(len(answer.choices), 2)
    tokens = answer.choices[0].logprobs.content
    equal("".join(token.token for token in tokens), answer.choices[0].message.content)


@check("chat: as hosted_vllm, with fields of vLLM's")
def as_vllm():
    answer = chat(model=f"hosted_vllm/{MODEL}", top_k=20, min_p=0.1, repetition_penalty=1.1)
    equal(answer.choices[0].message.content, plain_chat(top_k=20, min_p=0.1, repetition_penalty=1.1))


@check("chat: a tool, called whole and streamed, and its result")
def tools():
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = chat(**body).choices[0].message
    is_forecast(message.tool_calls[0].function.arguments)
    chunks = list(chat(**body, stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message
    equal(built.tool_calls[0].function.arguments, message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    assert chat(messages=[*MESSAGES, message.model_dump(), result], tools=[TOOL]).choices[0].message.content


@check("chat: a JSON schema")
def forms():
    is_forecast(chat(response_format=FORMAT, max_tokens=100).choices[0].message.content)


@check("responses: whole")
def responses():
    answer = litellm.responses(**SERVED, input="Write a class.", max_output_tokens=24, temperature=0)
    assert answer.output[0].content[0].text, answer


@check("completions: whole, and a stream")
def completions():
    body = {**SERVED, "model": f"text-completion-openai/{MODEL}", "prompt": PROMPT, **SAMPLING}
    equal(litellm.text_completion(**body).choices[0].text, plain_completion())
    chunks = list(litellm.text_completion(**body, stream=True))
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), plain_completion())


@check("errors: ContextWindowExceededError")
def overflow():
    with raises(litellm.ContextWindowExceededError):
        chat(messages=[{"role": "user", "content": TOO_LONG}])


@check("errors: a value, the model, the key")
def errors():
    with raises(litellm.BadRequestError, "temperature"):
        chat(temperature=-1)
    with raises(litellm.NotFoundError):
        chat(model="openai/other")
    with raises(litellm.AuthenticationError):
        chat(api_key="wrong")


run_checks()
