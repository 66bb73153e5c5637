"""Every drafter drafts for every family, and the tokens are those of plain decoding.

Models are random, and trained drafters are fitted to them, so that some draft tokens are accepted. tests/models checks
what a family's layers compute; other files of this folder cover number formats, batches and shapes of drafts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams, Speculation
from forerun.models.families import FAMILIES
from heads.modules import apart
from heads.trained import block_of, eagle_of, heads_of
from kit.sparse import write_architecture
from kit.texts import STARTS

DRAFTERS: dict[str, Callable[[Path, Path], str]] = {  # of a target, in a folder that is not there yet
    "ngram": lambda target, _: "ngram",
    "suffix": lambda target, _: "suffix",
    "a model": lambda target, _: f"model:{target}",
    "early exit": lambda target, _: "early-exit:2",
    "medusa": lambda target, folder: f"medusa:{heads_of(target, folder, 3)}",
    "eagle": lambda target, folder: f"eagle:{eagle_of(target, folder)}",
    "block": lambda target, folder: f"block:{block_of(target, folder, 400)}",
    "mtp": lambda target, folder: f"mtp:{apart(target, folder, 1, 'qwen')}",
}


@pytest.mark.short("Gemma2*")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_drafter_drafts_and_changes_no_token(architecture: str, tmp_path: Path) -> None:
    target = write_architecture(tmp_path / "target", architecture, num_hidden_layers=5)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=24, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = list(STARTS)[:2]
    plain = [each.outputs[0].token_ids for each in LLM(str(target), dtype="float32").generate(prompts, params)]
    for name, draft in DRAFTERS.items():
        llm = LLM(str(target), draft(target, tmp_path / name), dtype="float32", speculation=Speculation(3, 2, 6))
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == plain, name
        assert llm.stats.num_drafted > 0, name
        assert llm.stats.num_accepted > 0 or name in ("ngram", "suffix", "mtp"), name
