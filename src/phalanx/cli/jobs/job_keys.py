"""`phalanx show JOB --file`: prints the job file that would submit the same job again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.serve.services import find_service
from phalanx.user_files.yaml_text import yaml_text

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobKeysReply

LOST_COPY_HINT = "--copy uploads its working directory again, if this machine has it"


def show_job_file(head: Client, word: str, *, as_json: bool) -> None:
    """Print the keys of a job, an array or a service."""
    found = head.service_keys(word.strip()) if find_service(head, word) is not None else read_job_keys(head, word)
    if found.hidden_env:
        warn(f"only its owner sees the values of these variables, which are left out: {', '.join(found.hidden_env)}")
    if found.copy_lost:
        warn(f"the head no longer has the copy of the working directory: remove upload; {LOST_COPY_HINT}")
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json(found.keys, indent=2))
    else:
        print(yaml_text(found.keys), end="")


def read_job_keys(head: Client, word: str) -> JobKeysReply:
    """Return the keys of the job, array or element that a word names."""
    return head.job_keys(resolve_job(head, word))
