"""The uses of a cluster that the examples show, each on a real head, killed once and checked. `make test` runs the cheapest."""

import pytest

from tests.examples.environments import EnvironmentMissing
from tests.examples.use import ProgramMissing, cluster_for
from tests.examples.uses import USES

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(900)]
CHEAP = {"monte_carlo"}


@pytest.mark.parametrize(
    "use", [pytest.param(use, id=use.name, marks=() if use.name in CHEAP else pytest.mark.prove) for use in USES]
)
def test_a_use_is_killed_once_and_its_result_is_right(use, tmp_path):
    try:
        use.prepare()
    except (ProgramMissing, EnvironmentMissing) as error:
        pytest.skip(str(error))
    with cluster_for(use, tmp_path / "cluster", tmp_path / "results") as cluster:
        print(use.run(cluster))
    assert cluster.killed_at
    assert (tmp_path / "results" / "picture.png").stat().st_size > 5000
