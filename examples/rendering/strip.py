"""Join fetched frames: `python strip.py FOLDER` writes `picture.png`, a film strip, and `film.gif` beside the frames."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

COLUMNS = 6


def main(folder: Path, output: Path) -> None:
    """Read all frames under `folder`, in the order of their names, and write strip and film."""
    files = sorted(folder.rglob("frame-*.png"), key=lambda file: file.name)
    if not files:
        raise SystemExit(f"{folder} holds no frame-*.png; fetch them first: phalanx get JOB {folder}")
    frames = [Image.open(file).convert("RGB") for file in files]
    width, height = frames[0].size
    small = (width // 2, height // 2)
    strip = Image.new("RGB", (small[0] * COLUMNS, small[1] * -(-len(frames) // COLUMNS)))
    for place, frame in enumerate(frames):
        strip.paste(frame.resize(small), (place % COLUMNS * small[0], place // COLUMNS * small[1]))
    output.mkdir(parents=True, exist_ok=True)
    strip.save(output / "picture.png")
    frames[0].save(output / "film.gif", save_all=True, append_images=frames[1:], duration=80, loop=0)
    print(f"{len(frames)} frames: {output / 'picture.png'}, {output / 'film.gif'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else sys.argv[1]))
