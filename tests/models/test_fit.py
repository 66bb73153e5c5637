"""A tokenizer that cannot be a model's is refused, an unlikely one gives a warning; those of real checkpoints pass."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from forerun.errors import TokenizerError
from forerun.models.config import read_config
from forerun.models.fit import check_fit, find_end_ids
from forerun.models.loading import Blueprint
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET


def with_ids(num_ordinary: int, num_added: int = 0) -> Tokenizer:
    """A tokenizer of `num_ordinary` words and `num_added` added tokens after them."""
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
def test_sizes_of_real_checkpoints_are_accepted_without_a_warning(
    ordinary: int, added: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(read_config(TARGET), vocab_size=rows)
    check_fit(with_ids(ordinary, added), TARGET, config, "the model")
    assert not caplog.records


@pytest.mark.parametrize(("ordinary", "added", "rows"), [(513, 0, 512), (4096, 0, 512), (512, 200, 512), (512, 2, 400)])
def test_a_tokenizer_with_ids_beyond_the_model_is_refused(ordinary: int, added: int, rows: int) -> None:
    config = replace(read_config(TARGET), vocab_size=rows)
    with pytest.raises(TokenizerError, match=rf"json has {ordinary + added} ids, and M has {rows} embedding rows"):
        check_fit(with_ids(ordinary, added), TARGET, config, "M")


def test_a_tokenizer_with_far_fewer_ids_than_the_model_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(read_config(TARGET), vocab_size=4096)
    check_fit(with_ids(512), TARGET, config, "M")
    assert "has 512 ids, far fewer than the 4096 embedding rows of M" in caplog.text


def test_a_blueprint_checks_its_tokenizer(tmp_path: Path) -> None:
    folder = shutil.copytree(TARGET, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["strange"] = 512
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="has 513 ids"):
        Blueprint.of(str(folder)).tokenizer()
    with pytest.raises(TokenizerError, match="has 4096 ids"):
        Blueprint.of(str(TARGET), tokenizer="stdlib").tokenizer()


def chat_model(folder: Path, source: Path, model_ends: object, where: str, tokenizer_end: str | None) -> Blueprint:
    """The checkpoint with these ends, of the model in the file `where`, and of the tokenizer."""
    shutil.copytree(source, folder)
    ends = {"config.json": None, "generation_config.json": None, where: model_ends}
    ends |= {"tokenizer_config.json": tokenizer_end}
    for name, value in ends.items():
        values = json.loads((folder / name).read_text())
        key = "eos_token" if name.startswith("tokenizer") else "eos_token_id"
        (folder / name).write_text(json.dumps(values | {key: value}))
    return Blueprint.of(str(folder))


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_the_tokenizers_end_token_ends_answers_too_and_is_logged_once(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in vLLM: for many chat models only the tokenizer names the token that ends a turn."""
    model = chat_model(tmp_path / "model", TARGET, 1, where, "</s>")
    assert model.end_ids(model.tokenizer()) == (1, 2)
    (record,) = caplog.records
    sentence = record.getMessage()
    for part in ("tokenizer_config.json has the end token '</s>'", f"{where} has '<s>'", "both end an answer"):
        assert part in sentence


@pytest.mark.parametrize("ends", [2, [2], [1, 2], [2, 511]])
def test_equal_end_tokens_are_not_logged(ends: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = chat_model(tmp_path / "model", TARGET, ends, "config.json", "</s>")
    assert model.end_ids(model.tokenizer()) == tuple(ends if isinstance(ends, list) else [ends])
    assert not caplog.records


@pytest.mark.parametrize(
    ("ends", "tokenizer_end", "found", "message"),
    [
        (None, None, (), "has no end id: answers end only at max_tokens"),
        ([], None, (), "has no end id: answers end only at max_tokens"),
        (512, None, (), "has eos_token_id (512,) for a vocabulary of 512: answers end only"),
        (None, "</s>", (2,), "has none: both end an answer"),
        ([600], "</s>", (2,), "has none: both end an answer"),
        (2, "not in the vocabulary", (2,), ""),
    ],
)
def test_end_tokens_that_end_no_answer_are_logged(
    ends: object,
    tokenizer_end: str | None,
    found: tuple[int, ...],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = chat_model(tmp_path / "model", TARGET, ends, "config.json", tokenizer_end)
    assert model.end_ids(model.tokenizer()) == found
    assert len(caplog.records) == bool(message)
    assert message in caplog.text


def test_end_tokens_that_the_tokenizer_lacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(read_config(TARGET), vocab_size=4096, eos_ids=(2, 4000))
    assert find_end_ids(with_ids(512), TARGET, config, TARGET) == (2, 4000)
    assert "has the end ids 4000, which" in caplog.text
