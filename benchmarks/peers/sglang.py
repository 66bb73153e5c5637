"""SGLang's build for CPUs: plain; bfloat16.

This file decides how SGLang is installed. The package in the index needs CUDA's libraries. For CPUs its documentation
builds a checkout of the repository with separate project files, first the engine and then its kernels. This file does
the same, so on a machine without access to the repository the report has git's error.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.peers.place import Peer, Place
from benchmarks.peers.protocol import Answer, Mode, Service, Setup, Stopwatch, serve
from benchmarks.processes import StepFailed
from typing_extensions import override

REPOSITORY, VERSION = "https://github.com/sgl-project/sglang.git", "v0.5.23"
PROJECTS = ("python", "python/sglang/kernels/aot")  # each with project files for several kinds of hardware
CONTEXT_TOKENS = 2048


class Sglang(Peer):
    """Reads the checkpoints without conversion."""

    name = "sglang"
    drafts = False
    module = "benchmarks.peers.sglang"
    environment: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1"}

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Fetch the sources and install both projects from them."""
        place.install()
        place.once("build", VERSION, partial(self.build, place))

    def build(self, place: Place) -> None:
        """The steps of SGLang's documentation for servers without a GPU."""
        source = place.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", VERSION, REPOSITORY, str(source)]
        place.run(f"git clone {REPOSITORY}", clone)
        for project in PROJECTS:
            folder = source / project
            try:
                shutil.copyfile(folder / "pyproject_cpu.toml", folder / "pyproject.toml")
            except OSError as error:
                raise StepFailed(f"{project}: {error}") from error
            install = [place.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(folder)]
            place.run(f"pip install {project} (long)", install)


def load(setup: Setup, stack: ExitStack) -> Service:
    """One engine without a drafter, which supports plain mode only."""
    import sglang

    engine = sglang.Engine(
        model_path=setup.target,
        device="cpu",
        dtype=setup.format,
        context_length=CONTEXT_TOKENS,
        max_running_requests=1,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        log_level="warning",
    )
    stack.callback(engine.shutdown)

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        if mode.depth:
            raise StepFailed(f"mode {mode}: SGLang runs in plain mode only")
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        watch = Stopwatch()
        tokens: list[int] = []
        for part in engine.generate(input_ids=list(prompt_ids), sampling_params=params, stream=True):
            token_ids = part["output_ids"]  # all tokens of the answer up to now
            watch.emitted(len(token_ids) - len(tokens))
            tokens = list(token_ids)
        return watch.answer(tokens)

    return Service({"sglang": sglang.__version__}, generate)


if __name__ == "__main__":
    with ExitStack() as engines_up:
        serve(lambda setup: load(setup, engines_up))
