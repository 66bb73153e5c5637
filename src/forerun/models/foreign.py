"""Describes folders that cannot be loaded, for error messages: other formats, adapters, interrupted downloads.

A folder is recognised by its files, by config.json or by the names of its tensors; each kind has a description and a
fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forerun.errors import ModelError
from forerun.fields import read_fields
from forerun.limits import shown

ORIGINAL = "use the float16 or bfloat16 original, with --quantize int8 or int4 where memory is short"
OF_OTHER_KINDS = (
    ("modules.json", "is a model of sentence-transformers, which computes embeddings", "choose a language model"),
    ("model_index.json", "is a pipeline of diffusers, which generates images", "choose a language model"),
)
FOREIGN = (  # file pattern, the most specific first; description; fix
    (
        "adapter_config.json",
        "is an adapter (LoRA) of {base}, and adapters are not supported",
        "merge it into its base with peft (`AutoPeftModelForCausalLM.from_pretrained({folder!r}).merge_and_unload()"
        ".save_pretrained(NEW_FOLDER)`)",
    ),
    ("mmproj*.gguf", "has {name}, the image encoder of a model", "name the folder of a language model"),
    *OF_OTHER_KINDS,
    (
        "pytorch_model*.bin",
        "has {name} but no safetensors, and pickles can run code, so they are not loaded",
        'convert it, if you trust it, with `python -c "from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained({folder!r}, dtype='auto').save_pretrained({folder!r})\"`",
    ),
    (
        "consolidated*",
        "has {name}, weights in their publisher's own layout, which is not supported",
        "use the version of the model for Hugging Face transformers",
    ),
    (
        "model.safetensors",
        "has {name}, but another file is missing",
        "download the rest (`hf download owner/name`)",
    ),
    ("*.safetensors", "has {name} but no model.safetensors", "rename it if it contains the entire model"),
    *(
        (f"*.{end}", "has {name}, and weights in this format are not supported", "use the version in safetensors")
        for end in ("onnx", "h5", "msgpack", "pt", "pth", "bin", "ckpt", "nemo")
    ),
)
INTERRUPTED = tuple(  # files that interrupted downloads leave
    (pattern, "lacks files whose download was interrupted, as {name} shows", "repeat it (`hf download owner/name`)")
    for pattern in (
        "*.incomplete",
        ".cache/huggingface/download/*.incomplete",
        "../../blobs/*.incomplete",
        "*.aria2",
        "*.part",
    )
)
TENSORS = {  # endings or parts of tensor names, the most specific first, and their format
    ".lora_A.": "of an adapter (LoRA)",
    ".qweight": "quantised by GPTQ or AWQ",
    ".quant_map": "quantised by bitsandbytes",
    ".SCB": "quantised by bitsandbytes",
    ".weight_scale_inv": "quantised to FP8 in blocks",
    ".weight_packed": "quantised by compressed-tensors",
    ".weight_scale": "quantised by compressed-tensors, or to FP8",
    "_blocks": "quantised to MXFP4",
    ".W_q": "quantised by HQQ",
    ".codebooks": "quantised by AQLM",
    ".trellis": "quantised by ExLlama",
    ".q_weight": "quantised by ExLlama",
    ".scales": "quantised by MLX",  # after the formats above, which have scales too
}
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")  # keys of multimodal models


def describe_unreadable(folder: Path, kinds: Sequence[tuple[str, str, str]] = (*INTERRUPTED, *FOREIGN)) -> str | None:
    """What an unusable folder is, and a fix, as a sentence without its subject, the folder; None if it is unknown."""
    for pattern, what, fix in kinds:
        for path in sorted(folder.glob(pattern)):
            base = read_fields(path, ModelError).values.get("base_model_name_or_path") if "{base}" in what else None
            return f"{what}: {fix}".format(name=path.name, folder=str(folder), base=shown(base))
    return None


def foreign_tensors(names: Iterable[str]) -> str | None:
    """What unsupported tensors of these names are, and a fix; None if they may be a model's."""
    parts = {part for name in names for part in TENSORS if name.endswith(part) or (part[-1] == "." and part in name)}
    part = next((part for part in TENSORS if part in parts), None)
    config = f"{ORIGINAL}; or the config.json that came with the weights, if that describes the quantisation"
    fix = "merge it into its base with peft (merge_and_unload)" if part == ".lora_A." else config
    return None if part is None else f"its tensors are {TENSORS[part]}, as names with {part} show: {fix}"
