"""The first difference of two servers' answers, and what it means."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from forerun.bench.material import Passage
from forerun.errors import InvalidRequest
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AT_ONCE, AnswerClient, RemoteAnswer, TokenChance, answer_of
from forerun.remote.counters import SpeculationCounts
from forerun.remote.dialects import dialect_of
from forerun.remote.equality import (
    NEAR_TIE,
    TextEquality,
    compare_texts,
    difference_of,
    first_difference,
    gap_of,
    largest_drift,
    token_at,
)
from forerun.remote.time_limit import NO_LIMIT, TimeLimit
from forerun.traffic.plan import SpeculationMode

NEAR, FAR = {" a": -0.7, " b": -0.8, " c": -3.0}, {" a": -0.1, " b": -3.0, " c": -5.0}
HERE = (0, 1, None)  # prompt, concurrency, and where the plain server is unsteady


def answer(
    *words: str, likely: dict[str, float] | None = None, named: bool = True, stopped: bool = False
) -> RemoteAnswer:
    """An answer of these words, at each of which the same tokens are likely."""
    tokens = tuple(TokenChance(word, likely or {}) for word in words) if named else ()
    return RemoteAnswer("".join(words), tokens, stopped)


def test_a_near_tie_is_no_fault_and_a_wide_gap_is_one() -> None:
    near = difference_of(answer(" a", " a", likely=NEAR), answer(" a", " b"), *HERE, 0.25)
    assert (near.position, near.plain, near.other, near.meaning) == (1, " a", " b", "near tie")
    assert near.gap == pytest.approx(0.1)
    assert not near.at_least
    far = difference_of(answer(" a", " a", likely=FAR), answer(" a", " b"), *HERE, 0.25)
    assert (far.gap, far.meaning) == (pytest.approx(2.9), "fault")


def test_a_token_that_was_not_likely_at_all_was_worse_than_the_last_that_was() -> None:
    far = difference_of(answer(" a", likely=FAR), answer(" z"), *HERE, 0.25)
    assert (far.gap, far.at_least, far.meaning) == (pytest.approx(4.9), True, "fault")
    narrow = difference_of(answer(" a", likely={" a": -0.7, " b": -0.8}), answer(" z"), *HERE, 0.25)
    assert (narrow.at_least, narrow.meaning) == (True, "undecided")


def test_without_the_tokens_of_the_other_answer_the_text_says_which_it_was() -> None:
    found = difference_of(answer(" a", " a", " a", likely=NEAR), answer(" a", " b", " a", named=False), *HERE, 0.25)
    assert (found.position, found.other, found.meaning) == (1, " b", "near tie")
    assert found.before == " a "


def test_of_several_tokens_that_fit_a_text_the_likeliest_counts() -> None:
    likely = {" a": -0.7, " th": -0.72, " there": -8.0}
    found = difference_of(answer(" x", " a", likely=likely), answer(" x", " th", "ere", named=False), *HERE, 0.25)
    assert (found.position, found.other, found.meaning) == (1, " th", "near tie")


def test_tokens_that_do_not_spell_the_text_are_not_compared() -> None:
    """Behind parts of a character a count of characters is none of tokens: the token there is another one."""
    tokens = tuple(TokenChance(word, likely) for word, likely in (("\ufffd", NEAR), ("\ufffd", NEAR), (" a", FAR)))
    plain = RemoteAnswer("é a", tokens, False)
    found = difference_of(plain, answer("é", " b", named=False), *HERE, 0.25)
    assert (found.gap, found.meaning) == (None, "undecided")
    behind = RemoteAnswer(" aé", (TokenChance(" a", FAR), *tokens[:2]), False)
    early = difference_of(behind, answer(" b", "é", named=False), *HERE, 0.25)
    assert (early.position, early.other, early.meaning) == (0, " b", "fault")


def test_every_character_is_in_the_token_that_spells_it() -> None:
    words = ["ab", "", "c", " def", "é"]
    spelled_by = [number for number, word in enumerate(words) for _ in word]
    for character, number in enumerate(spelled_by):
        assert token_at(answer(*words), character) == (number, len("".join(words[:number])))
    assert token_at(answer(*words), len(spelled_by)) is None


def test_without_log_probabilities_nothing_is_decided() -> None:
    found = difference_of(answer(" a", " a", named=False), answer(" a", " b", named=False), *HERE, 0.25)
    assert (found.gap, found.meaning) == (None, "undecided")
    assert found.before == " a "


def test_where_the_plain_server_itself_differs_it_is_unsteady_but_not_before() -> None:
    plain, other = answer(" a", " a", likely=FAR), answer(" a", " b")
    assert difference_of(plain, other, 0, 8, 1, 0.25).meaning == "unsteady"
    assert difference_of(plain, other, 0, 8, 0, 0.25).meaning == "unsteady"
    assert difference_of(plain, other, 0, 8, 2, 0.25).meaning == "fault"


def test_an_answer_that_ends_too_early_is_a_fault_where_nothing_else_was_likely() -> None:
    sure = difference_of(
        answer(" a", " a", likely={" a": -0.001, "</s>": -7.0}), answer(" a", stopped=True), *HERE, 0.25
    )
    assert (sure.position, sure.at_least, sure.meaning) == (1, True, "fault")
    open_end = difference_of(answer(" a", " a", likely=NEAR), answer(" a", stopped=True), *HERE, 0.25)
    assert open_end.meaning == "undecided"


def test_gaps_of_a_server_that_tells_one_token_have_a_bound() -> None:
    gap, at_least = gap_of({" a": math.log(0.9)}, " a", " b")
    assert gap == pytest.approx(math.log(0.9) - math.log(0.1))
    assert at_least
    assert gap_of({}, " a", " b") == (None, False)


def test_the_first_difference_counts_tokens_where_they_are_named() -> None:
    assert first_difference(answer(" a", " bc"), answer(" a", " bd")) == 1
    assert first_difference(answer(" a", " bc"), answer(" a", " bd", named=False)) == 4
    assert first_difference(answer(" a"), answer(" a")) is None
    assert first_difference(answer(" a", " b"), answer(" a")) == 1


def test_drift_is_that_of_the_shared_beginning() -> None:
    one = RemoteAnswer(" a b", (TokenChance(" a", {" a": -0.5}), TokenChance(" b", {" b": -0.5})), False)
    other = RemoteAnswer(" a c", (TokenChance(" a", {" a": -0.4}), TokenChance(" c", {" c": -9.0})), False)
    assert largest_drift([one], [other]) == pytest.approx(0.1)
    far, near = (TokenChance(" d", {" d": value}) for value in (-9.0, -0.1))
    behind = [RemoteAnswer(each.text, (*each.tokens, last), False) for each, last in ((one, far), (other, near))]
    assert largest_drift(behind[:1], behind[1:]) == pytest.approx(0.1), "after a difference contexts are others"
    assert largest_drift([answer(" a", named=False)], [answer(" a", named=False)]) is None


class FixedAnswers(AnswerClient):
    """Gives every prompt the same answer: one for a single request, another one for concurrent requests."""

    def __init__(self, alone: RemoteAnswer, concurrent: RemoteAnswer) -> None:
        server: Any = SimpleNamespace(counts=self.counts)
        self.server, self.most_likely, self.answers = server, 3, {1: alone, AT_ONCE: concurrent}

    async def counts(self) -> SpeculationCounts:
        return SpeculationCounts()

    @override
    async def ask(
        self,
        prompts: Sequence[Passage],
        seeds: object,
        temperature: object,
        max_tokens: object,
        at_once: int,
        *_: Any,
        **__: Any,
    ) -> list[RemoteAnswer]:
        return [self.answers[at_once]] * len(prompts)


def compared(plain: FixedAnswers, speculating: FixedAnswers) -> TextEquality:
    """The comparison of two servers after one prompt."""
    workload = ProofWorkload(num_prompts=1)
    return asyncio.run(compare_texts(speculating, plain, [Passage("x", "")], workload, lambda *_: None))


class LateAnswers(FixedAnswers):
    """Answers one request fewer each time, in no time; records the times that it was given."""

    times: list[float]

    @override
    async def ask(self, prompts: Sequence[Passage], *more: Any, limit: TimeLimit = NO_LIMIT) -> list[RemoteAnswer]:
        self.times.append(limit.left_s)
        return (await super().ask(prompts, *more))[: 9 - len(self.times)]


def test_each_part_gets_an_equal_share_of_the_remaining_time_and_only_common_prompts_are_compared() -> None:
    one = answer(" a", likely=NEAR)
    server, plain = LateAnswers(one, one), LateAnswers(one, one)
    server.times = plain.times = times = list[float]()
    workload = ProofWorkload(num_prompts=8)
    prompts = [Passage(str(i), "") for i in range(8)]
    found = asyncio.run(compare_texts(server, plain, prompts, workload, lambda *_: None, TimeLimit.of(1200.0)))
    assert times == pytest.approx([300, 400, 600, 1200], rel=0.02)
    assert (found.num_asked, found.num_prompts, found.num_answers) == (8, 5, 10)


def test_answers_at_the_time_limit_are_those_before_the_first_missing_one() -> None:
    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60.0 * (body["prompt"] == "1"))
        return {"choices": [{"text": body["prompt"]}]}

    client = SimpleNamespace(address=SimpleNamespace(chat=False), complete=complete)
    server: Any = SimpleNamespace(client=client, dialect=dialect_of("", None), model=SimpleNamespace(name="m"))
    asked = AnswerClient(server, SpeculationMode())
    prompts = [Passage(str(i), "") for i in range(4)]
    answers = asyncio.run(asked.ask(prompts, range(4), 0.0, 8, 4, 0, lambda *_: None, limit=TimeLimit.of(0.05)))
    assert [each.text for each in answers] == ["0"]


@pytest.mark.parametrize(("drift", "meaning"), [(0.05, "fault"), (0.2, "fault"), (0.5, "near tie")])
def test_near_ties_are_as_wide_as_twice_the_plain_servers_own_noise(drift: float, meaning: str) -> None:
    """Its log-probabilities drift with concurrent requests; the other answer was worse by 0.8 of a logit."""
    alone, concurrent = ({" a": -0.1 - more, " b": -0.9} for more in (0.0, drift))
    plain = FixedAnswers(answer(" a", likely=alone), answer(" a", likely=concurrent))
    other = answer(" b", likely=alone)
    found = compared(plain, FixedAnswers(other, other))
    assert found.noise == pytest.approx(drift)
    assert found.tolerance == pytest.approx(max(NEAR_TIE, 2 * drift))
    assert [each.meaning for each in found.differences] == [meaning] * 2
    assert (found.num_prompts, found.num_answers, found.num_unsteady) == (1, 2, 0)


def test_both_forms_of_log_probabilities_are_read() -> None:
    lists = {"tokens": [" a", " b"], "token_logprobs": [-0.1, None], "top_logprobs": [{" a": -0.1, " b": -2.0}, None]}
    found = answer_of({"choices": [{"text": " a b", "logprobs": lists, "finish_reason": "stop"}]})
    assert found == RemoteAnswer(" a b", (TokenChance(" a", {" a": -0.1, " b": -2.0}), TokenChance(" b", {})), True)
    entry = {"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " a", "logprob": -0.1}, {"token": " a"}]}
    message = {"message": {"content": " a"}, "logprobs": {"content": [entry]}, "finish_reason": "length"}
    assert answer_of({"choices": [message]}) == RemoteAnswer(" a", (TokenChance(" a", {" a": -0.1}),), False)
    assert answer_of({"choices": [{"message": {"content": None}, "logprobs": None}]}) == RemoteAnswer("", (), False)


@pytest.mark.parametrize(
    "choices",
    [
        1,
        {"a": 1},
        [None],
        [{"text": [{"type": "text", "text": "a"}]}],
        [{"text": "a", "logprobs": {"tokens": 1}}],
        [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [["a"]]}}],
        [{"message": {"content": "a"}, "logprobs": {"content": [None]}}],
    ],
)
def test_an_answer_in_another_form_is_reported(choices: object) -> None:
    async def complete(body: object) -> dict[str, Any]:
        return {"choices": choices}

    address = SimpleNamespace(base="http://x", url_option="plain")
    server: Any = SimpleNamespace(client=SimpleNamespace(address=address, complete=complete))
    with pytest.raises(InvalidRequest, match=r"plain: http://x does not answer in OpenAI's form: \{'choices': "):
        asyncio.run(AnswerClient(server, SpeculationMode()).answer({}))
