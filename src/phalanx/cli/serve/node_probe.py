"""Asks a node, by a short job in the software of the service, which inference engines it has and which files the model has there."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.cli.jobs.job_end import end_summary
from phalanx.cli.jobs.job_follower import StatusLine
from phalanx.cli.jobs.log_pages import all_pages
from phalanx.cli.serve.inference_engines import ENGINES
from phalanx.cli.serve.model_files import CONFIG_BYTES_MAX, FILES_MAX, ModelFiles, model_files
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import Conflict, WaitTimedOut
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.units import format_duration
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.client import Client

PROBE_LIMIT_S: Final = 120.0  # a container image may have to be fetched first
_DIGEST_BYTES_PER_S: Final = 50e6  # of a slow network disk
_POLL_S: Final = 0.1
_JOB: Final = "find-engine"
_KEYS: Final = ("software", "setup", "image", "queue", "project", "nodelist", "exclude", "env", "secrets")
_MARK: Final = "phalanx-probe"  # begins the lines that are read; software may print others
_SCRIPT: Final = (
    f'p() {{ printf "{_MARK} %s %s\\n" "$1" "$2"; }}; '
    'for f in "$1" "$1"/*; do [ ! -f "$f" ] || p file "$(stat -Lc "%s %n" "$f" | tr "\n" " ")"; done; '
    f'[ ! -f "$1/config.json" ] || p config "$(head -c {CONFIG_BYTES_MAX} "$1/config.json" | base64 | tr -d "\\n")"; '
    + "".join(f"if ({one.installed}) >/dev/null 2>&1; then p engine {one.name}; fi; " for one in ENGINES)
    + 'if [ -n "$2" ]; then [ ! -d "$1" ] || cd "$1"; p digest "$(export LC_ALL=C; for f in *; do [ ! -f "$f" ] || sha256sum -- "$f"; done | sha256sum)"; fi; '
    "p end -"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What a node has: `engines` by name, and the model's files; `files` is None if nothing is at the path there.

    `digest`: of all files of the folder, as `sha256sum * | sha256sum` gives it; "" if it was not asked for.
    """

    node: str
    engines: tuple[str, ...]
    files: ModelFiles | None
    digest: str = ""


def ask_node(
    head: Client, keys: Mapping[str, object], path: str, nodes: Sequence[str], *, digest_bytes: int = 0
) -> NodeAnswer:
    """Run the job and return what it found.

    Args:
        head: client.
        keys: of the service; the job gets its software, queue, project and variables.
        path: of the model, absolute.
        nodes: one of these; empty for any.
        digest_bytes: how much there is to read for the digest; 0 for none.

    Raises:
        WaitTimedOut: it did not start or end in time; it is cancelled.
        Conflict: it failed.
    """
    job = {key: keys[key] for key in _KEYS if key in keys}
    if nodes and "nodelist" not in job:
        job["nodelist"] = fold_hostlist(list(nodes))
    limit_s = PROBE_LIMIT_S + digest_bytes / _DIGEST_BYTES_PER_S
    words = ["/bin/sh", "-c", _SCRIPT, "phalanx", path, "digest" if digest_bytes else ""]
    job |= {"name": _JOB, "run": words, "workdir": "/", "time": format_duration(limit_s)}
    job_id = head.submit(job).id
    status = StatusLine()
    try:
        node = _wait(head, job_id, status, limit_s)
    except BaseException:  # also Ctrl-C: nothing of it shall stay
        head.cancel(job_id, "phalanx serve model does not wait for it")
        raise
    finally:
        status.clear()
    text = "".join(chunk.text for page in all_pages(head, job_id, "0", None) for chunk in page.chunks)
    return parse_answer(text, node, path)


def parse_answer(text: str, node: str, path: str) -> NodeAnswer:
    """Return what the output of the job says.

    Raises:
        Conflict: it is not whole.
        BadFile: the model's config is no JSON object.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == _MARK:
            kind, _, value = rest.partition(" ")
            found.setdefault(kind, []).append(value)
    if "end" not in found:
        raise Conflict(f"node {node} did not answer in full which engines it has", hint="name one: --engine")
    sizes = {}
    for listed in found.get("file", [])[:FILES_MAX]:
        size, _, name = listed.partition(" ")
        if size.isdigit():
            sizes[name.rpartition("/")[2].removesuffix(" ")] = int(size)
    config = base64.b64decode(found.get("config", [""])[0]).decode("utf-8", "replace")
    files = model_files(path, sizes, config) if sizes else None
    digest = found.get("digest", [""])[0].partition(" ")[0]
    return NodeAnswer(node=node, engines=tuple(found.get("engine", ())), files=files, digest=digest)


def _wait(head: Client, job_id: str, status: StatusLine, limit_s: float) -> str:
    """Wait until the job has succeeded; return its node."""
    until_s = time.monotonic() + limit_s
    while not (job := head.job(job_id).job).state.terminal:
        waits = f": {wait_text(job.reason, job.detail)}" if job.state is JobState.PENDING and job.detail else ""
        status.show(f"job {job_id} asks a node which inference engine it has{waits}")
        if time.monotonic() >= until_s:
            raise WaitTimedOut(
                f"job {job_id} has not found out within {format_duration(limit_s)} which engine the nodes have{waits}",
                hint="name one: --engine",
            )
        time.sleep(_POLL_S)
    if job.state is not JobState.SUCCEEDED:
        print(f"phalanx logs {job_id} prints its output", file=sys.stderr)
        raise Conflict(
            f"no node could be asked which engine it has: {end_summary(job)}",
            hint="name one: --engine; check --venv, --conda or --image",
        )
    return job.nodes[0] if job.nodes else ""
