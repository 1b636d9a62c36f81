"""Prints every error of a command as one line on standard error, and chooses the exit code. Only `--debug` shows a traceback.

Exit codes are those of DESIGN 4, and: 70 for a bug in Phalanx, 74 for an I/O error, 130 for Ctrl-C and 141 for a closed standard
output, as in shells.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

import click

from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import ExitCode, PhalanxError

_INTERNAL: Final = 70  # EX_SOFTWARE of sysexits.h
_IO: Final = 74  # EX_IOERR
_INTERRUPTED: Final = 130  # 128 + SIGINT
_MESSAGE_CHARS_MAX: Final = 1200  # some eight lines of a terminal
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE


def report_exception(fault: BaseException, *, debug: bool) -> int:
    """Print the error and return the exit code."""
    if debug:
        import traceback

        traceback.print_exception(fault)
    match fault:
        case PhalanxError():
            return print_error(fault.message, fault.hint, fault.exit_code)
        case click.NoSuchOption():
            return print_error(*_no_such_option(fault), ExitCode.USAGE)
        case click.ClickException():
            return print_error(_message_of(fault.format_message()), _help_of(fault), ExitCode.USAGE)
        case KeyboardInterrupt() | click.Abort():
            return _INTERRUPTED
        case UnicodeEncodeError(reason="surrogates not allowed"):  # an argument is not UTF-8
            return print_error(f"{fault.object!r}: not UTF-8", "arguments must be UTF-8 text", ExitCode.USAGE)
        case ValueError(args=("embedded null byte",)):  # impossible from a shell, possible when called from Python
            return print_error("a file name contains a NUL byte", "", ExitCode.USAGE)
        case BrokenPipeError():
            # Discard what Python has buffered, so that flushing it at exit does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        case OSError():
            where = f"{fault.filename}: " if fault.filename else ""
            full = fault.errno in {errno.ENOSPC, errno.EDQUOT}
            hint = "free some space, then type the same command again" if full else ""
            return print_error(f"{where}{fault.strerror or fault}", hint, _IO)
        case _:
            return print_error(
                f"internal error: {type(fault).__name__}: {fault}",
                "this is a bug in Phalanx: run again with --debug and report it",
                _INTERNAL,
            )


def print_error(message: str, hint: str, code: int) -> int:
    """Print `phalanx: error: message (hint)` on standard error; return `code`."""
    from phalanx.web.command_hints import error_line, render_hint  # a command that has no error needs no words for one

    screen = terminal(sys.stderr)
    line = error_line(*(_short(strip_control(text).strip()) for text in (message, render_hint(hint))))
    print(f"phalanx: {screen.paint('error:', 'bright_red')} {line}", file=sys.stderr)
    return int(code)


def _short(text: str) -> str:
    """Return the text, with its middle left out if it is too long: an argument may be a whole file."""
    half = _MESSAGE_CHARS_MAX // 2
    return text if len(text) <= _MESSAGE_CHARS_MAX else f"{text[:half]} ... {text[-half:]}"


def warn(message: str) -> None:
    """Print one line on standard error and continue."""
    print(f"phalanx: {strip_control(message)}", file=sys.stderr)


def _no_such_option(fault: click.NoSuchOption) -> tuple[str, str]:
    from phalanx.core.work.nearest_match import suggestion

    known = [option for param in fault.ctx.command.get_params(fault.ctx) for option in param.opts] if fault.ctx else []
    options = [option for option in known if option.startswith("--")]
    return f"no such option {fault.option_name}", suggestion(fault.option_name, options, _help_of(fault))


def _message_of(message: str) -> str:
    """Return Click's message in our style: lower case at the start, no full stop at the end."""
    flat = " ".join(message.split()).rstrip(".")
    return flat[:1].lower() + flat[1:]


def _help_of(fault: click.ClickException) -> str:
    context = fault.ctx if isinstance(fault, click.UsageError) else None
    return f"see {context.command_path} --help" if context else ""
