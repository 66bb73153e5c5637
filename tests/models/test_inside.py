"""A language model inside a multimodal model gives that model's logits for text; vision and audio parts are ignored."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from forerun.errors import UnsupportedModel
from forerun.models.inside import INSIDE
from forerun.models.loading import Blueprint
from kit.checkpoints import read_json
from models.test_families import LENGTH, MINISTRAL, SIZES, VOCAB, WINDOW, our_logits, randomise

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
SIGLIP, CLIP = VISION | {"model_type": "siglip_vision_model"}, VISION | {"model_type": "clip_vision_model"}
COHERE = {"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": WINDOW}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # type, the text's options, the vision part's
    "Mistral3ForConditionalGeneration": ("mistral3", {"head_dim": 16}, VISION | {"head_dim": 16}),
    "Gemma3ForConditionalGeneration": ("gemma3", GEMMA3, SIGLIP),
    "LlavaForConditionalGeneration": ("llava", {"model_type": "llama"}, CLIP),
    "LlavaNextForConditionalGeneration": ("llava_next", {"model_type": "llama"}, CLIP),
    "InternVLForConditionalGeneration": ("internvl", {}, VISION | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "Cohere2VisionForConditionalGeneration": ("cohere2_vision", COHERE, SIGLIP),
    "AyaVisionForConditionalGeneration": ("aya_vision", COHERE, SIGLIP),
    "SmolVLMForConditionalGeneration": ("smolvlm", {}, VISION),
    "Idefics3ForConditionalGeneration": ("idefics3", {}, VISION),
    "VoxtralForConditionalGeneration": ("voxtral", {}, VISION),
}
MINISTRAL3 = {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL}
CASES = [*MODELS.items(), ("Mistral3ForConditionalGeneration", ("mistral3", MINISTRAL3, VISION | {"head_dim": 16}))]


def build(architecture: str, kind: str, text: dict[str, Any], vision: dict[str, Any], folder: Path) -> PreTrainedModel:
    """A random model of transformers, and its checkpoint in `folder`."""
    torch.manual_seed(5)
    senses = {"audio_config" if kind == "voxtral" else "vision_config": vision}
    sizes = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
    text = sizes | {"model_type": INSIDE[architecture]["model_type"]} | text
    config = AutoConfig.for_model(kind, text_config=text, tie_word_embeddings=False, **senses)
    model = getattr(transformers, architecture)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.short("Mistral3*", "Cohere2Vision*")
@pytest.mark.parametrize(("architecture", "parts"), CASES, ids=[f"{name} {text}"[:50] for name, (_, text, _) in CASES])
def test_logits_are_those_of_the_whole_model(
    architecture: str,
    parts: tuple[str, dict[str, Any], dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(architecture, *parts, tmp_path)
    tokens = torch.randint(11, VOCAB - 20, (LENGTH,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    assert expected.std() > 3
    with caplog.at_level(logging.WARNING):
        blueprint = Blueprint.of(str(tmp_path), dtype="float32", kernels="torch")
    messages = [record.getMessage() for record in caplog.records]
    assert [each for each in messages if "only text is supported" in each] == messages[:1]
    torch.testing.assert_close(our_logits(blueprint, tokens.tolist(), [LENGTH]), expected, rtol=0, atol=1e-4)


def test_all_models_of_the_table_are_compared() -> None:
    assert MODELS.keys() == INSIDE.keys()


def test_what_counts_for_all_parts_counts_for_the_text(tmp_path: Path) -> None:
    """End ids, number format, quantisation, and whether the head is tied may be outside of the text's values."""
    kind, text, vision = MODELS["LlavaForConditionalGeneration"]
    build("LlavaForConditionalGeneration", kind, text | {"eos_token_id": 9}, vision, tmp_path)
    raw = read_json(tmp_path / "config.json")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)

    def written(**changes: object) -> Blueprint:
        (tmp_path / "config.json").write_text(json.dumps(raw | changes), encoding="utf-8")
        return Blueprint.of(str(tmp_path), kernels="torch")

    assert written(eos_token_id=None).config.eos_ids == (9,)
    assert written(eos_token_id=7).config.eos_ids == (7,)
    assert written(dtype="bfloat16").config.dtype == torch.bfloat16
    with pytest.raises(UnsupportedModel, match=r"quantization_config: quant_method is 'aqlm'; supported are"):
        written(quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedModel, match=r"model_type is 'gpt2'; supported are"):
        written(text_config=raw["text_config"] | {"model_type": "gpt2", "architectures": None})
