"""How many heaps the C library keeps for the head's threads."""

import platform
import re
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
if sys.argv[1] == "few":
    from phalanx.app.head import limit_malloc_arenas
    limit_malloc_arenas()
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(12)
def work():
    together.wait()
    libc.malloc(5000)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
[one.start() for one in threads]
[one.join() for one in threads]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
out = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps a heap for each thread")
def test_twelve_threads_of_a_head_share_two_heaps():
    def heaps(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60
        )
        return len(re.findall("<heap nr", done.stdout))

    assert heaps("few") <= 2 < heaps("many")
