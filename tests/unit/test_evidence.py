"""Signs read out of text: kernel lines as drivers print them, the end of a rank's output, stacks."""

import pytest

from phalanx.node.logic.evidence import (
    OomKill,
    XidError,
    is_same_pci_address,
    last_lines,
    parse_kernel_log,
    stack_position,
)

KERNEL = [
    (
        "4,1,1;NVRM: Xid (PCI:0000:c6:00): 79, pid=1101234, name=python, GPU has fallen off the bus.",
        XidError(bus="0000:c6:00", xid=79),
    ),
    (
        "[ 966.503025] NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000",
        XidError(bus="0000:01:00", xid=31),
    ),
    (
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
        XidError(bus="0000:10:1c", xid=63),
    ),
    (
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=python, Timeout after 45s of waiting for RPC response from GPU0 GSP!",
        XidError(bus="0000:3b:00", xid=119),
    ),
    ("Out of memory: Killed process 4242 (python) total-vm:9000kB, anon-rss:100kB", OomKill(pid=4242)),
    ("Memory cgroup out of memory: Killed process 77 (pt_data_worker) total-vm:1kB", OomKill(pid=77)),
    ("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 30", None),
    ("usb 1-1: Product: Xid (PCI:0000:06:00): 79", None),
    ("NVRM: Xid (PCI:0000:06:00): 99999999", None),
    ("", None),
]


@pytest.mark.parametrize(("line", "sign"), KERNEL)
def test_kernel_line(line, sign):
    assert parse_kernel_log(line) == ([] if sign is None else [sign])


def test_kernel_lines_keep_their_order():
    assert [getattr(one, "xid", None) for one in parse_kernel_log("\n".join(line for line, _ in KERNEL[:4]))] == [
        79,
        31,
        63,
        119,
    ]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("0000:c6:00", "00000000:C6:00.0", True),
        ("c6:00", "00000000:C6:00.0", True),
        ("0000:c6:00", "0000:c7:00.0", False),
        ("0001:c6:00", "0000:c6:00.0", False),
        ("nonsense", "0000:c6:00.0", False),
    ],
)
def test_pci_address_is_the_same_however_it_is_written(left, right, same):
    assert is_same_pci_address(left, right) is same


def test_last_lines_are_the_last_that_say_something():
    tail = b"\n".join(b"line %d" % number for number in range(50)) + b"\n\n   \n"
    assert last_lines(tail) == tuple(f"line {number}" for number in range(38, 50))


def test_last_lines_carry_no_control_and_no_end():
    tail = b"\x1b[31mred\x1b[0m\nstep 1\rstep 2\r\nbell\x07 \x00\xff\xfe\n" + b"x" * 10_000
    lines = last_lines(tail)
    assert lines[:2] == ("red", "step 2")
    assert lines[2].isprintable()
    assert len(lines[3]) == 300


def test_values_of_the_jobs_variables_are_struck_out():
    tail = b"ValueError: bad key hf_abcdefgh for 1"
    assert last_lines(tail, ["hf_abcdefgh", "1", ""]) == ("ValueError: bad key *** for 1",)


ASLEEP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/a/train.py", line 12 in hang
  File "/home/a/train.py", line 40 in <module>
"""
WAITING = """Current thread 0x00007f2 [python] (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/a/train.py", line 20 in train
"""
BACKWARD = """Current thread 0x00007f2 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/x/site-packages/torch/_tensor.py", line 648 in backward
  File "/home/a/train.py", line 21 in train
"""


@pytest.mark.parametrize(
    ("dump", "where", "waits"),
    [
        (ASLEEP, "hang (train.py:12)", False),
        (WAITING, "all_reduce (distributed_c10d.py:2810) from train (train.py:20)", True),
        (BACKWARD, "_engine_run_backward (graph.py:829) from train (train.py:21)", True),
        (WAITING + ASLEEP, "hang (train.py:12)", False),  # asked twice: the newest dump
        ("", "", False),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", "", False),
        ("garbage\n" * 1000, "", False),
    ],
)
def test_where_a_rank_stands(dump, where, waits):
    assert stack_position(dump) == (where, waits)
