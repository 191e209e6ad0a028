"""The package's exceptions and their exit codes on the command line; each message says what to do."""


class FedetError(Exception):
    """An error that the user can fix; the message says how."""

    exit_code = 1


class ConfigError(FedetError):
    """The configuration or the command line asks for something impossible."""

    exit_code = 2


class DataError(FedetError):
    """Data is missing or invalid."""

    exit_code = 3


class Diverged(FedetError):
    """Training diverged: weights or losses are no longer finite."""

    exit_code = 4


class Interrupted(FedetError):
    """The run was stopped by the user, after writing a checkpoint."""

    exit_code = 130


class StopRun(Exception):
    """Raised by a callback to end the run after the current round, with a checkpoint and a result."""


class FedetWarning(UserWarning):
    """Something about a run that is no error but probably not what the user meant."""
