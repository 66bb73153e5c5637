"""The path of a token through the code: the files of src that one steady round enters, each counted once.

`python -m pytest tests/test_round_path.py -s` prints them in the order in which they are entered. docs/architecture.md
has them in its tables; the bounds below are lowered whenever the path becomes shorter.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import forerun
from forerun import LLM, SamplingParams
from forerun.models.backends.native_check import find_kernels
from forerun.request import Request

SRC = Path(forerun.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w/]+\.py)` \|", re.MULTILINE)
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=32, ignore_eos=True)
WARM_ROUNDS = 6
pytestmark = pytest.mark.skipif(
    find_kernels("auto", torch.float32) is None, reason="the way is that of the compiled path"
)


def files_entered(step: Callable[[], object]) -> dict[str, list[str]]:
    """The files of src in which functions are called, in order, with these functions."""
    entered: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SRC):
            functions = entered.setdefault(str(path.relative_to(SRC)), [])
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(previous)
    return entered


def steady_rounds(draft: str | None, speculation: int | bool) -> Iterator[dict[str, list[str]]]:
    """The files of rounds in the middle of an answer; with a drafter, of those in which it drafted something."""
    llm = LLM("stdlib", draft, dtype="float32", speculation=speculation, use_tqdm_on_load=False)
    engine = llm.engine
    for sequence in llm.requests.sequences(Request.of("def read(path):\n", PARAMS)):
        engine.submit(sequence)
    for _ in range(WARM_ROUNDS):
        engine.step()
    while engine.has_work:
        num_drafted = engine.stats.num_drafted
        entered = files_entered(engine.step)
        if draft is None or engine.stats.num_drafted > num_drafted:
            yield entered


def listed(heading: str) -> list[str]:
    """The files in the table under a heading of docs/architecture.md."""
    return ROW.findall(PAGE.split(f"\n### {heading}\n")[1].split("\n#")[0])


@pytest.mark.parametrize(
    ("draft", "bound", "heading"),
    [(None, 18, "A plain round"), ("ngram", 23, "With n-grams"), ("model:stdlib-draft", 25, "With a draft model")],
)
def test_a_steady_round_enters_few_files_which_are_documented(draft: str | None, bound: int, heading: str) -> None:
    entered = next(steady_rounds(draft, 4 if draft else False))
    shown = "".join(f"\n  {path}: {', '.join(functions)}" for path, functions in entered.items())
    print(f"\n{draft or 'plain'}: {len(entered)} files{shown}")
    assert len(entered) <= bound, shown
    plain = listed("A plain round")
    added = [path for path in entered if path not in plain] if draft else list(entered)
    assert added == listed(heading), "the table in docs/architecture.md has other files, or another order"
    assert entered.keys() >= set(plain), "a drafted round enters all files of a plain one"


@pytest.mark.parametrize(("draft", "bound"), [("ngram", 28), ("model:stdlib-draft", 30)])
def test_where_the_depth_is_measured_a_round_enters_the_controllers_files_too(draft: str, bound: int) -> None:
    """Of the rounds of an answer the one with the fewest, since a draw that kernels are not certain of enters more."""
    entered = min(steady_rounds(draft, speculation=True), key=len)
    added = sorted(entered.keys() - next(steady_rounds(draft, speculation=4)).keys())
    print(f"\n{draft}, depth auto: {len(entered)} files, among them {', '.join(added)}")
    assert len(entered) <= bound
