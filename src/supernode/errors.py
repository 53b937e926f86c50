"""What can go wrong, and what to do then.

Every error that a user, a file or a machine can cause is one of these: `what is wrong, with the numbers` in the
message, `what to do` in the hint. The command line prints both and leaves with `exit_code`; no traceback is shown.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "DataError",
    "MachineError",
    "ModelError",
    "RunError",
    "SpecError",
    "SupernodeError",
]


class SupernodeError(Exception):
    """An error with a remedy.

    Attributes:
        hint: what to do about it, naming the key or the flag.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\nhint: {self.hint}" if self.hint else message

    @property
    def message(self) -> str:
        """What is wrong, without the hint."""
        return super().__str__()


class SpecError(SupernodeError):
    """A job file, a flag or an argument is wrong."""


class CapacityError(SupernodeError):
    """The machine has less than was asked for; the message names what is short and the largest that would fit."""


class ModelError(SupernodeError):
    """The user's model cannot be loaded, built or cut as asked."""


class DataError(SupernodeError):
    """The training data is missing, too short or not what the job says."""


class CheckpointError(SupernodeError):
    """A checkpoint cannot be written, read or trusted."""


class MachineError(SupernodeError):
    """This computer lacks what the run needs: a library, a port, disk space, a card."""


class RunError(SupernodeError):
    """A run cannot start, go on or be found."""


BY_NAME = {
    kind.__name__: kind
    for kind in (SpecError, CapacityError, ModelError, DataError, CheckpointError, MachineError, RunError)
}
"""Every kind by its name, so that an error can cross a process as text and arrive as itself."""
