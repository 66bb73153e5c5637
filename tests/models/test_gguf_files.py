"""GGUF files: damage and unknown formats are named, and one of several files is chosen."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from huggingface_hub.utils._paths import filter_repo_objects
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forerun import LLM
from forerun.errors import ForerunError, MissingWeights, ModelNotFound, TokenizerError, UnsupportedModel
from forerun.fields import Fields
from forerun.models import loading
from forerun.models.config import config_of
from forerun.models.gguf.config import ARCHITECTURES, config_json
from forerun.models.gguf.file import GgufFile
from forerun.models.gguf.folder import INDEX, choose_file, folder_files
from forerun.models.gguf.formats import FORMATS, UNREADABLE
from forerun.models.gguf.tensors import ROPE_DIVISORS, GgufTensor, read_location
from forerun.models.loading import Blueprint
from forerun.models.source import find_checkpoint
from kit.checkpoints import TARGET
from kit.gguf_files import finish, stories
from models.damage import ABSENT, VALUES, judged

# Where a block's numbers of float16 begin; else (0,).
HALVES = {**dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,), "MXFP4": ()}
MORE = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.pre": "gpt-2"}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([name for name, each in FORMATS.items() if each.form]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.data(),
)
def test_unpacked_blocks_are_those_of_the_gguf_package(name: str, rows: int, blocks: int, data: st.DataObject) -> None:
    kind = GGMLQuantizationType[name]
    numbers, size = GGML_QUANT_SIZES[kind]
    stored = data.draw(arrays.arrays("uint8", (rows, blocks, size)))
    for at in HALVES.get(name, (0,)):  # finite ones
        halves = data.draw(arrays.arrays("float16", (rows, blocks), elements=st.floats(-8, 8, width=16)))
        stored[:, :, at : at + 2] = halves.view("uint8").reshape(rows, blocks, 2)
    if name == "MXFP4":
        stored[:, :, 0] = stored[:, :, 0] % 100 + 80  # a power of two that float32 holds
    flat = stored.reshape(rows, -1)
    expected = torch.from_numpy(dequantize(flat, kind))
    groups = FORMATS[name].grouped(flat)
    assert torch.equal(groups.dense(), expected)
    assert groups.numbers.shape == (rows, blocks * numbers)


def test_formats_have_the_codes_and_sizes_that_gguf_knows() -> None:
    for name, each in FORMATS.items():
        assert (each.numbers, each.num_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    codes = {each.code: name for name, each in FORMATS.items()} | UNREADABLE
    assert codes == {kind.value: kind.name for kind in GGMLQuantizationType}


def test_damage_is_named(tmp_path: Path) -> None:
    file = stories(tmp_path / "model.gguf")
    whole = file.read_bytes()
    cases: list[tuple[bytes, type[ForerunError], str]] = [
        (b"", MissingWeights, "is not a valid GGUF file"),
        (b"GGUF", MissingWeights, "is not a valid GGUF file"),
        (b"GGUF" + b"\x09" + whole[5:], MissingWeights, "version 9"),
        (whole[: len(whole) // 2], MissingWeights, "ends inside|not a valid"),
        (whole[:-40], MissingWeights, "ends inside|not a valid"),
        (whole[:200], MissingWeights, "not a valid"),
        (b"Once upon a time", MissingWeights, "it does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1", MissingWeights, "git lfs pull"),
        (b"GGUF" + whole[4:8][::-1] + whole[8:], MissingWeights, "little-endian"),
    ]
    for damaged, error, message in cases:
        file.write_bytes(damaged)
        with pytest.raises(error, match=message):
            Blueprint.of(str(file))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_header_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    file = tmp_path / "model.gguf"
    if not file.exists():
        stories(file)
        (tmp_path / "whole").write_bytes(file.read_bytes())
    damaged = bytearray((tmp_path / "whole").read_bytes())
    begin = damaged.index(b"token_embd") - 2000  # the end of the metadata, then the entries of tensors
    for at, byte in changes:
        damaged[begin + at % 4000] = byte
    file.write_bytes(damaged)
    with suppress(MissingWeights, UnsupportedModel):
        places = GgufFile.read(file).tensors.values()
        assert all(place.offset + place.num_bytes <= len(damaged) for place in places)


def described_as(file: GgufFile, architecture: str, **more: Any) -> GgufFile:
    """The file with the metadata of another architecture, and more of it."""
    own = {k.replace("llama.", f"{architecture}."): v for k, v in file.metadata.items()}
    return replace(file, metadata=own | {"general.architecture": architecture} | more)


def test_no_value_of_the_metadata_raises_raw(tmp_path: Path) -> None:
    llama = GgufFile.read(stories(tmp_path / "model.gguf", **dict[str, Any]({"llama.attention.key_length": 8}, **MORE)))
    merges = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]}
    for file in (llama, described_as(llama, "eagle3"), described_as(llama, "gemma3", **merges)):
        for key in file.metadata:
            for value in (*VALUES.values(), ["a"] * len(file.metadata["tokenizer.ggml.tokens"])):
                metadata = {name: value if name == key else known for name, known in file.metadata.items()}
                changed = {name: each for name, each in metadata.items() if each is not ABSENT}
                judged(lambda changed=changed, file=file: folder_files(replace(file, metadata=changed)))


def test_more_heads_than_width_raise_nothing_raw(tmp_path: Path) -> None:
    file = GgufFile.read(stories(tmp_path / "model.gguf"))
    for name in ARCHITECTURES:
        described = described_as(file, name, **{f"{name}.embedding_length": 4, f"{name}.rope.dimension_count": 2})
        path = tmp_path / "config.json"
        judged(lambda described=described, path=path: config_of(Fields(path, config_json(described))))


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan")])
def test_divisors_of_frequencies_that_no_scaling_has_are_refused(tmp_path: Path, divisor: float) -> None:
    file = GgufFile.read(stories(tmp_path / "model.gguf"))
    place, stored = file.tensors["output_norm.weight"], tmp_path / "divisors"
    stored.write_bytes(np.full(4, divisor, np.float32).tobytes())
    tensors = {**file.tensors, ROPE_DIVISORS: replace(place, file=stored, offset=0, num_bytes=16, shape=(4,))}
    assert "rope_freqs.weight" in str(judged(lambda: config_json(replace(file, tensors=tensors))))


@pytest.mark.parametrize("architecture", ["llama", "eagle3", "qwen2moe", "gpt-oss"])
def test_tensors_that_are_missing_or_have_strange_names_are_no_raw_errors(tmp_path: Path, architecture: str) -> None:
    file = described_as(
        GgufFile.read(stories(tmp_path / "model.gguf")), architecture, **{f"{architecture}.expert_count": 2}
    )
    other = next(iter(file.tensors.values()))
    for name in file.tensors:
        tensors = {key: place for key, place in file.tensors.items() if key != name}
        assert judged(lambda tensors=tensors: folder_files(replace(file, tensors=tensors))) is None
    for name in ("strange", "", ".", "blk.0.ffn_exps.weight", "blk.0.ffn_gate_exps.weight", "blk.x.y.z", "é.weight"):
        for shape in ((8,), (2, 4), (2, 2, 2)):
            tensors = {**file.tensors, name: replace(other, shape=shape)}
            judged(lambda tensors=tensors: folder_files(replace(file, tensors=tensors)))


def test_a_tensor_without_dimensions_is_refused(tmp_path: Path) -> None:
    file = stories(tmp_path / "model.gguf")
    name = b"token_embd.weight"
    whole = file.read_bytes()
    at = whole.index(name) + len(name)
    file.write_bytes(whole[:at] + b"\0\0\0\0" + whole[at + 4 + 2 * 8 :])
    with pytest.raises(MissingWeights, match=r"token_embd\.weight has 0 dimensions"):
        GgufFile.read(file)


def test_a_header_is_read_as_by_the_gguf_package(tmp_path: Path) -> None:
    more = {"general.alignment": 64, "llama.lists": [1, 2], "llama.flag": True, "llama.texts": ["a", "", "é"]}
    file = stories(tmp_path / "model.gguf", "Q4_1", **more)
    reader, header = GGUFReader(file), GgufFile.read(file)
    assert header.metadata == {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    expected = {
        t.name: (int(t.data_offset), int(t.n_bytes), t.tensor_type.name, tuple(reversed(t.shape.tolist())))
        for t in reader.tensors
    }
    assert {k: (p.offset, p.num_bytes, p.format, p.shape) for k, p in header.tensors.items()} == expected


def test_parts_may_be_links_to_folder_files_other_names(tmp_path: Path) -> None:
    for i in (1, 2):
        writer = GGUFWriter(tmp_path / f"blob{i}", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(f"part{i}", np.zeros((2, 32), np.float32))
        finish(writer)
        (tmp_path / f"split-0000{i}-of-00002.gguf").symlink_to(tmp_path / f"blob{i}")
    with pytest.raises(UnsupportedModel, match="embedding_length"):  # all parts were found
        find_checkpoint(str(tmp_path / "split-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    "name", ["model-00001-of-00000.gguf", "model-00003-of-00002.gguf", "model-00000-of-00002.gguf"]
)
def test_a_name_with_impossible_part_numbers_is_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    assert GgufFile.read(stories(tmp_path / name)).tensors == GgufFile.read(stories(tmp_path / name)).tensors


def test_unsupported_files_are_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    finish(writer)
    with pytest.raises(UnsupportedModel, match=r"general\.architecture is 'rwkv7'.*supported are llama"):
        Blueprint.of(str(tmp_path / "other.gguf"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is 'rwkv'; supported are gpt2 and llama"):
        LLM(str(stories(tmp_path / "model.gguf", **{"tokenizer.ggml.model": "rwkv"})))
    part = stories(tmp_path / "model-00002-of-00003.gguf")
    with pytest.raises(MissingWeights, match=r"one of 3 parts, and model-00001-of-00003\.gguf is missing"):
        Blueprint.of(str(part))


def test_a_missing_file_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no file .*missing\.gguf: correct the path"):
        find_checkpoint(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelNotFound, match=r"there is no file missing\.gguf"):
        find_checkpoint("missing.gguf")


def test_a_table_is_unpacked_without_a_copy_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile.read(stories(tmp_path / "model.gguf"))
    place = file.tensors["token_embd.weight"]
    table, expected = GgufTensor(place.shape, (place,)), read_location(place).bfloat16()
    monkeypatch.setattr("forerun.models.gguf.tensors.BLOCK_NUMBERS", 5 * place.shape[1])
    monkeypatch.setattr(GgufTensor, "read", None)
    assert torch.equal(table.read_into(torch.empty(place.shape, dtype=torch.bfloat16)), expected)


def test_one_of_several_files_is_chosen_by_its_format(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    first = stories(folder / "tiny-Q8_0.gguf")
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert find_checkpoint(str(folder)) == find_checkpoint(str(first))
    second = stories(folder / "tiny-Q4_0.gguf", "Q4_0")
    assert find_checkpoint(f"{folder}:q4_0") == find_checkpoint(str(second)) != find_checkpoint(str(first))
    with pytest.raises(ModelNotFound, match=r"files tiny-Q4_0\.gguf, tiny-Q8_0\.gguf: choose one by its format"):
        find_checkpoint(str(folder))
    with pytest.raises(ModelNotFound, match="choose one by its format"):
        find_checkpoint(f"{folder}:Q6_K")


def test_a_folder_and_the_folders_in_it_are_searched_and_no_others(tmp_path: Path) -> None:
    for parts, is_searched in (((), True), (("a",), True), (("a", "b"), False)):
        folder = tmp_path.joinpath(str(len(parts)), *parts)
        folder.mkdir(parents=True)
        (folder / "model.gguf").touch()
        expected = folder / "model.gguf" if is_searched else None
        assert choose_file(tmp_path / str(len(parts)), None, "model") == expected


@pytest.mark.parametrize("gone", ["folder", "subfolder", "file"])
def test_a_folder_that_vanishes_while_it_is_searched_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """As in a cache that another program cleans: what is left is used, and what is missing is named."""
    folder = tmp_path / "models"
    (folder / "aside").mkdir(parents=True)
    file = stories(folder / "tiny-Q8_0.gguf")
    expected = find_checkpoint(str(file))
    real = os.scandir

    def scan(path: str | Path = ".") -> object:
        if str(path) == str(folder / "aside" if gone != "folder" else folder):
            monkeypatch.setattr(os, "scandir", real)
            {"folder": folder, "subfolder": folder / "aside", "file": file}[gone].rename(tmp_path / "elsewhere")
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    if gone == "subfolder":
        assert find_checkpoint(str(folder)) == expected
        return
    with pytest.raises(ModelNotFound, match="models"):
        find_checkpoint(str(folder))


def test_of_a_repository_the_chosen_file_alone_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "repository"
    stored.mkdir()
    for number_format in ("Q8_0", "Q4_0"):
        stories(stored / f"tiny-{number_format}.gguf", number_format)
    stories(stored / "tiny-Q4_K_M.gguf", "Q4_1")
    fetched = tmp_path / "fetched"

    def fetch(name: str, revision: object, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "owner/name"
        fetched.mkdir(exist_ok=True)
        names = [path.name for path in stored.iterdir()]
        for each in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copyfile(stored / each, fetched / each)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_checkpoint("owner/name").name.startswith("tiny-Q4_K_M")
    assert [path.name for path in fetched.iterdir()] == ["tiny-Q4_K_M.gguf"]
    assert find_checkpoint("owner/name:Q8_0").name.startswith("tiny-Q8_0")
    with pytest.raises(ModelNotFound, match=r"owner/name .*choose"):
        find_checkpoint("owner/name:Q6_K")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").write_text("a file, in which no folder can be made")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with pytest.raises(ModelNotFound, match=r"full.*cannot be written.*let XDG_CACHE_HOME name"):
        find_checkpoint(str(stories(tmp_path / "model.gguf")))


@pytest.mark.parametrize("letter", ["x", "字"])
def test_a_file_may_have_the_longest_name_that_there_is(tmp_path: Path, letter: str) -> None:
    file = stories(tmp_path / "model.gguf").rename(tmp_path / f"{letter * (250 // len(letter.encode()))}.gguf")
    assert Blueprint.of(str(file)).config.layers == Blueprint.of(str(TARGET)).config.layers


def test_a_changed_file_gets_another_folder(tmp_path: Path) -> None:
    file = stories(tmp_path / "model.gguf")
    before = find_checkpoint(str(file))
    assert find_checkpoint(str(file)) == before
    assert find_checkpoint(str(stories(file, "Q4_0"))) != before


def test_stored_weights_are_kept_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("dense layers are not what will run")

    monkeypatch.setattr(loading, "choose_backend", measured)
    blueprint = Blueprint.of(str(stories(tmp_path / "model.gguf")))
    assert blueprint.keeps_groups
    shares = list[float]()
    blueprint.decoder(progress=lambda _what, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert max(after - before for before, after in pairwise(shares)) < 0.1, "stored weights are progress, too"


def test_a_damaged_folder_says_what_to_remove(tmp_path: Path) -> None:
    folder = find_checkpoint(str(stories(tmp_path / "model.gguf")))
    for text in ('{"model.norm.weight": {"shape": [64]}}', "{"):
        (folder / INDEX).write_text(text)
        with pytest.raises(MissingWeights, match="is damaged"):
            Blueprint.of(str(tmp_path / "model.gguf"))
