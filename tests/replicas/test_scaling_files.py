"""contrib/rayservice.yaml and contrib/compose.yaml: their options and arguments are the command's and the library's."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from forerun.cli import app
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.replicas.settings import ReplicaSettings
from forerun.serve.settings import ServeSettings
from kit.checkpoints import ROOT, SRC


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "contrib" / name).read_text(encoding="utf-8"))


def test_the_rayservice_names_an_application_and_arguments_that_there_are() -> None:
    spec = read("rayservice.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    source = (SRC / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    assert f"\ndef {name}(" in source
    known = {*inspect.signature(LLM).parameters, *(each.name for each in fields(ServeSettings)), "replicas"}
    assert application["args"].keys() <= known
    bounds = ReplicaSettings.of(application["args"]["replicas"])
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (bounds.least, bounds.most) == (workers["minReplicas"], workers["maxReplicas"])


def test_compose_starts_the_command_and_waits_until_it_has_drained() -> None:
    (service,) = read("compose.yaml")["services"].values()
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = dict(word.split("=") for word in service["command"])
    assert options.keys() <= {name for parameter in command.params for name in parameter.opts}
    assert float(service["stop_grace_period"].removesuffix("s")) > float(options["--drain-s"])
    assert f"ARG {next(iter(service['build']['args']))}=" in (ROOT / "contrib" / "Containerfile").read_text("utf-8")


@pytest.mark.parametrize(
    "replicas",
    [
        "0",
        "",
        "2:1",
        "1:",
        ":2",
        "a",
        "-1",
        "1:2:3",
        pytest.param("9" * 5000, id="9"),
        pytest.param("1:" + "9" * 5000, id="1:9"),
    ],
)
def test_numbers_of_replicas_are_checked(replicas: str) -> None:
    with pytest.raises(InvalidRequest, match="replicas: "):
        ReplicaSettings.of(replicas)


def test_a_replica_takes_its_threads_or_an_even_share_and_a_gpu_where_it_runs_on_one() -> None:
    two = ReplicaSettings.of("1:2")
    assert two.resources({}, {"CPU": 9.0}) == {"num_cpus": 4}
    assert two.resources({"threads": 3}, {"CPU": 9.0}) == {"num_cpus": 3}
    assert ReplicaSettings.of("4").resources({}, {"CPU": 2.0})["num_cpus"] * 4 <= 2
    assert two.resources({"threads": 1, "device": "cuda"}, {}) == {"num_cpus": 1, "num_gpus": 1}


@pytest.mark.parametrize(
    ("replicas", "arguments", "cluster"),
    [
        ("2", {"threads": 2}, {"CPU": 3.0}),
        ("2:4", {"threads": 2}, {"CPU": 3.0}),
        ("2", {"device": "cuda"}, {"CPU": 8.0, "GPU": 1.0}),
        ("1", {"device": "cuda"}, {"CPU": 8.0}),
    ],
)
def test_replicas_for_which_a_machine_has_no_room_are_refused(
    replicas: str, arguments: dict[str, Any], cluster: dict[str, float]
) -> None:
    with pytest.raises(InvalidRequest, match=r"replicas: . replicas need . .PUs each.*or a cluster with --ray"):
        ReplicaSettings.of(replicas).require_resources(arguments, cluster)


@pytest.mark.parametrize("replicas", ["1", "2", "1:4", "3", "7", "10"])
def test_replicas_that_share_a_machine_have_room(replicas: str) -> None:
    for num_cores in (1.0, 2.0, 16.0):
        ReplicaSettings.of(replicas).require_resources({}, {"CPU": num_cores})
    ReplicaSettings.of("1:4").require_resources({"threads": 2}, {"CPU": 2.0})
