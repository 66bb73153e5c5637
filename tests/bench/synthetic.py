"""Synthetic rounds whose every number is known beforehand."""

import random
from collections.abc import Sequence

from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.bench.plan import Group, Turn
from forerun.bench.run import BenchRun, RunLog, TimedRound

GROUP = Group("code", 1, 0.0)


def timed(
    rows: Sequence[RowOutcome], prompt: int, draft_s: float, pass_s: float, inner_s: float, rest_s: float
) -> TimedRound:
    """A round; the token ids of a sequence are all its own number."""
    deltas = [Delta(0, 0, r.seq_id, (r.seq_id,) * r.num_emitted, (), (), (), None, None) for r in rows]
    return TimedRound(deltas, Outcome(rows, prompt, draft_s, pass_s, inner_s), draft_s + pass_s + rest_s)


def random_rounds(rng: random.Random, batch: int, depth: int) -> list[TimedRound]:
    """Reading, then decoding with drafts of any depth up to `depth`, rows leaving one by one. Times are dyadic."""
    rows = [RowOutcome(i, 0, 0, 0, 1) for i in range(batch)]
    rounds = [timed([], 64, 0.0, 0.5, 0.0, 0.25), timed(rows, 7, 0.0, 0.5, 0.0, 0.25)]
    for left in range(batch, 0, -1):
        for _ in range(rng.randint(1, 6)):
            rows = []
            for seq_id in range(left):
                drafted = depth if rng.random() < 0.6 else rng.randint(0, depth)
                accepted = rng.randint(0, drafted)
                rows.append(RowOutcome(seq_id, drafted, min(drafted, accepted + 1), accepted, accepted + 1))
            draft_s, pass_s, rest_s = (rng.randint(1, 64) / 1024 for _ in range(3))
            rounds.append(timed(rows, 0, draft_s, pass_s, draft_s / 2, rest_s))
    return rounds


def taped(rounds: Sequence[TimedRound], group: Group, turn: Turn, answers: Sequence[Sequence[int]]) -> BenchRun:
    """The rounds as one run."""
    run_log, clock_s = RunLog(group.batch, turn.depth), 0.0
    for each in rounds:
        clock_s += each.step_s
        run_log.add(each, clock_s)
    return run_log.run(turn, answers, None)


def even(
    depth: int, num_rounds: int, accepted: int, pass_s: float, step_s: float, rest_s: float = 0.0
) -> list[TimedRound]:
    """A prompt's round, and then rounds that are all alike."""
    row = RowOutcome(0, depth, min(depth, accepted + 1), accepted, accepted + 1)
    first = timed([RowOutcome(0, 0, 0, 0, 1)], 5, 0.0, 9.0, 0.0, 0.0)
    return [first, *[timed([row], 0, depth * step_s, pass_s, depth * step_s, rest_s)] * num_rounds]
