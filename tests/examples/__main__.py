"""Runs the examples as real jobs, kills each once, checks what comes out, and prints a table.

    python -m tests.examples                   all of them, what `make examples` calls
    python -m tests.examples docking mpi_pi    some

The uses (docking, rendering, ...) leave their pictures and tables in `build/examples/NAME`. Packages go into environments outside the
repository; making all of them downloads about 1.6 GB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.examples.environments import FOLDER, EnvironmentMissing
from tests.examples.frameworks import EXAMPLES, run_example
from tests.examples.use import ProgramMissing, Use, cluster_for
from tests.examples.uses import USES

RESULTS: Final = FOLDER.parent / "build" / "examples"


def main(names: Sequence[str]) -> int:
    """Run the named examples, or all; returns 1 if one failed, 64 if there is none of that name."""
    known = [example.name for example in EXAMPLES] + [use.name for use in USES]
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"error: no example {unknown[0]}; there are: {' '.join(known)}", file=sys.stderr)
        return 64
    rows: list[tuple[str, str, float, str]] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-examples-") as folder:
        for use in USES:
            if not names or use.name in names:
                _note(rows, use.name, *_outcome(use, Path(folder)))
        frameworks = [example for example in EXAMPLES if not names or example.name in names]
        if frameworks:
            (Path(folder) / "frameworks").mkdir()
            shell = Shell(Path(folder) / "frameworks")
            shell("up", "--virtual", "2x2", "--port", str(free_port()))
            try:
                for example in frameworks:
                    begin_s, outcome, seen = time.monotonic(), "ok", "a process killed: it restarted and ended well"
                    try:
                        run_example(example, shell)
                    except EnvironmentMissing as error:
                        outcome, seen = "skipped", str(error)
                    except AssertionError as error:
                        outcome, seen = "FAILED", str(error)
                    _note(rows, example.name, outcome, time.monotonic() - begin_s, seen)
            finally:
                shell("down", "--cancel-jobs")
    print(f"\n{'example':20} {'outcome':8} {'s':>5}  seen")
    for name, outcome, seconds, seen in rows:
        print(f"{name:20} {outcome:8} {seconds:5.0f}  {seen.splitlines()[0]}")
    return int(any(outcome == "FAILED" for _, outcome, _, _ in rows))


def _outcome(use: Use, folder: Path) -> tuple[str, float, str]:
    begin_s = time.monotonic()
    try:
        use.prepare()
        begin_s = time.monotonic()
        with cluster_for(use, folder / use.name, RESULTS / use.name) as cluster:
            seen = use.run(cluster)
            return "ok", time.monotonic() - begin_s, seen
    except (ProgramMissing, EnvironmentMissing) as error:
        return "skipped", time.monotonic() - begin_s, str(error)
    except AssertionError as error:
        return "FAILED", time.monotonic() - begin_s, str(error)


def _note(rows: list[tuple[str, str, float, str]], name: str, outcome: str, seconds: float, seen: str) -> None:
    rows.append((name, outcome, seconds, seen))
    print(f"{name}: {outcome}: {seen}", file=sys.stdout if outcome == "ok" else sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
