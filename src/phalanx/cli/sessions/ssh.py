"""`phalanx ssh` and `phalanx proxy`: an SSH connection to a job, over an exec session that runs `sshd -i` there."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_node
from phalanx.cli.sessions import ssh_files
from phalanx.cli.sessions.exec import ExecCommand
from phalanx.cli.sessions.session_input import InputSender
from phalanx.core.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.exec_sessions import ExecConnection

_LINE_BYTES_MAX: Final = 16_384
_GREETING: Final = re.compile(rb"phalanx-ssh (\S+) (ssh-ed25519 [A-Za-z0-9+/=]+)\n")
_REFUSAL: Final = re.compile(rb"phalanx-ssh-error ([^\n]*)\n")


@click.command(cls=ExecCommand, context_settings={"allow_interspersed_args": False})
@JOB_ARGUMENT
@click.argument("command", metavar="[--] [COMMAND...]", nargs=-1, type=click.UNPROCESSED)
def ssh(job: str, command: tuple[str, ...]) -> None:
    """Connect to a job by SSH: a shell, or a command. JOB.N is node N of the job. The node needs sshd, and no open port."""
    words = command[1:] if command[:1] == ("--",) else command
    settings = ssh_files.settings_file()
    head = connect()
    job_id, node_rank = resolve_node(head, job)
    user = _account(head, job_id, node_rank)
    host = f"{job_id}.{node_rank}{ssh_files.DOMAIN}"
    os.execvp("ssh", ["ssh", "-F", settings, "-l", user, host, *words])  # noqa: S606  # the user's own ssh, found as a shell finds it


@click.command()
@click.argument("host")
@click.option(
    "--user", default="", metavar="NAME", help="The login name that ssh will use; refused if the job has another."
)
def proxy(host: str, user: str) -> int:
    """Carry an SSH connection to the job HOST, as 17.phalanx: for ProxyCommand of ssh, which `phalanx config ssh` sets."""
    key = ssh_files.public_key()
    head = connect()
    job_id, node_rank = resolve_node(head, host.removesuffix(ssh_files.DOMAIN))
    with open(os.path.join(os.path.dirname(__file__), "ssh_server.sh"), encoding="utf-8") as file:
        argv = ["/bin/sh", "-c", file.read(), "phalanx", key]
    with head.exec(job_id, argv, node_rank=node_rank) as session:
        account, host_key, data = _await_server(session, job_id)
        if user and user != account:
            raise BadRequest(f"job {job_id} runs as {account}, not {user}", hint=f"ssh {account}@{host}")
        ssh_files.know_host(host, host_key)
        with InputSender(session, tty=False):
            while data is not None:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                data = session.read()
    return session.exit_code or 0


def _await_server(session: ExecConnection, job_id: str) -> tuple[str, str, bytes | None]:
    """Return the job's account, the host key, and the bytes after them.

    Raises:
        Conflict: no server started.
    """
    seen = b""
    while len(seen) < _LINE_BYTES_MAX and (data := session.read()) is not None:
        seen += data
        found = _GREETING.search(seen)
        if found:
            return found[1].decode(), found[2].decode(), seen[found.end() :]
    refusal = _REFUSAL.search(seen)
    why = (refusal[1] if refusal else seen[-500:]).decode(errors="replace").strip() or f"code {session.exit_code}"
    raise Conflict(f"no SSH in job {job_id}: {why}", hint=f"phalanx shell {job_id} needs no sshd")


def _account(head: Client, job_id: str, node_rank: int) -> str:
    """Return the account under which the job runs on that node."""
    seen = b""
    with head.exec(job_id, ["id", "-un"], node_rank=node_rank) as session:
        while (data := session.read()) is not None:
            seen += data
    name = seen.decode(errors="replace").strip()
    if session.exit_code or not re.fullmatch(r"[\w.][\w.$@-]*", name):
        raise Conflict(f"the account of job {job_id} has no name: {name}", hint=f"phalanx shell {job_id}")
    return name
