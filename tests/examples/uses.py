"""All uses, in the order in which `make examples` runs them."""

from __future__ import annotations

from tests.examples.arrays import ARRAYS
from tests.examples.programs import PROGRAMS
from tests.examples.trainings import TRAININGS

USES = (*PROGRAMS, *ARRAYS, *TRAININGS)
