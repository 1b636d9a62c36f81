"""Facts about the house that import-linter and ruff cannot say: what may be imported whole, what is pinned, what ships.

The layers themselves stand in ``pyproject.toml`` (``make contracts``).
"""

import ast
import builtins
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"

# What a server must not need, with the one folder that may import it.
EXTRAS = {
    "torch": "torch",
    "ray": "engines/ray",
    "psycopg": "store",
    "authlib": "providers/identity",
    "botocore": "providers/aws",
    "google": "providers/google",
    "joserfc": "providers/identity",
    "opentelemetry": "providers/tracing",
    "submitit": "submitit",
    "joblib": "joblib",
    "obstore": "node/data",
    "optuna": "sweep",
    "aiohttp": "gateway",
    "uvloop": "gateway",
    "xxhash": "gateway",
}

# The standard library as core may see it: values, types and arithmetic.
PURE = {
    "__future__",
    "abc",
    "bisect",
    "builtins",
    "collections",
    "copy",
    "dataclasses",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "hmac",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "types",
    "typing",
    "unicodedata",
    "zlib",
}

# STYLE 5: a module is named by its noun.
NAMELESS = {"utils", "util", "helpers", "helper", "manager", "managers", "data", "info", "misc", "common"}

# Files at the top of the checkout; all else has a folder.
TOP = {
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("phalanx", include_external_packages=True, cache_dir=None)


def ours() -> list[str]:
    return sorted(name for name in imports().modules if name.split(".", 1)[0] == "phalanx")


def foreign(package: str) -> set[tuple[str, str]]:
    """(module, third-party or standard package) for every direct import out of Phalanx under ``package``."""
    graph = imports()
    inside = [name for name in ours() if name == package or name.startswith(package + ".")]
    return {
        (name, target.split(".", 1)[0])
        for name in inside
        for target in graph.find_modules_directly_imported_by(name)
        if target.split(".", 1)[0] != "phalanx"
    }


def third_party(package: str) -> set[str]:
    return {target for _, target in foreign(package) if target not in sys.stdlib_module_names and not by_path(target)}


def by_path(name: str) -> bool:
    """A file of ours that a bare process loads by its path, under such a name, because it cannot import phalanx."""
    return name.startswith("_phalanx_")


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)


def loaded_by(module: str) -> set[str]:
    """Top-level packages in ``sys.modules`` of a fresh process that imported only ``module``."""
    done = python(f"import {module}, sys; print(*{{name.split('.')[0] for name in sys.modules}})")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


# --------------------------------------------------------------------------------------------------- what imports what


def rests_on_an_extra(module: str) -> bool:
    """Whether ``module`` imports an extra, in the one folder that may."""
    return any(
        extra in imports().find_modules_directly_imported_by(module)
        and module.startswith("phalanx." + folder.replace("/", "."))
        for extra, folder in EXTRAS.items()
    )


@pytest.mark.slow
def test_control_plane_imports_without_any_extra():
    bare = {name for name, target in foreign("phalanx") if by_path(target)}
    wanted = [
        name
        for name in ours()
        if name not in bare
        and not rests_on_an_extra(name)
        and not name.startswith(("phalanx.torch", "phalanx.gateway"))
    ]
    # FastAPI brings OpenTelemetry's API, but not its SDK and exporters.
    absent = set(EXTRAS) - {"opentelemetry"} | {"opentelemetry.sdk", "opentelemetry.exporter"}
    done = python(
        "import importlib, importlib.abc, sys\n"
        f"absent = {absent!r}\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if absent & {name.split('.')[0], '.'.join(name.split('.')[:2])}: raise ModuleNotFoundError(f'{name} is not installed here', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"for name in {wanted!r}:\n"
        "    if not name.endswith('.__main__'): importlib.import_module(name)\n"
    )
    assert done.returncode == 0, done.stderr


def test_no_import_circle():
    graph = imports()
    state: dict[str, int] = {}  # 1 = on the path, 2 = done
    path: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        path.append(name)
        for target in sorted(graph.find_modules_directly_imported_by(name)):
            if not target.startswith("phalanx.") or (name, target) == ("phalanx", "phalanx.client"):
                continue
            if state.get(target) == 1:
                pytest.fail("import circle: " + " -> ".join([*path[path.index(target) :], target]))
            if target not in state:
                visit(target)
        path.pop()
        state[name] = 2

    for name in ours():
        if name not in state:
            visit(name)


def test_core_sees_only_values_and_arithmetic():
    numpy_rooms = ("phalanx.core.scheduling", "phalanx.planner.search")
    strange = {
        (name, target)
        for name, target in foreign("phalanx.core")
        if target not in PURE
        and not (target == "numpy" and name.startswith(numpy_rooms))
        # A trial makes a dozen boards: as rings of references each would wait for the collector. It decides nothing.
        and not (target == "weakref" and name.startswith("phalanx.core.scheduling"))
    }
    assert not strange


def test_node_needs_only_the_standard_library_msgspec_and_nvml():
    # obstore is an extra, which one module imports.
    assert third_party("phalanx.node") - {"obstore"} <= {"msgspec", "pynvml"}


def test_wire_needs_only_the_standard_library_and_msgspec():
    assert third_party("phalanx.wire") <= {"msgspec"}


def test_training_process_needs_only_torch():
    assert third_party("phalanx.torch") <= {"torch"}


@pytest.mark.parametrize("module", ["phalanx.wire.rank", "phalanx.wire.manifest"])
def test_what_a_rank_shares_with_its_supervisor_is_standard_library_only(module):
    assert third_party(module) == set()
    assert loaded_by(module) - loaded_by("phalanx") - sys.stdlib_module_names == set()


@pytest.mark.parametrize(
    ("entry", "heavy"),
    [
        # `--help` answers within 150 ms only while the entry point stays light.
        (
            "phalanx.app.cli",
            {"fastapi", "uvicorn", "websockets", "apsw", "textual", "numpy", "torch", "pynvml", "asyncio"},
        ),
        # Every supervisor of a fleet pays for what its entry point loads.
        (
            "phalanx.app.node",
            {
                "fastapi",
                "uvicorn",
                "websockets",
                "apsw",
                "click",
                "rich",
                "textual",
                "numpy",
                "torch",
                "pynvml",
                "asyncio",
            },
        ),
    ],
)
def test_entry_point_stays_light(entry, heavy):
    assert loaded_by(entry) & heavy == set()


def test_importing_phalanx_imports_nothing_else():
    done = python("import phalanx, sys; print(*sorted(name for name in sys.modules if name.startswith('phalanx')))")
    assert done.stdout.split() == ["phalanx"]


# Code that names an engine outside src/phalanx/engines, each with its reason. Comments, docstrings and CLI help texts may name any.
ENGINE_NAMES_ALLOWED = {
    "app/seat_supervisor.py": "SLURMD_NODENAME is one of the variables that name the node of a seat",
    "app/assigned_devices.py": "SLURM_JOB_GPUS is one of the variables that name the devices of a supervisor",
    "cli/cluster/doctor.py": "`joined` is the name of a finding, and means a server that joined",
    "cli/cluster/up.py": "the help of --engine",
    "cli/demo/node_kill.py": "the demo runs on virtual nodes of this machine, and kills one by the engine's record of it",
    "cli/demo/recovery_time.py": "compares with other systems",
    "cli/root.py": "the command `slurm-env`, and where Slurm's commands are looked up",
    "failpoints.py": "the names of the failpoints in the engine",
    "providers/virtual/provider.py": "a local engine with a folder of its own starts the virtual nodes",
    "node/membership.py": "the folder of the membership of a server that joined",
}
# The dialect of `#SBATCH` scripts, which run on every engine.
SBATCH_DIALECT = (
    "cli/jobs/",
    "cli/slurm_views/",
    "controller/requests/submits.py",
    "core/work/",
    "node/logic/",
    "node/shell/member_start.py",
    "node/slurm_compat/",
    "wire/api/jobs.py",
)
ENGINE_NAME = re.compile(r"slurm|(?<![a-z])ray(?![a-z])", re.IGNORECASE)


def engine_names(path: Path) -> list[str]:
    """Names of engines in the code of a file: whole words of identifiers, strings and imports, without docstrings."""
    text = path.read_text(encoding="utf-8")
    if not (ENGINE_NAME.search(text) or "joined" in text or "phalanx.engines" in text):
        return []  # most files: without a parse
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module) if module is not None:
                words = [module.removeprefix("phalanx.engines.registry")]
                found += [word for word in words if word.startswith("phalanx.engines")]
            case ast.Constant(value=str(text)) if id(node) not in prose:
                words = [text]
                found += [text for _ in [0] if text == "joined"]
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                words = [word]
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                words = [word]
            case _:
                words = []
        found += [word for word in words if ENGINE_NAME.search(word)]
    return found


def test_no_engine_is_named_outside_its_folder():
    named = {
        relative: found
        for path in python_files()
        if not (relative := str(path.relative_to(SOURCE))).startswith(("engines/", *SBATCH_DIALECT))
        and (found := engine_names(path))
    }
    assert {path: found for path, found in named.items() if path not in ENGINE_NAMES_ALLOWED} == {}
    assert sorted(ENGINE_NAMES_ALLOWED.keys() - named.keys()) == [], "an exception that is not needed any more"


# -------------------------------------------------------------------------------------------------- how it is laid out


def python_files() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def test_every_package_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_errors_of_a_docstring_exist():
    texts = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in python_files()}
    known = {*dir(builtins)}
    for text in texts.values():
        known |= set(re.findall(r"^ *class (\w+)", text, re.MULTILINE))
        for names in re.findall(r"^ *(?:from \S+ )?import (\([^)]*\)|.*)$", text, re.MULTILINE):
            known |= set(re.findall(r"\w+", names))
    documented = [
        (name, error)
        for name, text in texts.items()
        for _, section in re.findall(r"^( *)Raises:\n((?:\1    .*\n)*)", text, re.MULTILINE)
        for line in re.findall(r"^ +([A-Z]\w+(?:, [A-Z]\w+)*): ", section, re.MULTILINE)
        for error in line.split(", ")
    ]
    assert len(documented) > 500
    assert [one for one in documented if one[1] not in known] == []


def test_no_class_with_slots_calls_super_without_its_name():
    """`@dataclass(slots=True)` makes a second class; before Python 3.14 a bare `super()` in it means the first, and fails when it is called."""
    for path in (one for top in ("src", "benchmarks", "tests") for one in (ROOT / top).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "slots=True" not in text or "super()" not in text:
            continue
        for made in ast.walk(ast.parse(text)):
            if isinstance(made, ast.ClassDef) and any("slots=True" in ast.unparse(one) for one in made.decorator_list):
                assert "super()" not in ast.unparse(made), f"{path.relative_to(ROOT)}: {made.name}"


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in python_files()}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_modules_are_named_by_their_noun():
    assert [str(path.relative_to(ROOT)) for path in python_files() if path.stem in NAMELESS] == []


def test_all_that_is_not_python_ships_in_the_wheel():
    patterns = setuptools_data()
    left_out = [
        str(path.relative_to(ROOT))
        for path in sorted(SOURCE.rglob("*"))
        if path.is_file() and path.suffix not in {".py", ".pyc"} and not any(path.match(p) for p in patterns)
    ]
    assert left_out == [], "add their suffix to [tool.setuptools.package-data]"


def setuptools_data() -> list[str]:
    tables = project_file()["tool"]["setuptools"]["package-data"]
    return [pattern.removeprefix("**/") for patterns in tables.values() for pattern in patterns]


# --------------------------------------------------------------------------------------------------- what is installed


@cache
def project_file() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    # Names and versions, nothing else: no address, no hash, no option for pip.
    wrong = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line)]
    assert wrong == []
    pairs = [line.split("==") for line in pins]
    assert len({canonical(name) for name, _ in pairs}) == len(pairs), "a name is pinned twice"
    return {canonical(name): version for name, version in pairs}


def test_every_dependency_is_pinned():
    project = project_file()["project"]
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {canonical(re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]) for requirement in asked}
    assert names - constraints().keys() == set()


def test_extras_are_the_promised_ones():
    promised = {
        "aws",
        "google",
        "torch",
        "ray",
        "slurm",
        "kubernetes",
        "postgres",
        "oidc",
        "otel",
        "submitit",
        "joblib",
        "hydra",
        "gateway",
        "sweep",
        "data",
        "mount",
        "dev",
    }
    assert set(project_file()["project"]["optional-dependencies"]) == promised


def test_nothing_tells_users_to_install_phalanx_from_an_index():
    """No index has our package: whoever registers the name there would run code on the user's machine."""
    from_index = re.compile(r"pip3? install [^\n`]*\bphalanx\b|phalanx\[[a-z]+\]")
    pages = [
        ROOT / "README.md",
        *(path for top in ("src", "tests", "docs", "examples") for path in (ROOT / top).rglob("*")),
    ]
    texts = [path for path in pages if path.suffix in {".py", ".md", ".html", ".js", ".yaml"}]
    assert [str(path) for path in texts if from_index.search(path.read_text(encoding="utf-8"))] == []


def test_what_every_import_needs_is_a_dependency():
    modules = {"nvidia-ml-py": "pynvml", "ruamel-yaml": "ruamel", "prometheus-client": "prometheus_client"}
    project = project_file()["project"]
    asked = {canonical(re.split(r"[\[=<>!~; ]", r, maxsplit=1)[0]) for r in project["dependencies"]}
    installed = {modules.get(name, name.replace("-", "_")) for name in asked}
    # Starlette comes with FastAPI and is its public face for responses and streams.
    assert third_party("phalanx") - installed - set(EXTRAS) <= {"starlette"}


# -------------------------------------------------------------------------------------------------- what is written up


def test_decision_records_are_numbered_without_gaps_and_listed():
    folder = ROOT / "docs" / "decisions"
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    numbers = [int(name[:4]) for name in records]
    assert numbers[0] == 1
    assert all(after == before + 1 for before, after in pairwise(numbers)), records
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [name for name in records if f"({name})" not in index] == []


def test_decision_records_say_context_decision_consequences():
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        headings = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert headings[:3] == ["Context", "Decision", "Consequences"], path.name


def test_links_between_documents_lead_somewhere():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in sorted(pages)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_changelog_fragments_have_a_known_kind():
    kinds = {kind["directory"] for kind in project_file()["tool"]["towncrier"]["type"]}
    fragments = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert [name for name in fragments if name.split(".")[-2] not in kinds] == []


def test_only_what_belongs_there_lies_at_the_top_and_every_name_is_plain():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True)
    if not (ROOT / ".git").exists() or listed.returncode != 0:
        pytest.skip("this is no checkout that git would list")
    names = listed.stdout.split("\0")[:-1]
    assert {name for name in names if "/" not in name} == TOP
    assert [name for name in names if not re.fullmatch(r"[\w./+@-]+", name, re.ASCII)] == []
