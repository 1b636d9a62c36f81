"""Mounts of object stores on this node: one for each source, account and set of credentials, which the jobs that name it share.

The program of a mount (`node.data.mount_main`) is no process of an attempt: a frozen job does not freeze the file system on which its processes
wait, and a mount stays until no process of the last member that uses it is left. Its folders are root's, so that no job can put a link in their
place. The reasons are in decision 0111.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.units import parse_memory_bytes
from phalanx.node.data import fuse_mounts
from phalanx.node.data.rclone_remote import find_rclone, remote_variables, why_no_mounts
from phalanx.node.files.job_accounts import make_passable_folder
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare.shared_mount import SharedMount

CACHE_VARIABLE: Final = "PHALANX_MOUNT_CACHE"  # of the supervisor: the most that the cache of one mount takes
_CACHE: Final = "10GiB"  # eight ranks that each read one shard of 1 GiB and the next
_CACHES: Final = "caches"  # beside the folders of the mounts
_FREE_SHARE: Final = 0.05  # of the disk, as for copies of datasets
_POLL_S: Final = 0.1
_Key = tuple[
    int, frozenset[tuple[str, str]]
]  # the account's uid, and all that rclone gets: the source and the credentials


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
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _mounts: dict[_Key, SharedMount] = field(default_factory=dict, init=False)

    def remove_leftovers(self) -> None:
        """Detach the mounts of an earlier supervisor, whose jobs have ended by now, and remove their caches."""
        for folder in filter(os.path.isdir, (self.folder, self.shared_folder)):
            remove_tree(os.path.join(folder, _CACHES))
            fuse_mounts.remove_mount_folders(folder)

    @contextlib.contextmanager
    def hold(
        self,
        member: MemberRuntime,
        sources: tuple[tuple[str, str], ...],
        variables: Mapping[str, str],
        open_output: Callable[[], int],
    ) -> Iterator[dict[str, str]]:
        """Have the sources mounted while in the context; yields the path of each by its name.

        Args:
            member: whose account reads them.
            sources: names and addresses.
            variables: the environment of the job, with its credentials.
            open_output: returns a new descriptor of the job's log.

        Raises:
            PreparationFailed: a source cannot be mounted, or the member was stopped.
            OSError: a folder cannot be created.
        """
        if why := why_no_mounts(self.path):
            raise PreparationFailed(f"data cannot be mounted: {why}; or use mode: stage", charge=True)
        with contextlib.ExitStack() as held:
            yield {
                name: held.enter_context(self._hold_one(member, name, source, variables, open_output))
                for name, source in sources
            }

    @contextlib.contextmanager
    def _hold_one(
        self,
        member: MemberRuntime,
        name: str,
        source: str,
        variables: Mapping[str, str],
        open_output: Callable[[], int],
    ) -> Iterator[str]:
        uid = os.geteuid() if member.account is None else member.account.uid
        key = (uid, frozenset(remote_variables(source, variables).items()))
        output = open_output()
        try:
            mount, said = self._join(key, member, source, variables)
        except BaseException:
            os.close(output)
            raise
        try:
            with mount.logging_to(name, output):
                os.write(output, f"phalanx: data {name}: {said}\n".encode())
                yield mount.path
        finally:
            self._leave(key, mount)

    def _join(
        self, key: _Key, member: MemberRuntime, source: str, variables: Mapping[str, str]
    ) -> tuple[SharedMount, str]:
        """Use the mount of another job, or make one. A mount that failed for another job is tried again: the error is this job's own."""
        while True:
            with self._lock:
                mount = self._mounts.get(key)
                if made := mount is None or mount.broken:
                    mount = self._mounts[key] = SharedMount(*self._new_folders(member.account))
                assert mount is not None
                mount.users += 1
                is_old = mount.tried.is_set()  # else what it lists is newer than this job
            if made:
                try:
                    took_s = mount.start(self._order(member, source, variables), member.cancelled)
                except BaseException:
                    mount.broken = True
                    self._leave(key, mount)
                    raise
                finally:
                    mount.tried.set()
                limit = f"{parse_memory_bytes(self.cache_limit or _CACHE) >> 20} MiB"
                return mount, f"mounted in {took_s:.1f}s, 0 bytes to copy; its cache takes up to {limit}"
            while not mount.tried.wait(_POLL_S):
                if member.cancelled.is_set():
                    self._leave(key, mount)
                    raise PreparationFailed("the job was stopped during preparation", charge=False)
            if is_old and mount.path:
                mount.refresh()
            if mount.path and not mount.broken:
                return mount, "mounted already for another job, 0 bytes to copy; they share its cache"
            self._leave(key, mount)

    def _leave(self, key: _Key, mount: SharedMount) -> None:
        """One user less; the last one ends it."""
        with self._lock:
            mount.users -= 1
            last = mount.users == 0
            if (last or mount.broken) and self._mounts.get(key) is mount:
                del self._mounts[key]
        if last:
            mount.end()

    def _new_folders(self, account: NodeAccount | None) -> tuple[str, str]:
        """Make the folder of a new mount, which only root can replace, and that of its cache. The names are random, and in no list that a job can read."""
        above = self.folder if account is None else self.shared_folder
        name = secrets.token_hex(8)
        folder, caches = os.path.join(above, name), os.path.join(above, _CACHES)
        if account is None:
            for one in (folder, os.path.join(caches, name)):
                os.makedirs(one, mode=0o700, exist_ok=True)
        else:
            make_passable_folder(folder)
            make_passable_folder(caches)
            os.mkdir(os.path.join(caches, name), 0o700)
            os.chown(os.path.join(caches, name), account.uid, account.gid)
        return folder, os.path.join(caches, name)

    def _order(self, member: MemberRuntime, source: str, variables: Mapping[str, str]) -> dict[str, Any]:
        account = member.account
        return {
            "rclone": find_rclone(self.path),
            "source": source,
            "variables": dict(variables),
            "account": _account(account),
            "uid": os.geteuid() if account is None else account.uid,
            "gid": os.getegid() if account is None else account.gid,
            "cache_bytes": parse_memory_bytes(self.cache_limit or _CACHE),
            "free_bytes": int(
                shutil.disk_usage(self.folder if account is None else self.shared_folder).total * _FREE_SHARE
            ),
        }


def _account(account: NodeAccount | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
