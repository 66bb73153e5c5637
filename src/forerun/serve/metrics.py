"""Metrics for Prometheus, under vLLM's names with the prefix forerun.

Speculation counters are read from the engine at each scrape; latencies are observed as deltas arrive. No label value
comes from a request's content.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from forerun.accept.delta import Delta
from forerun.accept.outcome import Counts, Stats
from forerun.llm import LLM
from forerun.output import Answers, CollectedSample
from forerun.serve.gate import Gate, OpenRequest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
DRAFT_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
MOST_POSITIONS = 16  # with an acceptance histogram per position
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class EngineReader(Collector):
    """Reads the engine's counters, queue lengths and memory at each scrape."""

    def __init__(self, llm: LLM, gate: Gate) -> None:
        self.llm = llm
        self.gate = gate

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics at this moment."""
        stats, scheduler = self.llm.stats, self.llm.engine.scheduler
        num_drafts = stats.offered_at_depth[0] if stats.num_drafted else 0  # every draft has a token at depth 0
        counters = {
            "spec_decode_num_drafts": ("Drafts that were verified.", num_drafts),
            "spec_decode_num_draft_tokens": ("Draft tokens that were verified.", stats.num_drafted),
            "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", stats.num_accepted),
            "spec_decode_num_rounds": ("Rounds of samples, with and without a draft.", stats.num_rounds),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache, so not prefilled.", stats.num_prefix_hits),
            "generation_tokens": ("Tokens generated.", stats.num_emitted),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"forerun:{name}", text, value=value)
        at_depth = {"judged": ("verified", stats.offered_at_depth), "accepted": ("accepted", stats.accepted_at_depth)}
        for part, (verb, counts) in at_depth.items():
            name, text = f"spec_decode_num_{part}_tokens_per_pos", f"Draft tokens {verb}, by position."
            yield labelled(CounterMetricFamily, name, text, "position", dict(enumerate(list(counts))))
        yield from self.by_drafter(stats)
        yield from self.memory()
        num_waiting = self.gate.num_waiting + len(scheduler.waiting)
        yield GaugeMetricFamily("forerun:num_requests_running", "Samples in the batch.", value=len(scheduler.running))
        yield GaugeMetricFamily("forerun:num_requests_waiting", "Requests and samples that wait.", value=num_waiting)
        if stats.gain is not None:
            text = "Speed relative to plain decoding, estimated from the rounds measured since the start."
            yield GaugeMetricFamily("forerun:estimated_gain", text, value=stats.gain)
        if self.llm.forecasts:
            text = "Speed relative to plain decoding, as predicted at the start, by batch size."
            expected = {forecast.batch: forecast.gain for forecast in self.llm.forecasts}
            yield labelled(GaugeMetricFamily, "forecast_gain", text, "batch", expected)

    def by_drafter(self, stats: Stats) -> Iterator[Metric]:
        """Rounds and acceptance by drafter of a mix; empty for a single drafter."""
        kinds = {
            "rounds": ("Rounds of samples for which the drafter was chosen.", "num_rounds"),
            "draft_tokens": ("Draft tokens of the drafter.", "num_drafted"),
            "accepted_tokens": ("Draft tokens of the drafter that were accepted.", "num_accepted"),
        }
        for name, (text, count) in kinds.items():
            counts = {self.llm.drafter_names[i]: getattr(each, count) for i, each in sorted(stats.drafters.items())}
            yield labelled(CounterMetricFamily, f"spec_decode_arm_{name}", text, "arm", counts)

    def memory(self) -> Iterator[Metric]:
        """The memory plan, and the share of the target's cache in use."""
        plan, blocks = self.llm.plan, self.llm.engine.runner.cache.blocks
        text = "Memory plan: weights of all models, and the caches of the target and of each drafter."
        sizes = {"weights": plan.weights_bytes, "target cache": plan.cache_bytes}
        sizes |= {f"{name} cache": size for name, size in plan.drafter_cache_bytes.items()}
        sizes |= {f"{name} memory": size for name, size in plan.remembered_bytes.items()}
        yield labelled(GaugeMetricFamily, "memory_bytes", text, "of", sizes)
        used = 1 - blocks.num_free / blocks.num_blocks
        yield GaugeMetricFamily(
            "forerun:kv_cache_usage_perc", "Share of the target's cache in use, from 0 to 1.", value=used
        )


def labelled(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[Any, Any]
) -> Metric:
    """A metric with one sample for each label value."""
    family = kind(f"forerun:{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([str(each)], value)
    return family


class Metrics:
    """The metrics of one server, in a separate registry; `reader` collects those of its engine."""

    def __init__(self, reader: Collector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(reader)

        def histogram(name: str, text: str, buckets: Seq[float], *labels: str) -> Histogram:
            return Histogram(f"forerun:{name}", text, labels, buckets=buckets, registry=self.registry)

        text = "From a request's arrival to the first token of any sample."
        self.first = histogram("time_to_first_token_seconds", text, LONG_S)
        text = "Between tokens of a sample: the time between rounds, divided by the tokens of the round."
        self.between = histogram("inter_token_latency_seconds", text, SHORT_S)
        text = "From a request's arrival to a place in the batch."
        self.queue = histogram("request_queue_time_seconds", text, LONG_S)
        text = "From a request's arrival to its last token."
        self.total = histogram("e2e_request_latency_seconds", text, LONG_S)
        text = "Draft tokens of a sample in a round; 0 for a round of plain decoding."
        self.depth = histogram("spec_decode_num_draft_tokens_per_round", text, DRAFT_TOKENS)
        text = "Accepted draft tokens / draft tokens, per sample."
        self.accepted = histogram("request_acceptance_rate", text, SHARES)
        text = "Accepted draft tokens / verified draft tokens, per sample and position."
        self.accepted_at = histogram("request_acceptance_rate_per_pos", text, SHARES, "position")
        ProcessCollector(registry=self.registry)
        self.finished = Counter(
            "forerun:request_success", "Samples finished, by reason.", ["finished_reason"], registry=self.registry
        )
        self.prompts = Counter("forerun:prompt_tokens", "Prompt tokens, once per prompt.", registry=self.registry)
        self.answered = Counter("forerun:http_responses", "Answers, by status.", ["status"], registry=self.registry)

    def observe(self, entry: OpenRequest, delta: Delta, answers: Answers) -> None:
        """Observe latencies at one delta of a request's answer."""
        now, last = time.perf_counter(), entry.last_s.get(delta.seq_id)
        if last is None:
            if entry.first_token_s is None:
                entry.first_token_s = now - entry.entered_s
                self.first.observe(entry.first_token_s)
            sequence = answers.answers[delta.seq_id].sequence
            if sequence.started_s is not None:
                waited_s = max(0.0, sequence.started_s - entry.entered_s)
                entry.queue_s = waited_s if entry.queue_s is None else min(entry.queue_s, waited_s)
                self.queue.observe(waited_s)
            self.prompts.inc(sequence.num_prompt if delta.sample == 0 else 0)
        elif delta.token_ids:
            for _ in delta.token_ids:
                self.between.observe((now - last) / len(delta.token_ids))
        entry.last_s[delta.seq_id] = now
        if delta.outcome is not None:
            self.depth.observe(delta.outcome.num_drafted)
        if delta.finish_reason is not None:
            self.finished.labels(delta.finish_reason).inc()
            self.observe_acceptance(answers.answers[delta.seq_id])
            if answers.num_finished == len(answers.sequences):
                self.total.observe(now - entry.entered_s)

    def observe_acceptance(self, sample: CollectedSample) -> None:
        """Observe the acceptance rates of one finished sample."""
        counts = Counts()
        sample.count_into(counts)
        if counts.acceptance_rate is not None:
            self.accepted.observe(counts.acceptance_rate)
        for position, rate in enumerate(counts.acceptance_at_depth[:MOST_POSITIONS]):
            self.accepted_at.labels(str(position)).observe(rate)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
