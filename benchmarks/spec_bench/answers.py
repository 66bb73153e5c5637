"""The prompts of all turns as tokens, and the answers of plain decoding, whose lengths all modes use.

Plain decoding answers each question once, before anything is timed. Its answers are part of the prompts of later turns,
and every engine generates answers of the same lengths, so all modes generate equally many tokens after the same
prompts. Finished questions are stored in a file, one per line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.run_file import RunFile
from benchmarks.spec_bench.questions import Question

from forerun import LLM, SamplingParams
from forerun.errors import ChatTemplateError
from forerun.request import Prompt

BATCH = 16  # questions that are answered at once, with the same bits as one by one


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and answer of a conversation; `number` is that of the question."""

    number: int
    category: str
    task: str
    turn: int
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


class AnswerFile(RunFile):
    """The turns of one run."""

    def read(self) -> dict[int, list[Turn]]:
        """The stored turns by the number of their question."""
        questions = ([Turn(**turn) for turn in record["turns"]] for record in self.records())
        return {turns[0].number: turns for turns in questions}


def answer_all(llm: LLM, questions: Sequence[Question], params: SamplingParams, saved: AnswerFile) -> list[Turn]:
    """All turns of all questions, in this order; questions that are not saved are answered and saved."""
    by_question = saved.read()
    missing = [question for question in questions if question.number not in by_question]
    for first in range(0, len(missing), BATCH):
        batch = missing[first : first + BATCH]
        for turns in conversations(llm, batch, params):
            saved.add(turns=[asdict(turn) for turn in turns])
            by_question[turns[0].number] = turns
        print(f"  plain answers: {min(first + BATCH, len(missing))} of {len(missing)} questions", flush=True)
    return [turn for question in questions for turn in by_question[question.number]]


def prompt_of(llm: LLM, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """A conversation in the model's chat template; without a template, its texts separated by empty lines."""
    if template_of(llm) is None:
        return "".join(f"{message['content']}\n\n" for message in messages)
    return llm.chat_prompt(list(messages))


def template_of(llm: LLM) -> str | None:
    """The digest of the model's chat template; None if the model has none."""
    try:
        return llm.tokenizer.template().digest()
    except ChatTemplateError:
        return None


def conversations(llm: LLM, questions: Sequence[Question], params: SamplingParams) -> list[list[Turn]]:
    """The turns of each question; turns with the same number are answered in one batch."""
    messages: list[list[dict[str, str]]] = [[] for _ in questions]
    turns: list[list[Turn]] = [[] for _ in questions]
    for number in range(max(len(question.turns) for question in questions)):
        active = [i for i, question in enumerate(questions) if number < len(question.turns)]
        for i in active:
            messages[i].append({"role": "user", "content": questions[i].turns[number]})
        prompts = [prompt_of(llm, messages[i]) for i in active]
        for i, result in zip(active, llm.generate(prompts, params, speculation=False, use_tqdm=False), strict=True):
            question, answer = questions[i], result.outputs[0]
            prompt_ids, answer_ids = list(result.prompt_token_ids), list(answer.token_ids)
            turns[i].append(Turn(question.number, question.category, question.task, number, prompt_ids, answer_ids))
            messages[i].append({"role": "assistant", "content": answer.text})
    return turns
