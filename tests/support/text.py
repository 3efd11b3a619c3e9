"""A tokenizer without a model: a token per character on the way in, a scripted text on the way out."""

from collections.abc import Callable, Mapping, Sequence


class ScriptedTokenizer:
    """`says` makes the text of a generated response from its tokens."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(
        self, says: Callable[[Sequence[int]], str] = lambda tokens: "Looks right.\nScore: 8"
    ) -> None:
        self.says = says
        self.asked: list[str] = []

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "\n".join(message["content"] for message in messages)
        self.asked.append(text)
        return [ord(char) % 30_000 for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.says(token_ids)
