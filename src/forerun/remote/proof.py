"""The proof of a server: tests whether its speculation changes answers, by comparison with a plain server.

This file decides the order of the tests, which results are a fault, and the sentences about what is proven and what
remains undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.errors import InvalidRequest
from forerun.prove.chi_square import LEVEL
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AnswerClient
from forerun.remote.equality import TextEquality, compare_texts
from forerun.remote.law import ServedLaw, compare_laws
from forerun.remote.measure import PLAIN, contenders_at
from forerun.remote.time_limit import TimeLimit
from forerun.report import json_object
from forerun.traffic.client import ServerAddress

LIMIT_S = 300.0  # default


@dataclass(frozen=True, slots=True)
class ServerProof:
    """The results; `most_likely`: number of top log-probabilities of the plain server; `limit_s`: the time limit."""

    url: str
    plain_url: str
    model: str
    engine: str
    most_likely: int
    limit_s: float
    equality: TextEquality
    laws: tuple[ServedLaw, ...]

    @property
    def faulty(self) -> bool:
        """Whether there is a difference that neither rounding nor chance explains."""
        return bool(self.equality.count("fault")) or not all(law.holds for law in self.laws)

    @property
    def holds(self) -> bool:
        """Whether there is no fault, no undecided difference, and no test that the time limit prevented."""
        return not self.faulty and not self.equality.count("undecided") and not self.parts_without_time

    @property
    def parts_without_time(self) -> list[str]:
        """The tests that the time limit prevented."""
        parts = [] if self.equality.num_prompts else ["the answers at temperature 0"]
        return parts + [
            f"the distribution after {law.opening!r}"
            for law in self.laws
            if law.unconfirmed or (law.problem and law.cut_short)
        ]

    @property
    def proven(self) -> list[str]:
        """What is proven, as phrases."""
        sentences, e = list[str](), self.equality
        if e.num_prompts and not e.differences:
            sentences.append("at temperature 0, the same answers as plain decoding for all requests of this test")
        elif e.num_prompts and not (e.count("fault") or e.count("undecided")):
            sentences.append("at temperature 0, the same answers except at near ties and where plain answers differ")
        tested = [law for law in self.laws if not law.problem]
        if tested and all(law.holds and law.num_drafted != 0 for law in tested):
            least = max(law.smallest_bias for law in tested)
            sentences.append(
                f"at temperature 1, the distribution of plain decoding: probabilities that differ by {least:.0%} or "
                "more would be detected in 95 of 100 runs"
            )
        return sentences

    @property
    def undecided(self) -> list[str]:
        """What remains undecided, and why, as phrases."""
        e, phrases = self.equality, list[str]()
        cut = [law for law in self.laws if law.cut_short]
        if e.num_prompts < e.num_asked or cut:
            counts = [f"{e.num_prompts} of {e.num_asked} prompts were compared"] if e.num_prompts < e.num_asked else []
            counts += [f"{law.num_texts:,} of {law.num_asked:,} texts drawn after {law.opening!r}" for law in cut]
            phrases.append(
                f"the remaining requests, which {self.limit_s:g} seconds did not suffice for: only {', '.join(counts)}"
            )
        if e.num_unsteady:
            phrases.append(
                f"whether {e.num_unsteady} prompts have the same answers: the plain server answers them differently "
                "alone and with other requests"
            )
        if not self.most_likely:
            phrases.append(
                "the gaps between tokens of differing answers, and the exact distribution: the plain server reports no "
                "log-probabilities; the counts of both servers were compared instead, which needs twice the texts"
            )
        for law in self.laws:
            if law.control_p is not None and law.control_p < LEVEL:
                phrases.append(
                    f"the exact distribution after {law.opening!r}: the plain server does not sample from the "
                    "log-probabilities that it reports, so the counts of both servers were compared instead"
                )
            elif law.doubtful and law.holds and law.law_p is not None:
                agree = "but the counts of both servers agree over all texts"
                outcome = "and there was no time for more texts" if law.unconfirmed else agree
                problem = f"the server's first counts do not fit it (p = {law.law_p:.2g}), {outcome}"
                phrases.append(f"the exact distribution after {law.opening!r}: {problem}")
            if law.problem:
                phrases.append(f"the distribution after {law.opening!r}: {law.problem}")
        drafted = [e.num_drafted, *(law.num_drafted for law in self.laws)]
        if 0 in drafted:
            phrases.append("the effect of speculation in parts of the test, where the server reports no draft tokens")
        if None in drafted:
            phrases.append("whether any tokens were drafted: the server does not report its draft tokens")
        phrases.append("other prompts, lengths, sampling parameters and loads")
        return phrases

    def as_object(self) -> dict[str, Any]:
        """The proof as JSON: shares between 0 and 1, and null for unknown values."""
        values = json_object(
            holds=self.holds,
            faulty=self.faulty,
            level=LEVEL,
            **asdict(self),
            proven=self.proven,
            undecided=self.undecided,
        )
        for entry, law in zip(values["laws"], self.laws, strict=True):
            entry["holds"] = law.holds
        return values


async def prove_server(
    address: ServerAddress,
    plain_address: ServerAddress | None,
    prompts: Sequence[Passage],
    workload: ProofWorkload,
    report: ProgressCallback,
    limit_s: float = LIMIT_S,
) -> ServerProof:
    """Compare a server with a plain server of the same model; a forerun server can be both, chosen by each request.

    The workload's temperatures, batches and shapes are not used. After `limit_s` seconds the proof ends with the
    answers received by then; at most half of the time is for equality.

    Raises InvalidRequest if a server does not answer or has another model, or if there is no plain server.
    """
    limit = TimeLimit.of(limit_s)
    async with contenders_at(address, plain_address, prompts) as contenders:
        if contenders[-1].name != PLAIN:
            raise InvalidRequest(
                "plain",
                f"{address.base} is not a forerun server, so its requests cannot choose plain decoding: name a server "
                "of the same model without speculation with --plain URL.",
            )
        speculating, plain = (AnswerClient(each.server, each.mode) for each in contenders)
        for client in (speculating, plain):
            await client.detect_logprobs(prompts[0], limit.part(0.5))
        requested = [prompts[index % len(prompts)] for index in range(workload.num_prompts)]
        equality = await compare_texts(
            speculating, plain, requested, workload, lambda _, done: report("equality", done), limit.part(0.5)
        )
        openings = list({str(prompt.prompt): prompt for prompt in prompts}.values())
        laws = await compare_laws(
            speculating, plain, openings, workload, lambda _, done: report("distribution", done), limit
        )
        return ServerProof(
            address.base,
            plain.server.client.address.base,
            speculating.server.model.name,
            speculating.server.dialect.name,
            plain.most_likely or 0,
            limit_s,
            equality,
            laws,
        )
