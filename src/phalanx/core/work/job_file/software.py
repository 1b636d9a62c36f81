"""The key `software` of a job: the environment on each node that its processes run in. Nodes look for it themselves, before the gang starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.requirements import NO_REQUIREMENTS, parse_lock_file, parse_requirements
from phalanx.core.work.nearest_match import suggestion

MODULES_MAX: Final = 64
_TEXT_MAX: Final = 1024  # characters; Linux' own limit of a path is 4096
_FORMS: Final = ("conda", "modules", "venv", "uv", "requirements")
_PYTHONS: Final = ("conda", "venv", "uv", "requirements")  # each brings a Python of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The environment of a job on its nodes. Modules may stand beside one of the others, which is then activated after them.

    Attributes:
        conda: name or folder of a conda environment; "" for none.
        modules: as `module load` names them, in order.
        venv: folder of a virtual environment; "" for none. A relative folder is in the working directory.
        uv: lock file of a uv project in the working directory, from which each node makes the environment once; "" for none.
    """

    conda: str = ""
    modules: tuple[str, ...] = ()
    venv: str = ""
    uv: str = ""

    @property
    def has_python(self) -> bool:
        """Whether it brings a Python of its own, in which nothing else is installed."""
        return bool(self.conda or self.venv or self.uv)

    @property
    def exists(self) -> bool:
        """Whether a part of it must exist on the nodes already."""
        return bool(self.conda or self.modules or self.venv)

    def __bool__(self) -> bool:
        """Whether the job names anything."""
        return self != NO_SOFTWARE


NO_SOFTWARE: Final = Software()


def parse_software(value: object) -> tuple[Software, str]:
    """The environment, and the value of the key `requirements` that is its fifth form ("" if it is not given).

    Raises:
        BadRequest: an unknown form, several that exclude each other, none, or a name that cannot be one.
    """
    if not isinstance(value, Mapping):
        raise BadRequest("software: must contain a form and a name", hint="write software: {conda: NAME}")
    given = {str(form): named for form, named in value.items() if named is not None}
    for form in given:
        if form not in _FORMS:
            raise BadRequest(f"software: {form[:40]!r} is not known", hint=suggestion(form, _FORMS, " ".join(_FORMS)))
    pythons = [form for form in _PYTHONS if given.get(form) not in {None, NO_REQUIREMENTS}]
    if len(pythons) > 1:
        raise BadRequest(f"software: {' and '.join(pythons)} cannot be combined", hint="each brings its own Python")
    found = Software(
        conda=_one(given, "conda"),
        modules=tuple(_word("modules", name) for name in _listed(given.get("modules", ()))),
        venv=_one(given, "venv"),
        uv=parse_lock_file(given["uv"]) if "uv" in given else "",
    )
    if len(found.modules) > MODULES_MAX:
        raise BadRequest(f"software: {len(found.modules)} modules; at most {MODULES_MAX} are allowed")
    listed = parse_requirements(given.get("requirements", ""))
    if not found and not listed:
        raise BadRequest("software: names nothing", hint=f"one of {' '.join(_FORMS)}")
    return found, listed


def _one(given: Mapping[str, object], form: str) -> str:
    return _word(form, given[form]) if form in given else ""


def _listed(value: object) -> Sequence[object]:
    """Modules as a list, or as one text with commas or blanks between them."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return value if isinstance(value, Sequence) else (value,)


def _word(form: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else str(value) if isinstance(value, (int, float)) else ""
    spaced: Callable[[str], bool] = str.isspace
    blank = form == "modules" and any(map(spaced, text))
    if not text or blank or len(text) > _TEXT_MAX or text.startswith("-") or not text.isprintable():
        raise BadRequest(f"software: {form}: {str(value)[:80]!r} is not a name", hint=_EXAMPLES[form])
    return text


_EXAMPLES: Final = {
    "conda": "write conda: NAME, or conda: /folder/of/it",
    "modules": "write modules: [cuda/12, gcc]",
    "venv": "write venv: /folder/of/it",
}
