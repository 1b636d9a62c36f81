"""Mounts of object stores on this node: for each member whose job asks for them one program, which ends when its pipe is closed.

The program (`node.data.mount_main`) is no process of the attempt: a frozen job does not freeze the file system on which its processes wait, and the
mounts stay until no process of the member is left. Its mount folders are root's, so that no job can put a link in their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.units import parse_memory_bytes
from phalanx.node.data import fuse_mounts
from phalanx.node.data.rclone_remote import find_rclone, why_no_mounts
from phalanx.node.files.job_accounts import acting_as, make_passable_folder
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.member.member_runtime import MemberRuntime

CACHE_VARIABLE: Final = "PHALANX_MOUNT_CACHE"  # of the supervisor: the most that the cache of one mount takes
_MAIN: Final = (sys.executable, "-I", "-m", "phalanx.node.data.mount_main")
_CACHE: Final = "10GiB"  # eight ranks that each read one shard of 1 GiB and the next
_FREE_SHARE: Final = 0.05  # of the disk, as for copies of datasets
_POLL_S: Final = 0.2
_END_LIMIT_S: Final = 10.0
_ANSWER_CHARACTERS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMounts:
    """See the module. Called by many threads.

    Attributes:
        folder: of this node's mounts.
        shared_folder: of those of other accounts' jobs; only root can write it and the folders above. "" if there are none.
        path: PATH, where rclone is searched.
        cache_limit: of one mount's cache, as the operator wrote it; "" for the default.
    """

    folder: str
    shared_folder: str
    path: str
    cache_limit: str = ""

    def remove_leftovers(self) -> None:
        """Detach the mounts of an earlier supervisor, whose jobs have ended by now."""
        for folder in filter(os.path.isdir, (self.folder, self.shared_folder)):
            fuse_mounts.remove_mount_folders(folder)

    @contextlib.contextmanager
    def hold(
        self,
        member: MemberRuntime,
        sources: tuple[tuple[str, str], ...],
        variables: Mapping[str, str],
        open_output: Callable[[], int],
    ) -> Iterator[dict[str, str]]:
        """Mount the sources while in the context; yields the path of each by its name.

        Args:
            member: its scratch folder holds the caches.
            sources: names and addresses.
            variables: the environment of the job, with its credentials.
            open_output: returns a new descriptor of the job's log.

        Raises:
            PreparationFailed: a source cannot be mounted, or the member was stopped.
            OSError: a folder cannot be created.
        """
        if why := why_no_mounts(self.path):
            raise PreparationFailed(f"data cannot be mounted: {why}; or use mode: stage", charge=True)
        key = member.key
        above = self.folder if member.account is None else self.shared_folder
        folder = os.path.join(above, f"{key.job_id}.{key.epoch}.{key.generation}")
        fuse_mounts.remove_mount_folders(folder)  # of a try that failed
        if member.account is None:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        else:
            make_passable_folder(folder)
        order = json.dumps(self._order(member, folder, sources, variables))
        output = open_output()
        try:
            process = subprocess.Popen(
                _MAIN,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd="/",
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        finally:
            os.close(output)
        try:
            yield _answer(process, order, member)
        finally:
            _end(process)
            fuse_mounts.remove_mount_folders(folder)

    def _order(
        self,
        member: MemberRuntime,
        folder: str,
        sources: tuple[tuple[str, str], ...],
        variables: Mapping[str, str],
    ) -> dict[str, object]:
        account = member.account
        cache = os.path.join(member.scratch.path, f"mount-cache.{member.key.generation}")
        with acting_as(account):
            os.makedirs(cache, mode=0o700, exist_ok=True)
        return {
            "rclone": find_rclone(self.path),
            "folder": folder,
            "sources": sources,
            "variables": dict(variables),
            "account": _account(account),
            "uid": os.geteuid() if account is None else account.uid,
            "gid": os.getegid() if account is None else account.gid,
            "cache": cache,
            "cache_bytes": parse_memory_bytes(self.cache_limit or _CACHE),
            "free_bytes": int(shutil.disk_usage(member.scratch.path).total * _FREE_SHARE),
        }


def _answer(process: subprocess.Popen[str], order: str, member: MemberRuntime) -> dict[str, str]:
    """Give the program its order; return the paths that it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(order + "\n")
        process.stdin.flush()
    while not select.select([process.stdout], [], [], _POLL_S)[0]:
        if member.cancelled.is_set():
            raise PreparationFailed("the job was stopped during preparation", charge=False)
    try:
        found = json.loads(process.stdout.readline(_ANSWER_CHARACTERS_MAX))
    except ValueError:
        raise PreparationFailed("the program that mounts the job's data was ended on this node", charge=False) from None
    if "paths" not in found:
        raise PreparationFailed(str(found["why"]), charge=found["charge"] is True)
    paths: dict[str, str] = found["paths"]
    return paths


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, upon which it unmounts and ends; kill it if it does not."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _account(account: NodeAccount | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
