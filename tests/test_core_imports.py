"""The core computes without packages that only checks of shapes and the hub need."""

import os
import subprocess
import sys

from kit.checkpoints import SRC, TARGET

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jaxtyping", "beartype", "huggingface_hub", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from forerun import LLM, ForerunError, SamplingParams
llm = LLM(sys.argv[1], "ngram", kernels="torch", dtype="float32")
print(repr(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text))
try:
    LLM("owner/name")
except ForerunError as error:
    print(type(error).__name__, error)
"""


def test_it_generates_without_jaxtyping_and_without_the_hub() -> None:
    env = os.environ | {"PYTHONPATH": str(SRC)}
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(TARGET)], capture_output=True, text=True, env=env, check=True
    )
    text, error = run.stdout.splitlines()
    assert text == "', there was a'"
    assert error.startswith("MissingPackage owner/name is no folder here")
    assert "pip install huggingface_hub" in error
