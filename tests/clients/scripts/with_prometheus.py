"""Prometheus' own parser of metrics, in both of its formats."""

import urllib.request

from checks import MODEL, SAMPLING, SERVER, check, equal, plain_chat, run_checks
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families


def families(parse, accepted):
    request = urllib.request.Request(f"{SERVER}/metrics", headers={"Accept": accepted})
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Content-Type"], {each.name: each for each in parse(answer.read().decode())}


@check("the metrics as text")
def text():
    plain_chat()
    kind, before = families(text_string_to_metric_families, "text/plain")
    assert kind.startswith("text/plain"), kind
    plain_chat()
    _, after = families(text_string_to_metric_families, "text/plain")
    tokens = [each["forerun:generation_tokens"].samples[0].value for each in (before, after)]
    equal(tokens[1] - tokens[0], SAMPLING["max_tokens"])


@check("every histogram grows by bucket, up to its count")
def histograms():
    _, found = families(text_string_to_metric_families, "text/plain")
    for each in (family for family in found.values() if family.type == "histogram"):
        buckets = [sample.value for sample in each.samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in each.samples if sample.name.endswith("_count")]
        series = len(counts)
        assert series, each
        if series == 1:
            equal(buckets, sorted(buckets))
            equal(buckets[-1], counts[0])


@check("a server that is asked for OpenMetrics answers in a form that its type names")
def accepted():
    kind, found = families(
        lambda text: (openmetrics if text.rstrip().endswith("# EOF") else None or _text()).text_string_to_metric_families(text),
        "application/openmetrics-text; version=1.0.0",
    )
    assert found, (kind, MODEL)


def _text():
    from prometheus_client import parser

    return parser


run_checks()
