"""A printed trace shows every draft token whole and in place; its JSON is as documented; the command's options work."""

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


def printed(traced: Trace, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(picture(traced, STYLES), highlight=False)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def row_of(draft_token: TracedNode) -> str:
    """What identifies a draft token's line, apart from its branch."""
    q = "-" if draft_token.q is None else f"{draft_token.q:.3f}"
    return f"{quote(draft_token.text)} {q} {draft_token.p:.3f}"


@pytest.mark.short("model-coupled-4x1-0.0", "ngram-coupled-4x1-0.4", "model-token-3x2-1.0", "model-block-7x1-0.8")
@cases
def test_on_80_columns_every_draft_and_emitted_token_has_one_whole_line(case: Case) -> None:
    for traced in traces(case):
        lines = printed(traced, 80)
        assert max(map(cell_len, lines)) <= 80
        squeezed = [" ".join(line.lstrip(" │├└").split()) for line in lines]
        for round_ in traced.rounds:
            for draft_token in round_.guesses:
                mark = {"accepted": "✓", "rejected": "✗", "not judged": "·"}[draft_token.verdict]
                assert " ".join(f"{row_of(draft_token)} {mark} {draft_token.reason}".split()) in squeezed
        heads = [line for line in lines if line.startswith("round ")]
        assert len(heads) == len(traced.rounds)
        assert len({(line.index(" q "), line.index(" p ")) for line in heads}) == 1
        end_of_p = heads[0].index(" p ") + 2
        marked = [line for line in lines if line[end_of_p + 2 : end_of_p + 3] in set("✓✗·+")]
        num_lines = sum(len(round_.guesses) + 1 for round_ in traced.rounds)
        assert sum(line[end_of_p - 1].isdigit() for line in marked) == num_lines


def test_narrow_terminals_and_long_tokens_keep_within_their_width() -> None:
    traced = traces(CASES[1])[0]
    first = traced.rounds[1]
    long = replace(first, guesses=[replace(g, text="x" * 50 + "\n\x1b[31m漢字") for g in first.guesses])
    for width in (40, 60, 80):
        lines = printed(
            replace(traced, rounds=[traced.rounds[0], long], prompt="\x1b[31m a\tb" + "wörter " * 90), width
        )
        assert max(map(cell_len, lines)) <= width
        assert not any(ord(c) < 32 for line in lines for c in line)


def test_the_legend_explains_the_verdicts_that_occur_and_the_last_lines_give_the_totals() -> None:
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
    traced = traces(CASES[0])[0]
    assert f"{len(traced.rounds)} rounds for 12 tokens: plain decoding needs 12 target passes." in coupled
    assert f"Same tokens as plain decoding: yes (seed {traced.seed})" in coupled
    assert "the distribution of plain decoding" in token
    one = replace(traced, rounds=traced.rounds[:1], token_ids=traced.token_ids[:1], same_as_plain=False)
    end = " ".join(printed(one, 80)[-2:])
    assert "1 round for 1 token: plain decoding needs 1 target pass." in end
    assert "NO" in end


def test_the_svg_holds_the_picture_and_refers_to_nothing_outside() -> None:
    traced = traces(CASES[1])[0]
    drawn = svg(traced, STYLES)
    assert drawn == svg(traced, STYLES)
    assert drawn.startswith("<svg ")
    assert "url(http" not in drawn
    assert "@font-face" not in drawn
    text = drawn.replace("&#160;", " ")
    assert "Same tokens as plain decoding: yes" in text
    assert text.count("✓") == 1 + sum(round_.num_accepted for round_ in traced.rounds)
    assert "#008000" in drawn  # green, whatever NO_COLOR says


def test_the_object_is_json_and_as_documented() -> None:
    for case in CASES:
        traced = traces(case)[0]
        printed_object = traced.as_object()
        assert json.loads(json.dumps(printed_object, allow_nan=False)) == printed_object
        assert len(printed_object["rounds"]) == len(traced.rounds)
        assert printed_object["token_ids"] == [t["token_id"] for r in printed_object["rounds"] for t in r["emitted"]]
        for printed_round, round_ in zip(printed_object["rounds"], traced.rounds, strict=True):
            assert [TracedNode(**draft_token) for draft_token in printed_round["guesses"]] == list(round_.guesses)
            assert [Origin(token["origin"]) for token in printed_round["emitted"]] == [t.origin for t in round_.emitted]
    documented = set((values.__doc__ or "").replace("(0 is the root)", "").replace(",", " ").replace(":", " ").split())
    first = next(r for r in printed_object["rounds"] if r["guesses"])
    names = [*printed_object, *first, *first["guesses"][0], *first["emitted"][0], *first["segments"][0]]
    assert not set(names) - documented


RUN = ["trace", "-m", str(TARGET), "-d", MODEL, "--seed", "5", "-n", "6", "--depth", "3", "--temperature", "0.8"]


def test_the_command_prints_the_picture_or_the_object_and_draws(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    shown = command(*RUN, "--width", "2", "--svg", str(file), "Once upon a time")
    assert shown.exit_code == 0, shown.output
    assert "├" in shown.stdout
    assert "Same tokens as plain decoding: yes (seed 5)." in shown.stdout
    assert file.read_text("utf-8").startswith("<svg ")
    traced = command(*RUN, "--json", "--verification", "token", "Once upon a time")
    printed_object = json.loads(traced.stdout)
    assert (printed_object["draft"], printed_object["depth"], printed_object["width"], printed_object["seed"]) == (
        MODEL,
        3,
        1,
        5,
    )
    assert printed_object["prompt"] == "Once upon a time"
    assert {r["rule"] for r in printed_object["rounds"] if r["guesses"]} == {"token"}
    assert sum(len(r["emitted"]) for r in printed_object["rounds"]) == 6


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "a.svg"
    assert "svg: " in refusal(*RUN, "--svg", str(missing), "Once")
    assert "svg: rounds.png must be a .svg file" in refusal(*RUN, "--svg", "rounds.png", "Once")


def test_the_command_fails_if_the_tokens_differ_from_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(traces(CASES[0])[0], same_as_plain=False)
    monkeypatch.setattr(record, "trace", lambda *_: broken)
    failed = command(*RUN, "Once")
    assert failed.exit_code == 1
    assert "Same tokens as plain decoding: NO" in failed.stdout
