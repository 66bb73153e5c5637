"""Converts the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json.

Two kinds are supported: byte-level BPE with a named pre-tokenizer (`tokenizer.ggml.pre`), and SentencePiece BPE, whose
merges follow from the scores. The regular expressions in PRE are those of the publishers' tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.errors import TokenizerError
from forerun.limits import shown
from forerun.models.gguf.file import DOWNLOAD, GgufFile
from forerun.text.files import GGUF_FILE, damage_as_errors

CONTROL, USER_DEFINED = 3, 4  # token types
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, DIGITS = "gpt-2", "digits"  # the rule built into `tokenizers`; the same after splitting off single digits
PRE = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "phi-2", "roberta-bpe"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O),
    "tekken": TEKKEN,
}
# Pre-tokenizers of vocabularies in which a complete word is one token, without merges.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken", "gpt-4o", "llama4")
STARTED = ("llama-bpe", "llama3", "llama-v3", "tekken")  # pre-tokenizers whose texts begin with bos by default
NFC = ("qwen2", "deepseek-r1-qwen")
PRE_KEY = "tokenizer.ggml.pre"
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json. Raises TokenizerError for an unsupported kind."""
    tokens, kind = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TokenizerError(f"{file.path} has no list of tokens: name another tokenizer with --tokenizer")
    if kind not in ("gpt2", "llama"):
        known = "supported are gpt2 and llama: name another tokenizer with --tokenizer"
        raise TokenizerError(f"{file.path}: tokenizer.ggml.model is {shown(kind)}; {known}")
    backend = byte_level(file, tokens) if kind == "gpt2" else sentence_piece(file, tokens)
    types = file.metadata.get("tokenizer.ggml.token_type") or []
    if not isinstance(types, list) or not all(isinstance(token_type, int) for token_type in types):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.token_type must be a number for each token: {DOWNLOAD}")
    added: dict[int, list[AddedToken]] = {CONTROL: [], USER_DEFINED: []}
    for text, token_type in zip(tokens, types, strict=False):
        if token_type in added:
            added[token_type].append(AddedToken(text, special=token_type == CONTROL, normalized=False))
    backend.add_special_tokens(added[CONTROL])  # in one call, since each call builds a table of all tokens
    backend.add_tokens(added[USER_DEFINED])
    starts = kind == "llama" or file.metadata.get(PRE_KEY) in STARTED
    backend.post_processor = bos_and_eos(file, tokens, starts)
    config: dict[str, Any] = {name: named_token(file, tokens, key) for name, key in NAMED.items()}
    config |= {GGUF_FILE: str(file.path), "chat_template": templates_of(file)}
    config = {name: value for name, value in config.items() if value is not None}
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


def templates_of(file: GgufFile) -> Any:
    """The chat template, or a list of named templates, as in tokenizer_config.json; None without any."""
    key = "tokenizer.chat_template"
    named = {"default": file.metadata.get(key)} | {
        name.removeprefix(f"{key}."): template for name, template in file.metadata.items() if name.startswith(f"{key}.")
    }
    if len(named) == 1:
        return named["default"]
    return [{"name": name, "template": template} for name, template in named.items() if template is not None]


def byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE. Raises TokenizerError for an unknown pre-tokenizer."""
    pre, merges = file.metadata.get(PRE_KEY, "default"), file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(pre, str) or pre not in PRE:
        known = f"supported are {', '.join(PRE)}: name the original model's tokenizer with --tokenizer"
        raise TokenizerError(f"{file.path}: {PRE_KEY} is {shown(pre)}; {known}")
    if not isinstance(merges, list) or any(str(merge).count(" ") != 1 for merge in merges):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges must be pairs of tokens: {DOWNLOAD}")
    vocab = {text: i for i, text in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    with damage_as_errors(str(file.path)):
        backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in WHOLE_WORDS))
    rule = PRE[pre]
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = {GPT2: [], DIGITS: [pre_tokenizers.Digits(individual_digits=True)]}.get(
        rule, [pre_tokenizers.Split(Regex(rule), "isolated")]
    )
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in (GPT2, DIGITS)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose merged token has the highest score is merged first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(s, int | float) for s in scores)
    ):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.scores must be a number for each token: {DOWNLOAD}")
    vocab = {text: i for i, text in enumerate(tokens)}
    ranked = sorted((-scores[merged], left, right) for left, right, merged in splits(vocab))
    merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
    with damage_as_errors(str(file.path)):
        unknown = named_token(file, tokens, "unknown")
        model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
    lead = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if lead else blanks
    ends = [decoders.Strip(" ", 1, 0)] if lead else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend


def splits(vocab: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """(left, right, merged) for each way to split a token into two others, in time linear in the length of all tokens.

    Files may have tokens of any length, so the parts are not looked up for each place, which takes quadratic time.
    """
    texts, ids = list(vocab), list(vocab.values())
    before, after = longest_prefixes(texts), longest_prefixes([text[::-1] for text in texts])
    for place, text in enumerate(texts):
        rights = {len(text) - len(texts[suffix]): suffix for suffix in chain_from(place, after)}
        for prefix in reversed(list(chain_from(place, before))):
            if (suffix := rights.get(len(texts[prefix]))) is not None:
                yield ids[prefix], ids[suffix], ids[place]


def longest_prefixes(texts: Sequence[str]) -> dict[int, int]:
    """For each text that starts with another one the longest of these, by their places; no text is there twice."""
    longest: dict[int, int] = {}
    starts: list[int] = []  # the texts with which the last one starts, by length, and that text itself
    for place in sorted(range(len(texts)), key=texts.__getitem__):
        while starts and not texts[place].startswith(texts[starts[-1]]):
            starts.pop()
        if starts:
            longest[place] = starts[-1]
        starts.append(place)
    return longest


def chain_from(place: int, longest: Mapping[int, int]) -> Iterator[int]:
    """All prefixes of a text, by their places: the longest one, the longest of that, and so on."""
    while place in longest:
        place = longest[place]
        yield place


def bos_and_eos(file: GgufFile, tokens: list[str], starts: bool) -> Any:
    """The post-processor that adds the tokens with which every text begins and ends. `starts`: the default for bos."""
    template, special = ["$A"], []
    for key, default in (("bos", starts), ("eos", False)):
        text = named_token(file, tokens, key)
        if text is not None and file.metadata.get(f"tokenizer.ggml.add_{key}_token", default):
            template = [key, *template] if key == "bos" else [*template, key]  # a text may mean something else there
            special.append({"id": key, "ids": [file.metadata[f"tokenizer.ggml.{key}_token_id"]], "tokens": [text]})
    return processors.TemplateProcessing(single=template, pair=[*template, "$B"], special_tokens=special)


def named_token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    """The text of the special token `key`, such as "bos"; None if the metadata has no valid id for it."""
    number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
