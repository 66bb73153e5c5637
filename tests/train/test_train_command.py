"""`forerun train` from end to end: what it writes, how good that is, what it refuses, how it continues after a kill."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from typer.testing import Result

from forerun.draft.auto import DrafterRecord
from forerun.models.loading import Blueprint
from forerun.shape import StaticTree
from forerun.store import Journal
from forerun.train.answers import AnswerSource
from forerun.train.data import PromptIds
from forerun.train.held_out import TREE
from forerun.train.objective import LOSSES
from forerun.train.report import series
from forerun.train.state import TrainFolder, TrainState
from kit.checkpoints import TARGET, same_tensors
from kit.command import command, refusal
from train.material import answers, environment, finish, write_prompts

KINDS = {
    "block": ["--layers", "1", "--markov-rank", "16", "--rate", "0.005", "--steps", "60"],
    "draft": ["--layers", "1", "--hidden", "64", "--heads", "4", "--rate", "0.01", "--steps", "40"],
    "eagle": ["--mlp", "64", "--draft-vocab", "300", "--rate", "0.005", "--steps", "60"],
    "mtp": ["--mlp", "64", "--rate", "0.005", "--steps", "60"],
    "medusa": ["--heads", "2", "--hydra", "--rate", "0.01", "--steps", "40"],
    "early-exit": ["--exit", "3", "--rate", "0.01", "--checkpoint-every", "4", "--steps", "16"],
}
QUICK = ["--model", str(TARGET), "-n", "24", "--held-out", "6", "--look-every", "15", "--threads", "1"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


Trained = Callable[[str], tuple[Path, dict[str, object]]]


@pytest.fixture(scope="module")
def trained(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A trained drafter of each kind: its folder, and the command's report."""
    made: dict[str, tuple[Path, dict[str, object]]] = {}

    def train(kind: str) -> tuple[Path, dict[str, object]]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("trained") / kind
            result = command(
                "train", kind, *QUICK, *KINDS[kind], "--data", str(prompts), "--out", str(folder), "--json"
            )
            assert result.exit_code == 0, result.output
            steps = int(KINDS[kind][-1])
            line = r"^step (\d+), (\d+) % done(, about \d+ seconds left)?: .* accepted at depth 1"
            shown = re.findall(line, result.stderr, re.MULTILINE)
            assert [bool(left) for *_, left in shown] == [0 < int(done) < 100 for _, done, _ in shown]
            assert [int(step) for step, *_ in shown] == [*range(0, steps, 15), steps], (
                "without a terminal, one line per evaluation"
            )
            assert shown[-1][1] == "100"
            made[kind] = folder, json.loads(result.stdout)
        return made[kind]

    return train


@pytest.mark.short("draft")
@pytest.mark.parametrize("kind", ["draft", "early-exit", "block", "eagle", "medusa", "mtp"])
def test_a_trained_drafter_is_better_than_untrained_and_its_training_is_recorded(kind: str, trained: Trained) -> None:
    folder, report = trained(kind)
    steps = int(KINDS[kind][-1])
    before, now = report["untrained"], report["trained"]
    assert isinstance(before, dict)
    assert isinstance(now, dict)
    drafted, accepted = answers(str(report["draft"]))
    assert drafted == answers(None)[0]
    assert accepted > before["acceptance_at_depth"][0] + 0.02
    assert now["overlap"] > before["overlap"] + 0.03
    assert now["tokens_per_round"][1] > before["tokens_per_round"][1]
    assert report["steps"] == steps
    assert report["stopped"] == "all steps are done"
    assert report["predicted"]["speed_up"] > 0  # type: ignore[index]
    log = Journal.read(folder / "train.jsonl").entries
    looks = series(log, "held_out", "overlap")
    assert [step for step, _ in looks] == [*range(0, steps, 15), steps]
    assert max(value for _, value in looks) == now["overlap"]
    assert [step for step, _ in series(log, "loss")] == [1, *range(10, steps + 1, 10)]
    assert len(series(log, "predicted", "speed_up")) == len(looks)
    svg = ElementTree.fromstring((folder / "train.svg").read_text())
    assert len(svg.findall(".//{*}polyline")) >= 5
    record = DrafterRecord.read(folder)
    assert record is not None
    assert str(record.spec(folder)) == report["draft"]
    assert str(folder) in str(report["draft"])
    target = Blueprint.of(str(TARGET))
    assert (record.target, record.model) == (target.weights_digest(), target.norms_digest())
    assert list(record.tokens_per_round) == now["tokens_per_round"]
    assert record.speed_up == report["predicted"]["speed_up"]  # type: ignore[index]
    assert not list(folder.glob(".*"))
    at_once = kind in ("medusa", "block")
    assert (folder / TREE).exists() == at_once
    if at_once:
        assert 1 <= StaticTree.load(folder / TREE).depth <= len(now["tokens_per_round"])


def test_a_finished_training_is_reported_again_and_not_repeated(
    trained: Trained, prompts: Path, tmp_path: Path
) -> None:
    folder, _ = trained("early-exit")
    other = tmp_path / "other.txt"
    other.write_text("Lily found a big red ball.\nTom sat.\n" * 8)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    arguments = ["early-exit", *QUICK, *KINDS["early-exit"], "--data", str(prompts), "--out", str(folder)]
    result = command("train", *arguments)
    assert result.exit_code == 0, result.output
    assert f"early-exit:3:{folder}" in result.stdout.replace("\n", "")
    assert "accepted, before" in result.stdout
    steps = KINDS["early-exit"][-1]
    assert re.fullmatch(rf"{re.escape(str(folder))} is finished, after step {steps}: .* predicted\n", result.stderr)
    record = DrafterRecord.read(folder)
    assert record is not None
    assert record.speed_up is not None
    assert f"×{record.speed_up:.2f} predicted" in result.stderr
    assert f"×{record.speed_up:.2f} predicted" in result.stdout
    assert {path: path.read_bytes() for path in before} == before
    for more, message in (
        (["--seed", "1"], "--seed was 0 and is 1"),
        (["--loss", "kl"], "--loss was 'lk-lambda' and is 'kl'"),
        (["--exit", "2"], "(exit_layer was 3 and is 2)"),
        (["--steps", "9"], f"--steps was {steps} and is 9"),
        (["--steps", "99", "--seed", "1"], f"(--seed was 0 and is 1; --steps was {steps} and is 99)"),
        (["--data", str(other)], "has another training (other data)"),
    ):
        refused = refusal("train", *arguments, *more)
        assert message in refused
        assert "--force" in refused
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.full
def test_a_finished_training_continues_with_more_steps(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same weights also where it is killed meanwhile; an unfinished training must be finished first."""
    few, save, killed_at = ["-n", "8", "--checkpoint-every", "1", "--data", str(prompts)], TrainFolder.save, [-1]

    def saving(own: TrainFolder, state: TrainState) -> None:
        save(own, state)
        if state.step == killed_at[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainFolder, "save", saving)

    def trained_to(steps: int, name: str) -> Result:
        return command("train", "early-exit", *QUICK, *few, "--out", str(tmp_path / name), "--steps", str(steps))

    assert trained_to(3, "a").exit_code == 0
    short = contents(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    result = trained_to(5, "a")
    assert result.exit_code == 0, result.output
    assert "resumes at step 3: " in result.stderr
    assert "5 steps in" in result.stdout
    assert DrafterRecord.read(tmp_path / "a") is not None
    killed_at[0] = 4
    assert trained_to(5, "b").exit_code != 0
    result = trained_to(6, "b")
    assert result.exit_code == 2
    assert "with --steps 5: finish it with --steps 5 first" in result.stderr.replace("\n", " ")
    killed_at[0] = -1
    assert "resumes at step 4: " in trained_to(5, "b").stderr
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["last"] != short["last"]


@pytest.mark.parametrize("option", ["model", "init"])
def test_a_checkpoint_that_is_read_is_never_overwritten(option: str, prompts: Path, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint"
    shutil.copytree(TARGET, kept)
    read = {"model": str(TARGET), option: str(kept)}
    options = [word for name, folder in read.items() for word in (f"--{name}", folder)]
    (tmp_path / "link").symlink_to(kept)
    for out in (kept, tmp_path / "link"):
        words = ["train", "draft", *options, "--data", str(prompts), "--out", str(out), "--steps", "1", "--force"]
        assert f"{out} is the folder of --{option}: name another folder" in refusal(*words)
    assert same_tensors(kept, TARGET)


def test_a_folder_that_no_draft_can_name_is_refused_before_the_training(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / 'my "best"'
    words = ["train", "medusa", "--model", str(TARGET), "--data", str(prompts), "--out", str(out), "--steps", "1"]
    assert "has a double quote, with which --draft cannot name it: leave it out" in refusal(*words)
    assert not out.exists()


def test_nothing_that_the_user_has_is_overwritten_unless_forced(prompts: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("precious")
    (mine / "thesis.txt").write_text("years of work")
    arguments = ["early-exit", *QUICK, "--steps", "1", "--data", str(prompts), "--out", str(mine)]
    message = refusal("train", *arguments)
    assert "contains config.json, thesis.txt: name another folder with --out, or overwrite it with --force" in message
    assert sorted(path.name for path in mine.iterdir()) == ["config.json", "thesis.txt"]
    assert (mine / "config.json").read_text() == "precious"
    assert command("train", *arguments, "--force").exit_code == 0
    assert json.loads((mine / "config.json").read_text())["exit_layer"] == 1
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_mistaken_kind_is_reported_before_missing_options() -> None:
    assert "'KIND': 'medusae' is not known: did you mean medusa? Otherwise" in refusal("train", "medusae")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["medusa", "--exit", "2"], "exit: 2 is no option of medusa, which has --heads"),
        (["medusa", "--heads", "17"], "heads: 17 must be at most 16"),
        (["early-exit", "--exit", "5"], "exit: 5 must be from 1 to 4: .* has 5 layers"),
        (["early-exit", "--hidden", "8"], "hidden: 8 is no option of early-exit, which has --exit, --layers, --mlp"),
        (["draft", "--exit", "2"], "exit: 2 is no option of draft"),
        (["draft", "--hidden", "30", "--heads", "4"], "heads: 4 must divide hidden, 30, into parts of an even width"),
        (["draft", "--layers", "0"], "layers: 0"),
        (["eagle", "--draft-vocab", "0"], "draft_vocab: 0"),
        (["eagle", "--draft-vocab", "513"], "draft_vocab: 513 must be at most 512"),
        (["eagle", "--taps", "2,7"], "taps: '2,7' must be different layers, from 0 to 5"),
        (["block", "--taps", "2,2"], "taps: '2,2' must be different layers"),
        (["block", "--taps", "last"], "taps: 'last' must be numbers of layers between commas, such as 2,4"),
        (["mtp", "--taps", "2"], r"taps: '2' is no option of mtp, which has --mlp"),
        (["draft", "--init", "stdlib-draft"], "--init stdlib-draft has another tokenizer than"),
        (["draft", "--init", str(TARGET), "--layers", "2"], "layers: 2 is no option of draft --init"),
        (["draft", "--steps", "2", "--hours", "1"], "hours: it excludes --steps"),
        (["early-exit", "--first-share", "0.5"], "first_share: 0.5 is no option of early-exit"),
        (["draft", "--hours", "1", "--cache", "x"], "cache: its size is unknown with --hours: use --steps"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(
    arguments: list[str], pattern: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("train", *arguments, "--model", str(TARGET), "--data", str(prompts), "--out", "out")
    assert re.search(pattern, message), message
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_cache_changes_no_weight_and_saves_the_generation(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--steps", "3", "-n", "8", "--place-weights", "d-pace", "--data", str(prompts)]
    generated: list[int] = []
    plain_generate = AnswerSource.generate

    def counting(own: AnswerSource, asked: Seq[PromptIds], *rest: object) -> object:
        generated.append(len(asked))
        return plain_generate(own, asked, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(AnswerSource, "generate", counting)
    found = []
    kept = ["--cache", str(tmp_path / "cache")]
    for name, cache in (("a", []), ("b", kept), ("c", kept)):
        result = command("train", "early-exit", *QUICK, *more, "--out", str(tmp_path / name), *cache)
        assert result.exit_code == 0, result.output
        assert ("will take up to" in result.stderr) == bool(cache)
        found.append(contents(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert generated == [6, 32, 6, 32, 6]  # held-out answers are generated in each run


def test_a_time_limit_ends_a_training(prompts: Path, tmp_path: Path) -> None:
    arguments = ["-n", "8", "--hours", "0.0001", "--data", str(prompts), "--out", str(tmp_path / "out"), "--json"]
    report = json.loads(command("train", "early-exit", *QUICK, *arguments).stdout)
    assert report["stopped"] == "the time is over"
    assert report["steps"] > 0
    assert report["seconds"] >= 0.36


def test_it_stops_early_when_held_out_acceptance_no_longer_rises(prompts: Path, tmp_path: Path) -> None:
    more = ["--steps", "400", "--look-every", "2", "--patience", "3", "--rate", "1e-9", "-n", "8"]
    result = command(
        "train", "early-exit", *QUICK, *more, "--data", str(prompts), "--out", str(tmp_path / "out"), "--json"
    )
    report = json.loads(result.stdout)
    assert (report["steps"], report["best_step"]) == (6, 0)
    assert report["stopped"] == "held-out acceptance has not risen in 3 evaluations"


def test_a_loss_that_is_not_finite_ends_the_training_with_its_name(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "tv", lambda laws, _: laws.overlap / 0 * 0)
    more = ["--steps", "9", "-n", "8", "--loss", "tv", "--kl-share", "0.4", "--rate", "0.25"]
    result = command("train", "early-exit", *QUICK, *more, "--data", str(prompts), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "the loss of step 5 is nan: train again with a lower --rate than 0.25" in result.stderr.replace("\n", " ")
    assert answers(f"early-exit:1:{tmp_path / 'out'}")[1] >= 0  # the best weights before that are kept


def process_words(prompts: Path, folder: Path) -> list[str]:
    """The real command, in a separate process."""
    options = [*QUICK, *KINDS["early-exit"], "--data", str(prompts), "--out", str(folder)]
    return [sys.executable, "-m", "forerun", "train", "early-exit", *options]


def kill_at(prompts: Path, folder: Path, ready: Callable[[float], bool]) -> bool:
    """Starts the command and kills it when `ready` holds of the seconds since; returns whether it was still running."""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(process_words(prompts, folder), env=environment(), stdout=nowhere, stderr=nowhere)
    started_s = time.monotonic()
    while process.poll() is None and not ready(time.monotonic() - started_s):
        time.sleep(0.001)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def contents(folder: Path) -> dict[str, bytes]:
    """The files of the training, without times."""
    weights = {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json")}
    log = [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "predicted")}
        for line in (folder / "train.jsonl").read_text().splitlines()
    ]
    state = TrainFolder(folder).load()
    assert state is not None
    last = b"".join(state.weights[name].numpy().tobytes() for name in sorted(state.weights))
    return weights | {"log": json.dumps(log).encode(), "last": last}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_ten_kills_at_random_moments_leave_the_same_weights(
    seed: int, trained: Trained, prompts: Path, tmp_path: Path
) -> None:
    """At moments from the start of the process on, also while files are written.

    A run that ended before its moment is compared, and another one begins.
    """
    folder, rng, num_killed = tmp_path / "out", random.Random(time.time_ns() + seed), 0
    started_s = time.monotonic()
    finish(process_words(prompts, tmp_path / "timed"))
    whole_s = time.monotonic() - started_s
    expected = contents(tmp_path / "timed")
    assert expected == contents(trained("early-exit")[0])
    for _ in range(40):
        after_s = rng.uniform(0.3, 1.0) * whole_s
        was_killed = kill_at(prompts, folder, lambda now_s, after_s=after_s: now_s >= after_s)
        num_killed += was_killed
        if folder.exists():
            state = TrainFolder(folder).load()  # never a partial file
            assert state is None or not state.stopped or state.step == 16
        if num_killed == 10:
            break
        if not was_killed:
            assert contents(folder) == expected
            shutil.rmtree(folder)
    assert num_killed == 10
    finish(process_words(prompts, folder))
    assert contents(folder) == expected
