"""What every message on the bus is."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """A frozen value on the wire. Unknown fields are ignored, so that a newer peer can be read; new fields
    come last and have defaults. A change that an old reader would misread raises `schema_version`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    schema_version: ClassVar[int] = 1

    def summary(self) -> str:
        """One line for a person watching `nats sub 'pivotrl.>'`."""
        return type(self).__name__


class Done(Message):
    """any peer → its caller: the command was carried out and has nothing to report."""


class Failure(Message):
    """any peer → its caller: the command failed; `shared.errors.from_wire` makes the error again."""

    code: str
    message: str
    data: dict[str, object] = {}

    def summary(self) -> str:
        return f"failed ({self.code}): {self.message}"
