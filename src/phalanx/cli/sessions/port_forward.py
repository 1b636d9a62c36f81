"""`phalanx port-forward`: reach ports of a job on this machine."""

from __future__ import annotations

import re
import sys

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_lookup import resolve_node
from phalanx.core.errors import BadRequest, PhalanxError

_PORT_MAX = 65535


@click.command("port-forward")
@JOB_ARGUMENT
@click.argument("ports", metavar="[LOCAL:]REMOTE...", nargs=-1, required=True)
@click.option("--address", default="127.0.0.1", metavar="IP", help="Listen on this address of this machine.")
def port_forward(job: str, ports: tuple[str, ...], address: str) -> None:
    """Reach ports of a job's node on this machine, until Ctrl-C. JOB.N is node N of the job.

    LOCAL is the port here; by default the same, and 0 is any free one.
    """
    from phalanx.client.port_forward import ForwardedPort, PortForward

    wanted = [ForwardedPort(local=here, remote=there, address=address) for here, there in map(_ports, ports)]
    head = connect()
    job_id, node_rank = resolve_node(head, job)
    warned: set[int] = set()

    def refused(port: int) -> None:
        if port not in warned:
            warned.add(port)
            warn(f"nothing listens on port {port} in job {job_id} yet")

    def broken(error: PhalanxError) -> None:
        warn(f"{error.message}; connections ended with it, and new ones are possible once the head answers")

    forward = PortForward(head, job_id, wanted, node_rank=node_rank, on_refused=refused, on_broken=broken)

    def ready() -> None:
        for here, there in forward.bound():
            print(f"{address}:{here} -> job {job_id}, port {there}")
        sys.stdout.flush()

    try:
        forward.run(ready)
    except KeyboardInterrupt:
        forward.close()


def _ports(word: str) -> tuple[int, int]:
    """Parse [LOCAL:]REMOTE.

    Raises:
        BadRequest: it is something else.
    """
    found = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", word)
    here, there = (int(found[1] or found[2]), int(found[2])) if found else (-1, 0)
    if not (0 <= here <= _PORT_MAX and 1 <= there <= _PORT_MAX):
        raise BadRequest(f"{word!r} is no port", hint="write REMOTE or LOCAL:REMOTE, as in 8080:8888")
    return here, there
