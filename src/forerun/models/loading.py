"""Blueprint: loads a model. `Blueprint.of` finds the folder, reads the configuration, checks every tensor and chooses a
backend; `load` then reads and packs the weights."""

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
from forerun.device import CPU, Placement, lacking_operator
from forerun.errors import InvalidRequest
from forerun.kernels.sampling import SamplingKernels, find_sampling_kernels
from forerun.models.backends.base import Backend
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.memory import USUAL_PASSES, PassSizes, scratch_bytes
from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.choice import BackendChoice, BackendKind, choose_backend, cpu_backend
from forerun.models.config import ModelConfig, read_config
from forerun.models.decoder import Decoder, make_head
from forerun.models.fit import check_fit, find_end_ids
from forerun.models.layer import Linear
from forerun.models.packing import WeightLoader
from forerun.models.projections import FINAL_NORM, count_parameters, num_inactive
from forerun.models.runner import Read, Runner
from forerun.models.shards.launch import num_local_ranks, start_ranks
from forerun.models.shards.ranks import RankGroup
from forerun.models.shards.shard import Shard
from forerun.models.shards.target import shared_runner
from forerun.models.source import find_checkpoint, find_tokenizer
from forerun.models.spec import ModelSpec
from forerun.models.weights import Checkpoint, StoredGroups, candidate_dtypes, check_weights
from forerun.text.tokenizer import Tokenizer

SAMPLE_BYTES = 1 << 20
# Bytes of a weight in layers, and in the head.
QUANTIZED_BYTES: dict[Quantization | None, tuple[float, float]] = {"int8": (1, 1), "int4": (0.5625, 1), "fp8": (1, 1)}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A checked checkpoint that is not loaded yet, with all that memory planning needs.

    `spec` are the user's options; `name` is the user's name of the model, or the label of a widened checkpoint.
    `choice` is the backend with its dtype. `num_bytes` is the size of all parameters in that dtype. `stored` describes
    the checkpoint's quantized weights; `keeps_groups`: those in groups are loaded as stored, since the user chose no
    format and kernels support them. `passes` are the largest passes, which decide the memory needed on a GPU.
    """

    spec: ModelSpec
    name: str
    folder: Path
    config: ModelConfig
    choice: BackendChoice
    num_bytes: int
    placement: Placement = CPU
    stored: StoredGroups | None = None
    keeps_groups: bool = False
    passes: PassSizes = USUAL_PASSES

    @classmethod
    def of(cls, model: str | ModelSpec, progress: ProgressCallback | None = None, **options: Any) -> Blueprint:
        """Find a checkpoint, read its configuration, check its tensors, and choose a backend.

        `options` are further fields of ModelSpec. Raises InvalidRequest for an option that the device does not
        support, ModelError for an unusable checkpoint.
        """
        spec = ModelSpec(model, **options) if isinstance(model, str) else replace(model, **options)
        placement = Placement.of(spec.device, spec.one_gemm)
        if spec.kernels == "native" and placement.fixed:
            raise InvalidRequest("kernels", "'native' is for CPUs only: leave it out, or use device cpu.")
        if spec.quantize == "fp8" and not placement.fixed:
            raise InvalidRequest("quantize", "'fp8' is for GPUs only: use int8 or int4, or device cuda.")
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
        dtypes = candidate_dtypes(str(spec.dtype), config, placement.fixed)
        checkpoint = Checkpoint.of_model(folder, dtypes[0], placement.fixed)
        config = check_weights(config, checkpoint)
        if is_shared:
            Shard(0, spec.tensor_parallel_size).check_fit(config)
            spec = replace(spec, kernels="native")
        stored = checkpoint.stored_groups(config)
        is_automatic = spec.quantize is None and spec.dtype == "auto"
        keeps_groups = is_automatic and stored is not None and bool(stored.formats) and placement.holds_groups
        if placement.fixed:
            choice = BackendChoice(BackendKind("torch", dtypes[0]))
        elif keeps_groups and find_kernels(spec.kernels, dtypes[0], progress) is not None:
            choice = BackendChoice(BackendKind("native", dtypes[0]))  # measured times are those of dense layers
        else:
            choice = choose_backend(spec.kernels, dtypes, spec.quantize, config, progress)
            keeps_groups = False
        num_bytes = count_parameters(config) * choice.backend.dtype.itemsize
        name = config.widened or spec.model
        return cls(spec, name, folder, config, choice, num_bytes, placement, stored, keeps_groups)

    def for_texts(self, max_model_len: int | None, passes: PassSizes = USUAL_PASSES) -> Blueprint:
        """This model for texts of at most this length (None: any), on which some rotary scalings depend, and for passes
        of at most these sizes."""
        length = self.config.within(max_model_len).max_positions
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
    def format(self) -> str:
        """The formats as text, such as "bfloat16", "bfloat16, int8 weights" or "bfloat16, FP8 weights unpacked"."""
        name = str(self.dtype).removeprefix("torch.")
        if self.quantize or self.stored is None:
            return f"{name}, {self.quantize} weights" if self.quantize else name
        formats, unpacked = self.stored.formats, self.stored.unpacked
        if not self.keeps_groups:
            formats, unpacked = (), tuple(dict.fromkeys((*formats, *unpacked)))
        kinds = {"weights": formats, "weights unpacked": unpacked}
        listed = {kind: " and ".join(", ".join(names).rsplit(", ", 1)) for kind, names in kinds.items() if names}
        return ", ".join([name, *(f"{names} {kind}" for kind, names in listed.items())])

    def backend(self, progress: ProgressCallback | None = None) -> Backend:
        """The backend of its layers, and of trained heads for it; compiles the kernels if necessary."""
        fixed = self.placement.fixed
        return GpuBackend(self.placement) if fixed else cpu_backend(self.kernels, self.dtype, progress)

    @property
    def backend_name(self) -> str:
        """The name of the backend for users, such as "AMX kernels", "torch, AVX512", or "torch, " and a GPU's name."""
        return self.backend().name

    @property
    def backend_and_ranks(self) -> str:
        """The name of the backend, with the number of ranks if there are several."""
        world = self.spec.tensor_parallel_size
        return self.backend_name + (f" on {world} ranks" if world > 1 else "")

    @property
    def memory(self) -> ModelMemory:
        """The memory that the loaded model takes on this machine, with all ranks that run here."""
        c, shares = self.config, self.shares
        heads, num_tables = sum(len(share.kv_heads(c)) for share in shares), c.num_rope_tables + c.grows_queries
        return ModelMemory(
            weights_bytes=self.weights_bytes,
            bytes_per_token=PagedCache.bytes_per_token(
                layers=c.layers, kv_heads=heads, head_dim=c.head_dim, dtype=self.dtype
            ),
            bytes_per_position=2 * c.head_dim * torch.float32.itemsize * num_tables * len(shares),
            max_positions=c.max_positions,
            scratch_bytes=self.scratch_bytes(c.vocab_size),
        )

    def scratch_bytes(self, vocab: int) -> int:
        """Bytes that passes and verdicts over `vocab` ids need on a GPU; 0 on CPUs."""
        if not self.placement.graphs:
            return 0
        unpacks = bool(self.quantize or self.keeps_groups) and not self.placement.one_gemm
        return scratch_bytes(self.config, self.dtype.itemsize, self.passes, vocab, unpacks)

    @property
    def shares(self) -> list[Shard]:
        """The shards of the ranks that run on this machine."""
        world = self.spec.tensor_parallel_size
        return [Shard(rank, world) for rank in range(num_local_ranks(world))]

    @property
    def weights_bytes(self) -> int:
        """Bytes of all loaded weights on this machine. A tied head is a packed copy of the embedding; on GPUs it shares
        the embedding's memory if both have the same numbers. With several ranks, rank 0 may also hold the entire head,
        for drafters."""
        c = self.config
        table = c.vocab_size * c.hidden * self.dtype.itemsize
        changed = c.embedding_scale != 1 or c.layer_norm or self.quantize or self.keeps_groups
        if c.tied and self.placement.fixed and not changed:
            return self.read_bytes(0)
        share = len(self.shares) / self.spec.tensor_parallel_size
        return int(self.read_bytes(0) * share) + table * (2 if self.spec.tensor_parallel_size > 1 else 1)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the weights that a pass of one token reads: all but the embedding table and inactive experts."""
        return self.read_bytes(num_inactive(self.config))

    def read_bytes(self, num_inactive: int) -> int:
        """Bytes of all loaded weights, except the embedding table and `num_inactive` weights of layers."""
        table = self.config.vocab_size * self.config.hidden
        others = self.num_bytes // self.dtype.itemsize - table * (1 if self.config.tied else 2) - num_inactive
        size = float(self.dtype.itemsize)
        loaded = (
            (self.stored.layer_bytes, self.stored.head_bytes) if self.keeps_groups and self.stored else (size, size)
        )
        layer_bytes, head_bytes = {None: loaded, **QUANTIZED_BYTES}[self.quantize]
        return int(others * layer_bytes) + int(table * head_bytes)

    def checkpoint(self, dtype: torch.dtype) -> Checkpoint:
        return Checkpoint.of_model(self.folder, dtype, self.placement.fixed)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the options, else the checkpoint's. Raises TokenizerError if it does not fit the model."""
        folder = self.tokenizer_folder
        tokenizer = Tokenizer.load(folder)
        check_fit(tokenizer, folder, self.config, self.name)
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder if self.spec.tokenizer is None else find_tokenizer(self.spec.tokenizer)

    def end_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer, with the tokenizer's end token; logs contradictions between files."""
        return find_end_ids(tokenizer, self.tokenizer_folder, self.config, self.folder)

    def load(
        self,
        num_tokens: int,
        progress: ProgressCallback | None = None,
        max_model_len: int | None = None,
        host: Decoder | None = None,
    ) -> Runner:
        """Load the model with a cache of `num_tokens`, for texts of at most `max_model_len` tokens (default: any).

        With a `host`, the checkpoint is trained layers of a drafter, which use the host's embedding and head, and its
        final norm if the checkpoint has none. Other ranks load their shards meanwhile; raises RankLost if one fails.
        """
        if self.spec.tensor_parallel_size == 1 or host is not None:
            return self.runner(self.decoder(max_model_len, progress, host), num_tokens)
        fields = {"model": self.spec.model, "revision": self.spec.revision, "quantize": self.quantize}
        fields |= {"dtype": "auto" if self.keeps_groups else str(self.dtype), "kernels": "native"}
        sizes = [num_tokens, max_model_len or self.config.max_positions, self.config.longest_text]
        ranks = start_ranks(self.spec.tensor_parallel_size, [[*json.dumps(fields).encode()], sizes], self.fingerprint())
        decoder = self.decoder(max_model_len, progress, ranks=ranks)
        decoder.whole_head = cache(lambda: self.head_rows(torch.arange(self.config.vocab_size)))
        ranks.wait_until_loaded()
        return shared_runner(decoder, ranks, num_tokens)

    def runner(self, decoder: Decoder, num_tokens: int) -> Runner:
        """A runner of this decoder on the model's device, with a new cache of `num_tokens`."""
        if not self.placement.fixed:
            return Runner.of(decoder, num_tokens)
        runner = GraphRunner.of(decoder, num_tokens, most_judged=self.passes.judged)
        if not self.placement.holds_groups:
            try:
                runner.read([Read(-1, [0, 0], judged=(1,))])
            except NotImplementedError as error:
                raise lacking_operator(error) or error from error
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
        c = self.config.within(max_model_len)
        c = c if host is None else replace(c, vocab_size=host.config.vocab_size)
        decoder = Decoder(c, self.weights(progress, host), host, ranks=ranks)
        if progress is not None:
            progress(f"loading {self.name}", 1.0)
        return decoder

    def weights(self, progress: ProgressCallback | None = None, host: Decoder | None = None) -> WeightLoader:
        """The checkpoint's weights on the model's device; with a `host`, its final norm in place of a missing one."""
        checkpoint, num_read = self.checkpoint(self.dtype), 0

        def count(num: int) -> None:
            nonlocal num_read
            num_read += num * self.dtype.itemsize
            if progress is not None:
                progress(f"loading {self.name}", min(1.0, num_read / max(1, self.num_bytes)))

        def take(name: str, shape: tuple[int, ...]) -> Tensor:
            if host is not None and name == FINAL_NORM and name not in checkpoint:
                return host.norm
            tensor = checkpoint.take(name, shape)
            count(tensor.numel())
            return tensor.to(self.placement.device)

        def take_groups(name: str, shape: tuple[int, ...], part: int | None = None) -> GroupedWeight | None:
            weight = checkpoint.groups(name, shape, part)
            count(0 if weight is None else weight.numbers.numel())
            return weight

        groups = take_groups if self.keeps_groups else None
        return WeightLoader(take, self.dtype, self.backend(progress), self.quantize, groups)

    def head_rows(self, ids: Int[Tensor, " ids"]) -> Linear:
        """The output head for these tokens only, in the format of the entire head, with the same logits."""
        return make_head(self.config, self.weights(), ids)

    def sampling_kernels(self) -> SamplingKernels | None:
        """The compiled sampling functions, for a model on a CPU with compiled kernels; else None."""
        return None if self.placement.fixed or self.spec.kernels == "torch" else find_sampling_kernels()

    def fingerprint(self) -> str:
        """A digest of all that equal tokens depend on: weights, dtype, versions and the machine's arithmetic; 16 hex
        digits. Weights are identified by the size and the first and last MiB of each file."""
        digest = sha256(f"{__version__} {torch.__version__} {self.format} {self.backend_name}".encode())
        digest.update(self.backend().arithmetic.encode())
        if self.config.rope.kind == "longrope" and self.config.longest_text <= self.config.rope.original_max_positions:
            digest.update(b"short texts")
        for path in sorted([*self.weight_files, self.folder / "config.json"]):
            digest.update(file_sample(path))
        return digest.hexdigest()[:16]

    def weights_digest(self) -> str:
        """A digest of the weights, 16 hex digits, which does not depend on machine or version."""
        digest = sha256()
        for path in sorted(self.weight_files):
            digest.update(file_sample(path))
        return digest.hexdigest()[:16]

    def norms_digest(self) -> str:
        """A digest of the gains of all norms, 16 hex digits, which identifies a model in any stored format: quantized
        checkpoints hold norms in 16 bits or more."""
        digest, checkpoint = sha256(), self.checkpoint(torch.bfloat16)
        for name in sorted(name for name in checkpoint.stored if name.endswith("norm.weight")):
            gains = checkpoint.take(name, checkpoint.stored[name].shape)
            digest.update(name.encode() + gains.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def weight_files(self) -> set[Path]:
        """The files that hold the weights."""
        return {entry.file for entry in self.checkpoint(self.dtype).stored.values()}


def file_sample(path: Path) -> bytes:
    """The name, the size, and the first and last SAMPLE_BYTES of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return f"{path.name} {size}".encode() + first + file.read(SAMPLE_BYTES)
