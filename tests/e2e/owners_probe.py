"""Run as a job of one account: try everything that another account's job, root's files and our own processes must refuse. Prints JSON.

Plain Python of the system, started by path; takes the victim's facts as JSON.
"""

import ctypes
import json
import os
import signal
import sys

PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
libc = ctypes.CDLL(None, use_errno=True)


def ptrace(pid, request):
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def read(path, size=-1):
    with open(path, "rb") as file:
        return file.read(size)


def write(path):
    with open(path, "ab") as file:
        file.write(b"x")


def tries(facts):
    victim = facts["pid"]
    yield "its environment", lambda: read(f"/proc/{victim}/environ")
    yield "its memory", lambda: read(f"/proc/{victim}/mem", 1)
    yield "its open files", lambda: os.listdir(f"/proc/{victim}/fd")
    yield "its working directory by /proc", lambda: os.listdir(f"/proc/{victim}/cwd")
    yield "a signal to it", lambda: os.kill(victim, signal.SIGTERM)
    yield "a signal to its group", lambda: os.killpg(victim, signal.SIGTERM)
    yield "ptrace of it", lambda: ptrace(victim, PTRACE_ATTACH)
    yield "its home", lambda: os.listdir(facts["home"])
    for name in ("PHALANX_OUTPUT_DIR", "PHALANX_CHECKPOINT_DIR", "PHALANX_HOSTFILE", "PHALANX_LEASE_PAGE"):
        yield f"its {name}", lambda path=facts[name]: os.stat(path)
    yield "its report pipe", lambda: os.open(facts["PHALANX_REPORT_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
    for name in ("token", "secret", "phalanx.db", "head.json", "nodes", "logs", "outputs"):
        yield f"the head's {name}", lambda name=name: os.stat(os.path.join(facts["state"], name))
    yield "the folders of all jobs", lambda: os.listdir(os.path.dirname(facts["attempt"]))
    yield "a folder beside those of jobs", lambda: os.mkdir(os.path.join(os.path.dirname(facts["attempt"]), "mine"))
    yield "writing our own lease page", lambda: write(os.environ["PHALANX_LEASE_PAGE"])
    yield "shortening our own lease page", lambda: os.truncate(os.environ["PHALANX_LEASE_PAGE"], 0)
    yield "giving our own lease page away", lambda: os.chmod(os.environ["PHALANX_LEASE_PAGE"], 0o666)
    yield "being root again", lambda: os.setuid(0)
    yield "being the other", lambda: os.setuid(facts["uid"])
    yield "another group", lambda: os.setgroups([0])
    pid = os.getppid()
    while pid > 1:  # keeper, spawner, supervisor, head
        with open(f"/proc/{pid}/stat") as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
        for what, deed in (
            ("environment", lambda pid=pid: read(f"/proc/{pid}/environ")),
            ("memory", lambda pid=pid: read(f"/proc/{pid}/mem", 1)),
            ("descriptors", lambda pid=pid: os.listdir(f"/proc/{pid}/fd")),
            ("signal", lambda pid=pid: os.kill(pid, signal.SIGCONT)),
            ("ptrace", lambda pid=pid: ptrace(pid, PTRACE_SEIZE)),
        ):
            yield f"{what} of {name}", deed
        pid = int(rest.split()[1])
    with open("/proc/self/cgroup") as membership:
        for line in membership:
            if line.startswith("0::/") and "phalanx" in line:
                for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                    for name in ("cgroup.procs", "cgroup.freeze", "cgroup.kill"):
                        yield (
                            f"{name} of its cgroup in {root}",
                            lambda path=f"{root}{line[3:].strip()}/{name}": write(path),
                        )


def main():
    got, refused = [], 0
    for what, deed in tries(json.loads(sys.argv[1])):
        try:
            deed()
        except OSError:
            refused += 1
        else:
            got.append(what)
    print(json.dumps({"got": got, "refused": refused, "inherited": sorted(os.listdir("/proc/self/fd"))}))


main()
