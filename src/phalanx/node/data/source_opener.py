"""Which reader a source needs, by its address."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.work.job_file.data_sources import local_path
from phalanx.node.data.plain_sources import FolderSource, HttpFileSource, HubSource
from phalanx.node.data.sources import DataSource


def open_source(source: str, variables: Mapping[str, str]) -> DataSource:
    """The reader of a source. `variables`: of the job, with its credentials.

    Raises:
        DatasetInvalid: this node cannot read such sources.
    """
    path = local_path(source)
    if path is not None:
        return FolderSource(source, path)
    scheme = source.partition("://")[0]
    if scheme in {"http", "https"}:
        return HttpFileSource(source)
    if scheme == "hf":
        return HubSource(source, variables)
    from phalanx.node.data.object_store import ObjectStoreSource

    return ObjectStoreSource(source)
