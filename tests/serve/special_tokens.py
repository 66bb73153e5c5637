"""A small model whose tokenizer has special tokens like those of models that reason and call by them."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from typing_extensions import override

from forerun.llm import LLM
from forerun.serve.logprob_text import TokenTexts
from kit.checkpoints import TARGET

SPECIAL = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>",
    "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>",
)  # fmt: skip
FIRST = 248  # the id of the byte F5, which with those behind it is in no text of UTF-8


class Spelled(TokenTexts):
    """Tokens that are the places of these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    @override
    def bytes_of(self, token: int) -> bytes:
        return self.texts[token].encode()


ENDS = ("<|return|>", "<|call|>")


def id_of(token: str) -> int:
    """A special token's id."""
    return FIRST + SPECIAL.index(token)


def with_special_tokens(folder: Path) -> Path:
    """The model with these tokens, in a folder of its own."""
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    for token in SPECIAL:
        del vocab[f"<0x{id_of(token) - 3:02X}>"]
        vocab[token] = id_of(token)
        same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": id_of(token), "content": token, **same})
    file.write_text(json.dumps(tokenizer), "utf-8")
    config = folder / "generation_config.json"
    own = json.loads(config.read_text("utf-8")) | {"eos_token_id": [2, *map(id_of, ENDS)]}
    config.write_text(json.dumps(own), "utf-8")
    return folder


def tagged() -> LLM:
    """The model with these tokens, loaded."""
    with TemporaryDirectory() as folder:
        return LLM(str(with_special_tokens(Path(folder))), dtype="float32", max_num_seqs=4)
