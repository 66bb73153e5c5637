"""The way of a token through the code: the files of src that one steady round enters, each counted once.

`python -m pytest tests/test_round_path.py -s` prints them in the order in which they are entered. README says what a
reader needs to have read; the bounds below are lowered whenever the way becomes shorter.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import forerun
from forerun import LLM, SamplingParams
from forerun.models.backends.native import find_kernels
from forerun.request import Request

SRC = Path(forerun.__file__).parent
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=64, ignore_eos=True)
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


@pytest.mark.parametrize(("draft", "bound"), [(None, 18), ("ngram", 22), ("model:stdlib-draft", 25)])
def test_a_steady_round_enters_few_files(draft: str | None, bound: int) -> None:
    llm = LLM("stdlib", draft, dtype="float32", speculation=4 if draft else False, use_tqdm_on_load=False)
    engine = llm.engine
    for sequence in llm.requests.sequences(Request.of("def read(path):\n", PARAMS)):
        engine.submit(sequence)
    for _ in range(WARM_ROUNDS):
        engine.step()
    entered = files_entered(engine.step)
    listed = "".join(f"\n  {path}: {', '.join(functions)}" for path, functions in entered.items())
    print(f"\n{draft or 'plain'}: {len(entered)} files{listed}")
    assert {"engine/engine.py", "verify/verify.py"} <= entered.keys()
    assert len(entered) <= bound, listed
