"""For operators: metrics, their dashboard, log lines and traces, none of which contains text of a request."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.control.forecast import Forecast
from forerun.errors import MissingPackage
from forerun.llm import LLM
from forerun.serve import records
from forerun.serve.access import warn_if_readable
from forerun.serve.envelope import ACCESS
from forerun.serve.records import REQUESTS, LogFormat, log_to_stderr
from forerun.streams import show_warnings
from kit.checkpoints import ROOT, SMALL, TARGET
from kit.servers import Paced, Running, drafting, running, until

OK = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 1}
BOARD = json.loads((ROOT / "contrib" / "grafana.json").read_text(encoding="utf-8"))
DRAFTED: list[bool] = []  # whether each request was drafted: a mix decides by measured times
LINE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def metrics_of(server: Running) -> dict[str, float]:
    """All metrics by name and labels."""
    with server.http() as http:
        text = http.get("/metrics").text
    return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in LINE.findall(text)}


def leave_early(server: Running, paced: Paced, meanwhile: Callable[[], object] = lambda: None) -> None:
    """A client that leaves a stream after its first event; the stream cannot end before the server knows of that."""
    paced.hold(5)
    stream = server.client().completions.create(model="stories", **{**OK, "max_tokens": 400}, stream=True)
    next(stream)
    meanwhile()
    stream.close()
    paced.let_go_when(lambda: server.llm.driver.jobs or not server.llm.engine.has_work)
    until(lambda: not server.server.service.gate.num_in)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    draft = f"mix[ngram,model:{SMALL}]"
    with LLM(str(TARGET), draft, dtype="float32", speculation=3) as llm, running(llm) as found:
        for seed in range(3):
            usage = found.post("/v1/completions", **{**OK, "seed": seed}).json()["usage"]
            DRAFTED.append(bool(usage["speculation"]["num_drafted"]))
        found.post("/v1/completions", **OK, speculation=False)
        yield found


def test_every_metric_of_the_dashboard_is_reported(server: Running) -> None:
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    named = {name for each in expressions for name in re.findall(r"\b(?:forerun:|process_)\w+", each)}
    assert len(named) > 20
    server.llm.stats.pace.add(2.0, 3.0, 99)
    found = {name.partition("{")[0] for name in metrics_of(server)}
    assert named - found == {"forerun:forecast_gain"}, "which is known where the depth is chosen"
    labels = {each for expression in expressions for each in re.findall(r"by \((\w+)\)", expression)} - {"le"}
    every = " ".join(metrics_of(server))
    assert all(f"{label}=" in every for label in labels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)


def test_draft_tokens_are_counted_by_sample_position_round_and_drafter(server: Running) -> None:
    counts, stats = metrics_of(server), server.llm.stats
    rounds = "forerun:spec_decode_num_draft_tokens_per_round"
    assert counts[f"{rounds}_count"] == stats.num_rounds == counts["forerun:spec_decode_num_rounds_total"]
    assert counts[f"{rounds}_sum"] == stats.num_drafted
    plain = counts[rounds + '_bucket{le="0.0"}']
    assert 29 <= plain < stats.num_rounds, "the request without speculation has a round for each of its tokens"
    assert counts["forerun:request_acceptance_rate_count"] == sum(DRAFTED) > 0, "of samples that were drafted"
    assert counts['forerun:request_acceptance_rate_per_pos_count{position="0"}'] == sum(DRAFTED)
    for position, (judged, accepted) in enumerate(zip(stats.offered_at_depth, stats.accepted_at_depth, strict=True)):
        label = f'_per_pos_total{{position="{position}"}}'
        assert counts[f"forerun:spec_decode_num_judged_tokens{label}"] == judged
        assert counts[f"forerun:spec_decode_num_accepted_tokens{label}"] == accepted
    for kind, name in (("draft_tokens", "num_drafted"), ("accepted_tokens", "num_accepted")):
        by_drafter = [
            value for each, value in counts.items() if each.startswith(f"forerun:spec_decode_arm_{kind}_total")
        ]
        assert len(by_drafter) == len(stats.drafters) > 0
        assert sum(by_drafter) == getattr(stats, name)


def test_metrics_report_planned_memory_and_cache_usage(server: Running, paced: Paced) -> None:
    counts, plan, usages = metrics_of(server), server.llm.plan, list[float]()
    of = {name: value for name, value in counts.items() if name.startswith("forerun:memory_bytes")}
    assert sum(of.values()) == plan.num_bytes
    assert counts['forerun:memory_bytes{of="weights"}'] == plan.weights_bytes
    assert len(of) == 3, "weights, and the caches of the target and of the draft model"
    leave_early(server, paced, lambda: usages.append(metrics_of(server)["forerun:kv_cache_usage_perc"]))
    assert 0 < usages[0] <= 1


def test_cached_prompt_tokens_are_in_the_usage_and_do_not_count_as_used_cache(server: Running) -> None:
    ids = server.post("/tokenize", prompt="Lily and her cat went to the park. " * 16).json()["tokens"]
    size, hits = server.llm.engine.runner.cache.blocks.block_size, "forerun:prefix_cache_hits_total"
    known = (len(ids) - 1) // size * size
    assert known >= size
    before = metrics_of(server)[hits]
    found = []
    for prompt, n in ((ids, 1), (ids, 1), (ids, 3), ([ids, [5, 6, 7], ids], 1)):
        usage = server.post("/v1/completions", prompt=prompt, n=n, max_tokens=2).json()["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found[:2] == [0, known]
    assert known <= found[2] < len(ids), "of a prompt, not of its samples"
    assert 2 * known <= found[3] < 2 * len(ids), "of all prompts"
    counts = metrics_of(server)
    assert counts[hits] - before >= known * 6, "of all samples"
    assert counts["forerun:kv_cache_usage_perc"] == 0, "what is kept makes room when it is needed"
    assert len(server.llm.engine.runner.cache.prefix_store) * size >= known


def test_chats_and_responses_report_cached_prompt_tokens_too(server: Running) -> None:
    text = "Tom had a big red ball and a dog. " * 16
    own: dict[str, Any] = {"chat_template": "{{ messages[0].content }}"}
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=2, **own)
    response = server.post("/v1/responses", input=text, max_output_tokens=2, **own).json()["usage"]
    assert chat.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < response["input_tokens_details"]["cached_tokens"] < response["input_tokens"]
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "extra_body": own, "stream": True}
    chunks = [
        *server.client().chat.completions.create(model="stories", **asked, stream_options={"include_usage": True})
    ]
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == response["input_tokens_details"]["cached_tokens"]


def test_metrics_agree_with_the_usage_of_answers() -> None:
    with drafting() as llm, running(llm) as server:
        bodies = [{**OK, "seed": seed, "max_tokens": 40, "n": 2} for seed in range(3)]
        usages = [server.post("/v1/completions", **body).json()["usage"] for body in bodies]
        counts = {name.removeprefix("forerun:"): value for name, value in metrics_of(server).items()}
        drafted, accepted = (
            sum(usage["speculation"][name] for usage in usages) for name in ("num_drafted", "num_accepted")
        )
        assert counts["spec_decode_num_draft_tokens_total"] == drafted > accepted
        assert counts["spec_decode_num_accepted_tokens_total"] == accepted == sum(llm.stats.accepted_at_depth) > 0
        assert drafted <= 3 * counts["spec_decode_num_drafts_total"]
        assert counts["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
        assert counts["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
        assert counts["time_to_first_token_seconds_count"] == counts["e2e_request_latency_seconds_count"] == 3
        assert counts["request_queue_time_seconds_count"] == 6
        assert counts['request_success_total{finished_reason="length"}'] == 6
        first = counts["inter_token_latency_seconds_count"]
        assert first < counts["generation_tokens_total"] <= first + 6 * 4
        assert counts["num_requests_running"] == counts["num_requests_waiting"] == 0
        assert counts['http_responses_total{status="200"}'] == 3
        assert "estimated_gain" not in counts, "nothing is known of it where the depth is fixed"
        llm.stats.pace.add(2.0, 3.0, 99)
        llm.forecasts = (Forecast(8, "", 4, 1.25, 1.2, 1.3, 100),)
        counts = metrics_of(server)
        assert (counts["forerun:estimated_gain"], counts['forerun:forecast_gain{batch="8"}']) == (1.5, 1.25)


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What was written to standard error; loggers are as before at the end."""
    names = ["forerun", *records.LEVELS, REQUESTS, ACCESS]
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, names)]
    yield lambda: capsys.readouterr().err
    for logger, level, propagate in before:
        logger.handlers.clear()
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.short("json")
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_request_is_a_line_without_its_text(written: Callable[[], str], paced: Paced, form: LogFormat) -> None:
    log_to_stderr(form, access=True)
    with drafting() as llm, running(llm) as server:
        with server.http(headers={"x-session-id": "a talk"}) as http:
            answer = http.post("/v1/completions", json={**OK, "prompt": "Zebrafish", "n": 2}).json()
        leave_early(server, paced)
        assert server.post("/v1/completions", **OK, temprature=1).status_code == 400
        assert server.post("/v1/completions", **OK, logit_bias={"Zebrafish": 1}).status_code == 400
    text = written()
    assert "Zebrafish" not in text
    if form == "text":
        assert f"INFO forerun.serve.requests: finished id={answer['id']} endpoint=completions" in text
        line = r'127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" (\d+) request_id=".+" duration_s=\d+\.\d{6}(.*)\n'
        refused = [(400, " code=unknown_parameter param=null"), (400, ' code=invalid_value param="logit_bias"')]
        assert [(int(status), rest) for status, rest in re.findall(line, text)] == [(200, ""), (200, ""), *refused]
        return
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    first, second = (line for line in lines if line["logger"] == "forerun.serve.requests")
    assert first["id"] == answer["id"]
    assert (first["outcome"], second["outcome"]) == ("finished", "client_left")
    assert (first["session_id"], second["session_id"]) == ("a talk", None)
    usage = answer["usage"]
    assert (first["num_samples"], first["num_output_tokens"]) == (2, usage["completion_tokens"])
    assert first["num_drafted"] == usage["speculation"]["num_drafted"]
    assert 0 <= first["queue_s"] <= first["first_token_s"] <= first["total_s"]
    asked = {line["request_id"]: line for line in lines if line["logger"] == "forerun.serve.access"}
    assert len(asked) == 4
    refused = [(line["code"], line["param"]) for line in asked.values() if line["status"] == 400]
    assert refused == [("unknown_parameter", None), ("invalid_value", "logit_bias")]
    assert all(line["client"].startswith("127.0.0.1:") for line in asked.values())
    for line in (first, second):  # a stream's line is written at its end too
        assert asked[line["request_id"]]["duration_s"] >= line["total_s"] - 1e-6, "the whole request, parsing included"


def test_without_the_access_log_no_request_is_logged_but_warnings_of_access_are(
    written: Callable[[], str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1")
    keys.chmod(0o644)
    log_to_stderr("json", access=False)
    warn_if_readable(keys)
    with drafting() as llm, running(llm) as server:
        server.post("/v1/completions", **OK)
    lines = [json.loads(line) for line in written().splitlines()]
    assert not any(line["logger"] == REQUESTS for line in lines)
    assert [line["level"] for line in lines if line["logger"] == ACCESS] == ["warning"] * (os.name == "posix")


def test_warnings_of_the_engine_and_the_first_lines_are_json_too() -> None:
    command = [sys.executable, "-m", "forerun", "serve", "--model", str(TARGET), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        text = [process.stderr.readline()]
        while "page" not in text[-1] and text[-1]:
            text.append(process.stderr.readline())
        process.terminate()
        text += list(process.stderr)
    lines = [json.loads(line) for line in text]
    assert lines[0]["message"] == f"loading {TARGET}"
    assert lines[-1]["message"] == "All requests are answered; the server exits."
    (started,) = (line for line in lines if "page" in line)
    assert started["level"] == "info"
    assert started["message"] == f"{started['model']} at {started['address']}, fingerprint {started['fingerprint']}"
    assert (started["model"], started["page"]) == (str(TARGET), started["address"].removesuffix("v1"))
    assert [line["message"] for line in lines if line["message"].startswith("room for 16 sequences of")]


def test_a_warning_of_the_engine_is_one_line_with_its_time(written: Callable[[], str]) -> None:
    show_warnings()
    in_text = r"\d{4}-\d\d-\d\d \S+ WARNING forerun\.engine: slow for 2 reasons"
    lines: dict[LogFormat, str] = {"json": r'\{.+"message": ?"slow for 2 reasons".*\}', "text": in_text}
    for form, line in lines.items():
        log_to_stderr(form, access=False)
        logging.getLogger("forerun.engine").warning("slow for %d reasons", 2)
        assert re.fullmatch(line + "\n", written())


def test_a_request_is_a_trace_below_the_caller_s(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from forerun.serve.records import SpanSink

    in_memory = InMemorySpanExporter()
    monkeypatch.setattr("forerun.serve.service.SpanSink", lambda endpoint: SpanSink(endpoint, in_memory))
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with drafting() as llm, running(llm, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        with server.http(headers={"traceparent": caller}) as http:
            usage = http.post("/v1/completions", json={**OK, "prompt": "Zebrafish"}).json()["usage"]
        server.post("/v1/completions", **OK)
        leave_early(server, paced)
        server.server.service.spans.provider.force_flush()
        spans = in_memory.get_finished_spans()
    first, second, left = (span for span in spans if span.name == "llm_request")
    assert [each.status.description for each in (first, second, left)] == [None, None, "client_left"]
    assert f"{first.context.trace_id:x}" == caller.split("-")[1].lstrip("0")
    assert f"{first.parent.span_id:x}" == caller.split("-")[2]
    assert second.parent is None
    assert first.attributes is not None
    assert first.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert first.attributes["forerun.num_accepted"] == usage["speculation"]["num_accepted"]
    parts = [span for span in spans if span.parent and span.parent.span_id == first.context.span_id]
    assert [span.name for span in parts] == ["queue", "first token", "generation"]
    assert parts[0].start_time == first.start_time
    assert parts[-1].end_time == first.end_time
    assert all(a.end_time == b.start_time for a, b in itertools.pairwise(parts))
    assert "Zebrafish" not in "".join(span.to_json() for span in spans)


def test_missing_packages_for_traces_are_named_with_the_command_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from forerun.serve.records import SpanSink

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackage, match=r"pip install 'forerun\[otel\]'"):
        SpanSink("http://127.0.0.1:9")
