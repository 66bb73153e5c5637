"""Rounds on the GPU: the same tokens up to near ties, to the bit with one_gemm; graphs; one synchronisation."""

import random
import statistics
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from engine.test_chains_ahead import drafts_of
from engine.test_fixed_heads import TRAINED, Uneven
from engine.test_passes_ahead import taken
from forerun import LLM, Grammar, SamplingParams
from forerun.accept.outcome import Outcome, Stats
from forerun.config import Speculation
from forerun.machine import bandwidth_bytes_per_s
from forerun.models.backends.gpu import capture
from forerun.models.backends.gpu.ahead import ChainsAhead, PassAhead
from forerun.models.backends.gpu.capture import Graphs, KeptShapes
from forerun.models.backends.gpu.chain_graph import ChainGraph
from forerun.models.backends.gpu.chain_tables import ChainShape
from forerun.models.backends.gpu.fixed import Inputs, Layout
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.verdicts import VerdictGraph, VerdictShape
from forerun.models.decoder import Outputs
from forerun.models.runner import Read
from forerun.output import RequestOutput
from forerun.prove.plain import last_logits
from forerun.request import Request
from forerun.verify.verify import follow_packed, verify
from kit.checkpoints import TARGET
from law.drafters import spelled
from models.random_rounds import VOCAB, round_of

PROMPTS = ["Once upon a time", "The little dog", "One day, Tim", "Lily and her mom"]
NEAR_TIE = 1e-3  # of logits of size 10, in float32
GREEDY = SamplingParams(temperature=0, max_tokens=64)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=64)
PENALISED = SamplingParams(temperature=0.8, seed=4, top_k=20, repetition_penalty=1.1, max_tokens=64)
NUCLEUS = SamplingParams(temperature=1.2, seed=5, top_p=0.8, max_tokens=64)
BOTH = [GREEDY] * len(PROMPTS) + [SAMPLED] * len(PROMPTS)
SHAPES = [1, 4, Speculation(depth=3, width=2)]


def make(target: Path, draft: str | None = None, **options: object) -> LLM:
    settings: dict[str, object] = {"dtype": "float32", "device": "cuda", "max_model_len": 256} | options
    return LLM(str(target), draft, **settings)  # type: ignore[arg-type]


def texts_of(results: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*r.prompt_token_ids, *c.token_ids] for r in results for c in r.outputs]


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_greedy_tokens_are_those_of_plain_decoding_up_to_near_ties(
    target_dir: Path, draft_dir: Path, shape: int | Speculation, drafter: str
) -> None:
    plain = make(target_dir)
    drafted = make(target_dir, f"model:{draft_dir}" if drafter == "model" else drafter, speculation=shape)
    pairs = zip(*(texts_of(llm.generate(PROMPTS, GREEDY)) for llm in (plain, drafted)), strict=True)
    for one, other in pairs:
        at = first_difference(one, other)
        if at is None:
            assert one == other
            continue
        logits = last_logits(plain, [tuple(one[:at])])[0]
        margin = float((logits[one[at]] - logits[other[at]]).abs())
        print(f"a near tie at token {at}: {one[at]} and {other[at]}, {margin:.2g} apart")
        assert margin <= NEAR_TIE
    assert drafted.stats.num_accepted > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED, NUCLEUS], ids=["greedy", "sampled", "penalised", "nucleus"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_one_gemm_the_tokens_are_the_same(
    target_dir: Path, draft_dir: Path, dtype: str, params: SamplingParams, shape: int | Speculation
) -> None:
    plain = make(target_dir, dtype=dtype, one_gemm=True, max_num_seqs=1)
    drafted = make(target_dir, f"model:{draft_dir}", dtype=dtype, one_gemm=True, speculation=shape, chunk_tokens=3)
    alone = [texts_of(plain.generate(prompt, params))[0] for prompt in PROMPTS]
    assert texts_of(drafted.generate(PROMPTS, params)) == alone


@cache
def plain_texts() -> list[list[int]]:
    return texts_of(make(TARGET, one_gemm=True).generate(PROMPTS * 2, BOTH))


@pytest.mark.parametrize("kind", TRAINED)
def test_with_one_gemm_trained_drafters_give_the_same_tokens(kind: str) -> None:
    """In chains and trees; passes of their layers are captured, where they have any, and chains are one graph."""
    llm = make(TARGET, spelled(kind), one_gemm=True)
    for shape in (Speculation(4), Speculation(3, 2, 6)):
        before = llm.stats.num_accepted
        assert texts_of(llm.generate(PROMPTS * 2, BOTH, speculation=shape)) == plain_texts(), shape
        assert llm.stats.num_accepted > before, shape
    runner = getattr(llm.drafter, "runner", llm.engine.runner)
    assert isinstance(runner, GraphRunner)
    assert runner.graphs.num_replays > len(runner.graphs.captured) > 0
    assert not runner.graphs.refused
    assert any(isinstance(key[0], ChainShape) for key in runner.graphs.captured)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_graph_drafts_what_is_drafted_step_by_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of rows with different depths, some of them 0."""
    drafter, drafts = spelled(kind), list[dict[tuple[int, ...], list[int]]]()
    for at_once in (True, False):
        llm = make(TARGET, drafter, one_gemm=True, speculation=4)
        assert llm.drafter is not None
        runner = getattr(llm.drafter, "runner", llm.engine.runner)
        if not at_once:
            monkeypatch.setattr(runner, "draw_chains", lambda *_, **__: None)
        uneven = Uneven(llm.drafter.propose)
        monkeypatch.setattr(llm.drafter, "propose", uneven)
        assert texts_of(llm.generate(PROMPTS * 2, BOTH)) == plain_texts()
        drafts.append(uneven.drafts)
    same = sum(drafts[1][text] == chain for text, chain in drafts[0].items())
    assert same >= 0.98 * len(drafts[0]) > 100, "sums of other shapes may differ where two tokens are nearly tied"


@pytest.mark.parametrize("kind", TRAINED)
def test_chains_of_trained_drafters_wait_once_a_round(kind: str) -> None:
    llm = make(TARGET, spelled(kind), speculation=4)
    llm.generate(PROMPTS, SAMPLED)  # captures and compiles, for which the host waits
    assert waits_of(llm, SAMPLED) == {1}


def test_passes_begun_ahead_are_used_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among answers that end early; and what the device spends on them is not found in the verdict."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, stop=["."] * (i % 3)) for i in range(8)]
    rows_for, taken, found = PassAhead.rows_for, list[bool](), []

    def noted(ahead: PassAhead, seq_ids: Sequence[int], layout: Layout) -> list[int] | None:
        rows = rows_for(ahead, seq_ids, layout)
        taken.append(rows is not None)
        return rows

    monkeypatch.setattr(PassAhead, "rows_for", noted)
    for ahead in (True, False):
        llm = make(TARGET, one_gemm=True)
        if not ahead:
            monkeypatch.setattr(llm.engine.runner, "read_ahead", lambda *_: None)
        found.append(texts_of(llm.generate(PROMPTS * 2, params)))
    assert found[0] == found[1]
    assert all(taken)
    assert len(taken) > 30


@pytest.mark.parametrize("draft", ["eagle", "eagle-1", "mtp", "mtp-of-3"])
def test_chains_drafted_ahead_are_those_that_would_be_drafted_later(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, also where answers end early and the chains of the others go on."""
    params = [SamplingParams(temperature=i / 2, seed=i, max_tokens=60, stop=["."] * (i % 2)) for i in range(4)]
    found = taken(monkeypatch, ChainsAhead)
    begun = drafts_of(make(TARGET, spelled(draft), speculation=4, one_gemm=True), monkeypatch, params)
    assert all(found)
    assert len(found) > 10
    monkeypatch.setattr(ChainGraph, "launch_next", lambda *_: None)
    assert begun == drafts_of(make(TARGET, spelled(draft), speculation=4, one_gemm=True), monkeypatch, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_one_gemm_logits_are_the_same_bits_for_any_grouping(target_dir: Path, dtype: str) -> None:
    runner = make(target_dir, dtype=dtype, one_gemm=True).engine.runner
    text = [int(t) for t in torch.randint(3, 512, (150,), generator=torch.Generator().manual_seed(0))]
    whole = runner.read([Read(0, text, judged=range(150))]).logits
    for chunk in (1, 3, 16, 64):
        for start in range(0, 150, chunk):
            part = text[start : start + chunk]
            logits = runner.read([Read(1, part, judged=range(len(part)))]).logits
            assert torch.equal(logits, whole[start : start + len(part)]), f"chunks of {chunk}, token {start}"
            runner.keep([1], [range(len(part))])
        runner.release([1])
    runner.drop([0])


def test_passes_are_captured_once_and_replayed(target_dir: Path) -> None:
    llm = make(target_dir, "ngram", speculation=4)
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    llm.generate(PROMPTS, GREEDY)
    captured, replays = len(runner.graphs.captured), runner.graphs.num_replays
    assert 0 < captured < replays
    llm.generate(PROMPTS, GREEDY)
    assert len(runner.graphs.captured) == captured
    assert runner.graphs.num_replays > replays


def test_graphs_that_were_dropped_are_captured_again_and_give_the_same_tokens(
    target_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = texts_of(make(target_dir, one_gemm=True).generate(PROMPTS, SAMPLED))
    monkeypatch.setattr(capture, "MOST_SHAPES", 2)
    llm = make(target_dir, f"model:{draft_dir}", one_gemm=True)
    for depth in (1, 6, 2, 1):
        assert texts_of(llm.generate(PROMPTS, SAMPLED, speculation=depth)) == plain
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    assert len(runner.graphs.captured) <= 2 * 2, "passes and verdicts"
    assert not runner.graphs.refused


def test_a_replay_has_the_results_of_kernels_launched_one_by_one(target_dir: Path) -> None:
    runner = make(target_dir).engine.runner
    assert isinstance(runner, GraphRunner)
    reads = [Read(0, [5, 6, 7, 8], [-1, 0, 0, 2], judged=range(4)), Read(1, [9, 10], judged=[1])]
    found = [runner.read(reads).logits]
    runner.release([0, 1])
    found.append(runner.read(reads).logits)
    runner.release([0, 1])
    runner.graphs = Graphs(runner.device, enabled=False)
    found.append(runner.read(reads).logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("drafter", ["model", "ngram", None])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_one_synchronisation_per_round(
    target_dir: Path, draft_dir: Path, drafter: str | None, params: SamplingParams, rule: str
) -> None:
    draft = f"model:{draft_dir}" if drafter == "model" else drafter
    llm = make(target_dir, draft, speculation=4, verification=rule)
    llm.generate(PROMPTS, params)  # captures and compiles, for which the host waits
    assert waits_of(llm, params) == {1}


def runners_of(llm: LLM) -> list[GraphRunner]:
    """The target's, and the drafter's where it has one of its own."""
    runners = [llm.engine.runner, getattr(llm.drafter, "runner", llm.engine.runner)]
    return [runner for runner in runners if isinstance(runner, GraphRunner)]


def waits_of(llm: LLM, params: SamplingParams) -> set[int]:
    """How often the host waited in the rounds that answer these prompts."""
    for prompt in PROMPTS:
        for sequence in llm.requests.sequences(Request.of(prompt, params)):
            llm.engine.submit(sequence)
    counts, runner = set(), llm.engine.runner
    assert isinstance(runner, GraphRunner)
    owners: list[GraphRunner | ChainGraph] = [
        runner,
        *(graph for each in runners_of(llm) for graph in each.chain_graphs.values()),
    ]
    while llm.engine.has_work:
        before: list[PassAhead | ChainsAhead | None] = [owner.ahead for owner in owners]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                llm.engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        ahead = zip(owners, before, strict=True)  # whose verdicts come by events, of which torch does not warn
        begun = any(owner.ahead is not None and owner.ahead is not old for owner, old in ahead)
        counts.add(begun + sum("called a synchroniz" in str(w.message) for w in found))
    return counts


@pytest.mark.parametrize("filtered", [False, True], ids=["temperature", "filtered"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_verdict_by_a_graph_is_that_of_the_rules(width: int, filtered: bool) -> None:
    dice, device = random.Random(width), torch.device("cuda", 0)
    graph = VerdictGraph(Graphs(device), device, VOCAB)
    for _ in range(60):
        batch, num_ids = dice.randint(1, 6), dice.choice([VOCAB, 33])
        draws, tree, logits = round_of(dice, width, batch, num_ids, "cuda:0", filtered)
        found, expected = graph.judge(draws, tree, logits, follow_packed), verify(tree, logits, draws, "coupled").packed
        assert found is not None
        assert torch.equal(found.packed, expected)
    assert graph.graphs.num_replays == 60
    assert not graph.graphs.refused


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize(
    "params",
    [
        PENALISED,
        NUCLEUS,
        SamplingParams(temperature=0.9, seed=6, max_tokens=64, min_p=0.02, logit_bias={403: -3.0}, min_tokens=20,
                       bad_words=["the dog"], presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(temperature=1, seed=7, max_tokens=64, top_p=0.9, grammar=Grammar.regex("[A-Z][a-z ]*[.]")),
        SamplingParams(temperature=1, seed=8, max_tokens=64, top_k=50, logprobs=12),
    ],
    ids=["penalised", "nucleus", "edited", "grammar", "logprobs"],
)  # fmt: skip
def test_rounds_with_any_parameters_are_verified_in_graphs_and_equal_plain_decoding(
    target_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, params: SamplingParams
) -> None:
    """The reference is judged by the same operations one by one, and drafts nothing."""
    if params.grammar is not None:
        pytest.importorskip("llguidance", reason="grammars need the package llguidance, which is not installed")
    drafted = make(target_dir, f"model:{draft_dir}" if drafter == "model" else drafter, one_gemm=True, speculation=4)
    results = drafted.generate(PROMPTS, params)
    runner = drafted.engine.runner
    assert isinstance(runner, GraphRunner)
    assert any(isinstance(key[0], VerdictShape) for key in runner.graphs.captured)
    assert not runner.graphs.refused
    guesser = getattr(drafted.drafter, "runner", None)
    if isinstance(guesser, GraphRunner):
        assert any(isinstance(key[0], ChainShape) for key in guesser.graphs.captured)
        assert not guesser.graphs.refused
    monkeypatch.setattr(VerdictGraph, "judge", lambda *_: None)
    plain = make(target_dir, one_gemm=True).generate(PROMPTS, params)
    assert texts_of(results) == texts_of(plain)
    assert [r.outputs[0].logprobs for r in results] == [r.outputs[0].logprobs for r in plain]


def test_logits_of_a_gpu_and_a_cpu_are_nearly_the_same(target_dir: Path) -> None:
    on_gpu, on_cpu = make(target_dir), make(target_dir, device="cpu")
    text = tuple(on_cpu.requests.prompt_tokens(Request.of("Once upon a time, there was a little girl")))
    found, wanted = last_logits(on_gpu, [text]).cpu(), last_logits(on_cpu, [text])
    assert (found - wanted).abs().max() <= NEAR_TIE
    assert on_gpu.fingerprint != on_cpu.fingerprint


def test_bandwidth_is_that_of_the_card() -> None:
    """No host's memory is read at 200 GB/s by a sum, and no card's much slower."""
    assert bandwidth_bytes_per_s(device=torch.device("cuda")) > 2e11


def test_a_function_that_cannot_be_captured_runs_uncaptured_and_others_are_captured() -> None:
    graphs, x = Graphs(torch.device("cuda", 0)), torch.arange(4.0, device="cuda")
    stream = torch.cuda.current_stream()
    assert graphs.run(("waits",), lambda: x * x.sum().item()).tolist() == [0, 6, 12, 18]
    assert graphs.run(("waits",), lambda: x * x.sum().item()).tolist() == [0, 6, 12, 18]
    assert (graphs.refused, graphs.num_replays) == ({("waits",)}, 0)
    assert torch.cuda.current_stream() == stream
    for _ in range(2):
        assert graphs.run(("sums",), lambda: x + 1).tolist() == [1, 2, 3, 4]
    assert graphs.num_replays == 2


def test_dropped_graphs_leave_their_pool_to_others_and_the_last_one_frees_it() -> None:
    """Dropped while they run; what they gave stays as long as somebody has it."""
    graphs, x = Graphs(torch.device("cuda", 0)), torch.arange(1 << 20, device="cuda")
    for number in (1, 2, 3):
        found = [graphs.run((name, number), partial(torch.mul, x, factor)) for name, factor in (("a", 2), ("b", 3))]
        graphs.forget("a")
        assert [*graphs.captured] == [("b", number)]
        assert torch.equal(found[0], x * 2)
        graphs.forget("b")
        assert (graphs.captured, graphs.pool) == ({}, None)
        assert torch.equal(found[1], x * 3)
    assert graphs.num_replays == 6


def test_tables_of_all_shapes_share_one_buffer_that_each_round_fills() -> None:
    graphs = Graphs(torch.device("cuda", 0))
    kept = KeptShapes[int, torch.Tensor](graphs)
    for turn in range(3):
        for size in (3, 70_000, 5):
            table = kept.take(size, partial(kept.buffer, size))
            table.fill_(turn + 1)
            sums = graphs.run((size,), partial(torch.sum, table, dtype=torch.int64))
            assert sums.item() == size * (turn + 1)
    assert graphs.num_replays == 9
    assert kept[5].data_ptr() == kept[70_000].data_ptr()


@pytest.mark.parametrize("chunk_tokens", ["auto", 2])
def test_the_times_of_a_round_are_those_of_the_device(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int | str
) -> None:
    """The pass takes time on the card, which is not found in the verdict that waits for it, if there is one."""
    llm = make(target_dir, "ngram", speculation=4, chunk_tokens=chunk_tokens)
    llm.generate(PROMPTS, GREEDY)
    outcomes: list[Outcome] = []
    monkeypatch.setattr(Stats, "record", lambda stats, outcome: outcomes.append(outcome))
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    run = runner.run

    def slow(inputs: Inputs, taps: tuple[int, ...]) -> Outputs:
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms at 2 GHz
        return run(inputs, taps)

    monkeypatch.setattr(runner, "run", slow)  # of passes that are begun ahead too
    llm.generate("Once upon a time", GREEDY)
    usual = [each for each in outcomes if not each.captured]
    assert usual
    assert all(each.pass_s > 0.005 for each in usual), usual
    assert statistics.median(each.verdict_s for each in usual) < 0.005, usual  # other processes may use the card too
