"""`phalanx chat`: talks with a model that a service serves, through a gateway or with one replica."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.completion import complete_services
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error, warn
from phalanx.cli.jobs.job_follower import StatusLine
from phalanx.cli.list_output import to_json
from phalanx.cli.option_types import DURATION
from phalanx.cli.serve.gateway_address import known_gateway
from phalanx.cli.serve.rollout_wait import progress_text, waiting_hint
from phalanx.cli.serve.service_lookup import require_service
from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import BadRequest, Conflict, PhalanxError, Unreachable, WaitTimedOut
from phalanx.core.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.chat import ChatServer, ChatTimes
    from phalanx.wire.api.services import ServiceDetail

_URL: Final = re.compile(r"https?://[^/\s]+(/\S*)?", re.IGNORECASE)
_POLL_S: Final = 0.5
_PROMPT_MAX: Final = 4 << 20  # characters of standard input
_INTERRUPTED: Final = 130  # 128 + SIGINT


@click.command()
@click.argument("model", metavar="MODEL", shell_complete=complete_services)
@click.option("-m", "--message", metavar="TEXT", help="Ask this, print the answer, and end; - reads standard input.")
@click.option("--system", metavar="TEXT", default="", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0.0), metavar="T", help="0 for the likeliest answer.")
@click.option("--stats", is_flag=True, help="Print time to the first token and tokens per second after each answer.")
@click.option(
    "--gateway",
    metavar="URL",
    help="Gateway to ask; default: PHALANX_GATEWAY, else that of this machine, else a replica.",
)
@click.option("--wait", type=DURATION, default="10m", show_default=True, help="How long to wait for a replica.")
@click.option("--json", "as_json", is_flag=True, help="With -m: print the answer, its tokens and times as JSON.")
def chat(model: str, message: str | None, gateway: str | None, wait: str, as_json: bool, **options: Any) -> int:
    """Talk with the model of a service. Ctrl-C stops an answer, Ctrl-D leaves.

    A service without a replica is woken, or its first replica is started, as the gateway does.

    \b
    phalanx chat llama-8b
    phalanx chat llama-8b -m "Why is the sky blue?" --stats
    git diff | phalanx chat llama-8b -m - --system "Write a commit message."
    """  # noqa: D301 - click reads the backspace character itself
    message = _piped() if message == "-" or (message is None and not sys.stdin.isatty()) else message
    if message is not None and not message.strip():
        raise BadRequest("the message is empty", hint='phalanx chat MODEL -m "..."')
    if as_json and message is None:
        raise BadRequest("--json needs -m", hint='phalanx chat MODEL -m "..." --json')
    named = gateway or os.environ.get("PHALANX_GATEWAY", "")
    if named and not _URL.fullmatch(named):
        where = "--gateway" if gateway else "PHALANX_GATEWAY"
        raise BadRequest(f"{where}: {named[:80]!r} is not the URL of a gateway", hint="write http://HOST:PORT")
    talk = Conversation(model.strip(), named, parse_duration_s(wait), **options)
    talk.check_model()
    if message is not None:
        return talk.ask_once(message, as_json=as_json)
    return talk.converse()


class Conversation:
    """The turns so far, and where they are asked."""

    def __init__(
        self,
        model: str,
        gateway: str,
        wait_s: float,
        *,
        system: str,
        max_tokens: int | None,
        temperature: float | None,
        stats: bool,
    ) -> None:
        self.model, self._gateway, self._wait_s = model, gateway, wait_s
        self._system, self._stats = system, stats
        given = {"max_tokens": max_tokens, "temperature": temperature}
        self._body = {"model": model, **{key: value for key, value in given.items() if value is not None}}
        self._turns: list[tuple[str, str]] = []
        self._head = connect()
        self._status = StatusLine()
        self._screen = terminal()

    def check_model(self) -> None:
        """Check that a service has this name; without a head only if a gateway is named.

        Raises:
            NotFound: none has; the hint names the nearest.
            Conflict: it is stopped.
        """
        try:
            service = require_service(self._head, self.model).service
        except Unreachable:
            if not self._gateway:
                raise
            return
        if service.stopped_by:
            raise Conflict(f"service {service.name} was stopped by {service.stopped_by}", hint="phalanx serve up FILE")

    def ask_once(self, text: str, *, as_json: bool) -> int:
        """Print the answer to one message; return the exit code."""
        from phalanx.client.chat import ChatTimes

        times, parts = ChatTimes(), list[str]()
        self._turns.append(("user", text))
        try:
            with closing(self._answer(times, quiet=as_json)) as answer:
                parts.extend(answer)
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            self._status.clear()
            if parts and not as_json:
                print(flush=True)
        if as_json:
            print(to_json({"text": "".join(parts), **_stats_record(times)}, indent=2))
        elif self._stats:
            print(_stats_text(times), file=sys.stderr)
        return 0

    def converse(self) -> int:
        """Ask for messages at a prompt until Ctrl-D; an error ends one answer alone."""
        from phalanx.client.chat import ChatTimes

        _load_line_editor()
        print(self._screen.paint(f"{self.model}: Ctrl-C stops an answer, Ctrl-D leaves", "dim"), flush=True)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if not text:
                continue
            times, parts = ChatTimes(), list[str]()
            self._turns.append(("user", text))
            try:
                with closing(self._answer(times, quiet=False)) as answer:
                    parts.extend(answer)  # what came before Ctrl-C is kept
            except KeyboardInterrupt:
                print(self._screen.paint(" (stopped)", "dim"), end="")
            except PhalanxError as error:
                self._status.clear()
                print_error(error.message, error.hint, error.exit_code)
            self._status.clear()
            if parts:
                print()
                self._turns.append(("assistant", "".join(parts)))
            else:
                self._turns.pop()  # so that roles alternate, as chat templates demand
            if self._stats and parts:
                print(self._screen.paint(_stats_text(times), "dim"), file=sys.stderr)

    def _answer(self, times: ChatTimes, *, quiet: bool) -> Generator[str]:
        """Yield and print the pieces of the answer to the last turn; thoughts are printed and not yielded."""
        from phalanx.client.chat import messages

        server, thinking = self._server(), False
        with closing(server.ask({**self._body, "messages": messages(self._system, self._turns)}, times)) as stream:
            for piece in stream:
                if piece.waits:
                    self._status.show(piece.waits)
                    continue
                self._status.clear()
                if piece.thought and not quiet:
                    thinking = True
                    _write(self._screen.paint(self._clean(piece.thought), "dim"))
                if piece.text:
                    if thinking:
                        _write("\n\n")
                        thinking = False
                    if not quiet:
                        _write(self._clean(piece.text))
                    yield piece.text

    def _server(self) -> ChatServer:
        """Return the gateway, or a replica that is ready; wait for one if no replica is ready.

        Raises:
            Unreachable: the named gateway does not listen, or no replica can be reached from here.
            WaitTimedOut: no replica became ready.
        """
        from phalanx.client.chat import ChatServer
        from phalanx.wire.head_url import check_encrypted

        url = (self._gateway or known_gateway()).rstrip("/").removesuffix("/v1").rstrip("/")
        if url and (self._gateway or _listens(url)):
            if not check_encrypted(url):
                warn(f"warning: {url} is not encrypted; anyone on the network can read the token")
            return ChatServer(url=url, headers={"Authorization": self._head.transport.headers()["Authorization"]})
        detail = self._ready_service()
        ends = [end for end in detail.service.endpoints if end.ready]
        for end in ends:
            url = f"http://{f'[{end.address}]' if ':' in end.address else end.address}:{end.port}"
            if _listens(url):
                return ChatServer(url=url)
        where = ", ".join(f"{end.address}:{end.port}" for end in ends)
        raise Unreachable(
            f"no replica of {self.model} can be reached from this machine: {where}",
            hint="start phalanx gateway on a machine that reaches the nodes, and name it: --gateway URL",
        )

    def _ready_service(self) -> ServiceDetail:
        """Return the service once a replica is ready; ask for one if none is wanted or all sleep."""
        until_s, asked, hinted = time.monotonic() + self._wait_s, False, False
        while True:
            detail = self._head.service(self.model)
            service = detail.service
            if service.ready:
                return detail
            if service.stopped_by:
                raise Conflict(
                    f"service {service.name} was stopped by {service.stopped_by}", hint="phalanx serve up FILE"
                )
            if not asked:
                asked = True
                _ask_for_replica(self._head, detail)
            self._status.show(f"waiting for a replica of {self.model}: {progress_text(detail, service.revision)}")
            if time.monotonic() >= until_s:
                raise WaitTimedOut(
                    f"no replica of {self.model} is ready after {format_duration(self._wait_s)}",
                    hint=waiting_hint(detail, service.revision) or f"phalanx serve ps {self.model}",
                )
            if (
                not hinted
                and until_s - time.monotonic() < self._wait_s - 15
                and (hint := waiting_hint(detail, service.revision))
            ):
                hinted = True
                self._status.say(f"hint: {hint}")
            time.sleep(_POLL_S)

    def _clean(self, text: str) -> str:
        """Return the text without control characters on a terminal; a file or pipe gets it as it is."""
        return "\n".join(map(_clean_line, text.split("\n"))) if self._screen.interactive else text


def _ask_for_replica(head: Client, detail: ServiceDetail) -> None:
    """Wake a replica if all sleep, or start the first if none is wanted."""
    service = detail.service
    if service.desired == 0:
        head.scale_service(service.name, service.first_replicas)
    elif service.asleep_wanted >= service.desired:
        head.sleep_service(service.name, awake=1)


def _clean_line(line: str) -> str:
    return "\t".join(map(strip_control, line.split("\t")))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _piped() -> str:
    """Return the message on standard input.

    Raises:
        BadRequest: it is empty or too long.
    """
    text = sys.stdin.read(_PROMPT_MAX + 1).strip()
    if not text or len(text) > _PROMPT_MAX:
        raise BadRequest(
            "standard input has no message" if not text else f"standard input has more than {_PROMPT_MAX} characters"
        )
    return text


def _listens(url: str) -> bool:
    """Return whether something listens at a URL."""
    import socket

    from phalanx.client.chat import CONNECT_S
    from phalanx.wire.head_url import split_url

    try:
        _, host, port = split_url(url)
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, PhalanxError):
        return False
    return True


def _load_line_editor() -> None:
    """Let the prompt have cursor keys and earlier messages, where Python has readline."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported


def _stats_record(times: ChatTimes) -> dict[str, object]:
    return {
        "tokens": times.tokens,
        "prompt_tokens": times.prompt_tokens,
        "cached_tokens": times.cached_tokens,
        "finish": times.finish,
        "ttft_s": times.first_s,
        "total_s": times.last_s,
        "tokens_per_s": times.tokens_per_s,
    }


def _stats_text(times: ChatTimes) -> str:
    """Describe the times of an answer in one line."""
    if times.first_s is None:
        return "no token"
    count = f"{times.pieces} pieces" if times.tokens is None else f"{times.tokens} tokens"
    parts = [f"first token after {times.first_s:.2f} s", f"{count} in {times.last_s:.2f} s"]
    if times.tokens_per_s is not None:
        parts.append(f"{times.tokens_per_s:.1f} tokens/s")
    if times.prompt_tokens is not None:
        cached = f", {times.cached_tokens} of them cached" if times.cached_tokens else ""
        parts.append(f"prompt {times.prompt_tokens} tokens{cached}")
    if times.finish == "length":
        parts.append("cut at its longest")
    return ", ".join(parts)
