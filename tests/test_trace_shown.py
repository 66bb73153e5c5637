"""What a trace shows is all of it, whole, in its place; its JSON is what the documentation says; the command obeys."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from forerun.accept.commit import Origin
from forerun.card import STYLES
from forerun.trace import record, values
from forerun.trace.show import picture, svg
from forerun.trace.values import Trace, TracedNode, quote
from kit.checkpoints import TARGET
from kit.command import command, refusal
from kit.tracing import CASES, MODEL, Case, cases, traces


def printed(told: Trace, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(picture(told, STYLES), highlight=False)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def row_of(guess: TracedNode) -> str:
    """What identifies a guess's line, apart from its branch."""
    q = "-" if guess.q is None else f"{guess.q:.3f}"
    return f"{quote(guess.text)} {q} {guess.p:.3f}"


@pytest.mark.short("model-coupled-4x1-0.0", "ngram-coupled-4x1-0.4", "model-token-3x2-1.0", "model-block-7x1-0.8")
@cases
def test_on_80_columns_every_guess_and_token_has_one_whole_line(case: Case) -> None:
    for told in traces(case):
        lines = printed(told, 80)
        assert max(map(cell_len, lines)) <= 80
        squeezed = [" ".join(line.lstrip(" │├└").split()) for line in lines]
        for round_ in told.rounds:
            for guess in round_.guesses:
                mark = {"accepted": "✓", "rejected": "✗", "not judged": "·"}[guess.verdict]
                assert " ".join(f"{row_of(guess)} {mark} {guess.reason}".split()) in squeezed
        heads = [line for line in lines if line.startswith("round ")]
        assert len(heads) == len(told.rounds)
        assert len({(line.index(" q "), line.index(" p ")) for line in heads}) == 1
        end_of_p = heads[0].index(" p ") + 2
        marked = [line for line in lines if line[end_of_p + 2 : end_of_p + 3] in set("✓✗·+")]
        num_lines = sum(len(round_.guesses) + 1 for round_ in told.rounds)
        assert sum(line[end_of_p - 1].isdigit() for line in marked) == num_lines


def test_narrow_terminals_and_long_tokens_keep_within_their_width() -> None:
    told = traces(CASES[1])[0]
    first = told.rounds[1]
    long = replace(first, guesses=[replace(g, text="x" * 50 + "\n\x1b[31m漢字") for g in first.guesses])
    for width in (40, 60, 80):
        lines = printed(replace(told, rounds=[told.rounds[0], long], prompt="\x1b[31m a\tb" + "wörter " * 90), width)
        assert max(map(cell_len, lines)) <= width
        assert not any(ord(c) < 32 for line in lines for c in line)


def test_the_legend_explains_what_occurs_and_the_end_says_what_it_came_to() -> None:
    def shown(case: Case) -> str:
        return " ".join(" ".join(printed(traces(case)[0], 80)).split())

    coupled, greedy, ngram, plain, token, block = (shown(CASES[i]) for i in (0, 2, 4, 5, 6, 10))
    assert "same noise" in coupled
    assert "same noise" not in greedy + ngram + plain + token + block
    assert "temperature 0" in greedy
    assert "it has none" in ngram
    assert "plain decoding, one token per pass" in plain
    assert "its coin" in token
    assert "later token's coin" in block
    told = traces(CASES[0])[0]
    assert f"{len(told.rounds)} rounds for 12 tokens: plain decoding needs 12 target passes." in coupled
    assert f"Same tokens as plain decoding: yes (seed {told.seed})" in coupled
    assert "the distribution of plain decoding" in token
    one = replace(told, rounds=told.rounds[:1], token_ids=told.token_ids[:1], same_as_plain=False)
    end = " ".join(printed(one, 80)[-2:])
    assert "1 round for 1 token: plain decoding needs 1 target pass." in end
    assert "NO" in end


def test_the_svg_holds_the_picture_and_asks_the_network_for_nothing() -> None:
    told = traces(CASES[1])[0]
    drawn = svg(told, STYLES)
    assert drawn == svg(told, STYLES)
    assert drawn.startswith("<svg ")
    assert "url(http" not in drawn
    assert "@font-face" not in drawn
    text = drawn.replace("&#160;", " ")
    assert "Same tokens as plain decoding: yes" in text
    assert text.count("✓") == 1 + sum(round_.num_accepted for round_ in told.rounds)
    assert "#008000" in drawn  # green, whatever NO_COLOR says


def test_the_object_is_json_and_as_documented() -> None:
    for case in CASES:
        told = traces(case)[0]
        found = told.as_object()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert len(found["rounds"]) == len(told.rounds)
        assert found["token_ids"] == [t["token_id"] for r in found["rounds"] for t in r["emitted"]]
        for mine, round_ in zip(found["rounds"], told.rounds, strict=True):
            assert [TracedNode(**guess) for guess in mine["guesses"]] == list(round_.guesses)
            assert [Origin(token["origin"]) for token in mine["emitted"]] == [t.origin for t in round_.emitted]
    documented = set((values.__doc__ or "").replace("(0 is the root)", "").replace(",", " ").replace(":", " ").split())
    first = next(r for r in found["rounds"] if r["guesses"])
    names = [*found, *first, *first["guesses"][0], *first["emitted"][0], *first["segments"][0]]
    assert not set(names) - documented


RUN = ["trace", "-m", str(TARGET), "-d", MODEL, "--seed", "5", "-n", "6", "--depth", "3", "--temperature", "0.8"]


def test_the_command_prints_the_picture_or_the_object_and_draws(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    shown = command(*RUN, "--width", "2", "--svg", str(file), "Once upon a time")
    assert shown.exit_code == 0, shown.output
    assert "├" in shown.stdout
    assert "Same tokens as plain decoding: yes (seed 5)." in shown.stdout
    assert file.read_text("utf-8").startswith("<svg ")
    told = command(*RUN, "--json", "--verification", "token", "Once upon a time")
    found = json.loads(told.stdout)
    assert (found["draft"], found["depth"], found["width"], found["seed"]) == (MODEL, 3, 1, 5)
    assert found["prompt"] == "Once upon a time"
    assert {r["rule"] for r in found["rounds"] if r["guesses"]} == {"token"}
    assert sum(len(r["emitted"]) for r in found["rounds"]) == 6


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "a.svg"
    assert "svg: " in refusal(*RUN, "--svg", str(missing), "Once")


def test_the_command_fails_where_the_promise_does(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(traces(CASES[0])[0], same_as_plain=False)
    monkeypatch.setattr(record, "trace", lambda *_: broken)
    failed = command(*RUN, "Once")
    assert failed.exit_code == 1
    assert "Same tokens as plain decoding: NO" in failed.stdout
