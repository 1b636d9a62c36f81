"""Failure rules: which sign means what, drawn as a table; and what is refused of a rules file."""

from dataclasses import replace

import pytest

from phalanx.controller.rulebook import Rulebook
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.fleet.custom_failure_rules import OPERATORS, FailureRules
from phalanx.core.ids import UserId
from phalanx.core.recovery.failure_rules import (
    diagnose,
    diagnose_cause,
    matches,
    merge_rules,
    parse_rules,
)
from phalanx.core.state.records import FAILURE_RULES
from phalanx.core.state.world import World
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.failure import (
    FailureAttribution,
    FailureEvidence,
    FailureReaction,
    RestartBudget,
)
from phalanx.planner.facts.failure_rules import parse_failure_rules, shipped_rules
from tests.builders import exited

NCCL_PEER = "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.cpp:317, remote process exited or there was a network error"
TIMEOUT = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE) ran for 600021 milliseconds"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"

# code or signal, XIDs, last lines               ->  rule, blame, remedy, charge
SHIPPED = [
    (1, (), (), "exit-code user here retry"),
    (1, (), ("Traceback", "ValueError: no"), "python-error user here retry"),
    (1, (), (OOM,), "cuda-out-of-memory user here retry"),
    (1, (79,), ("RuntimeError: CUDA error: unspecified launch failure",), "xid-79 infrastructure drain progress"),
    (1, (48,), (), "xid-48 infrastructure drain progress"),
    (1, (64,), (), "xid-64 infrastructure drain progress"),
    (1, (95,), (), "xid-95 infrastructure drain progress"),
    (1, (119,), (), "xid-119 infrastructure drain progress"),
    (1, (120,), (), "xid-120 infrastructure drain progress"),
    (1, (140,), (), "xid-140 infrastructure drain progress"),
    (1, (74,), (), "xid-74 infrastructure elsewhere progress"),
    (1, (145,), (), "xid-nvlink5 infrastructure elsewhere progress"),
    (1, (94,), (), "xid-94 infrastructure here progress"),
    (1, (94, 63), (), "xid-94 infrastructure here progress"),
    (1, (92,), (), "xid-92 infrastructure here progress"),
    (1, (63,), (), "xid-63 infrastructure here progress"),
    (1, (13,), (), "xid-13 user here retry"),
    (1, (31,), (), "xid-31 user here retry"),
    (1, (43,), (), "xid-43 user here retry"),
    (1, (45,), (), "xid-45 echo here progress"),
    (1, (45, 79), (), "xid-79 infrastructure drain progress"),  # the other one counts
    (1, (43, 31), ("ValueError: no",), "python-error user here retry"),
    (1, (999,), (), "exit-code user here retry"),
    (1, (), ("CUDA error: uncorrectable ECC error encountered",), "cuda-ecc infrastructure elsewhere progress"),
    (1, (95,), ("CUDA error: uncorrectable ECC error encountered",), "xid-95 infrastructure drain progress"),
    (1, (), ("RuntimeError: No CUDA-capable device is detected",), "cuda-no-device infrastructure elsewhere progress"),
    (1, (), ("CUDA error: device-side assert triggered",), "cuda-assert user here retry"),
    (1, (), ("OSError: [Errno 28] No space left on device",), "no-space infrastructure elsewhere progress"),
    (1, (), (NCCL_PEER,), "nccl-peer echo here progress"),
    ("s6", (), (TIMEOUT,), "nccl-timeout echo here progress"),
    (
        1,
        (),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",),
        "peer-gone echo here progress",
    ),
    (1, (), ("ConnectionResetError: [Errno 104] Connection reset by peer",), "peer-gone echo here progress"),
    ("s11", (), (), "segfault infrastructure here progress"),
    (139, (), (), "segfault infrastructure here progress"),  # as a launcher tells it
    ("s7", (), (), "bus-error infrastructure here progress"),
    (134, (), (), "aborted infrastructure here progress"),
    ("s9", (), (), "killed infrastructure here progress"),
    ("s15", (), (), "signal infrastructure here progress"),
    (127, (), (), "not-found user here retry"),
]


def failed(how, xids=(), lines=(), *, oom=False):
    signal = int(how[1:]) if isinstance(how, str) else None
    exit = exited(0, "n0", None if signal else how, signal=signal)
    return replace(exit, evidence=FailureEvidence(lines=tuple(lines), xids=tuple(xids), oom_killed=oom))


def said(diagnosis):
    return f"{diagnosis.rule} {diagnosis.attribution} {diagnosis.remedy} {diagnosis.charge}"


@pytest.mark.parametrize(("how", "xids", "lines", "diagnosis"), SHIPPED)
def test_shipped_rules(how, xids, lines, diagnosis):
    assert said(diagnose(failed(how, xids, lines), shipped_rules())) == diagnosis


def test_no_shipped_rule_drains_a_node_for_what_a_job_printed():
    drains = [rule for rule in shipped_rules() if rule.remedy is FailureReaction.DRAIN]
    assert drains
    assert [rule.name for rule in drains if not rule.xids] == []


def test_killed_for_want_of_memory_is_the_users_whatever_the_log_says():
    assert said(diagnose(failed("s9", oom=True), shipped_rules())) == "oom-killed user here retry"


def test_verdict_names_the_xid_and_what_nvidia_calls_it():
    assert diagnose(failed(1, (79,)), shipped_rules()).description == "XID 79: the GPU has fallen off the bus"


def test_verdict_of_a_log_line_is_the_line_itself_and_the_last_one_counts():
    diagnosis = diagnose(failed(1, (), ("KeyError: 'a'", "ValueError: b", "1 more line")), shipped_rules())
    assert (diagnosis.description, diagnosis.line) == ("ValueError: b", "ValueError: b")


def test_every_shipped_rule_says_where_it_is_from_and_can_decide_something():
    rules = shipped_rules()
    assert all(rule.source and rule.date for rule in rules)
    for rule in rules:
        if rule.cause:
            diagnosis = diagnose_cause(EndCause(rule.cause), rules)
            assert diagnosis is not None
            assert diagnosis.rule == rule.name
            continue
        how = f"s{rule.signals[0]}" if rule.signals else rule.codes[0] if rule.codes else 1
        for option in rule.pattern.split("|"):
            lines = (option.replace("*", " x "),) if option else ()
            assert diagnose(failed(how, rule.xids[:1], lines, oom=rule.oom), rules).rule == rule.name, option


def test_hardware_goes_before_what_the_program_said():
    assert (
        diagnose(failed(1, (79,), ("ValueError: cannot convert float NaN to integer",)), shipped_rules()).rule
        == "xid-79"
    )


@pytest.mark.parametrize(
    ("pattern", "line", "fits"),
    [
        ("no space", "OSError: NO SPACE left", True),
        ("a*c", "abc", True),
        ("a*c", "cba", False),
        ("x|b", "abc", True),
        ("NET/IB*status=", "NET/IB : Got completion from peer with status=12", True),
        ("a*a", "a", False),  # two pieces, one letter
        ("(a+)+$", "aaaa", False),  # text, not a regular expression
    ],
)
def test_pattern(pattern, line, fits):
    assert matches(pattern, line) is fits


def test_hostile_pattern_and_line_cost_nothing():
    assert not matches("*".join(["a"] * 250), "a" * 249 + "b")


# ---- an operator's own ----------------------------------------------------------------------------------------------

OWN = {"name": "spot", "codes": [117], "blame": "preempted", "remedy": "elsewhere", "says": "the spot market took it"}


def test_own_rule_goes_before_the_shipped_ones_and_one_of_the_same_name_replaces():
    own = parse_rules([OWN, {"name": "xid-79", "xids": 79, "blame": "user", "remedy": "stop"}])
    rules = merge_rules(own, shipped_rules())
    assert said(diagnose(failed(117), rules)) == "spot preempted elsewhere progress"
    assert said(diagnose(failed(1, (79,)), rules)) == "xid-79 user stop retry"
    assert len(rules) == len(shipped_rules()) + 1


def test_all_signs_of_a_rule_must_be_there():
    rules = parse_rules(
        [{"name": "r", "codes": [3], "pattern": "lost", "blame": "infrastructure", "remedy": "elsewhere"}]
    )
    assert diagnose(failed(3, (), ("lost",)), rules).rule == "r"
    assert diagnose(failed(4, (), ("lost",)), rules).rule == "exit-code"
    assert diagnose(failed(3), rules).rule == "exit-code"


def test_signals_go_by_name_too():
    (rule,) = parse_rules([{"name": "r", "signals": ["sigxcpu", 30], "blame": "user", "remedy": "stop"}])
    assert rule.signals == (24, 30)


REFUSED = [
    ({**OWN, "exit_codes": 3}, "unknown key 'exit_codes'"),
    ({**OWN, "remdy": "here"}, "did you mean 'remedy'"),
    ({**OWN, "blame": "usr"}, "did you mean 'user'"),
    ({**OWN, "remedy": None}, "remedy"),
    ({**OWN, "codes": [0]}, "codes: '0'"),
    ({**OWN, "codes": [True]}, "codes: 'True'"),
    ({**OWN, "codes": ["3"]}, "codes: '3'"),
    ({**OWN, "signals": ["SIGFOO"]}, "signals: 'SIGFOO'"),
    ({**OWN, "pattern": "a|*"}, "would match every line"),
    ({**OWN, "pattern": "a\nb"}, "one line"),
    ({**OWN, "pattern": "x" * 501}, "at most 500"),
    ({**OWN, "oom": "yes"}, "true or false"),
    ({**OWN, "weight": float("nan")}, "weight"),
    ({**OWN, "cause": "crash"}, "not one of hang"),
    ({"name": "r", "blame": "user", "remedy": "stop"}, "a sign is missing"),
    ({"blame": "user", "remedy": "stop", "codes": 3}, "name is missing"),
    ("text", "a table is required"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED)
def test_rule_that_cannot_be_is_refused_with_its_place(value, words):
    with pytest.raises(BadRequest) as refusal:
        parse_rules([OWN | {"name": "first"}, value])
    assert words in f"{refusal.value.message} {refusal.value.hint}"
    assert "rule 2" in refusal.value.message


def test_no_two_rules_of_one_name_and_not_too_many():
    with pytest.raises(BadRequest, match="twice"):
        parse_rules([OWN, OWN])
    with pytest.raises(BadRequest, match="at most 500"):
        parse_rules([OWN] * 501)
    with pytest.raises(BadRequest, match="a list"):
        parse_rules({"rules": []})


def test_shipped_table_that_is_damaged_names_line_and_column():
    head = "name,blame,remedy,codes,source,date\n"
    with pytest.raises(BadFile, match=r"line 2, column codes: 'x'"):
        parse_failure_rules(f"{head}a,user,stop,x,here,2026\n", "failures.csv")
    with pytest.raises(BadFile, match=r"line 2, column name: .*blame"):
        parse_failure_rules(f"{head}a,usr,stop,3,here,2026\n", "failures.csv")


def test_defaults_of_charge_follow_the_blame():
    user, node = parse_rules(
        [
            {"name": "a", "codes": 3, "blame": "user", "remedy": "here"},
            {"name": "b", "codes": 4, "blame": "infrastructure", "remedy": "here"},
        ]
    )
    assert (user.charge, node.charge) == (RestartBudget.RETRY, RestartBudget.PROGRESS)
    assert (user.attribution, user.remedy) == (FailureAttribution.USER, FailureReaction.RESTART_IN_PLACE)


def test_rules_of_a_later_release_leave_the_shipped_ones_and_are_told(caplog):
    world = World()
    world.table(FAILURE_RULES)[OPERATORS] = FailureRules(
        rules='[{"name": "x", "moon": "full"}]', by=UserId("op"), at_s=1.0
    )
    book = Rulebook(world, shipped_rules())
    assert book.rules == book.rules == shipped_rules()
    assert [record.message for record in caplog.records] == [
        "the operators' failure rules are ignored: this release cannot read them: rule 1: unknown key 'moon'"
    ]
