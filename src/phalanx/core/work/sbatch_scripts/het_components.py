"""The components of a heterogeneous `#SBATCH` script: which options each has, and which of them this one job can honour. Pure.

Source: heterogeneous_jobs of Slurm 22.05, and the behaviour of its `sbatch`: a component takes over from the one before it what does not
describe its nodes. Here the components are the roles of one gang; what holds for the whole job is that of component 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.sbatch_scripts.sbatch import (
    SBATCH_OPTIONS,
    ParsedOption,
    parse_option_line,
    parse_script_components,
    split_components,
)

ComponentOptions = dict[str, ParsedOption]
ROLE_KEYS: Final = ("nodes", "gpus", "gpus_per_node", "cpus", "memory", "resources")
"""Keys of a job that each component has for itself; its `slurm` holds the settings that its nodes need."""
_INHERITED: Final = ("account", "job-name", "mem", "distribution", "export", "output", "error", "open-mode")
_MEMORY: Final = ("mem", "mem-per-cpu", "mem-per-gpu")
# What each component may have for itself.
_OWN: Final = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "cpus-per-gpu", "gpus", "gpus-per-node"),
        *("gpus-per-task", "gres", "exclusive", "licenses", "tmp", "constraint", *_MEMORY),
        *("account", "job-name", "distribution", "partition", "output", "error", "open-mode"),
    }
)
# What can neither be honoured for one component nor left out without changing where, or how often, the job runs.
REFUSED_COMPONENT_OPTIONS: Final = {
    "array": "leave --array out: Slurm refuses it too",
    "nodelist": "leave --nodelist out: each component gets nodes of its own by what it asks for",
}


def component_options(text: str, given: Sequence[str]) -> list[ComponentOptions]:
    """The options of each component of a script, with those that it takes over from the component before it; one for any other script.

    Args:
        text: the script.
        given: options of the command line, with a `:` between components: they replace those of the same component, or add components.

    Raises:
        BadFile: as in `parse_script_components`; or an option that several components cannot have.
    """
    found = [{one.name: one for one in options} for options in parse_script_components(text)]
    for number, words in enumerate(split_components(given)):
        if number == len(found):
            found.append({})
        found[number] |= {one.name: one for one in parse_option_line(words)}
    for before, own in pairwise(found):
        for name in _INHERITED:
            if name in before and name not in own:
                own[name] = before[name]
    if len(found) > 1:
        _check_options(found)
    return found


def component_notes(components: Sequence[ComponentOptions]) -> list[str]:
    """A line for each option of a further component that the job has only once, and that differs from that of component 0."""
    notes = []
    for number, own in enumerate(components[1:], start=1):
        for one in own.values():
            if _value(components[0], one.name) == one.value or SBATCH_OPTIONS[one.name].unsupported_reason:
                continue
            if one.name not in _OWN:
                why = "the job has only one, that of component 0"
            elif one.name == "partition":
                why = (
                    "a job waits in one queue, that of component 0; its nodes are chosen by what the component asks for"
                )
            else:
                continue
            value = f"={one.value}" if one.value else ""
            at = f"line {one.line}: " if one.line else ""
            notes.append(f"{at}--{one.name}{value} of component {number} is not honoured: {why}")
    return notes


def component_mapping(
    mapping: Mapping[str, object], slurm: Mapping[str, str], own: ComponentOptions, number: int
) -> dict[str, object]:
    """A further component as it is sent: the keys of a job that it has for itself, and the settings that its nodes need.

    Raises:
        BadFile: it asks for a part of a GPU.
    """
    check_whole_gpus(mapping, number)
    settings = {
        **slurm,
        "name": _value(own, "job-name"),
        "partition": _value(own, "partition"),
        "account": _value(own, "account"),
        "distribution": _value(own, "distribution"),
    }
    found: dict[str, object] = {key: mapping[key] for key in ROLE_KEYS if mapping.get(key) is not None}
    return {**found, "slurm": {key: value for key, value in settings.items() if value}}


def check_whole_gpus(mapping: Mapping[str, object], number: int) -> None:
    """Reject a component with parts of GPUs: a gang of several roles is placed on whole ones.

    Raises:
        BadFile: it asks for parts.
    """
    if mapping.get("share") or "x" in str(mapping.get("gpus") or ""):
        raise BadFile(
            f"component {number} asks for a part of a GPU or for MIG slices; a heterogeneous job takes whole GPUs",
            hint="ask for whole GPUs, or submit the components one by one",
        )


def read_components(text: str) -> list[dict[str, object]]:
    """The further components that the setting `components` of a job holds.

    Raises:
        ValueError: it is not what `component_mapping` writes.
    """
    found = json.loads(text) if text else []
    if not isinstance(found, list) or not all(
        isinstance(one, dict)
        and set(one) <= {*ROLE_KEYS, "slurm"}
        and isinstance(slurm := one.get("slurm", {}), dict)
        and all(isinstance(value, str) for value in slurm.values())
        for one in found
    ):
        raise ValueError("components is not a list of what each component asks for")
    return found


def slurm_settings(mapping: Mapping[str, object]) -> dict[str, str]:
    """The settings of a script's job, or of a component, that its nodes need; empty for another job."""
    found = mapping.get("slurm")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def _check_options(components: Sequence[ComponentOptions]) -> None:
    for number, own in enumerate(components):
        for name, hint in REFUSED_COMPONENT_OPTIONS.items():
            if name in own:
                at = f"line {own[name].line}: " if own[name].line else ""
                raise BadFile(f"{at}--{name}={own[name].value}: not in a heterogeneous job", hint=hint)
        memory = [name for name in _MEMORY if name in own]
        if len(memory) > 1:
            raise BadFile(
                f"--{memory[0]}={own[memory[0]].value} and --{memory[1]}={own[memory[1]].value} in component {number}: Slurm refuses both together",
                hint="a component takes over --mem from the one before it: give --mem in each, or in none",
            )
        if "exclude" in own and own["exclude"].value != _value(components[0], "exclude"):
            at = f"line {own['exclude'].line}: " if own["exclude"].line else ""
            raise BadFile(
                f"{at}--exclude={own['exclude'].value} of component {number}: the nodes are excluded for the whole job",
                hint="give --exclude to component 0",
            )


def _value(options: Mapping[str, ParsedOption], name: str) -> str:
    return options[name].value.strip() if name in options else ""
