"""What changes in the settings of a batch script whose job is submitted again. Other specs are returned unchanged."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.work.sbatch_scripts.sbatch_job import ARRAY_SETTING, SCRIPT_KEY
from phalanx.core.work.spec import JobSpec


def without_script_key(spec: JobSpec) -> JobSpec:
    """The spec without the secret of its processes, and with its present elements as those of the script."""
    settings = tuple(
        (name, spec.array if name == ARRAY_SETTING else text) for name, text in spec.slurm if name != SCRIPT_KEY
    )
    return replace(spec, slurm=settings)


def with_script_key(spec: JobSpec, key: str) -> JobSpec:
    """The spec with this secret if it has none: the command line sends one, a printed job file has none."""
    if not spec.is_batch_script or dict(spec.slurm).get(SCRIPT_KEY):
        return spec
    return replace(spec, slurm=(*((name, text) for name, text in spec.slurm if name != SCRIPT_KEY), (SCRIPT_KEY, key)))
