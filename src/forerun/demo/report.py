"""The text that a finished demo prints beside its table, and the demo's form as JSON."""

from __future__ import annotations

import torch

from forerun.cache.plan import size
from forerun.demo.meet import Meet
from forerun.demo.score import verdict
from forerun.machine import peak_rss_bytes


def facts_of(meet: Meet, num_prompts: int) -> list[tuple[str, str]]:
    """What else is worth knowing, by name."""
    params = meet.params
    num_threads = torch.get_num_threads()
    machine = f"{num_threads} thread{'s' * (num_threads > 1)}, {meet.track.llm.kernels}, {meet.track.llm.format}"
    lines = [("temperature", f"{params.temperature:g}, seed {params.seed}"), ("machine", machine)]
    if meet.track.llm.measured:
        lines.append(("computed by", meet.track.llm.measured))
    if peak := peak_rss_bytes():
        lines.append(("peak memory", size(peak)))
    if meet.shortened:
        lengths = ", ".join(str(heat.num_tokens) for heat in meet.heats)
        lines.append(("to be over in time", f"answers of at most {lengths} tokens instead of {meet.max_tokens}"))
    if num_left := num_prompts - len(meet.heats):
        lines.append(("left out", f"{num_left} of {num_prompts} prompts: this machine is too slow, or busy"))
    return lines


def as_object(title: str, meet: Meet) -> dict[str, object]:
    """The demo as JSON."""
    return {
        "models": title,
        "depth": meet.track.llm.requests.default.depth,
        "temperature": meet.params.temperature,
        "seed": meet.params.seed,
        "max_tokens": meet.max_tokens,
        "shortened": meet.shortened,
        "prompts": [heat.as_object() for heat in meet.heats],
        "total": meet.total.as_object(),
        "verdict": verdict(meet.total),
        "num_threads": torch.get_num_threads(),
        "peak_rss_bytes": peak_rss_bytes(),
        "fingerprint": meet.track.llm.fingerprint,
    }
