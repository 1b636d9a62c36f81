"""Clusters that this user has saved: the URL of each, its CA and a token. One of them may be the current one.

They are in `clusters.json` in the user's configuration folder, which only the user may read, and not in a head's state folder: commands of jobs
use the head of their job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from phalanx.client.input_files import read_small_json
from phalanx.core.errors import BadFile, BadRequest, Conflict, NotFound
from phalanx.core.hints import Hint, HintCode

CLUSTER_VARIABLE: Final = "PHALANX_CLUSTER"
_FILE: Final = "clusters.json"


class SavedCluster(NamedTuple):
    """One cluster. `url`: of its heads, separated by commas; `ca`: their CA in PEM format, "" for the system's CAs; `user`: whose token it is."""

    name: str
    url: str
    token: str = ""
    ca: str = ""
    user: str = ""
    expires_s: float | None = None

    def __repr__(self) -> str:
        """Return it without its token."""
        return f"SavedCluster({self.name!r}, {self.url!r})"


class SavedClusters(NamedTuple):
    """All of them, by name. `current`: the name of the current one; "" for none."""

    clusters: Mapping[str, SavedCluster]
    current: str = ""

    def require(self, name: str) -> SavedCluster:
        """Return the cluster of that name.

        Raises:
            NotFound: it is not saved.
        """
        if name not in self.clusters:
            from phalanx.core.work.nearest_match import suggestion

            otherwise = f"saved: {', '.join(self.clusters)}" if self.clusters else Hint(HintCode.LOGIN_FIRST)
            raise NotFound(f"no saved cluster {name[:80]!r}", hint=suggestion(name, list(self.clusters), otherwise))
        return self.clusters[name]

    def with_cluster(self, cluster: SavedCluster) -> SavedClusters:
        """Return them with this one, added or replaced.

        Raises:
            BadRequest: the name is not valid.
        """
        from phalanx.core.work.names import is_name

        if not is_name(cluster.name):
            raise BadRequest(
                f"{cluster.name[:80]!r} is not a valid name for a cluster",
                hint="use letters, digits and . _ - @ +, at most 63 characters, starting with a letter or digit",
            )
        return self._replace(clusters={**self.clusters, cluster.name: cluster})

    def with_current(self, name: str) -> SavedClusters:
        """Return them with another current one; "" for none.

        Raises:
            NotFound: it is not saved.
        """
        if name:
            self.require(name)
        return self._replace(current=name)

    def renamed(self, name: str, new: str) -> SavedClusters:
        """Return them with this one under another name, in its place.

        Raises:
            NotFound: it is not saved.
            Conflict: another one has the new name.
            BadRequest: the new name is not valid.
        """
        cluster = self.require(name)._replace(name=new)
        if new in self.clusters and new != name:
            raise Conflict(f"a cluster {new} is saved already", hint="remove or rename that one first")
        self.with_cluster(cluster)
        clusters = {new if key == name else key: cluster if key == name else one for key, one in self.clusters.items()}
        return SavedClusters(clusters=clusters, current=new if self.current == name else self.current)

    def without(self, name: str) -> SavedClusters:
        """Return them without this one.

        Raises:
            NotFound: it is not saved.
        """
        self.require(name)
        kept = {key: one for key, one in self.clusters.items() if key != name}
        return SavedClusters(clusters=kept, current="" if self.current == name else self.current)


def config_folder() -> str:
    """Return the user's configuration folder of Phalanx."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "phalanx")


def read_clusters() -> SavedClusters:
    """Return the saved clusters; none without the file.

    Raises:
        BadFile: the file is damaged, or cannot be read.
    """
    path = os.path.join(config_folder(), _FILE)
    try:
        record = read_small_json(path)
        clusters = {str(name): _cluster(str(name), one) for name, one in record["clusters"].items()}
        current = str(record.get("current") or "")
    except FileNotFoundError:
        return SavedClusters(clusters={})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path}: not a file of clusters: {error}", hint="remove it, and log in again") from error
    return SavedClusters(clusters=clusters, current=current if current in clusters else "")


def write_clusters(saved: SavedClusters) -> str:
    """Replace the file, readable for its owner only; return its path."""
    from phalanx.node.files.private_files import write_private

    folder = config_folder()
    clusters = {name: {k: v for k, v in one._asdict().items() if k != "name"} for name, one in saved.clusters.items()}
    return write_private(folder, _FILE, json.dumps({"current": saved.current, "clusters": clusters}, indent=2) + "\n")


def chosen_cluster() -> SavedCluster | None:
    """Return the cluster that PHALANX_CLUSTER names, else the current one unless the environment names a head; None for none.

    PHALANX_CLUSTER="" means none.

    Raises:
        NotFound: PHALANX_CLUSTER names one that is not saved.
        BadFile: the file of clusters is damaged.
    """
    name = os.environ.get(CLUSTER_VARIABLE)
    if name is None:
        if os.environ.get("PHALANX_URL") or os.environ.get("PHALANX_HOME"):
            return None
        saved = read_clusters()
        return saved.clusters[saved.current] if saved.current else None
    return read_clusters().require(name) if name else None


def _cluster(name: str, record: Any) -> SavedCluster:
    expires_s = record.get("expires_s")
    return SavedCluster(
        name=name,
        url=str(record["url"]),
        token=str(record.get("token") or ""),
        ca=str(record.get("ca") or ""),
        user=str(record.get("user") or ""),
        expires_s=None if expires_s is None else float(expires_s),
    )
