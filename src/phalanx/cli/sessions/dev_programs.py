"""What runs in a session of `phalanx dev`: a shell, or the server of an editor that the node has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import Conflict

if TYPE_CHECKING:
    from phalanx.client import Client

# An end with the exit code of the last command would be a failure of the job.
_START_SHELL: Final = (
    'rc=$(dirname "$PHALANX_HOSTFILE")/shellrc; '
    "command -v bash >/dev/null 2>&1 || exec sh -i; "
    "printf '%s\\n' '[ ! -f ~/.bashrc ] || . ~/.bashrc' 'trap \"exit 0\" EXIT' >\"$rc\"; "
    'exec bash --rcfile "$rc" -i'
)
SHELL: Final = ("/bin/sh", "-c", _START_SHELL)
_MAKE_KEY: Final = (
    'token=$(od -An -N24 -tx1 /dev/urandom | tr -d " \\n"); at=$(dirname "$PHALANX_HOSTFILE")/editor-token; '
)
_STORE_KEY: Final = '(umask 077; printf %s "$token" >"$at"); '  # the variable is visible in /proc to the user alone
_AWAIT: Final = (
    'at=$(dirname "$PHALANX_HOSTFILE")/editor-token; n=0; '
    'until [ -s "$at" ]; do n=$((n+1)); [ $n -lt 600 ] || exit 1; sleep 0.1; done; '
    'command -v bash >/dev/null 2>&1 && bash -c \'n=0; until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; '
    'do n=$((n+1)); [ $n -lt 600 ] || exit 1; sleep 0.1; done\' - "$1"; cat "$at"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Editor:
    """A server with web pages.

    Attributes:
        program: its name.
        script: shell text that starts it; `$1` is the port.
        query: what follows its address.
        keeps_path: it gets its base path at the head.
    """

    program: str
    script: str
    query: str
    keeps_path: bool

    def command(self, port: int) -> tuple[str, ...]:
        """Return the command of the job."""
        return ("/bin/sh", "-c", self.script, self.program, str(port))


EDITORS: Final = {
    "jupyter": Editor(
        program="jupyter",
        script='for p in jupyter-lab jupyter-notebook jupyter-server ""; do command -v "$p" >/dev/null 2>&1 && break; done; '
        '[ -n "$p" ] || { echo "no jupyter-lab, jupyter-notebook or jupyter-server on this node: '
        'pip install jupyterlab, or use --image or --requirements with it" >&2; exit 127; }; '
        + _MAKE_KEY
        + 'export JUPYTER_TOKEN="$token"; [ "$(id -u)" != 0 ] || set -- "$1" --allow-root; port=$1; shift; '
        + _STORE_KEY
        + 'exec "$p" --no-browser --ip=127.0.0.1 --port="$port" --ServerApp.port_retries=0 '
        '--ServerApp.base_url="/j/$PHALANX_JOB_ID/$port/" "$@"',
        query="?token={token}",
        keeps_path=True,
    ),
    "code": Editor(
        program="code-server",
        script="command -v code-server >/dev/null 2>&1 || { "
        'echo "no code-server on this node: npm install -g code-server, or use --image with it" >&2; exit 127; }; '
        + _MAKE_KEY
        + 'export PASSWORD="$token"; '
        + _STORE_KEY
        + 'exec code-server --bind-addr "127.0.0.1:$1" --auth password --disable-telemetry --disable-update-check .',
        query="    password: {token}",
        keeps_path=False,
    ),
}


def await_editor(head: Client, job_id: str, port: int) -> str | None:
    """Wait until the editor serves; return its token. None if it does not within a minute, or the job ends."""
    try:
        with head.exec(job_id, ["/bin/sh", "-c", _AWAIT, "phalanx", str(port)]) as session:
            found = b""
            while (data := session.read()) is not None:
                found += data
    except Conflict:  # it has ended
        return None
    return found.decode() if session.exit_code == 0 and found else None
