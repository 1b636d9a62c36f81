"""Job files whose service has roles: one service reads prompts, the other one answers. Each is a service of its own, with its own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.jobs.request.job_file import JOB_FILE, ROLES, JobFile, job_file_of
from phalanx.cli.jobs.request.job_request import JobRequest, job_request_of_file
from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.errors import BadFile

if TYPE_CHECKING:
    from phalanx.user_files.yaml_document import YamlValue

PREFILL: Final = "prefill"
DECODE: Final = "decode"
_PROTOCOL: Final = "protocol"
_HINT: Final = "write roles: {prefill: {...}, decode: {...}}, each with its own run, gpus and replicas"


def service_requests(path: str, *, copy: bool) -> list[JobRequest]:
    """Return the services of a job file: with roles the one that reads prompts, then the one that answers.

    Raises:
        BadFile: the file is missing or wrong, or describes a job.
    """
    root = read_yaml_file(path, JOB_FILE)
    if not isinstance(root.content, dict) or ROLES not in root.content:
        found = [job_request_of_file(path, copy=copy, file=job_file_of(root))]
    else:
        roles = root.content.pop(ROLES)
        found = [job_request_of_file(path, copy=copy, file=one) for one in _role_files(job_file_of(root), roles)]
    if any(one.spec.service is None for one in found):
        raise BadFile(f"{path}: not a service", hint="write type: service; phalanx submit starts a job")
    return found


def _role_files(shared: JobFile, roles: YamlValue) -> list[JobFile]:
    """The job file of each role: the keys of the file, those of the role, and what joins both."""
    given = roles.mapping(ROLES, (PREFILL, DECODE, _PROTOCOL))
    name = str(shared.mapping.get("name") or "")
    if not name:
        raise roles.error("a service with roles needs a name", "write name: chat")
    missing = next((one for one in (PREFILL, DECODE) if one not in given), "")
    if missing:
        raise roles.error(f"roles: {missing} is missing", _HINT)
    protocol = given[_PROTOCOL].text(f"roles: {_PROTOCOL}") if _PROTOCOL in given else "vllm"
    joined = {PREFILL: {"name": f"{name}-prefill", "prefill_for": {"service": name, "protocol": protocol}}, DECODE: {}}
    found = []
    for role, more in joined.items():
        one = job_file_of(given[role])
        wrong = next((key for key in ("name", "type", "prefill_for") if key in one.mapping), "")
        if wrong:
            raise given[role].error(f"roles: {role} has no {wrong} of its own", f"write {wrong} beside roles")
        found.append(
            JobFile(
                path=shared.path, mapping={**shared.mapping, **one.mapping, **more}, lines={**shared.lines, **one.lines}
            )
        )
    return found
