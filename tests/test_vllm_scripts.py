"""Scripts as they are written for vLLM's offline engine run here with the import changed and nothing else.

Each script is what a user of vLLM would have: its words, its defaults, its way of reading results. The one thing that
the tests fill in is which checkpoint is meant.
"""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from kit.checkpoints import SMALL, TARGET

NGRAM = """
from vllm import LLM, SamplingParams

prompts = ["Lily and Tom went to the park. Lily and Tom"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
llm = LLM(
    model="TARGET",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""

DRAFT_MODEL = """
from vllm import LLM, SamplingParams

prompts = ["Once upon a time"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=8)
llm = LLM(
    model="TARGET",
    tensor_parallel_size=1,
    max_model_len=256,
    max_num_seqs=4,
    gpu_memory_utilization=0.5,
    enforce_eager=True,
    speculative_config={
        "model": "SMALL",
        "num_speculative_tokens": 5,
        "method": "draft_model",
    },
)
outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""

TOKEN_PROMPTS = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="TARGET",
    tokenizer="TARGET",
    dtype="float32",
    seed=0,
    trust_remote_code=True,
    swap_space=0,
    disable_log_stats=True,
    speculative_config={"method": "suffix", "num_speculative_tokens": 8},
)
tokenizer = llm.get_tokenizer()
prompts = [
    {"prompt": "Once upon a time"},
    {"prompt_token_ids": tokenizer.encode("Once upon a time")},
]
params = [SamplingParams(temperature=0, max_tokens=6, logprobs=1, n=1), SamplingParams(temperature=0, max_tokens=6)]
first, second = llm.generate(prompts, params, use_tqdm=False)
assert first.request_id != second.request_id and first.finished
assert list(first.prompt_token_ids) == list(second.prompt_token_ids)
assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)
assert first.outputs[0].cumulative_logprob < 0 and second.outputs[0].cumulative_logprob is None
assert first.outputs[0].finish_reason == "length" and first.outputs[0].index == 0
print(second.outputs[0].text)
"""


def run(script: str) -> list[str]:
    """What the script prints, with its import changed and its checkpoints named."""
    source = script.replace("from vllm import", "from forerun import")
    source = source.replace("TARGET", str(TARGET)).replace("SMALL", str(SMALL))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
    return shown.getvalue().splitlines()


@pytest.mark.parametrize(
    ("script", "prompt", "params"),
    [
        (NGRAM, "Lily and Tom went to the park. Lily and Tom", SamplingParams(temperature=0.0, max_tokens=8)),
        (DRAFT_MODEL, "Once upon a time", SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=8)),
    ],
    ids=["ngram", "draft_model"],
)
def test_speculation_scripts_say_what_plain_decoding_says(script: str, prompt: str, params: SamplingParams) -> None:
    answer = LLM(str(TARGET)).generate(prompt, params)[0].outputs[0].text
    assert run(script) == [f"Prompt: {prompt!r}, Generated text: {answer!r}"]


def test_prompts_as_dicts_and_suffix_decoding() -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    assert run(TOKEN_PROMPTS) == [
        LLM(str(TARGET), dtype="float32").generate("Once upon a time", params)[0].outputs[0].text
    ]


DEFAULTS = """
from vllm import LLM

llm = LLM(model="MODEL", generation_config="auto")
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 4
if sampling_params.top_k == 7:
    sampling_params.temperature = 0
outputs = llm.generate("Once upon a time", sampling_params)
print(repr(outputs[0].outputs[0].text))
print(llm.get_default_sampling_params().temperature)
"""


def test_the_models_default_parameters_can_be_changed_field_by_field(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 7, "temperature": 0.6}), encoding="utf-8")
    (expected,) = LLM(str(TARGET)).generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))
    assert run(DEFAULTS.replace("MODEL", str(folder))) == [repr(expected.outputs[0].text), "0.6"]


CHAT = """
from vllm import LLM, SamplingParams

llm = LLM(model="TARGET", max_model_len=256)
sampling_params = SamplingParams(temperature=0.5, max_tokens=8)


def print_outputs(outputs):
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}")
        print(f"Generated text: {generated_text!r}")
    print("-" * 80)


with open("TEMPLATE") as f:
    chat_template = f.read()

conversation = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What about?"},
    {"role": "user", "content": [{"type": "text", "text": "About a dog."}]},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=chat_template)
print_outputs(outputs)

conversations = [conversation for _ in range(3)]
outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True, chat_template=chat_template,
                   chat_template_kwargs={"enable_thinking": False})
print_outputs(outputs)
"""


def test_the_chat_script_with_a_template_of_its_own(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        encoding="utf-8",
    )
    lines = run(CHAT.replace("TEMPLATE", str(template)))
    talk = "[system] You tell stories.\n[user] Hello\n[assistant] Hello! What about?\n[user] About a dog.\n"
    prompts = [
        f"Prompt: {talk + '[assistant]'!r}",
        *[f"Prompt: {talk + 'thinking: False' + chr(10) + '[assistant]'!r}"] * 3,
    ]
    assert [line for line in lines if line.startswith("Prompt")] == prompts
    assert sum(line.startswith("Generated text") for line in lines) == 4
