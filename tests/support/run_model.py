"""A tiny random model with which a whole run works: it has a chat template, and words of its vocabulary are
verdicts, so that even a random GenRM gives some."""

import json
from pathlib import Path

from tests.support.tiny_model import TinySpec, write_model

VERDICTS = tuple(f"{before}Score: {score}\n" for score in (3, 9) for before in ("\n", " \n", ".\n", "!\n"))
NUM_BYTE_TOKENS = 259
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_run_model(folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder of about 4 MB."""
    spec = TinySpec(
        vocab_size=NUM_BYTE_TOKENS + len(VERDICTS),
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
        seed=seed,
    )
    target = write_model(spec, folder)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    known = {entry["id"] for entry in tokenizer["added_tokens"]}
    for i, text in enumerate(VERDICTS):
        if NUM_BYTE_TOKENS + i not in known:
            tokenizer["added_tokens"].append(
                {
                    "id": NUM_BYTE_TOKENS + i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": False,
                }
            )
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return target
