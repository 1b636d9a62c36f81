"""A release that does not exist yet: today's migrations and three more. To it, a database of today is an older one.

`install(setattr)` makes this process that release, or one that knows only the first migrations.
"""

from phalanx.store.sql import backups, dumping
from phalanx.store.sql.migrations import Migration, migrations
from phalanx.store.sql.sqlite import connections

TODAY = migrations("sqlite")
# Each would fail, or leave a wrong sum, if it were applied twice.
MORE = (
    "CREATE TABLE later (x INTEGER) STRICT; INSERT INTO later VALUES (1);",
    "ALTER TABLE jobs ADD COLUMN more INTEGER NOT NULL DEFAULT 7; UPDATE jobs SET more = more + 1;",
    "CREATE INDEX jobs_by_more ON jobs (more); UPDATE jobs SET more = more * 10; INSERT INTO later VALUES (2);",
)
KNOWN = (
    *TODAY,
    *(Migration(len(TODAY) + nth, f"{len(TODAY) + nth:04}_more", sql) for nth, sql in enumerate(MORE, start=1)),
)


def install(set_attribute, *, level=len(KNOWN)):
    """Let it know the first `level` migrations of SQLite; `set_attribute`: `setattr`, or `monkeypatch.setattr`."""
    for module in (connections, dumping, backups):
        set_attribute(
            module, "migrations", lambda dialect: KNOWN[:level] if dialect == "sqlite" else migrations(dialect)
        )
