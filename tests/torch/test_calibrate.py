"""What the calibration trains is a real model: split over ranks or staged, it computes what the whole one does."""

import pytest

from tests.torch.gang import Gang

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch]
PARTS = __file__.replace("test_calibrate.py", "calibrate_parts.py")


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """Largest differences of gradients by what was split, as rank 0 printed them."""
    with Gang(tmp_path_factory.mktemp("calibrate"), PARTS, world_size=2, supervised=False, LOCAL_WORLD_SIZE=2) as gang:
        assert gang.finish() == [0, 0], gang.log()
        return {word: float(value) for word, value in (line.split() for line in gang.log().splitlines() if line)}


def test_a_block_split_over_two_ranks_has_the_gradients_of_the_whole_one(differences):
    assert differences["block"] < 1e-4


def test_a_pipeline_of_two_stages_has_the_gradients_of_one_process(differences):
    assert differences["pipeline"] < 1e-5


def test_replicas_with_several_micro_batches_average_all_of_them(differences):
    assert differences["replicas"] < 1e-5
