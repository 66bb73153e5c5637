"""Inside transformers the tokens are those of the model's own `generate`, drafted or not, whatever it is asked for."""

import gc
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.logits_process import (
    LogitNormalization,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from forerun import Speculation
from forerun.errors import InvalidRequest, TokenizerError, UnsupportedModel
from forerun.inside.transformers import ENGINES, FOLDER, engine_of, generate, release, sampling_fields
from forerun.prove.chi_square import LEVEL, chi_square
from kit.checkpoints import SMALL, TARGET
from kit.sparse import DENSE, FAMILIES, write_sparse
from law.drafters import DRAFTERS, as_draft

TREE = Speculation(depth=4, width=2)
TEXTS = ["Once upon a time", "Lily had a big red ball and she", "The"]
NEW = 40


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(TARGET, padding_side="left")
    loaded.pad_token = loaded.eos_token
    return loaded


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def inputs(tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Three prompts of different lengths, so two of them are padded."""
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert not batch.attention_mask.all()
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def drafted(model: PreTrainedModel, inputs: dict[str, Tensor], draft: Any = "ngram", **asked: Any) -> Tensor:
    """What the model generates with forerun's engine in the place of its own loop; something must have been drafted."""
    result = model.generate(**inputs, custom_generate=generate, draft=draft, **({"speculation": 4} | asked))
    if draft is not None and asked.get("speculation") is not False:
        assert engine_of(model).stats.num_drafted
    return result


@pytest.mark.parametrize("speculation", [4, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.short("ngram-chains", "model:stories280k-trees")
def test_greedy_tokens_are_the_models_own(
    model: PreTrainedModel, inputs: dict[str, Tensor], name: str, speculation: int | Speculation
) -> None:
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    got = drafted(model, inputs, as_draft(name), max_new_tokens=NEW, do_sample=False, speculation=speculation)
    assert torch.equal(got, plain)


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
@pytest.mark.short("qwen3_moe")
def test_greedy_tokens_are_the_models_own_in_every_family(
    tmp_path: Path, inputs: dict[str, Tensor], family: str
) -> None:
    folder = write_sparse(tmp_path / family, family, model_type=family, pad_token_id=2)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    asked: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    short = {"max_model_len": 60}  # by which LongRoPE goes: transformers goes by the length so far
    assert torch.equal(drafted(theirs, inputs, engine=short, **asked), theirs.generate(**inputs, **asked))


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "usual": {"temperature": 0.7, "top_k": 30, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.05, "top_k": 0},
    "both": {"top_p": 0.9, "min_p": 0.02, "top_k": 40},
    "repeats": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "top_k": 20},
    "typical": {"typical_p": 0.8, "temperature": 0.9},
}


@pytest.mark.parametrize("asked", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.short("usual")
def test_a_seed_gives_the_same_tokens_with_and_without_a_drafter(
    model: PreTrainedModel, inputs: dict[str, Tensor], asked: dict[str, Any]
) -> None:
    results = []
    for seed, speculation in ((7, False), (7, 4), (7, TREE), (8, 4)):
        torch.manual_seed(seed)
        results.append(
            drafted(model, inputs, "suffix", do_sample=True, max_new_tokens=NEW, speculation=speculation, **asked)
        )
    plain, chains, trees, other = (result.tolist() for result in results)
    assert plain == chains == trees
    assert other != plain


@pytest.mark.parametrize("asked", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.short("both")
def test_the_distribution_is_that_of_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: dict[str, Any]
) -> None:
    """The second token behind a padded prompt, among many samples: a chi-square test against transformers' own scores.

    It is a draft token wherever the drafter has one.
    """
    ids = tokenizer(["Lily had a red ball. Lily had a red ball. Lily had a"], return_tensors="pt").input_ids
    ids = torch.cat([torch.full((1, 2), tokenizer.pad_token_id), ids], dim=1)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) >= 2).long()[None]}
    torch.manual_seed(1)
    many = drafted(
        model, inputs, do_sample=True, max_new_tokens=3, min_new_tokens=3, num_return_sequences=400, **asked
    )[:, ids.shape[1] :].tolist()
    first, count = Counter(token for token, *_ in many).most_common(1)[0]
    longer = {"input_ids": torch.cat([ids, torch.tensor([[first]])], dim=1), "attention_mask": torch.ones(1, 1)}
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(1, 1, dtype=torch.long)], dim=1)
    scored = model.generate(
        **longer, do_sample=True, max_new_tokens=1, min_new_tokens=1, output_scores=True, return_dict_in_generate=True,
        **asked,
    )  # fmt: skip
    law = scored.scores[0][0].double().softmax(0)
    seen = Counter(second for token, second, _ in many if token == first)
    assert all(law[token] > 0 for token in seen), "a token was drawn that transformers would never draw"
    cells = [token for token in range(len(law)) if count * law[token] >= 5]
    expected = [count * float(law[token]) for token in cells]
    counts = [seen[token] for token in cells]
    if count - sum(expected) > 1e-6:
        expected, counts = [*expected, count - sum(expected)], [*counts, count - sum(counts)]
    assert len(cells) < 2 or chi_square(counts, expected).p_value > LEVEL


def never_two_vowels(batch: int, ids: Tensor) -> list[int]:
    """Which ids may follow: others in every row of the batch, and such as depend on the last."""
    return [i for i in range(3, 512) if i % 3 != batch % 3 and (i + int(ids[-1])) % 2]


PROCESSED: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.3},
    "penalty-first": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "ngrams": {"no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[403, 407], [261]], "suppress_tokens": [378, 300]},
    "longer": {"min_new_tokens": 20, "eos_token_id": [261, 286]},
    "forced": {"forced_eos_token_id": 2, "begin_suppress_tokens": [266]},
    "by-row": {"prefix_allowed_tokens_fn": never_two_vowels},
    "two-each": {"num_return_sequences": 2, "repetition_penalty": 1.2},
    "bias": {"sequence_bias": [[[261], -50.0], [[266, 300], 4.0]]},
    "own": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.index_fill(1, ids[0], -1e4)])},
    "answer-only": {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)]},
    "normed": {"logits_processor": [LogitNormalization(), RepetitionPenaltyLogitsProcessor(1.5)]},
}


@pytest.mark.parametrize("asked", PROCESSED.values(), ids=PROCESSED)
@pytest.mark.short("penalty-first", "by-row")
def test_greedy_tokens_are_the_models_own_behind_any_processor(
    model: PreTrainedModel, inputs: dict[str, Tensor], asked: dict[str, Any]
) -> None:
    if "num_return_sequences" in asked:
        inputs = {name: rows.repeat_interleave(2, 0) for name, rows in inputs.items()}
        asked = {name: value for name, value in asked.items() if name != "num_return_sequences"}
    if type(asked.get("logits_processor")) is list:
        asked = asked | {"logits_processor": LogitsProcessorList(asked["logits_processor"])}
    elif "logits_processor" in asked:
        inputs = {name: rows[:1] for name, rows in inputs.items()}
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **asked)
    got = drafted(model, inputs, max_new_tokens=NEW, do_sample=False, **asked)
    assert torch.equal(got, plain)
    unprocessed = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(plain, unprocessed), "the processor does nothing here"


def test_a_penalty_of_the_callers_counts_the_padding_too(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """The padding is the token with which an answer begins, so who does not count it gives another one."""
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    hidden = inputs["attention_mask"] == 0
    row, width = int(hidden.sum(1).argmax()), hidden.shape[1]
    padded = inputs | {"input_ids": inputs["input_ids"].masked_fill(hidden, int(plain[row, width]))}
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": penalty}
    theirs = model.generate(**padded, **asked)
    assert theirs[row, width] != plain[row, width], "the padding does nothing"
    assert torch.equal(drafted(model, padded, **asked), theirs)


def test_the_usual_penalty_is_the_engines_own() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([0, 2]))
    for row, padding in enumerate([(), (7, 7)]):
        fields = sampling_fields([penalty], GenerationConfig(), row, padding)
        assert fields == {"temperature": 0.0, "repetition_penalty": 1.5, "logits_processors": []}


def test_a_filter_that_keeps_some_tokens_whatever_their_chance_runs_as_it_is() -> None:
    config = GenerationConfig(do_sample=True)
    keeping, usual = TopPLogitsWarper(0.5, min_tokens_to_keep=3), TopPLogitsWarper(0.5)
    assert sampling_fields([usual], config, 0, ()) == {"temperature": 1.0, "top_p": 0.5, "logits_processors": []}
    kept = sampling_fields([keeping], config, 0, ())
    assert "top_p" not in kept
    (processor,) = kept["logits_processors"]
    logits = torch.tensor([9.0, 3.0, 2.0, 1.0])
    assert processor([1], logits).isfinite().tolist() == [True, True, True, False]


class AfterToken(StoppingCriteria):
    """Ends a row where it ends with one of these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("eos", [None, [403, 2], 2, 1000], ids=["none", "two", "one", "unknown"])
@pytest.mark.parametrize("stops", [(), (426, 430), (261,)], ids=["ids", "criterion", "soon"])
@pytest.mark.short("ids-two", "criterion-none")
def test_texts_end_where_transformers_ends_them(
    model: PreTrainedModel, inputs: dict[str, Tensor], eos: Any, stops: tuple[int, ...]
) -> None:
    """At ids, and where criteria say so: padded behind it, or going on as long as others do where there is no end."""
    asked: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
    if stops:
        asked["stopping_criteria"] = StoppingCriteriaList([AfterToken(*stops)])
    plain = model.generate(**inputs, **asked)
    assert torch.equal(drafted(model, inputs, **asked), plain)


def test_max_length_counts_the_padding(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    plain = model.generate(**inputs, max_length=30, do_sample=False)
    got: Any = drafted(model, inputs, max_length=30, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(got.sequences, plain)


class Recorder(BaseStreamer):
    """Records the values that it gets."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []
        self.ended = 0

    @override
    def put(self, value: Tensor) -> None:
        self.shown.append(value.flatten().tolist())

    @override
    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("form", ["bound", "folder"])
@pytest.mark.short("folder")
def test_a_streamer_gets_what_transformers_sends_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: str
) -> None:
    ids = tokenizer([TEXTS[0]], return_tensors="pt").input_ids
    theirs, ours = Recorder(), Recorder()
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 403}
    model.generate(ids, streamer=theirs, **asked)
    ways: dict[str, dict[str, Any]] = {
        "bound": {"custom_generate": partial(generate, streamer=ours)},
        "folder": {"custom_generate": str(FOLDER), "trust_remote_code": True},
    }
    model.generate(ids, streamer=ours, draft="ngram", speculation=4, **ways[form], **asked)
    assert ours.shown == theirs.shown
    assert ours.ended == theirs.ended == 1


def test_stop_strings_of_the_folder_end_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, Tensor]
) -> None:
    asked = {"max_new_tokens": NEW, "do_sample": False, "stop_strings": ["day", " was"], "tokenizer": tokenizer}
    plain = model.generate(**inputs, **asked)
    got = model.generate(**inputs, custom_generate=str(FOLDER), trust_remote_code=True, speculation=4, **asked)
    assert torch.equal(got, plain)
    with pytest.raises(InvalidRequest, match=r"stop_strings.*tokenizer"):
        model.generate(**inputs, custom_generate=str(FOLDER), trust_remote_code=True, **(asked | {"tokenizer": None}))


def test_changed_weights_are_noticed_and_a_dropped_model_takes_its_engine_along(inputs: dict[str, Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    before = drafted(model, inputs, **asked)
    first = engine_of(model)
    drafted(model, inputs, **asked)
    assert engine_of(model) is first
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
    after = drafted(model, inputs, **asked)
    assert engine_of(model) is not first
    assert torch.equal(after, model.generate(**inputs, **asked))
    assert not torch.equal(after, before)
    engine, num_engines = weakref.ref(engine_of(model)), len(ENGINES)
    del model, first
    gc.collect()
    assert engine() is None
    assert len(ENGINES) == num_engines - 1


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "logits_processor": {"encoder_repetition_penalty": 1.2},
    "position_ids": {"position_ids": torch.arange(5, 13)[None].expand(3, -1)},
    "max_length": {"max_new_tokens": 5000},
    "streamer": {"custom_generate": partial(generate, streamer=Recorder())},
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_options_are_refused_by_name(model: PreTrainedModel, inputs: dict[str, Tensor], field: str) -> None:
    asked = {"custom_generate": generate, "draft": "ngram", "max_new_tokens": 4} | REFUSED[field]
    if field == "position_ids":
        asked["position_ids"] = torch.arange(5, 5 + inputs["input_ids"].shape[1])[None].expand(3, -1)
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        model.generate(**inputs, **asked)


def test_padding_behind_a_text_is_refused(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    turned = {name: rows.flip(1) for name, rows in inputs.items()}
    with pytest.raises(InvalidRequest, match=r"attention_mask: row 0 .*padding_side"):
        model.generate(**turned, custom_generate=generate, draft="ngram", max_new_tokens=4)


def test_unsupported_models_are_refused(inputs: dict[str, Tensor]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 512}
    alien = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 1]]))
    with pytest.raises(UnsupportedModel, match="gpt_neo"):
        alien.generate(**inputs, custom_generate=generate, max_new_tokens=4)
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=512)
    config.decoder_start_token_id = 0
    encoder = T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="encoder"):
        encoder.generate(**inputs, custom_generate=generate, max_new_tokens=4)


def test_a_model_without_a_tokenizer_takes_one_that_is_bound(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict[str, Tensor]
) -> None:
    assert isinstance(model.config, LlamaConfig)
    made = LlamaForCausalLM(model.config)
    made.load_state_dict(model.state_dict())
    made.config._name_or_path = made.name_or_path = ""
    with pytest.raises(TokenizerError, match=r"partial\(generate, tokenizer=tokenizer\)"):
        made.generate(**inputs, custom_generate=generate, max_new_tokens=4)
    for bound in (tokenizer, str(SMALL)):
        got = made.generate(
            **inputs, max_new_tokens=4, custom_generate=partial(generate, tokenizer=bound), draft="suffix"
        )
        assert torch.equal(got, model.generate(**inputs, max_new_tokens=4))
        assert engine_of(made).stats.num_emitted
    release(made)
    assert made not in ENGINES
