"""The project keeps to plain words: no public class name twice, few private words, and a formatter that is left alone."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Words of the language that the project spoke before: in src, README and docs together fewer than USES_MAX uses.
PRIVATE_WORDS = (
    "anew",
    "whoever",
    "nobody",
    "told",
    "heard",
    "heed",
    "let go",
    "make way",
    "gives back",
    "hands in",
    "likes have",
    "harmless twice",
)
USES_MAX = 150
SKIPS_MAX = 10  # of `# fmt: skip` in src, tests and benchmarks together


def texts(*folders: str, suffix: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_a_public_class_name_means_one_thing():
    places = defaultdict(list)
    for name, text in texts("src", suffix=".py"):
        for public in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            places[public].append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def test_private_words_are_rare():
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(PRIVATE_WORDS)})(?![A-Za-z])", re.IGNORECASE)
    pages = [("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))]
    uses: Counter[str] = Counter()
    for name, text in [*texts("src", suffix=".py"), *texts("docs", suffix=".md"), *pages]:
        uses[name] += len(pattern.findall(text))
    assert uses.total() < USES_MAX, uses.most_common(20)


def test_the_formatter_decides():
    skips = {name: text.count("# fmt: " + "skip") for name, text in texts("src", "tests", "benchmarks", suffix=".py")}
    assert sum(skips.values()) <= SKIPS_MAX, sorted(skips.items(), key=lambda one: -one[1])[:20]
