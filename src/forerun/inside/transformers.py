"""forerun inside transformers: `model.generate(..., custom_generate=generate, draft="suffix")`.

A call of transformers' `generate` is translated to requests of a forerun engine, and the engine's tokens to the tensor
that transformers would return. The engine has a separate copy of the model's weights, packed for its kernels, and is
cached until the model changes or is deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import LongTensor, Tensor

from forerun.config import Speculation
from forerun.draft.base import Drafter
from forerun.engine.sequence import Sequence as EngineSequence
from forerun.errors import InvalidRequest, MissingPackage, ModelNotFound, TokenizerError, UnsupportedModel
from forerun.limits import shown
from forerun.llm import LLM
from forerun.models.config import read_config
from forerun.models.spec import ModelSpec
from forerun.request import Request
from forerun.sampling.params import SamplingParams

try:
    from transformers import PreTrainedModel
    from transformers.generation import logits_process
    from transformers.generation import stopping_criteria as criteria_of
    from transformers.generation.utils import GenerateDecoderOnlyOutput
except ImportError as error:
    raise MissingPackage(
        "forerun.inside.transformers needs transformers: pip install 'forerun[transformers]'"
    ) from error

FOLDER = Path(__file__).parent / "folder"  # for `custom_generate=FOLDER`
WARPERS: Mapping[type, str] = {  # in transformers' order; each has the field of SamplingParams as an attribute
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
BATCH_PROCESSORS = (  # not possible for single rows: they use the model or the entire batch, or have state
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
IGNORED = frozenset({"cache", "past_key_values", "use_cache", "logits_to_keep", "attention_mask", "position_ids"})
UNSUPPORTED_OPTIONS = {  # fields of GenerationConfig that are not supported, and what to do instead
    "num_beams": "beam search is not supported: leave it out",
    "output_scores": "scores are not returned: leave it out, or use forerun's LLM with logprobs",
    "output_logits": "logits are not returned: leave it out",
    "output_attentions": "attentions are not returned: leave it out",
    "output_hidden_states": "hidden states are not returned: leave it out",
    "penalty_alpha": "contrastive search is not supported: leave it out",
    "dola_layers": "DoLa is not supported: leave it out",
    "force_words_ids": "forced words are not supported: leave it out",
    "prompt_lookup_num_tokens": "use draft='ngram' instead",
    "assistant_early_exit": "use draft='early-exit:LAYERS' instead",
    "use_mtp": "use draft='mtp:DIR' instead",
}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The engine of a model, its options, and the (address, version) of each weight."""

    llm: LLM
    options: Mapping[str, object]
    weights: Sequence[tuple[int, int]]


ENGINES: WeakKeyDictionary[PreTrainedModel, BuiltEngine] = WeakKeyDictionary()  # engines are dropped with their models
BUILDING = threading.RLock()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    draft: str | Drafter | None = "suffix",
    speculation: bool | int | str | Speculation | None = None,
    engine: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A `custom_generate` for `model.generate` that returns the tokens of plain decoding.

    `draft`, `speculation` and `engine` are additional keywords of `model.generate`: the drafter and its depth, as in
    LLM and LLM.generate, and other keywords of LLM, such as max_num_seqs. At temperature 0 the tokens are those of the
    model's own `generate`, up to ties within rounding; otherwise they follow the same distribution, and the seed of
    `torch.manual_seed` gives the same tokens with any drafter or none. transformers 5 does not pass `tokenizer` and
    `streamer` to a callable: bind them, as in partial(generate, streamer=streamer), or use `FOLDER`.
    Raises UnsupportedModel for a model that forerun does not support, InvalidRequest for unsupported arguments.
    """
    check_call(model, generation_config, model_kwargs)
    if streamer is not None and len(input_ids) > 1:
        raise InvalidRequest("streamer", f"it supports one text, and there are {len(input_ids)}: leave it out.")
    llm = engine_of(model, draft=draft, tokenizer=tokenizer, **(engine or {}))
    criteria = Criteria.of(stopping_criteria, llm.requests.num_ids)
    num_new = criteria.max_length - input_ids.shape[1]
    if criteria.max_length > llm.plan.max_model_len:
        problem = f"{criteria.max_length} exceeds the engine's limit of {llm.plan.max_model_len} tokens"
        raise InvalidRequest("max_length", f"{problem}: set max_new_tokens, or max_model_len in engine.")
    seeds = [0] * len(input_ids)
    if generation_config.do_sample:
        seeds = torch.randint(2**62, (len(input_ids),)).tolist()
    texts = []
    for row, (ids, padding) in enumerate(prompts(input_ids, model_kwargs)):
        params = SamplingParams(
            max_tokens=num_new, ignore_eos=True, stop_token_ids=criteria.end_ids, seed=seeds[row],
            **sampling_fields(logits_processor, generation_config, row, padding),
        )  # fmt: skip
        (sequence,) = llm.requests.sequences(Request.of({"prompt_token_ids": ids}, params, speculation))
        texts.append(RowText(sequence, padding, criteria, streamer))
    run(llm, texts, criteria)
    if streamer is not None:
        streamer.end()
    sequences = as_tensor(input_ids, texts, criteria, generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(LongTensor, sequences))
    return sequences


def generate_in_folder(
    model: PreTrainedModel,
    generation_config: Any = None,
    stopping_criteria: Sequence[Any] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **arguments: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """`generate` for `custom_generate=FOLDER, trust_remote_code=True`, with streamers and stop strings."""
    ends, strings = list(stopping_criteria or ()), arguments.pop("stop_strings", None)
    config = generation_config or model.generation_config
    if strings is None and config.stop_strings:
        generation_config, strings = copy(config), config.stop_strings
        generation_config.stop_strings = None
    if strings:
        if tokenizer is None:
            raise InvalidRequest("stop_strings", f"{shown(strings)} need the tokenizer: pass tokenizer=tokenizer too.")
        ends.append(criteria_of.StopStringCriteria(tokenizer, strings))
    result: Tensor | GenerateDecoderOnlyOutput = cast(Any, model).generate(
        generation_config=generation_config,
        stopping_criteria=criteria_of.StoppingCriteriaList(ends),
        streamer=streamer,
        custom_generate=partial(generate, tokenizer=tokenizer, streamer=streamer),
        **arguments,
    )
    return result


def engine_of(model: PreTrainedModel, **options: Any) -> LLM:
    """The engine of this model; it is rebuilt if the options or the weights have changed.

    Without options, the existing engine is returned, for example to read its `stats`. Raises UnsupportedModel.
    """
    weights = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in model.parameters()]
    with BUILDING:
        built = ENGINES.get(model)
        if built is not None and (not options or options == built.options) and weights == built.weights:
            return built.llm
        release(model)
        ENGINES[model] = built = BuiltEngine(build(model, **options), options, weights)
        return built.llm


def release(model: PreTrainedModel) -> None:
    """Free the memory of the model's engine, if it has one."""
    with BUILDING:
        built = ENGINES.pop(model, None)
    if built is not None:
        built.llm.close()


def build(model: PreTrainedModel, draft: str | Drafter | None = None, tokenizer: Any = None, **options: Any) -> LLM:
    """Build an engine with a copy of the model's weights, which are saved to a temporary folder and loaded from it."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(f"{model.name_or_path}: its weights are quantised: load its folder with forerun's LLM")
    if any("lora_" in name or "base_layer" in name for name, _ in model.named_parameters()):
        raise UnsupportedModel(f"{model.name_or_path}: it has adapters: merge them, as with merge_and_unload()")
    with TemporaryDirectory(prefix="forerun-") as folder:
        model.config.save_pretrained(folder)
        read_config(Path(folder))  # raises for unsupported models before the weights are written
        model.save_pretrained(folder)
        source: str | None = model.name_or_path
        if tokenizer is not None and not isinstance(tokenizer, str):
            tokenizer.save_pretrained(folder)
            source = None
        spec = ModelSpec(folder, tokenizer=tokenizer or source if source is not None else None, dtype=model.dtype)
        try:
            return LLM(spec, draft, device=model.device, generation_config="none", **options)
        except (ModelNotFound, TokenizerError) as error:
            fix = "pass one with custom_generate=partial(generate, tokenizer=tokenizer)"
            raise TokenizerError(
                f"the model {source!r} has no tokenizer that forerun can load ({error}): {fix}"
            ) from error


def check_call(model: PreTrainedModel, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidRequest, naming the argument, for unsupported arguments that would change the answer."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{model.name_or_path}: it has an encoder: call generate without custom_generate")
    for name, answer in UNSUPPORTED_OPTIONS.items():
        value = getattr(config, name, None)
        if value and not (name == "num_beams" and value == 1):
            raise InvalidRequest(name, f"{shown(value)}: {answer}.")
    for name, value in model_kwargs.items():
        if value is not None and name not in IGNORED:
            raise InvalidRequest(name, f"{shown(value)[:80]} is not supported: leave it out.")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length():
            raise InvalidRequest(name, f"it holds {cache.get_seq_length()} tokens: pass the entire text as input_ids.")


def prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(tokens, left padding) of every row. Raises InvalidRequest for other padding."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    rows = []
    for row, ids in enumerate(input_ids.tolist()):
        seen = [True] * len(ids) if mask is None else mask[row].bool().tolist()
        num_padding = len(ids) - sum(seen)
        if any(seen[:num_padding]):
            fix = "pad on the left, as with tokenizer.padding_side = 'left'"
            raise InvalidRequest("attention_mask", f"row {row} masks tokens after the first visible one: {fix}.")
        if positions is not None:
            places = positions[row % len(positions), num_padding:].tolist()
            if places != list(range(len(places))):
                raise InvalidRequest("position_ids", f"row {row} has {shown(places)[:80]}: leave them out.")
        rows.append((ids[num_padding:], ids[:num_padding]))
    return rows


def sampling_fields(processors: Sequence[Any], config: Any, row: int, padding: Sequence[int]) -> dict[str, Any]:
    """The fields of SamplingParams for a row; processors without a counterpart are passed as logits processors."""
    left = list(processors)
    fields: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    names: list[str] = []
    while left:
        name = WARPERS.get(type(left[-1])) if config.do_sample else None
        if name and in_order(name, names) and getattr(left[-1], "min_tokens_to_keep", 1) == 1:
            fields[name] = getattr(left.pop(), name)
            names.insert(0, name)
        elif isinstance(left[-1], logits_process.LogitNormalization):  # it does not change the distribution
            left.pop()
        else:
            break
    if len(left) == 1 and is_repetition_penalty(left[0], row, padding):
        fields["repetition_penalty"] = left.pop().penalty
    fields["logits_processors"] = [RowProcessor(processor_for_row(each, row), tuple(padding)) for each in left]
    return fields


def is_repetition_penalty(processor: Any, row: int, padding: Sequence[int]) -> bool:
    """Whether a processor equals forerun's repetition_penalty: over all tokens of a row except its padding."""
    if type(processor) is not logits_process.RepetitionPenaltyLogitsProcessor:
        return False
    ignored = processor.prompt_ignore_length
    return int(ignored[row] if isinstance(ignored, Tensor) else ignored or 0) == len(padding)


def in_order(name: str, later: Sequence[str]) -> bool:
    """Whether forerun applies `name` and then `later` in transformers' order; they differ in min_p and top_p."""
    order = list(WARPERS.values())
    return not later or (order.index(name) < order.index(later[0]) and not {name, *later} >= {"top_p", "min_p"})


def processor_for_row(processor: Any, row: int) -> Any:
    """A batch's processor restricted to one row. Raises InvalidRequest if that is impossible."""
    if isinstance(processor, BATCH_PROCESSORS):
        problem = "it does not depend on a row's tokens and logits alone: leave it out"
        raise InvalidRequest("logits_processor", f"{type(processor).__name__}: {problem}.")
    if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        return logits_process.RepetitionPenaltyLogitsProcessor(
            processor.penalty, ignored[row : row + 1] if isinstance(ignored, Tensor) else ignored
        )
    if isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
        allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        return logits_process.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(number, ids), 1)
    return processor


@dataclass(frozen=True, slots=True)
class RowProcessor:
    """Adapts a processor of transformers, which also gets the padding, since some processors count it."""

    processor: Any
    padding: tuple[int, ...]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([[*self.padding, *tokens]], device=logits.device)
        scores: Tensor = self.processor(ids, logits[None])
        return scores[0]


@dataclass(frozen=True, slots=True)
class Criteria:
    """When texts end: at a length (including padding), at token ids, or by other stopping criteria.

    `pads`: whether finished rows are padded. Without end ids, as in transformers, all rows continue until all have
    ended.
    """

    max_length: int
    end_ids: tuple[int, ...]
    pads: bool
    others: tuple[Any, ...]

    @classmethod
    def of(cls, criteria: Sequence[Any], num_ids: int) -> Criteria:
        """Build it from transformers' criteria, for a vocabulary of `num_ids` ids."""
        lengths = [each.max_length for each in criteria if isinstance(each, criteria_of.MaxLengthCriteria)]
        ends = [each for each in criteria if isinstance(each, criteria_of.EosTokenCriteria)]
        known = (criteria_of.MaxLengthCriteria, criteria_of.EosTokenCriteria)
        ids = {int(i) for each in ends for i in torch.as_tensor(each.eos_token_id).flatten()}
        return cls(
            max_length=min(lengths),
            end_ids=tuple(sorted(i for i in ids if 0 <= i < num_ids)),
            pads=bool(ends),
            others=tuple(each for each in criteria if not isinstance(each, known)),
        )


@dataclass(slots=True)
class RowText:
    """One row of the batch: its sequence, its new tokens, and where it ended."""

    sequence: EngineSequence
    padding: Sequence[int]
    criteria: Criteria
    streamer: Any = None
    tokens: list[int] = field(default_factory=list)
    end: int | None = None  # number of tokens in the answer

    def add(self, token: int) -> None:
        """Add a token; the token that ends the text is part of it."""
        self.tokens.append(token)
        if self.end is None and self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if self.end is None and (token in self.criteria.end_ids or self.stopped()):
            self.end = len(self.tokens)

    def stopped(self) -> bool:
        """Whether any of the other stopping criteria ends the text here."""
        if not self.criteria.others:
            return False
        prompt = self.sequence.tokens[: self.sequence.num_prompt]
        ids = torch.tensor([[*self.padding, *prompt, *self.tokens]])
        return any(bool(torch.as_tensor(each(ids, None)).any()) for each in self.criteria.others)


def run(llm: LLM, texts: Sequence[RowText], criteria: Criteria) -> None:
    """Generate until the answers of all rows are complete."""
    by_id = {text.sequence.id: text for text in texts}
    for delta in llm.deltas([text.sequence for text in texts]):
        text = by_id[delta.seq_id]
        for token in delta.token_ids:
            text.add(token)
        if delta.finish_reason is not None and text.end is None:
            text.end = len(text.tokens)
        ended = all(each.end is not None for each in texts)
        if ended and (criteria.pads or min(len(each.tokens) for each in texts) >= longest(texts)):
            break
        if text.end is not None and criteria.pads and delta.finish_reason is None:
            llm.driver.jobs.append(llm.driver.cancel_job({text.sequence.request_id}))


def longest(texts: Sequence[RowText]) -> int:
    """The length of the longest answer."""
    return max(text.end or 0 for text in texts)


def as_tensor(input_ids: Tensor, texts: Sequence[RowText], criteria: Criteria, config: Any) -> Tensor:
    """Prompts and answers as one tensor, padded on the right."""
    width, pad = longest(texts), getattr(config, "_pad_token_tensor", None)
    rows = []
    for text in texts:
        tokens = text.tokens[: text.end if criteria.pads else width]
        rows.append([*tokens, *[0 if pad is None else int(pad)] * (width - len(tokens))])
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
