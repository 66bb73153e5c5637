"""N-gram tables: probabilities follow their definition, and unreadable files are refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from forerun.draft.plan import DraftContext
from forerun.draft.text.ngram_table import (
    DISCOUNT,
    FILE,
    LEAST_CHANCE,
    MOST_CONTINUATIONS,
    ORDER,
    NgramTable,
    write_ngrams,
)
from forerun.drafters import plan_drafter
from forerun.errors import ForerunError, PastFileError, VocabularyMismatch
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET
from kit.texts import story

TEXT = st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=30), st.integers(0, 2))
TEXTS = st.lists(TEXT, min_size=1, max_size=4)


def expected(texts: list[tuple[list[int], int]], context: list[int]) -> dict[int, float]:
    """Interpolated probabilities of stored tokens after the longest suffix of a context that occurred."""
    chances: dict[int, float] = {}
    for length in range(min(ORDER, len(context)) + 1):
        end = context[len(context) - length :]
        places = [(text, i) for text, first in texts for i in range(max(first, length), len(text))]
        times = Counter(text[i] for text, i in places if text[i - length : i] == end)
        if not times:
            break
        total = times.total()
        rest = DISCOUNT * len(times) / total
        chances = {w: max(0.0, times[w] - DISCOUNT) / total + rest * chances.get(w, 0.0) for w in {*times, *chances}}
        likely = sorted(((-c, w) for w, c in chances.items() if c >= LEAST_CHANCE))[:MOST_CONTINUATIONS]
        chances = {w: -minus for minus, w in likely}
    return chances


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(st.integers(0, 5), max_size=4))
def test_probabilities_are_those_of_the_definition(
    tmp_path: Path, texts: list[tuple[list[int], int]], context: list[int]
) -> None:
    write_ngrams(tmp_path, texts, "v")
    found = dict(NgramTable.read(tmp_path, "v").continuations(context))
    assert found == pytest.approx(expected(texts, context), abs=1 / 255)


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "vocabulary"])
def test_an_unreadable_table_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    target = Blueprint.of(str(TARGET))
    context = DraftContext(target, target.tokenizer())
    write_ngrams(tmp_path, [(story(50, 1), 1)], "v" if damage == "vocabulary" else context.tokenizer.fingerprint())
    spec = f"suffix:{tmp_path}"
    if damage != "vocabulary":
        plan_drafter(spec, context)
    file = tmp_path / FILE
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    elif damage == "other":
        file.write_bytes((TARGET / "model.safetensors").read_bytes())
    elif damage == "missing":
        file.unlink()
    refusal: type[ForerunError] = VocabularyMismatch if damage == "vocabulary" else PastFileError
    with pytest.raises(refusal, match="name a folder"):
        plan_drafter(spec, context)


@pytest.mark.parametrize("name", ["hashes", "firsts", "tokens", "chances"])
@pytest.mark.parametrize("damage", ["one number", "a matrix", "floats", "too short"])
def test_a_table_whose_arrays_do_not_fit_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    write_ngrams(tmp_path, [(story(50, 1), 1)], "v")
    arrays = load_file(tmp_path / FILE)
    array = arrays[name]
    changed = {"one number": array[0], "a matrix": array[:, None], "floats": array / 2, "too short": array[:-1]}
    arrays[name] = np.array(changed[damage])
    save_file(arrays, tmp_path / FILE, {"form": "1", "vocabulary": "v"})
    with pytest.raises(PastFileError, match="has no n-grams in format 1: name a folder"):
        NgramTable.read(tmp_path, "v")


def test_a_table_with_continuations_outside_of_it_is_refused(tmp_path: Path) -> None:
    write_ngrams(tmp_path, [(story(50, 1), 1)], "v")
    arrays = load_file(tmp_path / FILE)
    arrays["firsts"][1] = len(arrays["tokens"]) + 1
    save_file(arrays, tmp_path / FILE, {"form": "1", "vocabulary": "v"})
    with pytest.raises(PastFileError, match="has no n-grams in format 1: name a folder"):
        NgramTable.read(tmp_path, "v")


def test_a_table_in_bfloat16_is_refused(tmp_path: Path) -> None:
    """numpy does not have this type."""
    arrays = {name: torch.zeros(2, dtype=torch.bfloat16) for name in ("hashes", "firsts", "tokens", "chances")}
    save_torch(arrays, tmp_path / FILE, {"form": "1", "vocabulary": "v"})
    with pytest.raises(PastFileError, match="has no readable n-grams"):
        NgramTable.read(tmp_path, "v")
