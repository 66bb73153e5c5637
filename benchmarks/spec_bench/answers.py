"""What every mode is asked: the prompts of all turns as tokens, and how long plain decoding's answers to them are.

Plain decoding answers each question once, before anything is timed. Its answers are part of the prompts of later turns,
and their lengths those of all engines, so that everyone gives as many tokens after the same ones. Finished questions
are kept, a line each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.run_file import RunFile
from benchmarks.spec_bench.questions import Question

from forerun import LLM, SamplingParams
from forerun.errors import ChatTemplateError
from forerun.request import Prompt

BATCH = 16  # questions that are answered at once: the same bits as alone


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a conversation; `number` is the question's."""

    number: int
    category: str
    task: str
    turn: int
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


class AnswerFile(RunFile):
    """The turns of one run."""

    def read(self) -> dict[int, list[Turn]]:
        """By question."""
        questions = ([Turn(**turn) for turn in record["turns"]] for record in self.records())
        return {turns[0].number: turns for turns in questions}


def answer_all(llm: LLM, questions: Sequence[Question], params: SamplingParams, kept: AnswerFile) -> list[Turn]:
    """All turns of all questions, in their order; what is not kept yet is answered."""
    found = kept.read()
    missing = [question for question in questions if question.number not in found]
    for first in range(0, len(missing), BATCH):
        batch = missing[first : first + BATCH]
        for turns in conversations(llm, batch, params):
            kept.add(turns=[asdict(turn) for turn in turns])
            found[turns[0].number] = turns
        print(f"  plain answers: {min(first + BATCH, len(missing))} of {len(missing)} questions", flush=True)
    return [turn for question in questions for turn in found[question.number]]


def prompt_of(llm: LLM, talk: Sequence[Mapping[str, str]]) -> Prompt:
    """A conversation by the model's template; where it has none, its texts with empty lines between them."""
    if template_of(llm) is None:
        return "".join(f"{message['content']}\n\n" for message in talk)
    return llm.chat_prompt(list(talk))


def template_of(llm: LLM) -> str | None:
    """The digest of the model's chat template; None where it has none."""
    try:
        return llm.tokenizer.template().digest()
    except ChatTemplateError:
        return None


def conversations(llm: LLM, questions: Sequence[Question], params: SamplingParams) -> list[list[Turn]]:
    """The turns of each question; all that have a turn of a number give it at once."""
    talks: list[list[dict[str, str]]] = [[] for _ in questions]
    found: list[list[Turn]] = [[] for _ in questions]
    for number in range(max(len(question.turns) for question in questions)):
        asked = [i for i, question in enumerate(questions) if number < len(question.turns)]
        for i in asked:
            talks[i].append({"role": "user", "content": questions[i].turns[number]})
        prompts = [prompt_of(llm, talks[i]) for i in asked]
        for i, result in zip(asked, llm.generate(prompts, params, speculation=False, use_tqdm=False), strict=True):
            question, answer = questions[i], result.outputs[0]
            prompt_ids, answer_ids = list(result.prompt_token_ids), list(answer.token_ids)
            found[i].append(Turn(question.number, question.category, question.task, number, prompt_ids, answer_ids))
            talks[i].append({"role": "assistant", "content": answer.text})
    return found
