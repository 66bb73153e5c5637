"""Recognises folders that are no readable checkpoint, for error messages: other formats, parts, broken downloads.

Such a folder is recognised by its files, by config.json or by the names of its tensors; each kind has a description and
a fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forerun.errors import ModelError
from forerun.fields import read_fields
from forerun.limits import shown

ORIGINAL = "use the float16 or bfloat16 original, with --quantize int8 or int4 where memory is short"
OF_OTHER_KINDS = (
    ("modules.json", "is of sentence-transformers, whose models make vectors and no text", "choose a language model"),
    ("model_index.json", "is a pipeline of diffusers, which makes images", "choose a language model"),
)
FOREIGN = (  # file pattern, the most specific first; description; fix
    (
        "adapter_config.json",
        "is an adapter (LoRA) of {base}, and adapters are not read",
        "merge it into its base with peft (`AutoPeftModelForCausalLM.from_pretrained({folder!r}).merge_and_unload()"
        ".save_pretrained(NEW_FOLDER)`)",
    ),
    ("mmproj*.gguf", "has {name}, the part of a model that reads images", "name the folder of a language model"),
    *OF_OTHER_KINDS,
    (
        "pytorch_model*.bin",
        "has {name} but no safetensors, and pickles can run code, so they are not read",
        'convert it, if you trust it, with `python -c "from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained({folder!r}, dtype='auto').save_pretrained({folder!r})\"`",
    ),
    (
        "consolidated*",
        "has {name}, weights in their publisher's own layout, which is not read",
        "use the version of the model for Hugging Face transformers",
    ),
    (
        "model.safetensors",
        "has {name}, but a file beside it is missing",
        "download the rest (`hf download owner/name`)",
    ),
    ("*.safetensors", "has {name} but no model.safetensors", "rename it if it holds the whole model"),
    *(
        (f"*.{end}", "has {name}, and weights in this format are not read", "use the version in safetensors")
        for end in ("onnx", "h5", "msgpack", "pt", "pth", "bin", "ckpt", "nemo")
    ),
)
BROKEN_OFF = tuple(  # files that interrupted downloads leave
    (pattern, "lacks files whose download was interrupted, as {name} shows", "repeat it (`hf download owner/name`)")
    for pattern in (
        "*.incomplete",
        ".cache/huggingface/download/*.incomplete",
        "../../blobs/*.incomplete",
        "*.aria2",
        "*.part",
    )
)
TENSORS = {  # ends or parts of tensor names, the most specific first, and the format
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
    ".scales": "quantised by MLX",  # others have scales too, beside the names above
}
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")  # keys of multimodal models


def describe_unreadable(folder: Path, kinds: Sequence[tuple[str, str, str]] = (*BROKEN_OFF, *FOREIGN)) -> str | None:
    """A description of an unreadable folder and a fix, as a sentence without its subject, the folder; None if it is of
    no known kind."""
    for pattern, what, cure in kinds:
        for path in sorted(folder.glob(pattern)):
            base = read_fields(path, ModelError).values.get("base_model_name_or_path") if "{base}" in what else None
            return f"{what}: {cure}".format(name=path.name, folder=str(folder), base=shown(base))
    return None


def foreign_tensors(names: Iterable[str]) -> str | None:
    """A description of unsupported tensors with these names and a fix; None if they may be a model's."""
    parts = {part for name in names for part in TENSORS if name.endswith(part) or (part[-1] == "." and part in name)}
    part = next((part for part in TENSORS if part in parts), None)
    config = f"{ORIGINAL}; or config.json as it came with the weights, if that says how they are quantised"
    cure = "merge it into its base with peft (merge_and_unload)" if part == ".lora_A." else config
    return None if part is None else f"its tensors are {TENSORS[part]}, as names with {part} show: {cure}"
