"""One exception hierarchy; each class is one documented exit code.

0  done
1  the thing asked for is not so (a check fails, a benchmark differs)
2  usage or configuration
3  a requirement is missing (root, BPF, headers, a program, a file)
4  unexpected failure (a bug, or the system refused something it should not)
"""

from __future__ import annotations


class MoetunerError(Exception):
    """Something the user has to know, in one sentence, with what to do about it.

    `message` names the file, key, line or process; `hint` says what was expected
    or what to do. `exit_code` is what the command line ends with.
    """

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class NotSo(MoetunerError):
    """What was asked is not the case: a check failed, a comparison differs."""

    exit_code = 1


class UsageError(MoetunerError):
    """The command line is wrong."""

    exit_code = 2


class ConfigError(MoetunerError):
    """The configuration is wrong; `message` begins with `FILE:LINE:`."""

    exit_code = 2


class MissingRequirement(MoetunerError):
    """Root, a kernel feature, a package or a file is missing."""

    exit_code = 3


class SystemRefused(MoetunerError):
    """The kernel or the file system refused something; names path, value and reason."""

    exit_code = 4


def reason(error: OSError) -> str:
    """`Permission denied` rather than `[Errno 13] Permission denied: '/sys/…'`."""
    return error.strerror or str(error)
