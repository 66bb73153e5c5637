"""Loading a model: find the folder, read the configuration, check every tensor, then load and pack them.

Targets and draft models are loaded in the same way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun import __version__
from forerun.annotations import Int, ProgressCallback
from forerun.cache.paged import PagedCache
from forerun.cache.plan import ModelMemory
from forerun.config import KernelChoice, Quantization
from forerun.device import CPU, Placement, operators_named
from forerun.errors import InvalidRequest
from forerun.kernels.sampling import SamplingKernels, find_sampling_kernels
from forerun.models.backends.base import Backend
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.memory import USUAL_PASSES, PassSizes, scratch_bytes
from forerun.models.backends.native_check import find_kernels
from forerun.models.choice import BackendChoice, BackendKind, choose_backend, cpu_backend
from forerun.models.config import ModelConfig, read_config
from forerun.models.decoder import Decoder, make_head
from forerun.models.fit import check_fit, ends_of
from forerun.models.layer import Linear
from forerun.models.projections import FINAL_NORM, count_parameters, num_idle
from forerun.models.runner import Read, Runner
from forerun.models.shards.launch import num_here, share
from forerun.models.shards.ranks import RankGroup
from forerun.models.shards.shard import Shard
from forerun.models.shards.target import shared_runner
from forerun.models.source import find_checkpoint, find_tokenizer
from forerun.models.spec import ModelSpec
from forerun.models.weights import Checkpoint, StoredGroups, check_weights, number_formats
from forerun.text.tokenizer import Tokenizer

SAMPLE_BYTES = 1 << 20
# Bytes of a weight in layers, and in the head.
HELD_BYTES: dict[Quantization | None, tuple[float, float]] = {"int8": (1, 1), "int4": (0.5625, 1), "fp8": (1, 1)}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A checkpoint whose configuration and tensors were checked, but that is not loaded: enough to plan memory.

    `spec` are the user's options; `name` is the user's name for it, or the label of a widened checkpoint. `choice` is
    the backend and the dtype; `stored` describes quantized weights in its file; `passes` are the largest passes that a
    GPU needs memory for.
    """

    spec: ModelSpec
    name: str
    folder: Path
    config: ModelConfig
    choice: BackendChoice
    num_bytes: int
    placement: Placement = CPU
    stored: StoredGroups | None = None
    passes: PassSizes = USUAL_PASSES

    @classmethod
    def of(cls, model: str | ModelSpec, progress: ProgressCallback | None = None, **options: Any) -> Blueprint:
        """Find a checkpoint, read its configuration, and check that all tensors exist.

        `options` are further fields of ModelSpec. Raises InvalidRequest for an option that does not exist or does not
        fit the device, ModelError for an unusable checkpoint.
        """
        spec = ModelSpec(model, **options) if isinstance(model, str) else replace(model, **options)
        placement = Placement.of(spec.device, spec.one_gemm)
        if spec.kernels == "native" and placement.fixed:
            raise InvalidRequest("kernels", "'native' is for CPUs: leave it out, or use device cpu.")
        if spec.quantize == "fp8" and not placement.fixed:
            raise InvalidRequest("quantize", "'fp8' is for GPUs: use int8 or int4, or device cuda.")
        if spec.quantize and not placement.holds_groups:
            why = f"{spec.quantize!r} needs kernels that device mps lacks: leave it out, or use device cpu."
            raise InvalidRequest("quantize", why)
        is_shared = spec.tensor_parallel_size > 1
        if is_shared and (placement.fixed or spec.kernels == "torch"):
            raise InvalidRequest(
                "tensor_parallel_size",
                "ranks need the compiled kernels on CPUs: use device cpu, and leave kernels out.",
            )
        folder = find_checkpoint(spec.model, spec.revision)
        config = read_config(folder)
        dtypes = number_formats(spec.dtype, config, placement.fixed)
        checkpoint = Checkpoint.of_model(folder, dtypes[0], placement.fixed)
        judged = check_weights(config, checkpoint)
        if is_shared:
            Shard(0, spec.tensor_parallel_size).fits(judged)
            spec = replace(spec, kernels="native")
        stored = checkpoint.stored_groups(judged)
        as_stored = stored is not None and stored.formats and spec.quantize is None and spec.dtype == "auto"
        if placement.fixed:
            choice = BackendChoice(BackendKind("torch", dtypes[0]))
        elif as_stored and find_kernels(spec.kernels, dtypes[0], progress) is not None:
            choice = BackendChoice(BackendKind("native", dtypes[0]))  # times of dense layers do not apply to groups
        else:
            choice = choose_backend(spec.kernels, dtypes, spec.quantize, judged, progress)
        num_bytes = count_parameters(judged) * choice.backend.dtype.itemsize
        return cls(spec, judged.widened or spec.model, folder, judged, choice, num_bytes, placement, stored)

    def for_texts(self, max_model_len: int | None, passes: PassSizes = USUAL_PASSES) -> Blueprint:
        """The model for texts of at most this length (None: any), on which some rotary scalings depend, and for passes
        of at most these sizes."""
        length = min(max_model_len or self.config.max_positions, self.config.max_positions)
        return replace(self, config=replace(self.config, longest_text=length), passes=passes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the loaded weights that are not quantized."""
        return self.choice.backend.dtype

    @property
    def quantize(self) -> Quantization | None:
        return self.spec.quantize

    @property
    def kernels(self) -> KernelChoice:
        return self.choice.backend.kernels

    @property
    def as_stored(self) -> bool:
        """Whether weights stored in groups stay so: if kernels can multiply them, unless the user chose a format."""
        as_asked = self.quantize is None and self.spec.dtype == "auto"
        kernels = (self.kernels == "native" or self.placement.fixed) and self.placement.holds_groups
        return kernels and as_asked and self.stored is not None and bool(self.stored.formats)

    @property
    def format(self) -> str:
        """The formats for a reader: "bfloat16", "bfloat16, int8 weights", or "bfloat16, FP8 weights unpacked"."""
        name = str(self.dtype).removeprefix("torch.")
        if self.quantize or self.stored is None:
            return f"{name}, {self.quantize} weights" if self.quantize else name
        stay, unpacked = (self.stored.formats if self.as_stored else ()), self.stored.unpacked
        unpacked = unpacked if self.as_stored else tuple(dict.fromkeys((*self.stored.formats, *unpacked)))
        kinds = ((stay, "weights"), (unpacked, "weights unpacked"))
        listed = ((" and ".join(", ".join(names).rsplit(", ", 1)), what) for names, what in kinds if names)
        return ", ".join([name, *(f"{names} {what}" for names, what in listed)])

    def backend(self, progress: ProgressCallback | None = None) -> Backend:
        """The backend of its layers, and of trained heads for it; kernels are compiled if necessary."""
        fixed = self.placement.fixed
        return GpuBackend(self.placement) if fixed else cpu_backend(self.kernels, self.dtype, progress)

    @property
    def computed_by(self) -> str:
        """The backend for a reader: "AMX kernels", "torch, AVX512", or "torch, " and a GPU's name."""
        return self.backend().name

    @property
    def computed_where(self) -> str:
        """The backend and the number of ranks, if there are several, for a reader."""
        world = self.spec.tensor_parallel_size
        return self.computed_by + (f" on {world} ranks" if world > 1 else "")

    @property
    def memory(self) -> ModelMemory:
        """The memory of the loaded model on this machine, for all ranks that run here."""
        c, shares = self.config, self.shares
        heads = sum(len(share.kv_heads(c)) for share in shares)
        return ModelMemory(
            weights_bytes=self.weights_bytes,
            bytes_per_token=PagedCache.bytes_per_token(
                layers=c.layers, kv_heads=heads, head_dim=c.head_dim, dtype=self.dtype
            ),
            bytes_per_position=2 * c.head_dim * torch.float32.itemsize * (c.num_turns + c.queries_grow) * len(shares),
            max_positions=c.max_positions,
            scratch_bytes=self.scratch_bytes(c.vocab_size),
        )

    def scratch_bytes(self, vocab: int) -> int:
        """Bytes of passes and verdicts over `vocab` ids on a GPU; 0 on CPUs."""
        if not self.placement.graphs:
            return 0
        unpacks = bool(self.quantize or self.as_stored) and not self.placement.one_gemm
        return scratch_bytes(self.config, self.dtype.itemsize, self.passes, vocab, unpacks)

    @property
    def shares(self) -> list[Shard]:
        """The shards of the ranks that run on this machine."""
        world = self.spec.tensor_parallel_size
        return [Shard(rank, world) for rank in range(num_here(world))]

    @property
    def weights_bytes(self) -> int:
        """Bytes of all loaded weights on this machine, with all experts. A tied head is a packed copy of the embedding,
        except on GPUs, if their numbers are equal. With several ranks, rank 0 may also hold the whole head, for
        drafters."""
        c = self.config
        table = c.vocab_size * c.hidden * self.dtype.itemsize
        changed = c.embedding_scale != 1 or c.centred or self.quantize or self.as_stored
        if c.tied and self.placement.fixed and not changed:
            return self.read_bytes(0)
        share = len(self.shares) / self.spec.tensor_parallel_size
        return int(self.read_bytes(0) * share) + table * (2 if self.spec.tensor_parallel_size > 1 else 1)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the weights that a pass of one token reads: all but the embedding table and idle experts."""
        return self.read_bytes(num_idle(self.config))

    def read_bytes(self, num_idle: int) -> int:
        """Bytes of all weights as loaded, without the embedding table and `num_idle` weights of layers."""
        table = self.config.vocab_size * self.config.hidden
        others = self.num_bytes // self.dtype.itemsize - table * (1 if self.config.tied else 2) - num_idle
        size = float(self.dtype.itemsize)
        held = (self.stored.of_layers, self.stored.of_head) if self.as_stored and self.stored else (size, size)
        of_layers, of_head = {None: held, **HELD_BYTES}[self.quantize]
        return int(others * of_layers) + int(table * of_head)

    def checkpoint(self, dtype: torch.dtype) -> Checkpoint:
        return Checkpoint.of_model(self.folder, dtype, self.placement.fixed)

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, or the one in the options. Raises TokenizerError if it does not fit the model."""
        folder = self.tokenizer_folder
        tokenizer = Tokenizer.load(folder)
        check_fit(tokenizer, folder, self.config, self.name)
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder if self.spec.tokenizer is None else find_tokenizer(self.spec.tokenizer)

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer, the tokenizer's end token included; logs differences between files."""
        return ends_of(tokenizer, self.tokenizer_folder, self.config, self.folder)

    def load(
        self,
        num_tokens: int,
        progress: ProgressCallback | None = None,
        max_model_len: int | None = None,
        host: Decoder | None = None,
    ) -> Runner:
        """Load the model with a cache of `num_tokens`, for texts of at most `max_model_len` tokens (default: all).

        With a `host` it is layers that read that decoder's states and use its head, and its norm if the checkpoint has
        none. Other ranks load their shards at the same time. Raises RankLost if one of them fails.
        """
        if self.spec.tensor_parallel_size == 1 or host is not None:
            return self.runner(self.decoder(max_model_len, progress, host), num_tokens)
        fields = {"model": self.spec.model, "revision": self.spec.revision, "quantize": self.quantize}
        fields |= {"dtype": "auto" if self.as_stored else str(self.dtype), "kernels": "native"}
        sizes = [num_tokens, max_model_len or self.config.max_positions, self.config.longest_text]
        ranks = share(self.spec.tensor_parallel_size, [[*json.dumps(fields).encode()], sizes], self.fingerprint())
        decoder = self.decoder(max_model_len, progress, ranks=ranks)
        ranks.meet()
        return shared_runner(decoder, ranks, num_tokens)

    def runner(self, decoder: Decoder, num_tokens: int) -> Runner:
        """A runner of this decoder on the model's device, with a new cache of `num_tokens`."""
        if not self.placement.fixed:
            return Runner.of(decoder, num_tokens)
        runner = GraphRunner.of(decoder, num_tokens, most_judged=self.passes.judged)
        if not self.placement.holds_groups:
            with operators_named():
                runner.read([Read(-1, [0, 0], judged=(1,))])
            runner.release([-1])
        return runner

    def decoder(
        self,
        max_model_len: int | None = None,
        progress: ProgressCallback | None = None,
        host: Decoder | None = None,
        ranks: RankGroup | None = None,
    ) -> Decoder:
        """Load the model without a cache; with `ranks`, only this process's shard."""
        c = replace(
            self.config, max_positions=min(max_model_len or self.config.max_positions, self.config.max_positions)
        )
        c = c if host is None else replace(c, vocab_size=host.config.vocab_size)
        checkpoint, done = self.checkpoint(self.dtype), 0

        def take(name: str, shape: tuple[int, ...]) -> Tensor:
            nonlocal done
            if host is not None and name == FINAL_NORM and name not in checkpoint:
                return host.norm
            tensor = checkpoint.take(name, shape)
            done += tensor.numel() * tensor.element_size()
            if progress is not None:
                progress(f"loading {self.name}", min(1.0, done / max(1, self.num_bytes)))
            return tensor.to(self.placement.device)

        groups = checkpoint.groups if self.as_stored else None
        whole_head = None if ranks is None else cache(lambda: self.head_rows(torch.arange(c.vocab_size)))
        backend = self.backend(progress)
        decoder = Decoder(c, take, self.dtype, backend, self.quantize, host, groups, ranks=ranks, whole_head=whole_head)
        if progress is not None:
            progress(f"loading {self.name}", 1.0)  # tensors that stay as they are stored were not counted
        return decoder

    def head_rows(self, ids: Int[Tensor, " ids"]) -> Linear:
        """The output layer for these tokens only, with the logits and the format of the whole one."""
        checkpoint = self.checkpoint(self.dtype)

        def take(name: str, shape: tuple[int, ...]) -> Tensor:
            return checkpoint.take(name, shape).to(self.placement.device)

        groups = checkpoint.groups if self.as_stored else None
        return make_head(self.config, self.backend(), take, groups, self.quantize, ids)

    def sampling_kernels(self) -> SamplingKernels | None:
        """The compiled sampling functions, for a model on a CPU with compiled kernels; else None."""
        return None if self.placement.fixed or self.spec.kernels == "torch" else find_sampling_kernels()

    def fingerprint(self) -> str:
        """A digest of all on which the promise of equal tokens depends: weights, dtype, software and machine; 16 hex
        digits. Weights are identified by the size and the first and last MiB of each file."""
        digest = sha256(f"{__version__} {torch.__version__} {self.format} {self.computed_by}".encode())
        digest.update(self.backend().arithmetic.encode())
        if self.config.rope.kind == "longrope" and self.config.longest_text <= self.config.rope.original_max_positions:
            digest.update(b"short texts")
        for path in sorted([*self.weight_files, self.folder / "config.json"]):
            digest.update(sample(path))
        return digest.hexdigest()[:16]

    def weights_digest(self) -> str:
        """A digest of the weights, 16 hex digits, the same on every machine and in every version."""
        digest = sha256()
        for path in sorted(self.weight_files):
            digest.update(sample(path))
        return digest.hexdigest()[:16]

    def norms_digest(self) -> str:
        """A digest of the model, 16 hex digits, the same for every format that it is stored in.

        It hashes the gains of all norms, which quantized formats keep in 16 bits or more.
        """
        digest, checkpoint = sha256(), self.checkpoint(torch.bfloat16)
        for name in sorted(name for name in checkpoint.stored if name.endswith("norm.weight")):
            gains = checkpoint.take(name, checkpoint.stored[name].shape)
            digest.update(name.encode() + gains.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def weight_files(self) -> set[Path]:
        """The files that hold the weights."""
        return {entry.file for entry in self.checkpoint(self.dtype).stored.values()}


def sample(path: Path) -> bytes:
    """The name, the size, and the first and last MiB of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return f"{path.name} {size}".encode() + first + file.read(SAMPLE_BYTES)
