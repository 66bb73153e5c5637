"""A tokenizer that cannot be a model's is refused, an unlikely one warned of; what real checkpoints do is neither."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from forerun.errors import TokenizerError
from forerun.models.config import read_config
from forerun.models.fit import check_fit
from forerun.models.loading import Blueprint
from forerun.text.tokenizer import Tokenizer


def with_ids(num_ordinary: int, num_added: int = 0) -> Tokenizer:
    """A tokenizer of so many words, and of tokens that were added behind them."""
    words = {f"w{i}": i for i in range(num_ordinary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.add_special_tokens([f"<added {i}>" for i in range(num_added)])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("ordinary", "added", "rows"),
    [
        (15164, 2, 15206),  # Qwen2.5, a tenth as large
        (5029, 0, 5120),  # Phi-2
        (32000, 0, 32000),
        (3200, 1, 3200),  # a padding token that the model has no row for
        (330, 0, 400),
        (500, 12, 512),
    ],
)
def test_what_real_checkpoints_do_is_fine(
    ordinary: int, added: int, rows: int, target_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(read_config(target_dir), vocab_size=rows)
    check_fit(with_ids(ordinary, added), target_dir, config, "the model")
    assert not caplog.records


@pytest.mark.parametrize(("ordinary", "added", "rows"), [(513, 0, 512), (4096, 0, 512), (512, 200, 512), (512, 2, 400)])
def test_ids_that_the_model_cannot_have_are_refused(ordinary: int, added: int, rows: int, target_dir: Path) -> None:
    config = replace(read_config(target_dir), vocab_size=rows)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json has {ordinary + added} ids, and M has rows for {rows}"):
        check_fit(with_ids(ordinary, added), target_dir, config, "M")


def test_far_fewer_ids_than_rows_are_warned_of(target_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = replace(read_config(target_dir), vocab_size=4096, eos_ids=(2, 4000))
    check_fit(with_ids(512), target_dir, config, "M")
    assert "has 512 ids for the 4096 rows of M" in caplog.text
    assert "M names the end-of-sequence ids 4000, which" in caplog.text


def test_a_blueprint_checks_its_tokenizer(tmp_path: Path, target_dir: Path) -> None:
    folder = shutil.copytree(target_dir, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["strange"] = 512
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="has 513 ids"):
        Blueprint.of(str(folder)).tokenizer()
    with pytest.raises(TokenizerError, match="has 4096 ids"):
        Blueprint.of(str(target_dir), tokenizer="stdlib").tokenizer()
