"""Every way a command can end badly, as one line on standard error and an exit code. Nobody but `--debug` sees a traceback.

Exit codes are those of DESIGN 4. Beyond them: 70 for a fault of ours, 74 for a file or disk that fails, 130 for Ctrl-C and 141 for a
reader that went away, as shells have it.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

import click

from phalanx.cli.terminal import clean, terminal
from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.work.nearest import nearest

_INTERNAL: Final = 70  # EX_SOFTWARE of sysexits.h
_IO: Final = 74  # EX_IOERR
_INTERRUPTED: Final = 130  # 128 + SIGINT
_WORDS_MAX: Final = 1200  # characters of a message: some eight lines of a terminal
NO_READER: Final = 141  # 128 + SIGPIPE


def ended_by(fault: BaseException, *, debug: bool) -> int:
    """Tell what went wrong and give the exit code."""
    if debug:
        traceback.print_exception(fault)
    match fault:
        case PhalanxError():
            return told(fault.message, fault.hint, fault.exit_code)
        case click.NoSuchOption():
            return told(*_no_such_option(fault), ExitCode.USAGE)
        case click.ClickException():
            return told(_words(fault.format_message()), _help_of(fault), ExitCode.USAGE)
        case KeyboardInterrupt() | click.Abort():
            return _INTERRUPTED
        case UnicodeEncodeError(reason="surrogates not allowed"):  # bytes of the command line that are no text
            return told(f"{fault.object!r}: not UTF-8", "names and words are UTF-8 text", ExitCode.USAGE)
        case ValueError(
            args=("embedded null byte",)
        ):  # no shell can hand one over, but a program that calls us in its own process can
            return told("a name with a NUL byte in it: there is no such file", "", ExitCode.USAGE)
        case BrokenPipeError():
            # What Python still holds for the reader that left must not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NO_READER
        case OSError():
            where = f"{fault.filename}: " if fault.filename else ""
            return told(f"{where}{fault.strerror or fault}", "", _IO)
        case _:
            return told(
                f"a fault of Phalanx itself: {type(fault).__name__}: {fault}",
                "run again with --debug and report it",
                _INTERNAL,
            )


def told(message: str, hint: str, code: int) -> int:
    """Print `phalanx: error: message (hint)` on standard error; give `code` back."""
    screen = terminal(sys.stderr)
    line = _short(clean(message).strip()) + (f" ({_short(clean(hint).strip())})" if hint else "")
    print(f"phalanx: {screen.paint('error:', 'bright_red')} {line}", file=sys.stderr)
    return int(code)


def _short(text: str) -> str:
    """The text, without its middle where that is longer than anybody reads: what was typed may be a whole file."""
    return text if len(text) <= _WORDS_MAX else f"{text[: _WORDS_MAX // 2]} ... {text[-_WORDS_MAX // 2 :]}"


def warn(message: str) -> None:
    """One line on standard error that stops nothing."""
    print(f"phalanx: {clean(message)}", file=sys.stderr)


def _no_such_option(fault: click.NoSuchOption) -> tuple[str, str]:
    known = [option for param in fault.ctx.command.get_params(fault.ctx) for option in param.opts] if fault.ctx else []
    near = nearest(fault.option_name, [option for option in known if option.startswith("--")])
    return f"no such option {fault.option_name}", f"did you mean {near}?" if near else _help_of(fault)


def _words(message: str) -> str:
    """Click's sentence in our manner: lower case at the start, no full stop at the end."""
    flat = " ".join(message.split()).rstrip(".")
    return flat[:1].lower() + flat[1:]


def _help_of(fault: click.ClickException) -> str:
    context = fault.ctx if isinstance(fault, click.UsageError) else None
    return f"see {context.command_path} --help" if context else ""
