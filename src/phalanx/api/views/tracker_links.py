"""Links to the runs of a job at experiment trackers, as far as its own variables say where they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from phalanx.core.work.job_file.trackers import TrackedJob
from phalanx.wire.api.jobs import JobLinkView

_WANDB_URL: Final = "https://wandb.ai"
_NEEDED: Final = ("WANDB_ENTITY", "MLFLOW_TRACKING_URI")
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def tracker_links(job: TrackedJob, env: Mapping[str, str]) -> list[JobLinkView]:
    """The links that the job's own variables allow. No part of a URL with a password is repeated."""
    found = []
    entity, project = env.get("WANDB_ENTITY", ""), env.get("WANDB_PROJECT", "")
    base = _web_address(env.get("WANDB_BASE_URL") or _WANDB_URL).replace("https://api.wandb.ai", _WANDB_URL)
    run = env.get("WANDB_RUN_ID") or ("" if "WANDB_RESUME" in env or job.has_many_runs else job.folder)
    offline = env.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")
    if base and not offline and _WORD.fullmatch(entity) and _WORD.fullmatch(project):
        page = f"/runs/{quote(run, safe='')}" if run else ""
        found.append(JobLinkView(name="wandb", url=f"{base}/{entity}/{project}{page}"))
    if address := _web_address(env.get("MLFLOW_TRACKING_URI", "")):
        experiment = env.get("MLFLOW_EXPERIMENT_ID", "")
        wanted = f"/#/experiments/{experiment}" if experiment.isdecimal() else "/"
        found.append(JobLinkView(name="mlflow", url=f"{address}{wanted}"))
    return found


def may_have_links(variables: Iterable[tuple[str, str]]) -> bool:
    """Whether a job has a variable without which it has no link: most jobs have none, and the views of many jobs are made at once."""
    return any(name in _NEEDED for name, _ in variables)


def _web_address(text: str) -> str:
    """A URL of the web without user, query and fragment; empty for any other text."""
    try:
        parts = urlsplit(text.strip())
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return ""
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[A-Za-z0-9.-]+|[0-9a-f:]+", host):
        return ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{quote(parts.path.rstrip('/'), safe='/%')}"
