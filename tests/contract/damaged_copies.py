"""Opens damaged copies of a database, in a process of its own: what SQLite makes of them may not be survivable.

python -m tests.contract.damaged_copies FOLDER FIRST EVERY [LARGE]

FOLDER holds `closed.db`, `open.db`, `open.db-wal` and `state-<k>.db`, the whole earlier states. Prints a line for each copy that was neither
equal to a state it may have nor refused in one line, then `done COPIES OVERRUN_MAX EARLIER`. With LARGE, it is judged as a database that is too
large to be read whole at the start.
"""

import logging
import os
import shutil
import sys
from itertools import islice

from phalanx.core.errors import Conflict
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.sqlite import connections
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.contract.damage import copies
from tests.contract.records import dump


def read(path):
    with open(path, "rb") as file:
        return file.read()


def opened(path):
    """All that a store at this path answers, as a head would read it."""
    store = SqliteStore(path)
    try:
        assert store.wait_for_integrity_check(60.0)
        return dump(store)
    finally:
        store.close()


def judge(copy, folder, states):
    """ "" for what may be, "refused", "earlier", or what is wrong."""
    path = os.path.join(folder, "phalanx.db")
    for suffix, content in (("", copy.database), ("-wal", copy.wal), ("-shm", copy.shm), (".lock", copy.lock)):
        if content is not None:
            with open(path + suffix, "wb") as file:
                file.write(content)
    try:
        found = opened(path)
    except (StoreUnusable, StoreRefused, Conflict) as error:
        return (
            "refused"
            if "\n" not in error.message and error.hint
            else f"refused in other than a line: {error.message!r}"
        )
    except Exception as error:  # noqa: BLE001  # whatever else comes out is the finding
        return f"broke: {type(error).__name__}: {error}"
    if found == states[-1]:
        return ""
    if copy.earlier and found in states:
        return "earlier"
    wrong = next((name for name, value in found.items() if value != states[-1][name]), "?")
    return f"opened with other {wrong}"


def main(home, first, every, large):
    logging.getLogger("phalanx").addHandler(logging.NullHandler())  # the store says it loudly
    if large:
        connections.CHECKED_AT_OPEN_BYTES = 0  # type: ignore[misc]
    names = sorted(
        (name for name in os.listdir(home) if name.startswith("state-") and name.endswith(".db")),
        key=lambda name: int(name[6:-3]),
    )
    states = [opened(os.path.join(home, name)) for name in names]
    counts = {"": 0, "refused": 0, "earlier": 0}
    folder = os.path.join(home, f"copy-{first}")
    all_copies = copies(read(home + "/closed.db"), read(home + "/open.db"), read(home + "/open.db-wal"))
    for copy in islice(all_copies, first, None, every):
        os.makedirs(folder)
        print("at", copy.what, flush=True)
        said = judge(copy, folder, states)
        if said not in counts:
            print("WRONG", copy.what, said, sep=": ", flush=True)
        counts[said] = counts.get(said, 0) + 1
        shutil.rmtree(folder)
    print("done", sum(counts.values()), counts["refused"], counts["earlier"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4)
