"""RankWorker: a process with a shard of the model, which executes the orders of rank 0 until rank 0 ends.

Rank 0 starts it on its own machine as `python -m forerun.models.shards.worker`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from array import array

import torch

from forerun.cache.paged import PagedCache
from forerun.errors import RankLost
from forerun.models.backends.native import NativeExecutor
from forerun.models.loading import Blueprint
from forerun.models.shards.launch import join, started_rank
from forerun.models.shards.ranks import Order, RankGroup, RankMessage
from forerun.models.shards.shard import Columns
from forerun.models.spec import ModelSpec


class RankWorker:
    """The layers, head and cache of one rank."""

    def __init__(self, ranks: RankGroup, message: RankMessage) -> None:
        text, (num_tokens, max_model_len, longest_text) = (each.tolist() for each in message.numbers)
        spec = ModelSpec(**json.loads(bytes(text)), tensor_parallel_size=ranks.shard.world)
        model = Blueprint.of(spec).for_texts(longest_text)
        self.ranks = ranks
        ranks.check_fingerprint(model.fingerprint())
        decoder = model.decoder(max_model_len, ranks=ranks)
        assert isinstance(decoder.executor, NativeExecutor), "ranks share what the compiled kernels compute"
        self.executor = decoder.executor
        self.cache = PagedCache(**decoder.cache_shape, num_tokens=num_tokens)
        ranks.wait_until_loaded()

    @torch.inference_mode()
    def execute(self, message: RankMessage) -> None:
        numbers = message.numbers
        if message.order == Order.RUN:
            assert message.rows is not None, "a pass without tokens"
            layers, positions, slots, *others = numbers
            tables = [array("q", table.numpy().tobytes()) for table in others]
            self.executor.compute(range(*layers.tolist()), message.rows, (positions, slots), tables, self.cache)
        elif message.order == Order.LOGITS:
            assert message.rows is not None, "logits of no rows"
            config, logits = self.executor.parts.config, self.executor.logits(message.rows)
            self.ranks.joined(Columns.TOKENS, logits, config.vocab_size, config)
        elif message.order == Order.COPY:
            self.cache.copy_slots(*numbers[0].tolist())
        elif message.order == Order.ZERO:
            self.cache.zero_slots(*numbers[0].tolist())
        elif message.order == Order.GATHER:
            self.cache.gather_slots(numbers[0].tolist(), numbers[1].tolist())


def work(ranks: RankGroup) -> None:
    """Execute the orders of rank 0 until it stops this rank or ends."""
    worker: RankWorker | None = None
    try:
        while (message := ranks.receive()).order != Order.STOP:
            if message.order == Order.LOAD:
                worker = RankWorker(ranks, message)
            elif worker is not None:
                worker.execute(message)
    except RankLost:
        return  # rank 0 has ended, or reports the error
    except BaseException as error:
        ranks.report(error)
        raise


def serve_started_rank(world: int) -> None:
    """If this process was started as a rank other than 0, run as a worker and then exit."""
    if world > 1 and (started_rank() or 0) > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all ranks, but rank 0 decides
        work(join())
        sys.exit(0)


if __name__ == "__main__":
    serve_started_rank(int(os.environ["WORLD_SIZE"]))
