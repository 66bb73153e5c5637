"""Stage 2: texts of the target, on which the students are trained together with the corpus.

A drafter has to predict texts of its target, not of people. So the target continues excerpts of the corpus, at two
temperatures. Each batch is stored in its own file, so that an interruption costs at most one batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from forerun import LLM, SamplingParams

TEMPERATURES = (1.0, 0.7)
BATCH = 64


@dataclass(frozen=True, slots=True)
class Texts:
    """The number and length of texts: `num_prompt` tokens of the corpus, then `num_new` of the target."""

    count: int
    num_prompt: int = 32
    num_new: int = 224
    seed: int = 0

    def prompts(self, corpus: Tensor, bos: int) -> list[list[int]]:
        """The prompts: `<s>` and tokens of the corpus from places that are sampled with the seed."""
        dice = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(0, len(corpus) - self.num_prompt, (self.count,), generator=dice).tolist()
        return [[bos, *corpus[start : start + self.num_prompt].tolist()] for start in starts]


def generate_texts(model: Path, prompts: Sequence[Sequence[int]], texts: Texts, folder: Path, bar: Progress) -> Tensor:
    """All texts as one stream of tokens, prompts included but without `<s>`; existing batches are reused."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, texts.count, BATCH)
    files = [folder / f"{start:06}.json" for start in starts]
    missing = [(start, file) for start, file in zip(starts, files, strict=True) if not file.exists()]
    task = bar.add_task("the target's own texts", total=len(files), completed=len(files) - len(missing))
    llm = LLM(str(model), max_num_seqs=BATCH, max_model_len=512) if missing else None
    for start, file in missing:
        assert llm is not None, "a batch is missing and no model was loaded"
        params = [
            SamplingParams(
                temperature=TEMPERATURES[(start + i) % 2], seed=start + i, max_tokens=texts.num_new, ignore_eos=True
            )
            for i in range(len(prompts[start : start + BATCH]))
        ]
        results = llm.generate([list(prompt) for prompt in prompts[start : start + BATCH]], params)
        rows = [[*result.prompt_token_ids[1:], *result.outputs[0].token_ids] for result in results]
        fresh = file.with_suffix(".tmp")
        fresh.write_text(json.dumps(rows), "utf-8")
        os.replace(fresh, file)
        bar.advance(task)
    return torch.tensor([token for file in files for row in json.loads(file.read_text("utf-8")) for token in row])
