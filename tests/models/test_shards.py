"""The parts of a model that ranks hold make up the model: for every family, stored format and number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import ForerunError, InvalidRequest
from forerun.models.config import read_config
from forerun.models.families import FAMILIES
from forerun.models.shards.shard import Columns, Shard, is_divisible
from kit.checkpoints import TARGET
from kit.quantized_folders import KINDS, write_mxfp4, write_quantized
from kit.sparse import write_architecture, write_sparse
from kit.texts import STARTS
from models.thread_ranks import in_threads

__all__ = ["in_threads"]
PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=16, ignore_eos=True, logprobs=0) for t in (0.0, 1.0)]
SIZES = {
    "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 180,
    "moe_intermediate_size": 104, "shared_expert_intermediate_size": 136,
}  # fmt: skip


def answers_of(model: Path, **options: object) -> list[tuple[object, object]]:
    """Tokens and log-probabilities of two answers, drafted in trees."""
    with LLM(str(model), "ngram", **options) as llm:  # type: ignore[arg-type]
        answers = llm.generate(list(STARTS)[:2], PARAMS)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in answers]


@pytest.mark.usefixtures("in_threads")
@pytest.mark.short("2-Gemma2ForCausalLM", "4-MixtralForCausalLM")
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_give_the_answers_of_one_process_for_every_family(world: int, architecture: str, tmp_path: Path) -> None:
    target = write_architecture(tmp_path / "target", architecture, num_hidden_layers=2, **SIZES)
    if read_config(target).joint_norm:
        with pytest.raises(ForerunError, match="norms all heads as one"):
            LLM(str(target), tensor_parallel_size=world)
        return
    for dtype in ("float32", "bfloat16"):
        assert answers_of(target, dtype=dtype, tensor_parallel_size=world) == answers_of(target, dtype=dtype)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.short("awq, 64", "gptq, by activations", "gptq 2, *", "gptq, outputs", "gptq, 8 bits, zeros",
                   "compressed, mixed", "compressed, bytes", "fp8, 48 x 80", "nf4, nested", "bitsandbytes*",
                   "mxfp4")  # fmt: skip
@pytest.mark.parametrize("kind", [*KINDS, "mxfp4"])
def test_ranks_give_the_answers_of_one_process_for_stored_formats(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "torch_dtype": "bfloat16"}
    if kind == "mxfp4":
        write_mxfp4(write_sparse(tmp_path / "source", "gpt_oss", **sizes | {"intermediate_size": 96}), tmp_path / "q")
    else:
        source = write_architecture(tmp_path / "source", "LlamaForCausalLM", **sizes)
        write_quantized(source, tmp_path / "q", kind)
    assert answers_of(tmp_path / "q", tensor_parallel_size=2) == answers_of(tmp_path / "q")


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_ranks_have_every_head_once_and_its_key_head_with_it(kv_heads: int, group: int) -> None:
    config = replace(read_config(TARGET), heads=kv_heads * group, kv_heads=kv_heads)
    for world in range(1, config.heads + 1):
        if not is_divisible(config, world):
            continue
        shards = [Shard(rank, world) for rank in range(world)]
        assert [head for shard in shards for head in shard.heads(config)] == [*range(config.heads)]
        for shard in shards:
            local, heads, keys = shard.of(config), shard.heads(config), shard.kv_heads(config)
            assert local.heads > 0
            assert local.heads % local.kv_heads == 0
            read = [keys[i // local.group] for i in range(local.heads)]  # the key head that the kernels read
            assert read == [head // config.group for head in heads]


@pytest.mark.parametrize("what", [Columns.HIDDEN, Columns.NEURONS, Columns.TOKENS])
def test_ranks_have_every_column_once(what: Columns) -> None:
    config = read_config(TARGET)
    for count in (32, 64, 96, 160, 512, 4096):
        for world in range(1, count // 32 + 1):
            columns = Shard(0, world).columns(what, count, config)
            assert [column for each in columns for column in each] == [*range(count)]
            assert min(map(len, columns)) > 0


@pytest.mark.parametrize("world", [5, 7, 16])
def test_more_ranks_than_heads_are_refused_with_possible_numbers(world: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{world} ranks cannot share 8 heads, 4 key heads.*use 1, 2, 3, 4"):
        LLM(str(TARGET), tensor_parallel_size=world)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"tensor_parallel_size": 0}])
def test_options_that_ranks_do_not_support_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="tensor_parallel_size"):
        LLM(str(TARGET), **{"tensor_parallel_size": 2, **options})  # type: ignore[arg-type]
