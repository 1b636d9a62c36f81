"""What a supervisor measures of its members: values that never fall, at intervals, and one odd member does not hide the others."""

# mypy: disable-error-code="arg-type, misc"

from types import SimpleNamespace

from phalanx.node.diagnosis.job_usage import EVERY_S, JobUsageProbe
from phalanx.node.logic.events import MemberKey


class Contained:
    def __init__(self, cpu_s=0.0, memory=0):
        self.cpu_s, self.memory, self.looks = cpu_s, memory, 0

    def cpu_seconds(self, read):
        self.looks += 1
        if self.cpu_s is None:
            raise KeyError(7)
        return self.cpu_s

    def memory_bytes(self, read):
        return self.memory


def member(job_id, contained, *, pids=(7,), generation=0):
    processes = None if contained is None else SimpleNamespace(containment=contained)
    return SimpleNamespace(key=MemberKey(job_id, 1, generation), processes=processes, pids=dict.fromkeys(pids))


class Node:
    def __init__(self, *members):
        self.members, self.now_s = list(members), 0.0
        self.probe = JobUsageProbe(lambda: self.members, clock=lambda: self.now_s)

    def sample(self, after_s=EVERY_S):
        self.now_s += after_s
        return {one.job_id: (one.cpu_s, one.memory_peak_bytes) for one in self.probe.sample()}


def test_cpu_time_and_the_highest_memory_never_fall_within_a_generation():
    contained = Contained(5.0, 300)
    node = Node(member("1", contained))
    assert node.sample() == {"1": (5.0, 300)}
    contained.cpu_s, contained.memory = 4.0, 100
    assert node.sample() == {"1": (5.0, 300)}
    contained.cpu_s, contained.memory = 9.0, 400
    assert node.sample() == {"1": (9.0, 400)}
    node.members = [member("1", Contained(1.0, 10), generation=1)]
    assert node.sample() == {"1": (1.0, 10)}


def test_processes_are_looked_at_no_more_often_than_needed():
    contained = Contained(5.0, 300)
    node = Node(member("1", contained))
    assert node.sample() == node.sample(EVERY_S / 2) == {"1": (5.0, 300)}
    assert contained.looks == 1


def test_members_without_processes_have_no_sample_and_an_odd_one_does_not_hide_the_others():
    node = Node(
        member("1", None),
        member("2", Contained(), pids=()),
        member("3", Contained(None)),
        member("4", Contained(2.0, 7)),
    )
    assert node.sample() == {"4": (2.0, 7)}
