"""What widening leaves and reports: files, what is reused or refused, the cache, names of models, the command."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest

from forerun.commands.chat import label_of_widened
from forerun.commands.widening import read_amount
from forerun.drafters import draft_label
from forerun.errors import InvalidRequest, UnsupportedModel, WidenedDiffers
from forerun.llm import LLM
from forerun.models import widen as module
from forerun.models.agreement import Agreement
from forerun.models.config import amount, read_config
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider, cached_widened, widen
from kit.checkpoints import DATA, SMALL, TARGET
from kit.command import command, refusal
from models.test_widen import TIED, made_in, source_of


def test_nan_logits_do_not_count_as_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compare_logits", lambda *_: Agreement(float("nan"), 1.0, 1.0))
    with pytest.raises(WidenedDiffers):
        widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    assert not made_in(tmp_path)


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    wider = Wider(128, 6)
    for name in ("empty", "full", "file"):
        path = tmp_path / name
        path.write_text("mine") if name == "file" else path.mkdir()
        if name == "full":
            (path / "config.json").write_text("{}")
        with pytest.raises(InvalidRequest, match=f"{name} exists and is not this widening: choose another"):
            widen(str(SMALL), path, wider)
    assert (tmp_path / "file").read_text() == "mine"
    assert made_in(tmp_path / "full") == ["config.json"]
    assert not made_in(tmp_path / "empty")
    assert {path.suffix for path in tmp_path.glob(".*")} <= {".lock"}


def test_the_same_widening_is_reused_and_another_is_not(tmp_path: Path) -> None:
    seen: list[str] = []
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert widen(str(SMALL), folder, Wider(128, 6), lambda what, _: seen.append(what)) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert not seen
    others: list[tuple[Wider, int]] = [
        (Wider(128, 7), 0),
        (Wider(256, 6), 0),
        (Wider(128, 6, mlp=1000), 0),
        (Wider(128, 6), 1),
    ]
    for wider, seed in others:
        with pytest.raises(InvalidRequest, match=r"out: .* is not this widening"):
            widen(str(SMALL), folder, wider, seed=seed)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_the_cache_knows_weights_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = source_of(tmp_path / "source", TIED)
    first = cached_widened(str(source), Wider(256, 4))
    assert first.parent == tmp_path / "cache" / "forerun" / "widened"
    assert cached_widened(str(source), Wider(256, 4)) == first
    assert cached_widened(str(source), Wider(256, 5)) != first
    file = max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert cached_widened(str(source), Wider(256, 4)) != first
    assert len(made_in(first.parent)) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached_widened(str(source), Wider(64, 4)).is_relative_to(tmp_path / "home" / ".cache" / "forerun")


def test_two_concurrent_widenings_write_one_folder(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {"a": [], "b": []}

    def work(name: str) -> None:
        widen(str(SMALL), tmp_path / "wide", Wider(256, 8), lambda what, _: seen[name].append(what))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, seen))
    assert sorted(map(bool, seen.values())) == [False, True]
    assert made_in(tmp_path) == ["wide"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"out: .*file/wide cannot be written .*choose another"):
        widen(str(SMALL), tmp_path / "file" / "wide", Wider(128, 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        InvalidRequest, match=r"^cache: .*file/forerun/widened/.* cannot be written .*set XDG_CACHE_HOME"
    ):
        cached_widened(str(SMALL), Wider(128, 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(InvalidRequest, match=r"^cache: .*0\.0 GB are free: set XDG_CACHE_HOME"):
        cached_widened(str(SMALL), Wider(256, 6))
    with pytest.raises(InvalidRequest, match=r"out: .* are needed there, 0\.0 GB are free: choose another"):
        widen(str(SMALL), tmp_path / "wide", Wider(256, 6))
    assert not (tmp_path / "wide").exists(), "nothing is written before"
    monkeypatch.setattr(module, "cache_folder", lambda kind: (_ for _ in ()).throw(OSError("no home: set HOME")))
    with pytest.raises(InvalidRequest, match="cache: no home: set HOME"):
        cached_widened(str(SMALL), Wider(128, 6))


def test_shards_have_the_requested_size_and_progress_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[str, float]] = []
    monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6), lambda *news: progress.append(news))
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert Blueprint.of(str(folder)).load(64).decoder.config.hidden == 128
    for stage in {what for what, _ in progress}:
        fractions = [done for what, done in progress if what == stage]
        assert fractions == sorted(fractions), stage
        assert 0 < fractions[0] <= fractions[-1] == 1.0, stage
    assert len({what for what, _ in progress}) == 3


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_next_to_the_weights_are_copied(tmp_path: Path) -> None:
    source = copytree(TARGET, tmp_path / "source")
    extra = {
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "generation_config.json": '{"eos_token_id": [2, 3]}',
        "LICENSE": "x",
    }
    (source / "additional_chat_templates").mkdir()
    for name, text in extra.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("what the small model scores")
    folder = widen(str(source), tmp_path / "wide", Wider(128, 6))
    kept = files_of(source) - {"README.md", "model.safetensors"}
    made = {name for name in files_of(folder) if "safetensors" not in name}
    assert kept >= {"tokenizer.json", "config.json", *extra}
    assert made == kept
    for name in kept - {"config.json"}:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert read_config(folder).eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("wider", "message"),
    [
        (Wider(63, 5), "hidden: 63 must be a whole number of at least 64"),
        (Wider(64, 4), "layers: 4 must be a whole number of at least 5"),
        (Wider(64, 5, mlp=10), "mlp: 10 must be"),
        (Wider(64, 5, heads=4), "heads: 4 must be a whole number of at least 8"),
        (Wider(64, 5, heads=9), "heads: 9 must be a multiple of 2"),
        (Wider(65, 5), "heads: 8 must divide hidden, 65"),
        (Wider(64, 5, heads=10), "heads: 10 must divide hidden, 64"),
    ],
)
def test_shapes_that_do_not_fit_are_named(wider: Wider, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=message):
        widen(str(TARGET), tmp_path / "wide", wider)
    assert not made_in(tmp_path)


def test_a_widened_checkpoint_is_not_widened_again(tmp_path: Path) -> None:
    folder = widen(str(SMALL), tmp_path / "wide", Wider(128, 6))
    with pytest.raises(UnsupportedModel, match=r"already widened, .* to 1\.\d M parameters\): widen its source"):
        widen(str(folder), tmp_path / "wider", Wider(256, 6))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (11_015_040, "11 M"),
        (509_670_912, "0.51 B"),
        (926_336, "0.93 M"),
        (99_600_000, "100 M"),
        (405_000_000_000, "405 B"),
        (5_000, "5 K"),
        (7, "7"),
    ],
)
def test_amounts_have_two_digits(count: int, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(
    ("text", "count"), [("0.5B", 5 * 10**8), ("21M", 21 * 10**6), ("21 m", 21 * 10**6), ("900k", 900_000), ("77", 77)]
)
def test_amounts_are_parsed_in_usual_spellings(text: str, count: int) -> None:
    assert read_amount(text) == count


@pytest.mark.parametrize("text", ["", "B", "1T", "-3M", "1.2.3B"])
def test_an_invalid_amount_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"parameters: .* is not a number of parameters: write it like 21M"):
        read_amount(text)


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    data, out = DATA, tmp_path_factory.mktemp("wide")
    target = widen(str(data / "stories260k"), out / "target", Wider(128, 6))
    return target, widen(str(data / "stories280k"), out / "draft", Wider(256, 8))


def test_every_report_of_a_speed_says_that_the_model_is_widened(wide_pair: tuple[Path, Path]) -> None:
    target, draft = wide_pair
    widened = "stories260k (widened from 0.26 M to 1.2 M parameters)"
    given = ("--model", str(target), "--draft", f"model:{draft}", "-n", "4", "--max-model-len", "64", "-t", "0", "Once")
    card = command("generate", *given)
    assert card.exit_code == 0
    shown = json.loads(command("generate", "--json", *given).stdout)
    config = read_config(draft)
    assert config.widened is not None
    for model, drafter in ((card.stderr, card.stderr), (shown["model"], shown["draft"])):
        assert widened in model
        assert config.widened in drafter
    llm = LLM(str(target), f"model:{draft}", max_model_len=64)
    label = label_of_widened(llm)
    assert llm.name in label
    assert llm.draft_name == f"model:{config.widened}"
    assert llm.draft_name in label
    assert "widened" in llm.name
    plain = TARGET
    assert label_of_widened(LLM(str(plain), "ngram", max_model_len=64)) == ""


def test_nested_drafters_are_named_too(wide_pair: tuple[Path, Path]) -> None:
    label = draft_label(f"cascade[ngram:3,model:{wide_pair[1]},mix[ngram]]")
    assert label == f"cascade[ngram:3,model:{read_config(wide_pair[1]).widened},mix[ngram]]"
    assert draft_label(None) == ""


def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "wide"
    for _ in range(2):
        result = command("widen", "--model", str(SMALL), "--out", str(out), "--parameters", "5M")
        assert result.exit_code == 0, result.stderr
        for words in ("0.28 M parameters: ", "4.9 M parameters: ", "logits  differ by at most ", str(out)):
            assert words in result.stdout
    explicit = command("widen", "-m", str(SMALL), "--out", str(tmp_path / "b"), "--layers", "9", "--mlp", "512")
    assert explicit.exit_code == 0
    assert read_config(tmp_path / "b").layers == 9
    assert read_config(tmp_path / "b").intermediate == 512
    sparse = command("widen", "-m", str(SMALL), "--out", str(tmp_path / "c"), "--experts", "4", "--active", "3")
    assert sparse.exit_code == 0, sparse.stderr
    assert "4 experts of 192, 3 per token" in sparse.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no new size is given: give --parameters 0.5B"),
        (("--parameters", "5M", "--layers", "9"), "give either it or the sizes"),
        (("--parameters", "five"), "'five' is not a number of parameters"),
        (("--parameters", "5K"), "must be at least the model's own"),
        (("--layers", "1"), "layers: 1 must be a whole number of at least"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal("widen", "--model", str(SMALL), "--out", str(tmp_path / "wide"), *arguments)
    assert not (tmp_path / "wide").exists()


def test_a_source_without_an_end_is_widened_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(tmp_path / "source", TIED)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(values | {"eos_token_id": None}))
    widen(str(source), tmp_path / "wide", Wider(256, 4))
    assert not caplog.messages
