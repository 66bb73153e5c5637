"""Of tokenizers of every class of transformers, tokenizer.json decides about ids, as it does in transformers 5."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forerun.text.tokenizer import Tokenizer

CORPUS = ["Once upon a time, Lily's dog said: naïve café 123 45", "def f(x):\n    return x ** 2", "  two  spaces 你好"]
TEXTS = ["", "Once upon a time", " leading", "  two  spaces ", "a\n\nb 123 45", "x{end}y {begin} z", "你好 naïve\t."]
CLASSES = (
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "TokenizersBackend",
    "Qwen3_5Tokenizer",
    "GPTNeoXTokenizer",
    "CohereTokenizer",
    "CodeGenTokenizer",
    "OpenAIGPTTokenizer",
    "T5Tokenizer",
    "XGLMTokenizer",
)
FORGETFUL = {"CodeLlamaTokenizer", "GPTNeoXTokenizer", "XGLMTokenizer"}  # put around texts what their class says
OF_ENCODERS = {  # among the language models of transformers, but made of encoders or with one
    *("BertTokenizer", "BigBirdTokenizer", "BlenderbotTokenizer", "CamembertTokenizer", "MBartTokenizer"),
    *("MvpTokenizer", "PegasusTokenizer", "ReformerTokenizer", "RemBertTokenizer", "RoFormerTokenizer"),
    *("RobertaTokenizer", "WhisperTokenizer", "XLMRobertaTokenizer", "XLNetTokenizer"),
}


def trained(name: str) -> Any:
    """A small tokenizer of a class."""
    if name != "TokenizersBackend":
        return getattr(transformers, name)().train_new_from_iterator(CORPUS * 5, 400)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    backend.train_from_iterator(
        CORPUS * 5,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def configured(folder: Path, *names: str) -> Iterator[dict[str, bool | None]]:
    """The folder with each combination of true, false and nothing under these keys of tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    whole = json.loads(path.read_text())
    for values in itertools.product((None, True, False), repeat=len(names)):
        flags = dict(zip(names, values, strict=True))
        path.write_text(json.dumps(whole | {key: value for key, value in flags.items() if value is not None}))
        yield flags
    path.write_text(json.dumps(whole))


def same_ids(folder: Path, theirs: Any, about: object) -> None:
    """Both give the same ids for all texts, except that an empty text is BOS alone, where there is one."""
    ours = Tokenizer.load(folder)
    for pattern in TEXTS:
        text = pattern.format(begin=theirs.bos_token, end=theirs.eos_token)
        ids = theirs(text).input_ids
        if not ids and theirs.bos_token_id is not None:
            ids = [theirs.bos_token_id]
        assert ours.encode(text) == ids, (about, text)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.short(
    "LlamaTokenizer-*",
    "Qwen2Tokenizer-as it is",
    "GemmaTokenizer-with BOS",
    "GPT2Tokenizer-with both",
    "TokenizersBackend-with both",
    "T5Tokenizer-as it is",
    "CohereTokenizer-with BOS",
)
@pytest.mark.parametrize("saved", ["as it is", "with BOS", "with both"])
@pytest.mark.parametrize("name", CLASSES)
def test_ids_are_those_of_transformers_whatever_the_configuration_of_bos_and_eos(
    name: str, saved: str, tmp_path: Path
) -> None:
    """tokenizer.json decides what surrounds texts; `add_bos_token` and `add_eos_token` of the configuration do not."""
    tokenizer = trained(name)
    if saved != "as it is" and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    if saved == "with both" and tokenizer.eos_token is not None:
        tokenizer.add_eos_token = True
    tokenizer.save_pretrained(tmp_path)
    for flags in configured(tmp_path, "add_bos_token", "add_eos_token"):
        forgets = saved != "as it is" and name in FORGETFUL
        reader = transformers.TokenizersBackend if forgets else transformers.AutoTokenizer
        same_ids(tmp_path, reader.from_pretrained(tmp_path), flags)


@pytest.mark.short("LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer")
@pytest.mark.parametrize("name", CLASSES)
def test_blanks_are_put_in_front_as_tokenizer_json_says(name: str, tmp_path: Path) -> None:
    """As transformers does where it takes the file as it is; some of its classes build the steps anew by these keys."""
    trained(name).save_pretrained(tmp_path)
    for flags in configured(tmp_path, "add_prefix_space", "legacy"):
        same_ids(tmp_path, transformers.TokenizersBackend.from_pretrained(tmp_path), flags)


def test_every_class_that_language_models_use_is_here() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = {TOKENIZER_MAPPING_NAMES.get(model) for model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    classes = {name: getattr(transformers, name, None) for name in names if name is not None}
    fast = {n for n, c in classes.items() if isinstance(c, type) and issubclass(c, transformers.TokenizersBackend)}
    assert not fast - {*CLASSES, *OF_ENCODERS}
