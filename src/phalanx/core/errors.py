"""Errors that reach a user. Each class defines whether a retry helps, and the exit code of the command (DESIGN 4)."""

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
    """Base class: a one-line message with a hint.

    Args:
        message: what is wrong, and with which id.
        hint: what to do next: a sentence, or a `core.hints.Hint`, which front ends render; empty if nothing helps.
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
    """A command or request is malformed or contradicts itself."""

    code = "bad_request"


class BadFile(PhalanxError):
    """A job file, script or upload cannot be parsed."""

    code = "bad_file"
    exit_code = ExitCode.BAD_FILE
    http_status = 422


class NeverFits(PhalanxError):
    """The job can never start: no placement exists even on the empty fleet, or it alone exceeds a limit of its queue."""

    code = "never_fits"
    http_status = 422


class NotFound(PhalanxError):
    """The job, node, user, project, queue or token does not exist."""

    code = "not_found"
    http_status = 404


class Conflict(PhalanxError):
    """The object's current state does not allow this operation."""

    code = "conflict"
    http_status = 409


class UploadNotBegun(Conflict):
    """The head has no open upload of this checkpoint, for example because it restarted: begin again."""

    code = "upload_not_begun"


class OutputsFull(Conflict):
    """The project has used the space that its jobs may take for outputs at the head."""

    code = "outputs_full"


class NotSignedIn(PhalanxError):
    """The token is missing, unknown, expired or revoked."""

    code = "not_signed_in"
    exit_code = ExitCode.NOT_PERMITTED
    http_status = 401


class NotPermitted(PhalanxError):
    """The token is valid, but its user may not do this."""

    code = "not_permitted"
    exit_code = ExitCode.NOT_PERMITTED
    http_status = 403


class TooLarge(PhalanxError):
    """A body, file or name is over its limit."""

    code = "too_large"
    exit_code = ExitCode.BAD_FILE
    http_status = 413


class TryLater(PhalanxError):
    """Nothing was done; the same request may succeed later."""

    code = "try_later"
    exit_code = ExitCode.TRY_LATER
    http_status = 503
    retry_helps = True


class NotLeading(TryLater):
    """This head is a standby. `leader`: URL of the leading head; empty if unknown or if none leads."""

    code = "not_leading"

    def __init__(self, message: str, *, hint: str = "", leader: str = "") -> None:
        super().__init__(message, hint=hint)
        self.leader = leader


class OutcomeUnknown(PhalanxError):
    """This head lost leadership before it answered: the request may or may not have been carried out. Repeat it only if it is idempotent."""

    code = "outcome_unknown"
    exit_code = ExitCode.TRY_LATER
    http_status = 503


class Unreachable(PhalanxError):
    """The head does not answer. Raised only by the client."""

    code = "unreachable"
    exit_code = ExitCode.UNREACHABLE
    http_status = 502
    retry_helps = True


class WaitTimedOut(PhalanxError):
    """The user's time limit for waiting has passed; the job continues."""

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
        UploadNotBegun,
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
