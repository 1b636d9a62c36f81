"""How the forwarding of ports ends with its job."""

# mypy: disable-error-code="arg-type, method-assign"

from types import SimpleNamespace

import pytest

from phalanx.client.port_forward import ForwardedPort, PortForward
from phalanx.core.errors import Conflict, Unreachable


@pytest.mark.parametrize(
    ("state", "attempt_state", "says"),
    [
        ("running", "stopping", "job 7 is stopping; its ports are gone with it"),
        ("cancelled", "ended", "job 7 is cancelled; its ports are gone with it"),
        ("running", "running", "what the head said"),
    ],
)
def test_a_job_that_stops_while_its_connection_is_opened_again_ends_it_in_words(state, attempt_state, says):
    """Found by a test on a busy machine: "job 7 is running, its attempt stopping; exec needs a running job"."""
    view = SimpleNamespace(job=SimpleNamespace(state=state, attempt_state=attempt_state))
    forward = PortForward(SimpleNamespace(job=lambda _: view), "7", [ForwardedPort(local=0, remote=9)])
    ends = iter([Unreachable("the relay in the job ended"), Conflict("what the head said")])

    def session(_):
        raise next(ends)

    forward._run_session = session
    with pytest.raises(Conflict, match=says):
        forward.run()
