"""Drafts for another engine: its rows are known by their texts only, and its times determine the depth."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.draft.base import Budget, Committed, Drafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.draft.text.suffix import SuffixDrafter
from forerun.errors import ForerunError, InvalidRequest, UnknownDrafter
from forerun.inside import chain_rounds
from forerun.inside.chain_rounds import GREEDY, UNKNOWN, ChainRounds, DraftedChain
from forerun.inside.row_texts import PATIENCE, EngineRow, KnownText, RowTexts, extend
from forerun.inside.vllm import Proposer, options_of
from forerun.sampling.draws import Draws
from forerun.sampling.tables import RowSampling
from forerun.tree import HostTree
from kit.checkpoints import TARGET

VOCAB, LONGEST, DEPTH, MOST_ROWS = 40, 160, 4, 6


def vllm_config(most_drafted: int = DEPTH, **options: Any) -> SimpleNamespace:
    """vLLM's configuration, as far as a proposer reads it."""
    return SimpleNamespace(
        additional_config={"forerun": options} if options else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=most_drafted),
        model_config=SimpleNamespace(
            tokenizer=str(TARGET), model=str(TARGET), get_vocab_size=lambda: VOCAB, max_model_len=LONGEST
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_ROWS),
    )


class Request:
    """A text that repeats itself now and then, from few tokens, so that texts begin alike by chance."""

    def __init__(self, dice: random.Random) -> None:
        period = [dice.randrange(3) for _ in range(dice.randint(1, 6))]
        self.whole = [dice.choice(period) if dice.random() < 0.1 else period[i % len(period)] for i in range(LONGEST)]
        self.num_prompt = dice.randint(1, 12)
        self.length = self.num_prompt
        self.end = dice.randint(self.length + 1, LONGEST)
        self.unread = dice.choice([0, 0, 0, 2])  # steps in which its prompt is read in part

    @property
    def text(self) -> list[int]:
        return self.whole[: self.length]


class ToyEngine:
    """Rows as vLLM keeps them: they are filled, swapped, condensed, taken out for a while and brought back."""

    def __init__(self, proposer: Proposer, seed: int) -> None:
        self.dice, self.proposer = random.Random(seed), proposer
        self.rows: list[Request] = []
        self.waiting: list[Request] = []
        self.drafts: dict[int, list[int]] = {}
        self.buffer = np.zeros((MOST_ROWS, LONGEST + DEPTH), np.int32)

    def step(self) -> tuple[list[Request], list[list[int]]]:
        """One step; returns the rows that drew tokens and their drafts."""
        dice = self.dice
        self.rows = [row for row in self.rows if row.length < row.end]
        if self.rows and dice.random() < 0.1:
            self.waiting.append(self.rows.pop(dice.randrange(len(self.rows))))
        while len(self.rows) < MOST_ROWS and dice.random() < 0.4:
            twin = Request(random.Random(dice.randrange(5)))  # so that some requests are the same
            old = bool(self.waiting) and dice.random() < 0.7
            self.rows.append(self.waiting.pop() if old else dice.choice([twin, Request(dice)]))
        if len(self.rows) > 1 and dice.random() < 0.3:
            i, j = dice.sample(range(len(self.rows)), 2)
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        new: list[list[int]] = []
        self.buffer[:] = dice.randrange(VOCAB)  # the buffer behind a text is arbitrary
        for number, row in enumerate(self.rows):
            if row.unread:
                row.unread -= 1
                new.append([])
            else:
                following = row.whole[row.length : row.end]
                draft, kept = self.drafts.get(id(row), []), 0
                while kept < min(len(draft), len(following) - 1) and draft[kept] == following[kept]:
                    kept += 1
                new.append(following[: kept + 1])
                row.length += kept + 1
            self.buffer[number, : row.length] = row.text
        lengths = np.array([row.length for row in self.rows], np.int32)
        drafts = self.proposer.propose(new, lengths, self.buffer, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        assert not self.proposer.rounds.broken
        self.drafts = {id(row): draft for row, draft in zip(self.rows, drafts, strict=True)}
        drew = [i for i, tokens in enumerate(new) if tokens]
        assert not any(drafts[i] for i in range(len(drafts)) if i not in drew)
        return [self.rows[i] for i in drew], [drafts[i] for i in drew]


def observed_at_once(drafter: Drafter, text: Sequence[int], depth: int) -> list[int]:
    """The chain of a fresh drafter that observes a whole text at once."""
    drafter.observe(Committed([0], list(text[:-1]), [0, len(text) - 1], [text[-1]]))
    limit = drafter.outlook([0]).limit[0]
    if not min(limit, depth):
        return []
    draws = Draws([RowSampling(0, GREEDY, 0, 0, list(text), 1)], VOCAB)
    (tree,) = drafter.propose(draws, [Budget(min(limit, depth))]).tree.host()
    return tree.tokens[1:]


FRESH: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "ngram:2": lambda: NgramDrafter(2),
    "suffix": SuffixDrafter,
}


def wrong_drafts(draft: str, seed: int, num_steps: int = 150) -> tuple[int, int]:
    """How many drafts in a random run are not those of a drafter that observes the row's text at once; and all."""
    engine = ToyEngine(Proposer(vllm_config(draft=draft, speculation=DEPTH, share_answers=False)), seed)
    wrong = count = 0
    for _ in range(num_steps):
        for row, draft_tokens in zip(*engine.step(), strict=True):
            room = max(0, min(DEPTH, LONGEST - row.length - 1))
            wrong += draft_tokens != observed_at_once(FRESH[draft](), row.text, room)
            count += bool(draft_tokens)
    return wrong, count


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draft", FRESH)
@pytest.mark.short("ngram-0", "suffix-1")
def test_a_draft_is_a_function_of_the_rows_text_however_rows_move(draft: str, seed: int) -> None:
    wrong, count = wrong_drafts(draft, seed)
    assert count > 100
    assert wrong == 0


@pytest.mark.parametrize("mistake", ["any", "by number"])
def test_a_fault_in_distinguishing_texts_is_detected(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """By length alone; or by the row's number with the last token."""
    begins = {
        "any": lambda text, row: len(text.ids) <= len(row),
        "by number": lambda text, row: len(text.ids) <= len(row) and row[len(text.ids) - 1] == text.ids[-1],
    }
    monkeypatch.setattr(KnownText, "begins", begins[mistake])
    assert wrong_drafts("ngram", 0)[0] > 0


@pytest.mark.parametrize("draft", ["ngram", "suffix", "mix[ngram,suffix]"])
def test_the_state_of_ended_requests_is_dropped(draft: str) -> None:
    engine = ToyEngine(Proposer(vllm_config(draft=draft)), 3)
    rounds = engine.proposer.rounds
    for _ in range(200):
        engine.step()
        assert len(rounds.texts.at_row) + len(rounds.texts.absent) <= 2 * MOST_ROWS
    engine.rows, last = [], np.arange(LONGEST, dtype=np.int32)[None] % VOCAB
    for step in range(PATIENCE + 2):
        engine.proposer.propose([[1]], np.array([20 + step]), last)
    members = getattr(rounds.drafter, "members", [rounds.drafter])
    kept = [len(member.texts if isinstance(member, NgramDrafter) else member.sequences) for member in members]
    assert kept == [1] * len(members)


def test_answers_are_shared_or_not() -> None:
    """A second request with another prompt is drafted from the first one's answer, if that is allowed."""
    answer = [(7 * i) % VOCAB for i in range(30)]
    for shared in (True, False):
        proposer, buffer = Proposer(vllm_config(draft="suffix", share_answers=shared)), np.zeros((1, LONGEST), np.int32)
        num_right = 0
        for prompt in ([1, 2], [3, 4], [5, 6]):
            for length in range(1, len(answer)):
                text = [*prompt, *answer[:length]]
                buffer[0, : len(text)] = text
                (draft_tokens,) = proposer.propose([[text[-1]]], np.array([len(text)]), buffer)
                num_right += sum(a == b for a, b in zip(draft_tokens, answer[length:], strict=False))
        assert (num_right > 0) is shared


class SimulatedEngine:
    """A clock that the engine's passes advance, and rows whose draft tokens are accepted with a probability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token_s: float, chance: float) -> None:
        self.now_s, self.token_s, self.chance = 0.0, token_s, chance
        monkeypatch.setattr(chain_rounds, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def share_drafted(self, num_rounds: int = 400, num_rows: int = 2) -> float:
        """The share of the last half of so many rounds in which something was drafted."""
        dice, drafter = random.Random(0), NgramDrafter()
        rounds = ChainRounds(drafter, DEPTH, VOCAB, 1 << 20, MOST_ROWS)
        texts = [[*range(number, VOCAB)] * 2 for number in range(num_rows)]
        new, drafted = [1] * num_rows, 0
        for number in range(num_rounds):
            rows = {i: EngineRow(np.array(text, np.int32), new[i]) for i, text in enumerate(texts)}
            drafts = rounds.propose(rows, prefill=False)
            assert not rounds.broken
            num_tokens = num_rows + sum(map(len, drafts.values()))
            drafted += num_tokens > num_rows and number >= num_rounds // 2
            self.now_s += 0.010 + self.token_s * (num_tokens - num_rows)
            for i, text in enumerate(texts):
                kept = 0
                while kept < len(drafts[i]) and dice.random() < self.chance:
                    kept += 1
                text += [*drafts[i][:kept], dice.randrange(VOCAB) if kept < len(drafts[i]) else (text[-1] + 1) % VOCAB]
                new[i] = kept + 1
        return drafted / (num_rounds - num_rounds // 2)


def test_it_drafts_where_draft_tokens_are_cheap_and_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SimulatedEngine(monkeypatch, token_s=0.0001, chance=0.9).share_drafted() > 0.9


def test_it_does_not_draft_where_draft_tokens_are_expensive_and_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SimulatedEngine(monkeypatch, token_s=0.006, chance=0.1).share_drafted() < 0.1


def test_rounds_after_prompts_or_with_added_or_removed_rows_are_not_measured() -> None:
    """After prompts, and where rows were added or removed; their acceptance counts in any case."""
    outcomes = []
    rounds = ChainRounds(NgramDrafter(), DEPTH, VOCAB, LONGEST, MOST_ROWS)
    record = rounds.controller.record
    rounds.controller.record = lambda outcome: outcomes.append(outcome) or record(outcome)  # type: ignore[method-assign]
    text = np.array([1, 2, 3] * 20, np.int32)
    rounds.propose({0: EngineRow(text[:12], 1)}, False)
    rounds.propose({0: EngineRow(text[:13], 1)}, False)
    rounds.propose({0: EngineRow(text[:14], 1)}, True)
    rounds.propose({0: EngineRow(text[:15], 1), 1: EngineRow(text[5:9], 1)}, False)
    rounds.propose({1: EngineRow(text[5:10], 1)}, False)
    assert [outcome.captured for outcome in outcomes] == [False, True, True, True]
    ended, stayed = outcomes[-1].rows
    assert (ended.num_emitted, stayed.num_emitted) == (0, 1)


def test_a_drafter_that_raises_ends_only_the_drafting(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Proposer(vllm_config(draft="ngram"))
    proposer.rounds.drafter.observe = lambda committed: 1 / 0  # type: ignore[method-assign,assignment]
    for _ in range(3):
        assert proposer.propose([[1], []], np.array([3, 2]), np.ones((2, LONGEST), np.int32)) == [[], []]
    assert caplog.text.count("Drafting is switched off") == 1


def test_equal_texts_are_distinguished_by_their_rows() -> None:
    texts = RowTexts(most_absent=2)
    one = np.array([1, 2, 3], np.int32)
    (first, second), _ = texts.follow({0: EngineRow(one, 1), 1: EngineRow(one, 2)})
    assert (first.id, first.num_prompt, second.num_prompt) == (0, 2, 1)
    assert extend(first, one) == [1, 2, 3]
    assert extend(second, one) == [1, 2, 3]
    other, longer = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 3, 5, 6], np.int32)
    followed, forgotten = texts.follow({0: EngineRow(longer, 2), 1: EngineRow(other, 1)})
    assert followed == [first, second]
    assert not forgotten


def follow(texts: RowTexts, rows: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """The ids of the texts of these rows, which are extended to them, and those of forgotten texts."""
    ids = {number: np.array(row, np.int32) for number, row in rows.items()}
    found, forgotten = texts.follow({number: EngineRow(row, 1) for number, row in ids.items()})
    for text, row in zip(found, ids.values(), strict=True):
        extend(text, row)
    return [text.id for text in found], forgotten


def test_an_absent_text_waits_for_its_row_for_some_steps_and_the_longest_one_is_continued() -> None:
    texts = RowTexts(most_absent=2)
    assert follow(texts, {0: [1], 1: [1, 2]}) == ([0, 1], [])
    assert follow(texts, {}) == ([], [])
    assert follow(texts, {5: [1, 2, 3]}) == ([1], [])
    steps = [follow(texts, {5: [1, 2, 3]}) for _ in range(PATIENCE - 1)]
    assert steps == [([1], [])] * (PATIENCE - 2) + [([1], [0])]
    assert follow(texts, {0: [9], 1: [8], 5: [1, 2, 3], 7: [7]}) == ([2, 3, 1, 4], [])
    assert follow(texts, {5: [1, 2, 3]}) == ([1], [2]), "the oldest beyond the most absent ones"


def test_the_outcome_of_a_chain_has_its_judged_tokens_alone() -> None:
    chain = DraftedChain((5, 6, 7), 1)
    for gained, offered in ([9], 1), ([5, 9], 2), ([5, 6, 9], 3), ([5, 6, 7, 9], 3):
        accepted = len(gained) - 1
        assert chain.outcome(4, gained) == RowOutcome(4, 3, offered, accepted, len(gained), 1)
    assert chain.outcome(4, None) == RowOutcome(4, 0, 0, 0, 0, UNKNOWN)


def test_a_chain_ends_before_the_first_token_that_is_none_and_undrafted_rounds_have_no_times_of_drafters() -> None:
    rounds, outcomes = ChainRounds(NgramDrafter(), DEPTH, VOCAB, LONGEST, MOST_ROWS), list[Outcome]()
    for last in (-1, VOCAB):
        tree = HostTree([1, 2, last, 3], [-1, 0, 1, 2])
        assert rounds.chain(tree, Budget(depth=3, nodes=3)) == [2]
    text = np.array([1, 2, 3] * 9, np.int32)
    rounds.controller.record = outcomes.append  # type: ignore[method-assign,assignment]
    rounds.drafter_s = (0.5,)
    rounds.max_length = 12
    for length in (12, 13):
        rounds.propose({0: EngineRow(text[:length], 1)}, False)
    assert [outcome.drafter_s for outcome in outcomes] == [()]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draft": "model:x"}, UnknownDrafter, "copy text|convert"),
        ({"draft": "mix[ngram,eagle:x]"}, UnknownDrafter, "convert"),
        ({"draft": "ngram:0"}, UnknownDrafter, "at least 1"),
        ({"drafter": "ngram"}, InvalidRequest, "draft, speculation, share_answers"),
        ({"speculation": "fast"}, InvalidRequest, "auto"),
        ({"share_answers": "no"}, InvalidRequest, "true or false"),
    ],
)
def test_invalid_options_are_refused_at_the_start(
    options: dict[str, Any], error: type[ForerunError], words: str
) -> None:
    with pytest.raises(error, match=words):
        Proposer(vllm_config(**options))


def test_a_text_names_the_drafter() -> None:
    assert (
        options_of({"forerun": "suffix"})["draft"] == options_of({"forerun": {"draft": "suffix"}})["draft"] == "suffix"
    )
