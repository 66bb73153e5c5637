"""Prometheus' own parser of metrics, on what the server tells of itself."""

import urllib.request
from collections import defaultdict

from checks import SAMPLING, SERVER, check, equal, plain_chat, run_checks
from prometheus_client.parser import text_string_to_metric_families

ACCEPTED = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


def families():
    request = urllib.request.Request(f"{SERVER}/metrics", headers={"Accept": ACCEPTED})
    with urllib.request.urlopen(request) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    assert kind.startswith("text/plain; version=0.0.4"), kind
    return {family.name: family for family in text_string_to_metric_families(text)}


@check("the metrics, before and after a chat")
def counters():
    plain_chat()
    before = families()
    plain_chat()
    tokens = [each["forerun:generation_tokens"].samples[0].value for each in (before, families())]
    equal(tokens[1] - tokens[0], SAMPLING["max_tokens"])


@check("histograms grow by bucket, up to their count")
def histograms():
    for family in families().values():
        buckets, counts = defaultdict(list), {}
        for sample in family.samples if family.type == "histogram" else ():
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            if sample.name.endswith("_bucket"):
                buckets[labels].append(sample.value)
            elif sample.name.endswith("_count"):
                counts[labels] = sample.value
        equal({labels: values[-1] for labels, values in buckets.items()}, counts)
        for values in buckets.values():
            equal(values, sorted(values))


run_checks()
