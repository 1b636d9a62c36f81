"""The shortest run about which advice is given."""

from __future__ import annotations

from typing import Final

JUDGED_MIN_S: Final = 600.0
"""A shorter run says too little: imports, compilation and the first epoch take minutes. Job Defense Shield's examples leave out up to 61 minutes,
because they judge many jobs of a user together."""
