"""History over a real restart of a real head: what devices did, and the curve of a job whose steps came before it."""

import time

import pytest

from benchmarks.cluster import cluster, wait_until

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]
STEPS = 3000  # more than both ends of the stored stream that a new head reads

RANK = f"""
import json, os, time
with open(os.environ["PHALANX_REPORT_PIPE"], "w") as pipe:
    for step in range({STEPS}):
        at_s, end_ns = time.time(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        loss = 99.0 if step == {STEPS // 2} else 10.0 - step / {STEPS}
        report = dict(k="step", rank=0, epoch=1, generation=0, step=step, begin_ns=end_ns - 1000000, end_ns=end_ns, at_s=at_s, loss=loss)
        pipe.write(json.dumps(report) + "\\n")
        pipe.flush()
while time.process_time() < 1.0:
    pass
time.sleep(100)
"""


def test_history_is_there_after_a_restart():
    with cluster("1x2") as head:
        job = head.submit(run=["python3", "-c", RANK], gpus="1x1", name="steps")
        curves = lambda: head.call("GET", f"/v1/jobs/{job}/history")  # noqa: E731
        wait_until(lambda: curves()["step"][-1:] == [STEPS - 1], "all steps are in the curve")
        before = curves()
        assert max(before["loss_max"]) == 99.0
        begun_s = time.time() - 600
        used = lambda: [  # noqa: E731
            value
            for one in head.call("GET", f"/v1/history/devices?node=n0&device=0&since_s={begun_s}")["columns"]
            if one["metric"] == "utilization"
            for value in one["mean"]
            if value is not None
        ]
        wait_until(lambda: len(used()) >= 2, "twenty seconds are recorded")
        recorded = used()
        assert head.head is not None
        head.head.terminate()
        assert head.head.wait(timeout=60) == 0
        head.head = None
        head.start()
        assert head.job(job)["progress"]["step"] == STEPS - 1  # read from both ends of the stored stream
        after = curves()
        assert after["step"] == before["step"]
        assert after["loss_max"] == before["loss_max"]
        assert used()[: len(recorded)] == recorded
        assert head.call("GET", "/v1/history")["problem"] == ""
