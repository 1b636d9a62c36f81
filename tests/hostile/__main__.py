"""Hostile requests against a head of its own: `python -m tests.hostile [--inputs 100000] [--seed N] [--json]`. Ends with 1 if anything failed."""

from __future__ import annotations

import argparse
import json
import sys

from tests.hostile.campaign import GROWTH_MIB_PER_10K, Campaign
from tests.hostile.head import serving


def main() -> int:
    """Run one campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with serving() as served:
        diagnosis = Campaign(served, inputs=given.inputs, seed=given.seed).run()
    print(json.dumps(diagnosis.as_record(), indent=1) if given.json else diagnosis.told())
    return 1 if diagnosis.failures or diagnosis.growth_mib_per_10k > GROWTH_MIB_PER_10K else 0


if __name__ == "__main__":
    sys.exit(main())
