"""The simulator: laws that hold on any card, and formulas compared with enumerations and simulations."""

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.simulate import __main__ as command
from benchmarks.simulate.check import check
from benchmarks.simulate.predict import DraftShape, Setting, chain, saved_controller, saved_prediction, tree
from benchmarks.simulate.roofline import CARDS, Card, Constants, Machine, Shape, config_named, drafter_of

from forerun.control.costs import Kind
from forerun.control.forecast import forecast
from forerun.control.kept_costs import as_json, from_json
from forerun.economy import best_depth, expected_tokens

CONFIG = config_named("llama-3.1-8b")
TARGET = Shape.of(CONFIG)
SPARSE = Shape.of(config_named("qwen3-30b-a3b"))
FREE = replace(Constants(), host_s=0.0, drafted_s=0.0, step_s=0.0, layer_s=0.0, sum_s=0.0)  # nothing but the roofline
TREES = [tree([0.8], 4, 4, 8, 0.5), tree([0.8], 8, 8, 64, 0.5)]


def setting(draft: str = "eagle3", card: str = "H100", cards: int = 1, **changes: object) -> Setting:
    constants = changes.pop("constants", Constants())
    machine = Machine(CARDS[card], cards, constants=constants)  # type: ignore[arg-type]
    return Setting(machine, TARGET, drafter_of(draft, CONFIG), **changes)  # type: ignore[arg-type]


def test_models_have_as_many_weights_as_their_names_say() -> None:
    sizes = {name: Shape.of(config_named(name)) for name in ("llama-3.1-70b", "llama-3.1-8b", "qwen3-235b-a22b")}
    billions = {name: (shape.num_weights + shape.head) / 1e9 for name, shape in sizes.items()}
    assert billions == pytest.approx({"llama-3.1-70b": 70.6, "llama-3.1-8b": 8.03, "qwen3-235b-a22b": 235.1}, rel=1e-3)
    sparse = sizes["qwen3-235b-a22b"]
    taken = sparse.dense + sparse.layers * sparse.active * sparse.expert + 2 * sparse.head
    assert taken / 1e9 == pytest.approx(22, rel=0.02)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_without_acceptance_plain_decoding_is_chosen(card: str, batch: int) -> None:
    shapes = [chain([0.0], 8), tree([0.0], 4, 4, 8, 0.5)]
    prediction = setting(card=card).predict(batch, shapes)
    assert (prediction.depth, prediction.tokens_per_round, prediction.speed_up) == (0.0, 1.0, 1.0)
    assert setting(card=card).predict(batch, shapes[:1], free=False).speed_up < 1


@pytest.mark.parametrize("draft", ["ngram", "eagle3", "model:llama-3.2-1b"])
@pytest.mark.parametrize("batch", [1, 8, 128])
def test_speed_ups_grow_with_acceptance_and_are_never_below_plain(draft: str, batch: int) -> None:
    rates = [step / 10 for step in range(11)]
    for shapes in ([chain([rate], 16) for rate in rates], [tree([rate], 4, 4, 16, 0.5) for rate in rates]):
        speed_ups = [setting(draft).predict(batch, [shape]).speed_up for shape in shapes]
        assert speed_ups == sorted(speed_ups)
        assert speed_ups[0] == 1.0 < speed_ups[-1]


def test_the_depth_is_the_best_of_all_depths() -> None:
    rates = [0.8, 0.75, 0.6, 0.6, 0.5]
    for batch in (1, 4):
        at = [setting().predict(batch, [chain(rates, depth)], free=False) for depth in range(1, 17)]
        chosen = setting().predict(batch, [chain(rates, 16)])
        assert chosen.tokens_per_s >= max(each.tokens_per_s for each in at) * (1 - 1e-9)
    s = setting()

    def round_s(depth: int) -> float:
        drafting_s = s.machine.constants.drafted_s + depth * s.step_s(1, 1) if depth else 0.0
        return s.machine.constants.host_s + s.machine.pass_s(TARGET, 1 + depth, 1, s.context) + drafting_s

    rates += [0.5] * 11
    depth, prediction = best_depth(rates, round_s), s.predict(1, [chain(rates, 16)])
    assert prediction.depth == depth > 1
    assert prediction.tokens_per_s == pytest.approx(expected_tokens(rates, depth) / round_s(depth), rel=1e-6)


def test_plain_decoding_is_chosen_where_a_draft_gains_less_than_two_percent() -> None:
    some = setting()
    low = next(step for step in range(100) if some.predict(1, [chain([step / 100], 1)], free=False).speed_up > 1.03)
    rates = [low / 100 - step / 1000 for step in range(30)]
    hardly = [rate for rate in rates if 1 < some.predict(1, [chain([rate], 1)], free=False).speed_up < 1.019]
    assert hardly
    assert {some.predict(1, [chain([rate], 1)]).depth for rate in hardly} == {0.0}


def test_large_batches_are_bound_by_arithmetic() -> None:
    alone, depth = setting("ngram", constants=FREE, context=0), 4
    drafts = chain([0.8], depth)
    tokens = expected_tokens([0.8] * depth, depth)
    few, many = (alone.predict(batch, [drafts], free=False).speed_up for batch in (1, 100_000))
    assert few == pytest.approx(tokens, rel=0.02)  # weights are read once, whatever is drafted
    assert many == pytest.approx(tokens / (1 + depth), rel=0.02)  # every draft token is computed
    assert alone.predict(4096, [drafts]).depth == 0
    ups = [setting("ngram").predict(batch, [drafts]).speed_up for batch in (1, 8, 64, 256, 1024)]
    assert ups == sorted(ups, reverse=True)


def test_long_contexts_keep_large_batches_bound_by_memory() -> None:
    ups = [
        setting("ngram", context=context).predict(256, [chain([0.8], 4)]).speed_up for context in (256, 4096, 32_768)
    ]
    assert ups == sorted(ups)
    assert ups[-1] > 1.5 * ups[0]


@pytest.mark.parametrize("cards", [1, 8])
def test_a_card_that_is_faster_in_everything_changes_no_ratio(cards: int) -> None:
    card, factor = CARDS["H100"], 3.0
    flops = {bits: factor * each for bits, each in card.flops.items()}
    faster = Card(card.memory_bytes, factor * card.memory_bytes_per_s, factor * card.link_bytes_per_s, flops)
    names = ("layer_s", "host_s", "drafted_s", "step_s", "sum_s")
    sooner = replace(Constants(), **{name: getattr(Constants(), name) / factor for name in names})
    slow = setting(cards=cards)
    fast = replace(slow, machine=Machine(faster, cards, constants=sooner))
    for batch in (1, 64):
        one, other = (each.predict(batch, [chain([0.7], 16), *TREES]) for each in (slow, fast))
        assert other.tokens_per_s == pytest.approx(factor * one.tokens_per_s)
        assert (other.speed_up, other.depth) == pytest.approx((one.speed_up, one.depth))


def test_more_cards_share_the_work_and_need_time_for_all_reduces() -> None:
    one, eight = (Machine(CARDS["H100"], cards, constants=FREE) for cards in (1, 8))
    assert one.sum_s(1e9) == 0.0
    sums_s = (2 * TARGET.layers + 1) * eight.sum_s(2 * TARGET.hidden * 16)
    assert eight.pass_s(TARGET, 16, 1, 0) == pytest.approx(one.pass_s(TARGET, 16, 1, 0) / 8 + sums_s)
    few_heads = replace(TARGET, kv_heads=4)  # with 8 cards, two of them read the same keys
    cache_s = [machine.pass_s(few_heads, 1, 1, 1e6) - machine.pass_s(few_heads, 1, 1, 0) for machine in (one, eight)]
    assert cache_s[1] > cache_s[0] / 8 * 1.5
    small = drafter_of("model:llama-3.2-1b", CONFIG)
    costly = Machine(CARDS["H100"], 8, constants=replace(Constants(), sum_s=1e-3))
    alone, split = (Setting(costly, TARGET, small, alone).step_s(1, 1) for alone in (True, False))
    assert alone < split
    handed_s = Setting(replace(costly, num_cards=1), TARGET, small).step_s(1, 1) + 1e-3
    assert alone == pytest.approx(handed_s)


def test_models_that_exceed_the_memory_do_not_fit() -> None:
    shape = Shape.of(config_named("llama-3.1-70b"))
    fits = {cards: Setting(Machine(CARDS["H100"], cards), shape).fits(1) for cards in (1, 2, 4)}
    assert fits == {1: False, 2: True, 4: True}
    assert not Setting(Machine(CARDS["H100"], 4), shape, context=32_768).fits(64)
    drafter = Shape.of(CONFIG)
    assert [Setting(Machine(CARDS["H100"], 2), shape, drafter, alone).fits(1) for alone in (False, True)] == [False] * 2


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 100])
def test_touched_experts_agree_with_simulated_routers(num_tokens: int) -> None:
    random.seed(num_tokens)
    counts = []
    for _ in range(2000):
        chosen = (random.sample(range(SPARSE.experts), SPARSE.active) for _ in range(num_tokens))
        counts.append(len(set(itertools.chain.from_iterable(chosen))))
    off = 4 * statistics.pstdev(counts) / len(counts) ** 0.5
    assert SPARSE.touched(num_tokens) == pytest.approx(statistics.fmean(counts), abs=off + 1e-9)


def test_a_sparse_pass_over_more_tokens_reads_more_experts() -> None:
    ratios = []
    for shape in (TARGET, SPARSE):
        machine = Machine(CARDS["H100"], constants=FREE)
        ratios.append(machine.pass_s(shape, 8, 1, 0) / machine.pass_s(shape, 1, 1, 0))
    assert ratios[0] < 1.05 < 3 < ratios[1]


def test_expected_tokens_agree_with_enumerated_rounds() -> None:
    rates = [0.9, 0.5, 0.3, 0.3]
    total = 0.0
    for accepted in itertools.product((True, False), repeat=len(rates)):
        chance = 1.0
        for rate, each in zip(rates, accepted, strict=True):
            chance *= rate if each else 1 - rate
        total += chance * (1 + next((depth for depth, each in enumerate(accepted) if not each), len(rates)))
    assert 1 + sum(chain(rates, 4).survival) == pytest.approx(total)
    assert 1 + sum(chain(rates[:3], 4).survival) == pytest.approx(total)  # the last one stands for deeper ones


@pytest.mark.parametrize("nodes", range(1, 8))
def test_trees_are_the_best_of_all_trees(nodes: int) -> None:
    rates, spread, depth, width = [0.6, 0.4, 0.5], 0.7, 3, 2
    by_rank = [[rate, min(rate, (1 - rate) * (1 - 2**-spread))] for rate in rates]
    paths = [path for level in range(1, depth + 1) for path in itertools.product(range(width), repeat=level)]

    def chance(path: tuple[int, ...]) -> float:
        return 1.0 if not path else chance(path[:-1]) * by_rank[len(path) - 1][path[-1]]

    whole = [
        subset
        for subset in itertools.combinations(paths, nodes)
        if all(len(path) == 1 or path[:-1] in subset for path in subset)
    ]
    best = max(sum(map(chance, subset)) for subset in whole)
    built = tree(rates, depth, width, nodes, spread)
    assert sum(built.survival) == pytest.approx(best)
    assert built.nodes == nodes
    assert tree(rates, depth, width, 100, spread).nodes == len(paths)


def test_saved_costs_give_the_engines_forecast(tmp_path: Path) -> None:
    engine = setting().controller(4, [1])
    engine.drafters.names = [""]
    engine.drafters.all[0].acceptance.count([(4, 3)] * 200)
    passes = engine.costs.kinds.pop(Kind.of(4, 4 * 2048))
    for num_tokens in (4, 8, 12, 16, 20):
        engine.costs.record(Kind.of(4, 0), num_tokens, passes.expect(num_tokens))
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps(as_json(engine)))
    row = saved_prediction(saved_controller(file), 4)
    expected = forecast((saved := from_json(as_json(engine), ["alone"])).costs, saved.drafters, 4)
    assert expected is not None
    assert (row["depth"], row["speed_up"]) == (expected.depth, expected.gain)
    assert row["speed_up"] > 1.5
    assert command.acceptance(str(file)) == pytest.approx(saved.drafters.all[0].evidence.rates())


def test_the_check_has_many_sources_and_the_errors_that_results_reports() -> None:
    checked = check()
    errors = [abs(row["error"]) for row in checked["rounds"] if row["error"] is not None]
    assert len(errors) >= 8
    assert len({row["source"] for row in checked["rounds"]}) >= 6
    assert statistics.median(errors) < 0.15
    assert max(abs(row["error"]) for row in checked["passes"]) < 0.07


def test_the_command_writes_its_table_as_json_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.json"
    asked = "--target llama-3.1-8b --draft eagle3 ngram --card H100 B200 --cards 1 --batch 1 512 --context 8192 --trees"
    monkeypatch.setattr("sys.argv", ["simulate", *asked.split(), "--acceptance", "3@4", "--output", str(output)])
    assert command.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 8
    assert {row["speed_up"] is None for row in rows} == {False, True}  # 512 rows of 8,192 tokens do not fit
    assert output.with_suffix(".md").read_text().count("\n") == 10


@pytest.mark.parametrize("text", ["2", "x", "9@4", "0.5,-1", "3@x"])
def test_a_wrong_acceptance_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=f"--acceptance {text}: use"):
        command.acceptance(text)


def test_wrong_names_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="model 'gpt-5': use llama"):
        config_named("gpt-5")
    with pytest.raises(SystemExit, match="draft 'owl': use model:NAME"):
        drafter_of("owl", CONFIG)
    (tmp_path / "rounds.json").write_text("[]")
    with pytest.raises(SystemExit, match="an engine saved"):
        saved_controller(tmp_path / "rounds.json")


def test_only_the_sum_of_survival_counts_where_the_depth_is_fixed() -> None:
    one, other = DraftShape((0.5, 0.5), 2), DraftShape((0.9, 0.1), 2)
    assert setting().predict(1, [one], free=False) == setting().predict(1, [other], free=False)
