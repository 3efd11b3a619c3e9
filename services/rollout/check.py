"""Reads the data and the reward template of a run as the services will, before anything starts.

python -m services.rollout.check < config.json      one JSON line: {"detail"} or {"field", "value",
"problem", "remedy"}"""

import json
import sys
from pathlib import Path

from services.rollout.dataset import open_source
from shared.errors import ConfigError
from shared.runtime.config import RunConfig


def main() -> None:
    config = RunConfig.model_validate_json(sys.stdin.read())
    try:
        source = open_source(config.data, config.run.seed)
        question = source.prompt(0).question
        _check_template(config.reward.template)
    except ConfigError as error:
        answer = {
            "field": error.field,
            "value": str(error.value) if error.value is not None else None,
            "problem": error.problem,
            "remedy": error.remedy,
        }
    else:
        answer = {"detail": f"{config.data.source}, first: {question[:60]!r}"}
    print(json.dumps(answer))


def _check_template(name: str) -> None:
    if name != "pointwise" and not Path(name).is_file():
        raise ConfigError(
            "reward.template", name, "is no built-in template and no file", "Use pointwise, or a file"
        )


if __name__ == "__main__":
    main()
