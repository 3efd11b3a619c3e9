"""Text to token ids and back, with the model's own chat template. Token ids travel from then on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder (transformers).

    Raises:
        ConfigError: the folder has no tokenizer or no chat template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "models", str(folder), f"has no usable tokenizer ({error})", "Name a complete folder"
            ) from error
        if not self._tokenizer.chat_template:
            raise ConfigError("models", str(folder), "has no chat template", "Use an instruct model")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the templated conversation, ready for the assistant's turn."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)
