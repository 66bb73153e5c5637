"""The evaluation harness of EleutherAI: tasks of this file's own, over completions and over chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, KEY, MODEL, URL, check, run_checks

TASKS = Path.cwd() / "tasks"
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
task: choice
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
LIKELIHOOD = """
task: likelihood
output_type: loglikelihood
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
ROLLING = """
task: rolling
output_type: loglikelihood_rolling
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
WRITTEN = """
task: written
output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
DOCUMENTS = [
    {"question": "import", "choices": [" os", " sys.path.join.zebra"], "answer": 0},
    {"question": "class Stack:\n    def push(self,", "choices": [" item):", " 3 + 4 5"], "answer": 0},
    {"question": "for i in", "choices": [" range(", " lambda while"], "answer": 0},
]
LOCAL = f"model={MODEL},num_concurrent=2,max_retries=1"
COMPLETIONS = f"{LOCAL},base_url={URL}/completions"
COUNTED_HERE = f"{COMPLETIONS},tokenizer_backend=huggingface,tokenizer={FOLDER}"
CHATS = f"{LOCAL},base_url={URL}/chat/completions"


def write_tasks():
    """The tasks and their documents, as files."""
    TASKS.mkdir()
    data = TASKS / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)), "utf-8")
    for task in (CHOICE, LIKELIHOOD, ROLLING, WRITTEN):
        text = (task.strip() + COMMON).format(data=data)
        (TASKS / f"{text.split()[1]}.yaml").write_text(text, "utf-8")


def evaluate(kind, arguments, *tasks, options=()):
    """The results of tasks, by name."""
    out = Path.cwd() / f"results-{len(list(Path.cwd().glob('results-*')))}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments]
    command += [
        "--tasks",
        ",".join(tasks),
        "--include_path",
        TASKS,
        "--output_path",
        out,
        "--batch_size",
        "2",
        *options,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OPENAI_API_KEY": KEY}, check=False
    )
    print(done.stdout, done.stderr)
    errors = [line for line in done.stderr.splitlines() if "Response text" in line] or [done.stderr[-700:]]
    assert done.returncode == 0, errors[0]
    (results,) = out.rglob("results_*.json")
    return json.loads(results.read_text("utf-8"))["results"]


@check("local-completions: generation")
def generation():
    evaluate("local-completions", COUNTED_HERE, "written")


@check("local-completions: log-likelihoods and multiple choice")
def likelihoods():
    results = evaluate("local-completions", COUNTED_HERE, "choice", "likelihood", "rolling")
    assert results["choice"]["acc,none"] > 0.6, results
    assert results["likelihood"]["perplexity,none"] > 1, results


@check("local-completions: with the server's tokenizer")
def remote_tokenizer():
    remote = f"{COMPLETIONS},tokenizer_backend=remote,auth_token={KEY}"
    assert evaluate("local-completions", remote, "choice")["choice"]["acc,none"] > 0.6
    evaluate("local-completions", remote, "written")  # with chats it would have a list encoded, which is no text


@check("local-chat-completions: generation")
def chats():
    evaluate("local-chat-completions", CHATS, "written", options=["--apply_chat_template"])


write_tasks()
run_checks()
