"""What can go wrong, each with a sentence that says what to do and the exit code of the command line."""


class FedetError(Exception):
    """A failure the user can act on; its message says how."""

    exit_code = 1


class ConfigError(FedetError):
    """The configuration or the command line asks for something that can't be."""

    exit_code = 2


class DataError(FedetError):
    """Data is missing, or is not what it should be."""

    exit_code = 3


class Diverged(FedetError):
    """Training left the finite numbers."""

    exit_code = 4


class Interrupted(FedetError):
    """The user stopped the run; a checkpoint was written."""

    exit_code = 130
