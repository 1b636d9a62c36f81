"""The order of a head's system calls, as strace wrote it down: what was on the disk when an answer went out. Pure.

    strace -f -yy -s 6000 -e trace=... -o FILE -p PID

Every line is one call, or one half of a call that others came between ("<unfinished ...>", "<... fdatasync resumed>"); lines are in the
order of time. A call is done when its second half is there.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

TRACED = "pwrite64,pwritev,write,writev,sendto,sendmsg,recvfrom,recvmsg,read,fdatasync,fsync,openat,rename,renameat,renameat2,unlink"
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)")
_FD = re.compile(r"^(\d+)<((?:->|[^<>\\]|\\.)*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_RESULT = re.compile(r"\) += (-?\d+)[^=]*$")
_REQUEST = re.compile(r"^(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1")
_ANSWER = re.compile(r"^HTTP/1\.1 (\d{3})")
_MARK = re.compile(r"\r\n[Xx]-[Mm]ark: ([^\r]+)\r\n")
_ENCODED = re.compile(r'"data":"([A-Za-z0-9+/=]+)"')  # msgspec writes bytes as base64
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", '"': '"', "\\": "\\"}
_WRITING = ("pwrite64", "pwritev", "write", "writev")
_SYNCING = ("fdatasync", "fsync")
_AND = " & "  # between the marks of one request
_WAL = "-wal"  # how the name of SQLite's log of commits ends
# Before each page; bytes 4..8 are 0 but in a commit's last frame (sqlite.org/fileformat.html, 4.2).
_FRAME_HEADER_BYTES = 24
_PG_WAL = "/pg_wal/"
_PG_PAGE_BYTES = 8192
# XLogPageHeaderData and XLogLongPageHeaderData of PostgreSQL's access/xlog_internal.h, with padding; which of them, its third byte says.
_PG_HEADER_BYTES, _PG_LONG_HEADER_BYTES, _PG_LONG_HEADER = 24, 40, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One system call.

    Attributes:
        on: what its descriptor is: a path, or a socket as `TCP:[...]`; of openat and rename the path it names.
        text: bytes written, read or sent, one character each; of a rename, the new path. Of PostgreSQL's log without the heads of its
            pages, which may stand amid a record.
        begun, ended: lines of the trace; another call came before this one only if it ended before this began.
    """

    name: str
    on: str
    text: str
    result: int
    begun: int
    ended: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request and its answer on one connection. `marks`: each must be among the bytes that it made durable; empty if it does not say."""

    method: str
    path: str
    status: int
    marks: tuple[str, ...]
    text: str
    received: int
    sent: int


def calls_of(lines: Iterable[str]) -> list[Call]:
    """The calls of a trace that came to an end, in the order in which they began."""
    halves: dict[tuple[str, str], tuple[int, str]] = {}
    found: list[Call] = []
    for at, line in enumerate(lines):
        seen = _LINE.match(line.rstrip("\n"))
        if seen is None:
            continue
        thread, resumed, begun, rest = seen.groups()
        if resumed is not None:
            start, before = halves.pop((thread, resumed), (-1, ""))
            if start >= 0:
                found.append(_call(resumed, before + rest, start, at))
        elif rest.endswith("<unfinished ...>"):
            halves[thread, begun] = at, rest.removesuffix("<unfinished ...>")
        else:
            found.append(_call(begun, rest, at, at))
    return sorted((call for call in found if call.result >= 0), key=lambda call: call.begun)


def _call(name: str, rest: str, begun: int, ended: int) -> Call:
    fd = _FD.match(rest)
    texts = [unescaped(text) for text in _TEXT.findall(rest)]
    result = _RESULT.search(rest)
    on = fd[2] if fd is not None else ""
    if name == "openat":
        on, texts = (texts[0] if texts else ""), ["O_CREAT" if "O_CREAT" in rest else ""]
    if name.startswith("rename"):
        folders = re.findall(r"(?:AT_FDCWD|\d+)<((?:[^<>\\]|\\.)*)>", rest)
        old, new = (*texts, "", "")[:2]
        on = old if old.startswith("/") or not folders else os.path.join(folders[0], old)
        texts = [new if new.startswith("/") or not folders else os.path.join(folders[-1], new)]
    if name == "unlink":
        on, texts = (texts[0] if texts else ""), []
    text = "".join(texts)
    return Call(
        name=name,
        on=on,
        text=_records(text) if name in _WRITING and _PG_WAL in on else text,
        result=int(result[1]) if result else -1,
        begun=begun,
        ended=ended,
    )


def _records(pages: str) -> str:
    """What pages of PostgreSQL's log hold."""
    found = []
    for at in range(0, len(pages), _PG_PAGE_BYTES):
        page = pages[at : at + _PG_PAGE_BYTES]
        is_long = len(page) > _PG_LONG_HEADER and ord(page[_PG_LONG_HEADER]) & _PG_LONG_HEADER
        found.append(page[_PG_LONG_HEADER_BYTES if is_long else _PG_HEADER_BYTES :])
    return "".join(found)


def unescaped(text: str) -> str:
    """What strace wrote as a C string, one character for a byte."""
    return re.sub(
        r"\\(?:([0-7]{1,3})|(.))",
        lambda found: chr(int(found[1], 8)) if found[1] else _ESCAPES.get(found[2], found[2]),
        text,
    )


def answers_of(calls: Sequence[Call]) -> list[Answered]:
    """Every request that came whole and was answered, in the order of the answers."""
    coming: dict[str, tuple[str, int]] = {}
    found = []
    for call in calls:
        if not call.on.startswith(("TCP:", "TCPv6:")):
            continue
        if call.name in ("recvfrom", "recvmsg", "read") and call.result > 0:
            before, _ = coming.get(call.on, ("", 0))
            coming[call.on] = before + call.text, call.ended
        elif call.name in ("sendto", "sendmsg", "write", "writev") and (status := _ANSWER.match(call.text)):
            text, received = coming.pop(call.on, ("", 0))
            request = _REQUEST.match(text)
            if request is not None:
                mark = _MARK.search(text)
                found.append(
                    Answered(
                        method=request[1],
                        path=request[2].partition("?")[0],
                        status=int(status[1]),
                        marks=tuple(mark[1].split(_AND)) if mark else (),
                        text=text + decoded(text),
                        received=received,
                        sent=call.begun,
                    )
                )
    return found


def decoded(text: str) -> str:
    """What a request carries as base64."""
    whole = []
    for encoded in _ENCODED.findall(text):
        try:
            whole.append(base64.b64decode(encoded, validate=True).decode("latin-1"))
        except (binascii.Error, ValueError):
            continue
    return "".join(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Writes that count together: in a WAL the frames of one commit, in any other file one write alone.

    Attributes:
        whole: a commit's last frame is among them. Without it SQLite takes none of the others for written.
    """

    calls: tuple[Call, ...]
    whole: bool

    @property
    def last(self) -> Call:
        """The one that was done last: a sync counts from there."""
        return max(self.calls, key=lambda call: call.ended)

    def holds(self, mark: str) -> bool:
        """Whether the mark is among its bytes."""
        return any(mark in call.text for call in self.calls)


def written_in(calls: Sequence[Call], where: str) -> list[Written]:
    """What was written to the files whose path has `where` in it, in the order in which it began."""
    found: list[Written] = []
    coming: dict[str, list[Call]] = {}
    for call in calls:
        if call.name not in _WRITING or where not in call.on:
            continue
        if not call.on.endswith(_WAL):
            found.append(Written(calls=(call,), whole=True))
            continue
        frames = coming.setdefault(call.on, [])
        closes = bool(frames) and _is_last_of_commit(frames[-1])  # this is the page that its header announced
        frames.append(call)
        if closes:
            found.append(Written(calls=tuple(coming.pop(call.on)), whole=True))
    return found + [Written(calls=tuple(frames), whole=False) for frames in coming.values()]


def _is_last_of_commit(call: Call) -> bool:
    return len(call.text) == _FRAME_HEADER_BYTES and call.text[4:8] != "\0\0\0\0"


def out_of_order(answer: Answered, calls: Sequence[Call], where: str, there: Collection[str] = ()) -> str:
    """What was missing on the disk when this answer went out; empty when nothing was.

    A page of a database carries its neighbours: a later commit of somebody else writes the same mark again, and may be under way as the
    answer goes out. So in a WAL, PostgreSQL's as SQLite's, the first commit that holds the mark is the one that counts. That is the
    request's own only if the mark stood nowhere before; one that did is refused.

    Args:
        answer: the answer.
        calls: the whole trace.
        where: part of the path of the file that must hold it.
        there: paths that had been there before the trace began: to open them makes nothing.
    """
    before = [call for call in calls if call.ended < answer.sent]
    written = written_in(before, where)
    since = [one for one in written if one.calls[0].begun > answer.received]
    said = f"{answer.method} {answer.path} was answered {answer.status}"
    for mark in answer.marks or ("",):
        holding = [one for one in since if one.holds(mark)]
        if not holding:
            return f"{said} and its bytes were not written to {where} before"
        path = holding[0].last.on
        if mark and any(one not in since and one.last.on == path and one.holds(mark) for one in written):
            return f"{said} and nothing can be told: {mark} stood in {path} before it was asked"
        lacking = [_lacking_of(one, before, there) for one in holding]
        if not mark:  # any may be another's, and one has to be whole
            found = "" if "" in lacking else lacking[0]
        elif path.endswith(_WAL) or _PG_WAL in path:
            found = lacking[0]
        else:
            found = next((what for what in lacking if what), "")
        if found:
            return f"{said} before {found}"
    return ""


def _lacking_of(written: Written, before: Sequence[Call], there: Collection[str]) -> str:
    return _lacking(written.last, before, there) if written.whole else f"{written.last.on} held the whole commit"


def _lacking(written: Call, before: Sequence[Call], there: Collection[str]) -> str:
    """What a write still lacked when the answer went out; empty where its bytes, its name and the folder of that name were synced."""
    path = written.on
    synced = next(
        (call for call in before if call.name in _SYNCING and call.on == path and call.begun > written.ended), None
    )
    if synced is None:
        return f"{path} was synced"
    named = next(
        (call for call in before if call.name.startswith("rename") and call.on == path and call.begun > written.ended),
        None,
    )
    made = next((call for call in before if call.name == "openat" and call.on == path and call.text), None)
    if named is not None and named.begun < synced.ended:
        return f"{path} was synced, and it had its name already"
    if named is not None:
        return _lacking_name(named.text, named.ended, before)
    if made is not None and path not in there:
        return _lacking_name(path, made.ended, before)
    return ""


def _lacking_name(path: str, since: int, before: Sequence[Call]) -> str:
    folder = os.path.dirname(path)
    if any(call.name == "fsync" and call.on == folder and call.begun > since for call in before):
        return ""
    return f"the folder {folder} was synced, which holds its name"
