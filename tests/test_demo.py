"""The demo: each side has its own clock, the card agrees with the events, and any terminal can show it."""

import hashlib
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import Result

from forerun import LLM
from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, Segment
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.bench.run import TimedRound
from forerun.demo import material
from forerun.demo.material import BUNDLED_DRAFT, QUESTIONS, DemoPrompt, Pair, chat_prompts, load_prompts
from forerun.demo.race import LEAST_TOKENS, Comparison, PromptScore, RaceSetup, Score, Side, affordable_tokens
from forerun.demo.screen import FinalAnswers, Panels, demo_card, view_of
from forerun.models.bundled import BUNDLED
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import SMALL, TARGET
from kit.command import command, refusal

Step = tuple[Side, TimedRound]
STORY = "Once upon a time, there was a little girl named Lily. One day, Lily"
PROMPTS = [DemoPrompt("a/story.py", STORY), DemoPrompt("b/echo.py", f"{STORY} went out. {STORY}", repeats=True)]


class ScriptedClock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(str(TARGET), f"model:{SMALL}")


@pytest.fixture(scope="module")
def setup(pair: Pair) -> RaceSetup:
    return RaceSetup(pair.load(depth=3))


def params(temperature: float = 0.7, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=5, ignore_eos=True)


def score_of(steps: Sequence[Step]) -> Score:
    score = Score()
    for step in steps:
        score.add(*step)
    return score


def takes(
    setup: RaceSetup, monkeypatch: pytest.MonkeyPatch, clock: ScriptedClock, plain_s: float, drafted_s: float
) -> None:
    """From now on a round of either side takes so long on the clock, whatever it computes."""
    for engine in (setup.plain, setup.llm.engine):
        step_s = plain_s if engine is setup.plain else drafted_s

        def step(real: Callable[[], list[Delta]] = engine.step, step_s: float = step_s) -> list[Delta]:
            clock.now_s += step_s
            return real()

        monkeypatch.setattr(engine, "step", step)


def made_step(side: Side, tokens: Sequence[int], step_s: float, *, read: int = 0, drafted: int = 0) -> Step:
    """A round of decoding with all draft tokens accepted and three quarters of its time in the target's pass."""
    row = RowOutcome(0, drafted, drafted, drafted, len(tokens))
    origins = (Origin.DRAFTED,) * (len(tokens) - 1) + (Origin.BONUS,)
    segments = tuple(Segment(f"word{token} ", origin) for token, origin in zip(tokens, origins, strict=True))
    delta = Delta(0, 0, 0, tuple(tokens), origins, segments, (), None, None)
    return side, TimedRound([delta], Outcome([row], read, step_s / 4 if drafted else 0.0, step_s * 3 / 4), step_s)


def made_score(plain_s: float, drafted_s: float) -> Score:
    """Six tokens after the first: six plain rounds of so long each, and two drafted ones."""
    plain = [made_step(Side.PLAIN, [token], plain_s, read=4 * (token == 0)) for token in range(7)]
    first = made_step(Side.SPECULATIVE, [0], drafted_s, read=4)
    drafted = [made_step(Side.SPECULATIVE, [i, i + 1, i + 2], drafted_s, drafted=2) for i in (1, 4)]
    return score_of([*plain, first, *drafted])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_sides_give_the_tokens_that_the_llm_gives_alone(setup: RaceSetup, temperature: float) -> None:
    alone = setup.llm.generate(STORY, params(temperature), speculation=False)[0].outputs[0]
    steps = list(setup.race(STORY, params(temperature)))
    score = score_of(steps)
    assert score.same_tokens
    assert tuple(score.plain.token_ids) == alone.token_ids
    assert "".join(delta.text for side, step in steps if side is Side.PLAIN for delta in step.deltas) == alone.text
    assert score.plain.stats.num_drafted == 0
    assert score.speculative.stats.num_drafted > 0


@pytest.mark.parametrize(("plain_s", "drafted_s"), [(1.0, 2.5), (1.0, 0.25)])
def test_each_clock_counts_only_its_own_steps_and_the_side_behind_steps_next(
    setup: RaceSetup, monkeypatch: pytest.MonkeyPatch, plain_s: float, drafted_s: float
) -> None:
    clock = ScriptedClock()
    takes(setup, monkeypatch, clock, plain_s, drafted_s)
    used, rounds, running = dict.fromkeys(Side, 0.0), dict.fromkeys(Side, 0), set(Side)
    for side, step in setup.race(STORY, params(), clock):
        assert used[side] == min(used[each] for each in running)
        used[side] += step.step_s
        rounds[side] += 1
        if any(delta.finish_reason for delta in step.deltas):
            running.remove(side)
        clock.now_s += 100.0  # time between steps, such as for drawing, is on neither clock
    assert not running
    assert used == {Side.PLAIN: rounds[Side.PLAIN] * plain_s, Side.SPECULATIVE: rounds[Side.SPECULATIVE] * drafted_s}
    assert rounds[Side.SPECULATIVE] < rounds[Side.PLAIN]


def test_a_race_closed_early_leaves_no_request_in_the_engine(setup: RaceSetup) -> None:
    race = setup.race(STORY, params())
    next(race)
    race.close()  # type: ignore[attr-defined]
    assert not setup.plain.has_work
    assert not setup.llm.engine.has_work
    unstarted = setup.race(STORY, params())
    del unstarted
    assert score_of(list(setup.race(STORY, params()))).same_tokens


def test_the_cards_figures_are_those_of_the_events(setup: RaceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ScriptedClock()
    takes(setup, monkeypatch, clock, plain_s=0.5, drafted_s=0.8)
    steps = list(setup.race(STORY, params(), clock))
    decoding = {side: [s for of, s in steps if of is side and not s.outcome.num_prompt_tokens] for side in Side}
    speeds = {
        side: sum(len(delta.token_ids) for s in own for delta in s.deltas) / sum(s.step_s for s in own)
        for side, own in decoding.items()
    }
    rows = [row for s in decoding[Side.SPECULATIVE] for row in s.outcome.rows]
    per_round = 1 + sum(row.accepted for row in rows) / len(rows)
    reached = [sum(row.offered > depth for row in rows) for depth in range(3)]
    taken = [sum(row.accepted > depth for row in rows) for depth in range(3)]
    score = score_of(steps)
    text = shown(demo_card("the models", [PromptScore("a/story.py", 0.7, 40, score)], score, [("about", "a detail")]))
    numbers = f"{speeds[Side.PLAIN]:.1f} +{speeds[Side.SPECULATIVE]:.1f}"
    line = f"{numbers} +×{speeds[Side.SPECULATIVE] / speeds[Side.PLAIN]:.2f} +{per_round:.2f} +yes"
    assert re.search(f"story.py +0.7 +{line}", text)
    assert re.search(f"total +{line}", text)
    assert " ".join(f"{a / o:.2f}" for a, o in zip(taken, reached, strict=True)) in text
    assert "All 40 tokens are the same" in text
    assert "the models" in text
    assert "a detail" in text


def shown(what: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("drafted_s", "faster"), [(2.9, True), (3.1, False)])
def test_a_slowdown_is_stated_and_explained(drafted_s: float, faster: bool) -> None:
    score = made_score(1.0, drafted_s)  # three tokens per drafted round, of three times a plain one's time
    assert score.pays == faster
    text = shown(demo_card("", [PromptScore("a.py", 0.0, 7, score)], score, []))
    assert score.verdict in text
    assert ("is not faster than plain decoding on this machine" in text) == (not faster)
    assert text.count(score.costs) == (1 if faster else 2)
    assert f"a pass over 3.0 tokens takes {drafted_s:.2f} times as long as over one" in score.costs
    assert "drafting takes 25% of the time; a round yields 3.00 tokens" in score.costs


def test_an_overall_speedup_does_not_hide_a_slowdown_on_one_prompt() -> None:
    loss, gain = made_score(1.0, 4.0), made_score(1.0, 0.5)
    scores = [PromptScore("x/slow.py", 1.0, 7, loss), PromptScore("fast.py", 1.0, 7, gain)]
    text = shown(demo_card("", scores, gain, []))
    assert f"It is not faster on slow.py at temperature 1 (×{loss.speed_up:.2f})." in text


def test_different_tokens_are_reported_in_capitals() -> None:
    score = made_score(1.0, 1.0)
    score.speculative.token_ids[3] += 1
    text = shown(demo_card("", [PromptScore("a.py", 0.0, 7, score)], score, []))
    assert "The tokens differ" in text
    assert "are the same" not in text
    assert re.search("a.py .* NO", text)


def test_a_score_without_tokens_is_no_slowdown() -> None:
    assert "too short to compare" in Score().verdict
    assert "is not faster" not in shown(demo_card("", [PromptScore("a.py", 0.0, 2, Score())], Score(), []))


@pytest.mark.parametrize("left_s", [-5.0, 0.0, 20.0, 60.0, 140.0, 10_000.0])
def test_answers_are_as_long_as_time_allows(left_s: float) -> None:
    seen = made_score(1.0, 1.5)  # per token 1 s and 0.5 s; a prompt token 0.25 s and 0.375 s
    most = affordable_tokens(seen, num_prompt_tokens=16, left_s=left_s, most=96)

    def cost_s(num_tokens: int) -> float:
        return 16 * (0.25 + 0.375) + num_tokens * (1.0 + 0.5)

    assert LEAST_TOKENS <= most <= 96
    assert most == LEAST_TOKENS or cost_s(most) <= left_s
    assert most == 96 or cost_s(most + 1) > left_s
    assert affordable_tokens(seen, 16, left_s, most=3) == 3


def test_a_comparison_leaves_out_its_warm_up_and_ends(setup: RaceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ScriptedClock()
    takes(setup, monkeypatch, clock, plain_s=1.0, drafted_s=0.125)
    comparison = Comparison(setup, 5, 40, deadline_s=45.0, clock=clock)
    comparison.warm_up(PROMPTS[0])
    assert not comparison.total.plain.token_ids
    assert not comparison.late
    assert clock.now_s > 0
    steps: list[Step] = []
    race = comparison.race(PROMPTS[0], 0.7, 1, lambda side, step, _: steps.append((side, step)))
    assert race.score.plain.token_ids == comparison.total.plain.token_ids
    assert race.score.plain.total_s == sum(step.step_s for side, step in steps if side is Side.PLAIN)
    assert race.num_tokens < 40
    assert comparison.shortened
    assert clock.now_s <= comparison.deadline_s
    assert not comparison.late
    clock.now_s = comparison.deadline_s
    assert comparison.late


def terminal(width: int, height: int, **more: object) -> Console:
    settings: dict[str, object] = {"force_terminal": True, "color_system": "standard", "_environ": {}} | more
    return Console(file=io.StringIO(), width=width, height=height, **settings)  # type: ignore[arg-type]


def test_panels_are_only_for_interactive_terminals_with_colours() -> None:
    assert isinstance(view_of(terminal(80, 24), False, "", ""), Panels)
    assert isinstance(view_of(terminal(80, 24), True, "", ""), FinalAnswers)
    others: list[dict[str, object]] = [{"no_color": True}, {"color_system": None}, {"force_terminal": False}]
    for console in (*(terminal(80, 24, **more) for more in others), terminal(59, 24), terminal(80, 13)):
        assert isinstance(view_of(console, False, "", ""), FinalAnswers)


@pytest.mark.parametrize("width", [1, 20, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 14, 24, 100])
def test_any_terminal_shows_a_race_to_its_end(width: int, height: int) -> None:
    console = terminal(width, height)
    score = Score()
    prompt = "def a_name_that_is_longer_than_a_narrow_panel_is_wide(self):\n\tpass\n"
    view = view_of(console, False, "1/4  a/story.py", prompt)
    with view:
        for n, side in itertools.product(range(50), Side):
            step = made_step(side, [n], 1.0, read=5 * (n == 0))
            score.add(*step)
            view.show(*step, score)
        if isinstance(view, Panels):
            frame = shown(view._frame(), width).splitlines()
            assert len(frame) < height
            assert max(map(len, frame)) <= width
    console.print(demo_card("the models", [PromptScore("a/story.py", 0.0, 50, score)], score, []))
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    if width >= 60:
        assert seen.count("word49") >= 2
        assert "×1.00, 1.00 tokens per round; same tokens: yes" in seen


@pytest.fixture
def run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command on the reference pair."""
    monkeypatch.setattr(material, "Pair", lambda draft: pair if draft == BUNDLED_DRAFT else Pair(pair.target, draft))
    monkeypatch.setattr(material, "load_prompts", lambda: PROMPTS)
    monkeypatch.setattr("forerun.commands.demo.LIMIT_S", 1e6)
    return lambda *arguments: command("demo", "--small", "--max-tokens", "24", *arguments)


def test_without_a_terminal_the_command_prints_both_texts_and_the_numbers(run: Callable[..., Result]) -> None:
    result = run()
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    titles = [line for line in result.stdout.splitlines() if line.startswith(("1/2", "2/2"))]
    assert titles == ["1/2, temperature 0  a/story.py", "2/2, temperature 0  b/echo.py"]
    for part in result.stdout.split("/2, ")[1:]:
        sides = re.split(r"--- [a-z]+: 24 tokens, .* tokens/s\n", part)[1:]
        assert len(sides) == 2
        assert sides[0].strip() == sides[1].split("\n×")[0].strip() != ""
    assert "All 48 tokens are the same" in result.stdout
    assert "peak memory" in result.stdout


def test_json_is_one_object_with_all_numbers(run: Callable[..., Result]) -> None:
    result = run("--json", "--temperature", "0.5", "--depth", "2")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert [(p["name"], p["temperature"]) for p in answer["prompts"]] == [(p.name, 0.5) for p in PROMPTS]
    assert answer["depth"] == 2
    for part in [*answer["prompts"], answer["total"]]:
        assert part["same_tokens"]
        assert part["plain"]["token_ids"] == part["speculative"]["token_ids"]
        assert part["speed_up"] == pytest.approx(part["speculative"]["tokens_per_s"] / part["plain"]["tokens_per_s"])
        assert part["pays"] == (part["speed_up"] > 1)
        assert len(part["acceptance_at_depth"]) <= 2
    assert answer["total"]["plain"]["num_tokens"] == sum(p["plain"]["num_tokens"] for p in answer["prompts"])
    assert 10**7 < answer["peak_rss_bytes"] < 8 * 10**9


def test_a_drafter_given_by_option_drafts_for_every_prompt(run: Callable[..., Result]) -> None:
    answer = json.loads(run("--json", "--draft", "suffix").stdout)
    assert answer["drafter"] == "suffix"
    assert answer["models"].endswith(", draft suffix")
    assert answer["total"]["same_tokens"]
    assert "no-such-drafter" in refusal("demo", "--small", "--draft", "no-such-drafter")


def test_different_tokens_fail_the_command(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Score, "same_tokens", False)
    assert run().exit_code == 1


def test_a_chat_model_is_asked_every_question_at_both_temperatures(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(TARGET, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}")
    monkeypatch.setattr("forerun.demo.chat_model.fetch", lambda: folder)
    monkeypatch.setattr(material, "Pair", Pair)
    result = command("demo", "--json", "-n", "6")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    questions = [(name, temperature) for temperature in (0.0, 0.7) for name in QUESTIONS]
    assert [(each["name"], each["temperature"]) for each in answer["prompts"]] == questions
    assert answer["depth"] == "auto"
    assert answer["total"]["same_tokens"]
    assert list(answer["totals"]) == ["0", "0.7"]
    titles = {prompt.name: prompt.title for prompt in chat_prompts()}
    assert titles["summary"] == "summary: Summarize this text in two sentences."
    turns = sum(map(len, QUESTIONS.values()))
    assert sum(each["plain"]["num_tokens"] for each in answer["prompts"]) == 2 * 6 * turns
    asked = DemoPrompt("", "How?", is_chat=True).tokens(LLM(str(folder), use_tqdm_on_load=False))
    assert asked == Tokenizer.load(folder).encode("<user> How?\n", add_special_tokens=False)


def test_a_later_turn_is_asked_behind_the_answer_and_counted_with_the_turns_before(
    setup: RaceSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ScriptedClock()
    takes(setup, monkeypatch, clock, plain_s=1.0, drafted_s=0.5)
    monkeypatch.setattr(LLM, "chat_prompt", lambda _llm, messages: "|".join(each["content"] for each in messages))
    comparison = Comparison(setup, 5, 12, deadline_s=1e6, clock=clock)
    prompt: DemoPrompt | None = DemoPrompt("two turns", "Once", is_chat=True, later=["The dog"])
    asked = list[str]()
    while prompt is not None:
        asked.append(setup.llm.tokenizer.decode(prompt.tokens(setup.llm)))
        steps: list[Step] = []
        comparison.race(prompt, 0.7, 1, lambda side, step, _, steps=steps: steps.append((side, step)))
        text = "".join(delta.text for side, step in steps if side is Side.PLAIN for delta in step.deltas)
        assert comparison.answer == text
        prompt = prompt.after(comparison.answer)
    assert asked[0] == "Once"
    assert asked[1].startswith("Once|")
    assert asked[1].endswith("|The dog")
    assert [(race.name, len(race.score.plain.token_ids)) for race in comparison.races] == [("two turns", 24)]
    assert comparison.totals[0.7].plain.total_s == comparison.total.plain.total_s > 0


def test_without_the_chat_model_the_bundled_ones_go_on_with_code(
    run: Callable[..., Result], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_OFFLINE", "1")
    monkeypatch.setattr("forerun.demo.chat_model.cached_file", lambda: None)
    monkeypatch.setattr(material, "Pair", SimpleNamespace(widened=lambda _draft, _bar: pair))
    result = command("demo", "-n", "6")
    assert result.exit_code == 0
    message = " ".join(result.stderr.split())
    assert "Using the bundled models instead: " in message
    assert "FORERUN_OFFLINE is set: unset it" in message
    assert "1/2, temperature 0  a/story.py" in result.stdout


def test_prompts_are_held_out_code_of_the_right_length() -> None:
    tokenizer = Tokenizer.load(BUNDLED["stdlib"])
    prompts = load_prompts()
    assert [prompt.repeats for prompt in prompts] == [False, False, False, True]
    for prompt in prompts:
        assert int.from_bytes(hashlib.sha256(prompt.name.encode()).digest()[:8], "big") % 50 == 0
        assert 100 <= len(tokenizer.encode(prompt.text)) <= 300
        source = Path(json.__file__).parent.parent / prompt.name
        if sys.version_info[:2] == (3, 11) and source.exists():
            assert prompt.text in source.read_text(encoding="utf-8")
