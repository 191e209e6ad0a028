"""The package's exceptions. Each message says what to do; each class has an exit code for the command line."""


class FedetError(Exception):
    """A failure that the user can do something about; the message says what."""

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
    """The user stopped the run; a checkpoint was written."""

    exit_code = 130
