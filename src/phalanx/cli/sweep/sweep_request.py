"""From the command line and the file of `phalanx sweep` to the definition of the sweep."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any, Final

import click

from phalanx.cli.jobs.request.job_file import JOB_FILE
from phalanx.cli.jobs.request.job_request import JobRequest, job_request
from phalanx.cli.sweep.parameter_options import file_parameters, typed_parameters
from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.errors import BadRequest
from phalanx.core.work.names import is_name
from phalanx.sweep.definition import METRICS, SEARCHES, SweepDefinition, sweeps_folder
from phalanx.sweep.space import SweepParameter, check_space, grid_size
from phalanx.sweep.trial_jobs import placeholders

_KEY: Final = "sweep"
_FILE_ENDINGS: Final = (".yaml", ".yml")
_SAMPLES: Final = 20
_GRACE: Final = "1s"
"""From SIGTERM to SIGKILL for a trial that says nothing else, so that a stopped one frees its GPU within 2 s."""
_NUMBERS: Final = ("samples", "seed", "min_steps", "eta", "max_parallel")
_WORDS: Final = ("search", "metric", "stop", "goal")
_STOPS: Final = ("asha", "none")
_GOALS: Final = ("minimize", "maximize")


def sweep_request(context: click.Context, given: Mapping[str, Any]) -> tuple[SweepDefinition, JobRequest]:
    """Return the sweep that a command line and its file describe, without the head and the number of parallel trials.

    Raises:
        BadFile: the file is wrong.
        BadRequest: options are wrong or contradict each other.
    """
    if given["file"] and not given["file"][0].lower().endswith(_FILE_ENDINGS):
        raise BadRequest(f"{given['file'][0][:80]!r} is not a sweep file (*.yaml)", hint="a command goes after --")
    wanted = job_request(context, {**given, "name": None}, beside=_KEY)
    if wanted.spec.array or wanted.spec.service is not None or wanted.plan_request is not None:
        raise BadRequest("a trial is one job: no array, service or plan", hint="leave that key out")
    settings, parameters = _file_settings(given["file"])
    settings.update({key: given[key] for key in (*_NUMBERS, *_WORDS) if given.get(key) is not None})
    typed = {one.name: one for one in typed_parameters(context)}
    merged = {**{one.name: one for one in parameters}, **typed}
    space = tuple(merged.values())
    check_space(space)
    _check_words(settings)
    search = settings.get("search", "random")
    samples = _samples(search, settings.get("samples"), space)
    job = dict(wanted.mapping)
    if "grace" not in job and not job.get("saves_on_stop"):
        job["grace"] = _GRACE
    named = placeholders(job["run"], [one.name for one in space])
    definition = SweepDefinition(
        id=secrets.token_hex(8),
        name=given["name"] or settings.get("name") or _free_name(wanted.spec.name),
        parameters=space,
        job=job,
        append=not named and "\n" not in str(job["run"]).strip(),
        samples=samples,
        search=search,
        seed=settings.get("seed", 0),
        metric=settings.get("metric", "loss"),
        maximize=settings.get("goal") == "maximize",
        asha=settings.get("stop") == "asha",
        min_steps=settings.get("min_steps", 0),
        eta=settings.get("eta", 3),
        max_parallel=settings.get("max_parallel", 0),
    )
    if not is_name(definition.name):
        raise BadRequest(f"{definition.name[:80]!r} is not a name for a sweep", hint="use letters, digits and . _ -")
    if definition.min_steps < 0 or definition.eta < 2 or definition.max_parallel < 0 or definition.samples < 1:
        raise BadRequest("samples and max-parallel begin at 1, eta at 2")
    return definition, wanted


def _file_settings(files: tuple[str, ...]) -> tuple[dict[str, Any], tuple[SweepParameter, ...]]:
    """Return the settings and parameters under `sweep:` of the file; nothing without one."""
    if not files:
        return {}, ()
    if files[0] == "-":
        raise BadRequest("a sweep cannot be read from standard input", hint="save it as a file")
    table = read_yaml_file(files[0], JOB_FILE)
    if not isinstance(table.content, dict) or _KEY not in table.content:
        return {}, ()
    keys = table.content[_KEY].mapping(_KEY, ("name", "parameters", *_NUMBERS, *_WORDS))
    settings: dict[str, Any] = {}
    for key, value in keys.items():
        if key == "parameters":
            continue
        settings[key] = text = value.text(key)
        if key in _NUMBERS:
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise value.error(f"{key}: {text[:40]!r} is not a whole number")
            settings[key] = int(text)
    return settings, file_parameters(keys["parameters"]) if "parameters" in keys else ()


def _check_words(settings: Mapping[str, Any]) -> None:
    known = {"search": SEARCHES, "metric": METRICS, "stop": _STOPS, "goal": _GOALS}
    for key, words in known.items():
        if key in settings and settings[key] not in words:
            raise BadRequest(f"{key}: {settings[key][:40]!r}", hint=f"one of {', '.join(words)}")


def _samples(search: str, given: int | None, space: tuple[SweepParameter, ...]) -> int:
    if search != "grid":
        return _SAMPLES if given is None else given
    size = grid_size(space)
    return size if given is None else min(given, size)


def _free_name(base: str) -> str:
    """Return a name that no sweep of this user has: train-1, train-2."""
    clean = "".join(char if char.isalnum() and char.isascii() else "-" for char in base).strip("-")[:40] or "sweep"
    number = 1
    while os.path.exists(os.path.join(sweeps_folder(), f"{clean}-{number}")):
        number += 1
    return f"{clean}-{number}"
