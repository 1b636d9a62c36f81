"""`phalanx licences`: the table."""

from phalanx.cli.cluster.licences import _lines
from phalanx.cli.terminal import Terminal
from phalanx.core.ids import JobId, UserId
from phalanx.wire.api.licences import LicenceHolderView, LicenceView

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)


def test_the_table_names_the_holders_and_counts_those_that_wait():
    holders = [LicenceHolderView(job_id=JobId(str(job)), user=UserId("ada"), seats=2) for job in range(1, 8)]
    found = [
        LicenceView(name="cad", seats=1),
        LicenceView(name="matlab", seats=12, used=14, holders=holders, waiting=3),
    ]
    assert _lines(found, WIDE) == [
        "LICENCE  SEATS  USED  FREE  WAITING  HELD BY",
        "cad          1     0     1        0",
        "matlab      12    14     0        3  1 (2), 2 (2), 3 (2), 4 (2), 5 (2) and 2 more",
    ]
    assert _lines([], WIDE) == ["no licence"]
