"""The server side of libpmix, by ctypes: what a resource manager does for Open MPI's ranks on one node.

Source: PMIx standard 4.1 and `pmix_server.h` of OpenPMIx 4.2. The structures below are the same from version 3 on.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final

from phalanx.node.mpi.world import MpiWorld

VERSION_MIN: Final = 3
SERVER_NAME: Final = "pmix-server"
_STRING, _BOOL, _UINT16, _UINT32, _INFO, _ARRAY, _RANK = 3, 1, 13, 14, 24, 39, 40  # pmix_common.h, PMIX_STRING ...
_WILDCARD: Final = 0xFFFFFFFE
_SUCCESS, _DONE_AT_ONCE, _ERROR = 0, -157, -1
_CALLBACKS_MAX: Final = 64  # 28 in version 4; those that are null are "not supported"


class PmixFailed(Exception):
    """The library is missing, too old, or refused a call."""


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("flag", ctypes.c_bool),
        ("uint16", ctypes.c_uint16),
        ("uint32", ctypes.c_uint32),
        ("array", ctypes.c_void_p),
        ("room", ctypes.c_char * 24),
    )


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _DataArray(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("size", ctypes.c_size_t), ("array", ctypes.c_void_p))


_CLIENT: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Proc), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_ABORT: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Proc),
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(_Proc),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_MODEX_DONE: Final = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_FENCE: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Proc),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class PmixServer:
    """A PMIx server for the ranks of a step on this node. There is one in a process: the library has global state.

    Args:
        send: receives {"fence": ranks, "places", "data": bytes}, {"initialized": rank}, {"finalized": rank} and {"abort": code}, from a thread of the library.
    """

    def __init__(self, library: str, world: MpiWorld, folder: str, send: Callable[[dict[str, Any]], None]) -> None:
        """Start the server.

        Raises:
            PmixFailed: the library cannot be used.
        """
        try:
            self._pmix = ctypes.CDLL(library)
            self._pmix.PMIx_Get_version.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:  # AttributeError: another library of this name
            raise PmixFailed(str(error)) from None
        self._world, self._send = world, send
        self._name = world.namespace.encode()
        self._fences: dict[str, tuple[int, int]] = {}
        self._kept: list[Any] = []  # what the library may still read
        self._check_version()
        module = (ctypes.c_void_p * _CALLBACKS_MAX)()
        for index, callback in enumerate(
            (_CLIENT(self._initialized), _CLIENT(self._finalized), _ABORT(self._aborted), _FENCE(self._fence))
        ):
            self._kept.append(callback)
            module[index] = ctypes.cast(callback, ctypes.c_void_p)
        self._kept.append(module)
        about = (
            ("pmix.srvr.tmpdir", _STRING, folder),
            ("pmix.sys.tmpdir", _STRING, tempfile.gettempdir()),
            ("pmix.hname", _STRING, world.hosts[world.place]),
            ("pmix.srv.nspace", _STRING, SERVER_NAME),
            ("pmix.srv.rank", _RANK, 0),
        )
        self._call("PMIx_server_init", module, self._infos(about), ctypes.c_size_t(len(about)))
        self._register(folder)

    def port(self) -> int:
        """Return the port of 127.0.0.1 where it listens.

        Raises:
            PmixFailed: the library refused.
        """
        variables = ctypes.POINTER(ctypes.c_char_p)()
        self._call("PMIx_server_setup_fork", ctypes.byref(self._proc(self._world.local[0])), ctypes.byref(variables))
        place = 0
        while (word := variables[place]) is not None:
            if (found := re.match(rb"PMIX_SERVER_URI.*:([0-9]+)$", word)) is not None:
                return int(found[1])
            place += 1
        raise PmixFailed("libpmix does not listen on a TCP port")

    def exchanged(self, fence: str, parts: Sequence[bytes]) -> None:
        """End a fence, with the data of all of its nodes."""
        callback, data = self._fences.pop(fence)
        blob = b"".join(parts)
        self._kept.append(blob)
        _MODEX_DONE(callback)(_SUCCESS, blob, len(blob), data, None, None)

    # ---- callbacks, in a thread of the library -------------------------------------------------------------------------

    def _initialized(self, proc: Any, _object: int, _callback: int, _data: int) -> int:
        self._send({"initialized": int(proc[0].rank)})
        return _DONE_AT_ONCE

    def _finalized(self, proc: Any, _object: int, _callback: int, _data: int) -> int:
        self._send({"finalized": int(proc[0].rank)})
        return _DONE_AT_ONCE

    def _aborted(
        self, _proc: Any, _object: int, status: int, _text: bytes, _procs: Any, _count: int, _callback: int, _data: int
    ) -> int:
        self._send({"abort": status & 0xFF or 1})
        return _DONE_AT_ONCE

    def _fence(
        self, procs: Any, count: int, _infos: int, _info_count: int, data: int, size: int, callback: int, cbdata: int
    ) -> int:
        given = [procs[index] for index in range(count)]
        if any(one.nspace != self._name for one in given):
            return _ERROR
        ranks = [] if any(one.rank == _WILDCARD for one in given) else sorted(int(one.rank) for one in given)
        fence = ",".join(map(str, ranks)) or "all"
        self._fences[fence] = callback, cbdata
        blob = ctypes.string_at(data, size) if data and size else b""
        self._send({"fence": fence, "places": self._world.places(ranks), "data": blob})
        return _SUCCESS

    # ---- what the library gets to know -------------------------------------------------------------------------------

    def _check_version(self) -> None:
        said = self._pmix.PMIx_Get_version().decode("ascii", "replace")
        version = re.search(r"([0-9]+)\.[0-9]+", said)
        if version is None or int(version[1]) < VERSION_MIN:
            raise PmixFailed(f"libpmix is of version {said!r}; {VERSION_MIN} or newer is needed")

    def _register(self, folder: str) -> None:
        world = self._world
        size = world.size
        everything = (
            ("pmix.univ.size", _UINT32, size),
            ("pmix.job.size", _UINT32, size),
            ("pmix.max.size", _UINT32, size),
            ("pmix.job.napps", _UINT32, 1),
            ("pmix.num.nodes", _UINT32, len(world.hosts)),
            ("pmix.jobid", _STRING, self._name.decode()),
            ("pmix.nmap", _STRING, self._expression("PMIx_generate_regex", ",".join(world.hosts))),
            (
                "pmix.pmap",
                _STRING,
                self._expression("PMIx_generate_ppn", ";".join(",".join(map(str, one)) for one in world.ranks)),
            ),
            ("pmix.local.size", _UINT32, len(world.local)),
            ("pmix.node.size", _UINT32, len(world.local)),
            ("pmix.lpeers", _STRING, ",".join(map(str, world.local))),
            ("pmix.lldr", _RANK, world.local[0]),
            ("pmix.tmpdir", _STRING, folder),
            ("pmix.nsdir", _STRING, os.path.join(folder, "job")),
            *(("pmix.pdata", _ARRAY, self._about_rank(rank, folder)) for rank in range(size)),
        )
        os.makedirs(os.path.join(folder, "job"), mode=0o700, exist_ok=True)
        infos, count = self._infos(everything), ctypes.c_size_t(len(everything))
        self._call("PMIx_server_register_nspace", self._name, len(world.local), infos, count, None, None)
        for rank in world.local:
            proc = ctypes.byref(self._proc(rank))
            uid, gid = ctypes.c_uint32(world.uid), ctypes.c_uint32(world.gid)
            self._call("PMIx_server_register_client", proc, uid, gid, None, None, None)

    def _about_rank(self, rank: int, folder: str) -> _DataArray:
        place = self._world.node_of(rank)
        local = self._world.ranks[place].index(rank)
        values = (
            ("pmix.rank", _RANK, rank),
            ("pmix.appnum", _UINT32, 0),
            ("pmix.grank", _RANK, rank),
            ("pmix.apprank", _RANK, rank),
            ("pmix.lrank", _UINT16, local),
            ("pmix.nrank", _UINT16, local),
            ("pmix.nodeid", _UINT32, place),
            ("pmix.hname", _STRING, self._world.hosts[place]),
            ("pmix.pdir", _STRING, os.path.join(folder, "job", str(rank))),
        )
        infos = self._infos(values)
        return _DataArray(type=_INFO, size=len(values), array=ctypes.cast(infos, ctypes.c_void_p))

    def _expression(self, function: str, text: str) -> str:
        found = ctypes.c_char_p()
        self._call(function, text.encode(), ctypes.byref(found))
        return (found.value or b"").decode()

    def _infos(self, values: Sequence[tuple[str, int, Any]]) -> Any:
        infos = (_Info * len(values))()
        for info, (key, kind, value) in zip(infos, values, strict=True):
            info.key, info.value.type = key.encode(), kind
            if kind == _STRING:
                info.value.data.text = value.encode()
            elif kind == _ARRAY:
                self._kept.append(value)
                info.value.data.array = ctypes.addressof(value)
            elif kind == _UINT16:
                info.value.data.uint16 = value
            else:
                info.value.data.uint32 = value
        self._kept.append(infos)
        return infos

    def _proc(self, rank: int) -> _Proc:
        return _Proc(nspace=self._name, rank=rank)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._pmix, function)(*arguments)
        if code not in {_SUCCESS, _DONE_AT_ONCE}:
            raise PmixFailed(f"{function} of libpmix failed with {code}")
