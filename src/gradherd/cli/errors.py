"""The two ways in which a command fails; `main` turns them into one line and an exit code.

They have a module of their own because `main` imports nothing else: `gradherd --help` should not
wait for the packages that commands need.
"""


class UsageError(ValueError):
    """The call is wrong (exit code 2): one line with the option, the value and what is allowed."""


class CommandFailed(RuntimeError):
    """The call is right but the work failed (exit code 1): one line that says what happened."""


def reason_of(error: Exception) -> str:
    """Return what an error says to people, without the number of the operating system.

    >>> reason_of(OSError(28, "No space left on device", "out/record.json"))
    'No space left on device: out/record.json'
    """
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (error.strerror, str(error.filename or ""))))
    return str(error)
