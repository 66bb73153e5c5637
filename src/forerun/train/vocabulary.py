"""The vocabulary of a draft that has fewer tokens than the target: those that the target says most often.

This file decides which they are. The answers of the first steps are counted before training begins, and where a token
does not occur in them, the prompts are; among equals the lower id counts more, since tokenizers give the low ids to the
frequent pieces. The choice is kept with the state of the training, so one that goes on goes on with the same tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from forerun.annotations import ProgressCallback
from forerun.errors import FolderTaken
from forerun.heads.student import check_most
from forerun.store import writable, write_whole
from forerun.train.answers import AnswerSource
from forerun.train.state import TrainFolder

COUNTED_STEPS = 32  # whose answers are counted
VOCABULARY = "vocabulary.json"


def draft_vocabulary(
    source: AnswerSource, size: int, folder: TrainFolder, progress: ProgressCallback
) -> tuple[int, ...]:
    """The ids of a draft of `size` tokens, in ascending order. Raises InvalidRequest for more than the tokenizer has,
    FolderTaken where the choice of an earlier run is damaged."""
    check_most("draft_vocab", size, source.llm.requests.num_ids)
    path, team = folder.state_folder / VOCABULARY, source.team
    if (known := team.of_first(lambda: read_vocabulary(path, size) if path.exists() else None)) is not None:
        return known
    ids = most_said(source, size, progress)
    with writable(folder.folder):
        write_whole(path, json.dumps(ids) + "\n")
    return ids


def most_said(source: AnswerSource, size: int, progress: ProgressCallback) -> tuple[int, ...]:
    """The tokens that occur most often in the answers, and then in the prompts."""
    said, read = Counter[int](), Counter(token for prompt in source.data.train for token in prompt)
    steps = COUNTED_STEPS if source.settings.steps is None else min(COUNTED_STEPS, source.settings.steps)
    for step in range(steps):
        for text in source.of_step(step, progress):
            said.update(text.tokens[text.num_prompt :])
    num_said = source.team.sums([float(said[token]) for token in range(source.llm.requests.num_ids)])
    ids = sorted(range(len(num_said)), key=lambda token: (-num_said[token], -read[token], token))
    return tuple(sorted(ids[:size]))


def read_vocabulary(path: Path, size: int) -> tuple[int, ...]:
    """The choice of an earlier run."""
    try:
        ids = json.loads(path.read_text("utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, list) or len(ids) != size or not all(isinstance(token, int) for token in ids):
        raise FolderTaken(f"{path} is damaged: start over with --force")
    return tuple(ids)
