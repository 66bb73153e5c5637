"""The bundled heads draft for the bundled target as well as their records say, and are found by name."""

import json
import sysconfig
from pathlib import Path

import pytest
from safetensors import safe_open

from forerun.config import Speculation
from forerun.draft.auto import DrafterRecord, records_of
from forerun.draft.spec import DraftSpec
from forerun.draft.text.ngram_table import FILE
from forerun.draft.text.suffix import files_of
from forerun.errors import ModelNotFound
from forerun.llm import LLM
from forerun.models.bundled import BUNDLED_HEADS, BUNDLED_TABLES, FOLDER, bundled_name
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams

DEPTH, TOLERANCE = 4, 0.15
HELD_OUT = [
    line.split("\t")[2]
    for line in (FOLDER / "stdlib" / "corpus.tsv").read_text("utf-8").splitlines()
    if line.startswith("held-out")
]


def record_of(name: str) -> DrafterRecord:
    """The record next to the weights."""
    record = DrafterRecord.read(BUNDLED_HEADS[name])
    assert record is not None
    return record


def prompts() -> list[str]:
    """Beginnings of held-out files, long enough to contain code."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [library / name for name in HELD_OUT if (library / name).is_file()]
    texts = [path.read_text("utf-8")[600:900] for path in found[:12]]
    return [text for text in texts if len(text) > 250][:8]


@pytest.mark.short("stdlib-eagle")
@pytest.mark.parametrize("name", BUNDLED_HEADS)
def test_a_head_drafts_as_its_record_says_and_changes_no_token(name: str) -> None:
    record, texts = record_of(name), prompts()
    if len(texts) < 6:
        pytest.skip("this Python has none of the held-out files")
    draft = str(DraftSpec(record.drafter, argument=f"{record.argument}{name}"))
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=64, ignore_eos=True) for i in range(len(texts))]
    found = []
    for each in (None, draft):
        llm = LLM("stdlib", each, speculation=Speculation(DEPTH), max_num_seqs=8, max_model_len=512)
        found.append([answer.outputs[0].token_ids for answer in llm.generate(texts, params)])
    assert found[0] == found[1]
    assert llm.stats.acceptance_at_depth[0] > record.acceptance_at_depth[0] - TOLERANCE
    assert llm.stats.tokens_per_round > record.tokens_per_round[-1] * (1 - TOLERANCE)


def test_every_bundled_head_has_a_record_and_a_card() -> None:
    target = Blueprint.of("stdlib")
    found = dict(records_of(target))
    assert {path.resolve() for path in BUNDLED_HEADS.values()} <= {path.resolve() for path in found}
    for name, folder in BUNDLED_HEADS.items():
        card, record = (folder / "README.md").read_text("utf-8"), record_of(name)
        assert f"--draft {record.drafter}:{record.argument}{name}" in card
        assert f"forerun train {record.drafter} " in card
        assert f"| {record.tokens_per_round[-1]:.2f} |" in card
        assert json.loads((folder / "config.json").read_text("utf-8"))


def test_what_is_bundled_has_its_short_name_unless_a_file_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Blueprint.of("stdlib")
    names = {record.spec(folder).argument for folder, record in records_of(target)}
    assert {"2:stdlib-early-exit", "stdlib-block", "stdlib-draft"} <= names
    monkeypatch.chdir(tmp_path)
    for name, folder in BUNDLED_TABLES.items():
        assert bundled_name(folder) == name
        with safe_open(folder / FILE, framework="np") as file:
            vocabulary = file.metadata()["vocabulary"]
        past, table = files_of(DraftSpec("suffix", argument=name), lambda vocabulary=vocabulary: vocabulary)
        assert (past, table is None) == (None, False)
        (tmp_path / name).touch()
        assert bundled_name(folder) == str(folder)


def test_the_message_for_a_misspelt_head_suggests_the_right_name() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean stdlib-early-exit\b"):
        LLM("stdlib", "early-exit:2:stdlib-earlyexit")
