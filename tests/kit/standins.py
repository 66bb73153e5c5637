"""Stand-ins for servers of other engines: a toy language model behind the OpenAI-compatible interface, in each dialect.

A stand-in speaks the lists of models, log-probabilities, counters and timings of its engine as that engine writes them.
Its model is a table over a dozen words, so its law is known. It runs speculative sampling itself, by one of several
rules, of which only the first is exact. It sleeps for the time of each round, or puts a clock forward.
"""

import json
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import numpy as np
import prometheus_client
from typing_extensions import override

from kit.round_clock import RoundClock
from kit.toy_model import WORDS, Round, Rule, ToyModel, draw, softmax, speculate

DialectName = Literal["forerun", "vllm", "sglang", "llamacpp", "other"]


@dataclass
class StandIn:
    """A server of one engine; with a `depth` it speculates. `url` is known while it runs.

    A plain round takes `round_s`, a drafted one `cost` times that; each other request adds a share `crowd` to it.
    `likely` is the largest allowed number of log-probabilities. A `filtered` server draws from its two likeliest words
    only, without reporting it. `jitter` is the noise of logits from request to request, as with kernels that depend on
    the batch. `ends` is the word that ends texts.
    """

    dialect: DialectName = "vllm"
    model: ToyModel = field(default_factory=ToyModel.random)
    depth: int = 0
    rule: Rule = "exact"
    name: str = "toy"
    key: str = ""
    likely: int = 20
    filtered: bool = False
    jitter: float = 0.0
    round_s: float = 0.0
    cost: float = 1.0
    crowd: float = 0.0
    counted: bool = True
    clock: RoundClock | None = None
    ends: int | None = None
    url: str = ""
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    at_depth: list[int] = field(default_factory=lambda: [0] * 16)
    seeds: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rounds(self, body: Mapping[str, Any]) -> Iterator[Round]:
        """The rounds of one answer; the first word comes from reading the prompt."""
        noise = random.Random(f"{body.get('seed')} {body.get('temperature')}")
        model, left = self.model, int(body.get("max_tokens") or 16)
        if self.jitter:
            shaken = model.logits + self.jitter * np.random.default_rng().standard_normal(model.logits.shape)
            model = ToyModel(shaken, model.drafts)
        if self.filtered:
            model = ToyModel(np.where(model.logits >= np.sort(model.logits)[:, -2:-1], model.logits, -50), model.drafts)
        temperature = float(body.get("temperature", 1.0))
        last = draw(model.law(last_word(body), temperature), noise)
        yield Round([last], 0, 0)
        left -= 1
        asked = body.get("speculation")
        most = self.depth if asked is None else int(asked)
        while left > 0 and last != self.ends:
            depth = min(most, left - 1)
            found = speculate(model, last, temperature, depth, self.rule, noise)
            if self.ends in found.words:
                found.words = found.words[: found.words.index(self.ends) + 1]
            self.wait(depth)
            self.count(found)
            last, left = found.words[-1], left - len(found.words)
            yield found

    def wait(self, depth: int) -> None:
        """Let the time of a round pass."""
        if self.round_s:
            round_s = self.round_s * (self.cost if depth else 1.0) * (1 + self.crowd * (self.active - 1))
            if self.clock is None:
                time.sleep(round_s)
            else:
                self.clock.put_forward(round_s / max(1, self.active))

    def count(self, found: Round) -> None:
        """Count the drafted and accepted words of a round."""
        with self.lock:
            self.num_rounds += 1
            if found.drafted:
                self.num_drafts += 1
                self.num_drafted += found.drafted
                self.num_accepted += found.accepted
                for place in range(found.accepted):
                    self.at_depth[place] += 1

    def metrics(self) -> str:
        """The text of the metrics endpoint."""
        if self.dialect == "llamacpp":
            return self.llama_cpp_metrics()
        registry = prometheus_client.CollectorRegistry()
        labels = {"model_name": self.name} | ({"engine": "0"} if self.dialect == "vllm" else {})
        if self.dialect == "sglang":
            length = (self.num_accepted + self.num_rounds) / max(1, self.num_rounds)
            gauge(registry, "sglang:spec_accept_length", "The average acceptance length.", labels, length)
            gauge(registry, "sglang:spec_num_steps", "Steps.", labels, self.depth)
            counter(registry, "sglang:spec_verify_calls_total", "Verification calls.", labels, self.num_rounds)
        else:
            prefix = self.dialect
            for name, value in self.totals().items():
                counter(registry, f"{prefix}:{name}", "Number of tokens.", labels, value)
            for place in range(self.depth):
                where = {**labels, "position": str(place)}
                name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos"
                counter(registry, name, "Accepted tokens per draft position.", where, self.at_depth[place])
        text: str = prometheus_client.generate_latest(registry).decode()
        return text

    def totals(self) -> dict[str, int]:
        """The counters that have no labels of their own."""
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_drafted,
            "spec_decode_num_accepted_tokens": self.num_accepted,
        }

    def llama_cpp_metrics(self) -> str:
        """As llama-server writes them, by hand."""
        lines = []
        for name, value in self.totals().items():
            full = f"llamacpp:{name}_total"
            lines += [f"# HELP {full} Speculative: what its name says", f"# TYPE {full} counter", f"{full} {value}"]
        full = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f"# HELP {full} Accepted tokens per draft position", f"# TYPE {full} counter"]
        lines += [f'{full}{{position="{place}"}} {self.at_depth[place]}' for place in range(self.depth)]
        return "\n".join(lines) + "\n"

    @contextmanager
    def running(self) -> Iterator["StandIn"]:
        """Within it the server answers at `url`."""
        standin = self

        class Handler(Answering):
            server_of = standin

        server = Listening(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def counter(registry: Any, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
    """A counter as prometheus_client shows it."""
    series(prometheus_client.Counter, registry, name, text, labels).inc(value)


def gauge(registry: Any, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
    """A gauge as prometheus_client shows it."""
    series(prometheus_client.Gauge, registry, name, text, labels).set(value)


def series(kind: Any, registry: Any, name: str, text: str, labels: Mapping[str, str]) -> Any:
    """One series; several of one name share what they are named by."""
    known = getattr(registry, "known", None)
    if known is None:
        known = registry.known = {}
    if name not in known:
        known[name] = kind(name, text, list(labels), registry=registry)
    return known[name].labels(**labels)


def last_word(body: Mapping[str, Any]) -> int:
    """The state that a prompt leaves."""
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    return sum(map(ord, str(prompt))) % len(WORDS)


class Listening(ThreadingHTTPServer):
    """What takes the connections of a stand-in, many at once."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left: standard error is that of the command."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Answering(BaseHTTPRequestHandler):
    """The HTTP of a stand-in."""

    server_of: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet

    @override
    def log_message(self, *_: Any) -> None:
        """Silence."""

    def reply(self, status: int, body: object, kind: str = "application/json") -> None:
        """A whole answer."""
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        """Whether the key is wrong."""
        key = self.server_of.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.reply(401, {"error": {"message": "Unauthorized"}})
            return True
        return False

    def do_GET(self) -> None:
        """The list of models, and metrics."""
        server = self.server_of
        if self.refused():
            return
        if self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": server.name, "owned_by": server.dialect}]})
        elif self.path == "/metrics" and server.counted and server.dialect != "other":
            self.reply(200, server.metrics(), "text/plain")
        else:
            self.reply(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        """An answer."""
        server = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        asked = body.get("top_logprobs", body.get("logprobs")) or 0
        if asked and asked is not True and asked > server.likely:
            self.reply(400, {"error": {"message": f"logprobs must be at most {server.likely}"}})
            return
        with server.lock:
            server.bodies.append(body)
            server.active += 1
        try:
            self.answer(body, int(asked))
        finally:
            with server.lock:
                server.active -= 1

    def answer(self, body: dict[str, Any], asked: int) -> None:
        """An answer in one piece, or as a stream."""
        server, chat = self.server_of, "/chat/" in self.path
        if body.get("stream"):
            self.stream(body, chat)
            return
        rounds = list(server.rounds(body))
        words = [word for found in rounds for word in found.words]
        stopped = words[-1] == server.ends
        shown = words[:-1] if stopped else words
        text = "".join(WORDS[word] for word in shown)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if asked:
            choice["logprobs"] = Chances(server, body, asked).logprobs(rounds, chat)
        self.reply(200, {"choices": [choice], **usage_of(server, rounds)})

    def stream(self, body: dict[str, Any], chat: bool) -> None:
        """Chunks, one for each round."""
        server = self.server_of
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        rounds = []
        for found in server.rounds(body):
            rounds.append(found)
            text = "".join(WORDS[word] for word in found.words)
            self.event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        self.event({"choices": [{"finish_reason": "length"}], **usage_of(server, rounds)})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: object) -> None:
        """One event."""
        if self.server_of.clock is not None:
            self.server_of.clock.wrote()
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()


def usage_of(server: StandIn, rounds: Sequence[Round]) -> dict[str, Any]:
    """The usage and timings in an answer, in the dialect's form."""
    drafted, accepted = sum(each.drafted for each in rounds), sum(each.accepted for each in rounds)
    num_words = sum(len(each.words) for each in rounds)
    usage: dict[str, Any] = {"completion_tokens": num_words}
    if server.dialect == "forerun":
        usage["speculation"] = {"num_drafted": drafted, "num_accepted": accepted, "num_rounds": len(rounds) - 1}
    if server.dialect != "llamacpp":
        return {"usage": usage}
    timings = {"predicted_n": num_words, "predicted_ms": 1.0}
    counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    return {"usage": usage, "timings": timings | counts}


@dataclass
class Chances:
    """Log-probabilities of an answer, in the form of its engine."""

    server: StandIn
    body: Mapping[str, Any]
    asked: int

    def likely(self, last: int) -> dict[int, float]:
        """The likeliest words and the logarithms of their chances, of the law without filters or temperature."""
        law = softmax(self.server.model.logits[last])
        if self.server.jitter:
            law = softmax(np.log(law) + self.server.jitter * np.random.default_rng().standard_normal(len(law)))
        best = sorted(range(len(law)), key=lambda word: -law[word])[: self.asked]
        return {word: math.log(law[word]) for word in best}

    def name(self, word: int) -> str:
        """A word as the engine names it."""
        if self.server.dialect == "vllm" and self.body.get("return_tokens_as_token_ids"):
            return f"token_id:{word}"
        return "" if word == self.server.ends else WORDS[word]

    def logprobs(self, rounds: Sequence[Round], chat: bool) -> dict[str, Any]:
        """The log-probabilities of the entire answer."""
        last, places = last_word(self.body), []
        for found in rounds:
            for word in found.words:
                hidden = self.server.dialect == "llamacpp" and found.drafted
                places.append((word, {} if hidden else self.likely(last)))
                last = word
        if self.server.dialect == "llamacpp" or chat:
            return {"content": [self.entry(word, likely) for word, likely in places]}
        return {
            "tokens": [self.name(word) for word, _ in places],
            "token_logprobs": [likely.get(word, -9.0) for word, likely in places],
            "top_logprobs": [{self.name(w): value for w, value in likely.items()} for _, likely in places],
        }

    def entry(self, word: int, likely: Mapping[int, float]) -> dict[str, Any]:
        """One token as chats have it."""
        top = [{"token": self.name(other), "logprob": value} for other, value in likely.items()]
        return {"token": self.name(word), "logprob": likely.get(word, 0.0), "top_logprobs": top}
