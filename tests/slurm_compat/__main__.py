"""Compares every script, or those whose number is given: `python -m tests.slurm_compat [--keep FILE] [07 12 ...]` (root, the lab).

`--keep` writes what each script did to a file, `--again FILE` compares it once more without running anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.slurm_compat import cases
from tests.slurm_compat.cluster import Outcome, World
from tests.slurm_compat.compare import compare

SHARED = Path("/srv")
"""A folder that the lab's hosts share with this machine; they have a /tmp of their own."""


def main(words: list[str]) -> int:
    """Print one line for each script, and each difference; returns 1 if a script differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_compat")
    parser.add_argument("numbers", nargs="*", metavar="NUMBER")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="FILE")
    asked = parser.parse_args(words)
    known = (*cases.SCRIPTS, *cases.HET_SCRIPTS)
    scripts = [script for script in known if not asked.numbers or script.name[:2] in asked.numbers]
    equal, kept = 0, {}
    for script, slurm, ours in _again(asked.again, scripts) if asked.again else _outcomes(scripts):
        kept[script.name] = (asdict(slurm), asdict(ours))
        found = compare(slurm, ours, script.read_text(encoding="utf-8"))
        equal += not found
        did = f"exit {slurm.exit_code}, {len(slurm.calls)} calls, {len(slurm.files)} files"
        print(f"{'same  ' if not found else 'DIFFER'} {script.stem}: {did}", flush=True)
        for line in found:
            print(f"         {line}", flush=True)
    if asked.keep:
        asked.keep.write_text(json.dumps(kept), encoding="utf-8")
    print(f"{equal} of {len(kept)} the same")
    return int(equal < len(kept))


def _outcomes(scripts: list[Path]) -> Iterator[tuple[Path, Outcome, Outcome]]:
    with tempfile.TemporaryDirectory(prefix="phalanx-compat-", dir=SHARED) as folder, World(Path(folder)) as world:
        for script in scripts:
            yield script, world.on_slurm(script), world.on_phalanx(script)


def _again(path: Path, scripts: list[Path]) -> Iterator[tuple[Path, Outcome, Outcome]]:
    kept = json.loads(path.read_text(encoding="utf-8"))
    for script in scripts:
        if script.name in kept:
            slurm, ours = kept[script.name]
            yield script, Outcome(**slurm), Outcome(**ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
