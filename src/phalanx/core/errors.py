"""Errors that reach a user. Each class says whether another try helps and which exit code the command ends with (DESIGN 4)."""

from __future__ import annotations

import enum
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """Exit codes of `phalanx` itself; a job's own code passes through unchanged."""

    USAGE = 64
    UNREACHABLE = 69
    TRY_LATER = 75
    NOT_PERMITTED = 77
    BAD_FILE = 78
    WAIT_TIMED_OUT = 124


class PhalanxError(Exception):
    """A refusal in one line.

    Args:
        message: what is wrong and with which id.
        hint: what to do next, as a sentence or a command; empty when nothing helps.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[ExitCode] = ExitCode.USAGE
    http_status: ClassVar[int] = 400
    retry_helps: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadRequest(PhalanxError):
    """The words of a command or request contradict each other or the grammar."""

    code = "bad_request"


class BadFile(PhalanxError):
    """A job file, script or upload cannot be read as what it should be."""

    code = "bad_file"
    exit_code = ExitCode.BAD_FILE
    http_status = 422


class NeverFits(PhalanxError):
    """No placement exists even on the empty fleet."""

    code = "never_fits"
    http_status = 422


class NotFound(PhalanxError):
    """There is no such job, node, user, project, queue or token."""

    code = "not_found"
    http_status = 404


class Conflict(PhalanxError):
    """The thing is in a state in which this cannot be done."""

    code = "conflict"
    http_status = 409


class NotSignedIn(PhalanxError):
    """No token, an unknown one, an expired or revoked one."""

    code = "not_signed_in"
    exit_code = ExitCode.NOT_PERMITTED
    http_status = 401


class NotPermitted(PhalanxError):
    """The token is good and its user may not do this."""

    code = "not_permitted"
    exit_code = ExitCode.NOT_PERMITTED
    http_status = 403


class TooLarge(PhalanxError):
    """A body, file or name is over its limit."""

    code = "too_large"
    exit_code = ExitCode.BAD_FILE
    http_status = 413


class TryLater(PhalanxError):
    """Nothing was done, and the same request may go through later."""

    code = "try_later"
    exit_code = ExitCode.TRY_LATER
    http_status = 503
    retry_helps = True


class NotLeading(TryLater):
    """This head stands by; another leads, or none does yet. `leader` is where that one is, empty where it is not known."""

    code = "not_leading"

    def __init__(self, message: str, *, hint: str = "", leader: str = "") -> None:
        super().__init__(message, hint=hint)
        self.leader = leader


class OutcomeUnknown(PhalanxError):
    """This head's term ended before it could answer: the thing may have been done, or not. What may happen twice is safe to repeat."""

    code = "outcome_unknown"
    exit_code = ExitCode.TRY_LATER
    http_status = 503


class Unreachable(PhalanxError):
    """The head does not answer. Raised on the client's side alone."""

    code = "unreachable"
    exit_code = ExitCode.UNREACHABLE
    http_status = 502
    retry_helps = True


class WaitTimedOut(PhalanxError):
    """The wait the user bounded is over; the job goes on."""

    code = "wait_timed_out"
    exit_code = ExitCode.WAIT_TIMED_OUT
    http_status = 504
    retry_helps = True


BY_CODE: dict[str, type[PhalanxError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        BadFile,
        NeverFits,
        NotFound,
        Conflict,
        NotSignedIn,
        NotPermitted,
        TooLarge,
        TryLater,
        NotLeading,
        OutcomeUnknown,
        Unreachable,
        WaitTimedOut,
    )
}
