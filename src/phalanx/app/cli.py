"""The entry point `phalanx`: passes the arguments to `phalanx.cli.root` and exits with its code."""

from __future__ import annotations

import sys

from phalanx.cli.root import main as run


def main() -> None:
    """Run one command line; never returns."""
    sys.exit(run())


if __name__ == "__main__":
    main()
