"""Packages from a folder, for a machine without a package index.

The folder has wheels (`pip wheel --wheel-dir`), or what `pip install --target` made. Wheels are
unpacked, because C++ that is compiled at first use must be files. They come behind what is
installed: a package that is there already is not replaced.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path


def importable(folder: Path, into: Path) -> list[Path]:
    """Folders for `sys.path`.

    Args:
        folder: of wheels, or of packages.
        into: where wheels are unpacked.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"--wheels: got {folder}, needed a folder")
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return [folder]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return [into, *into.glob("*.data/purelib"), *into.glob("*.data/platlib")]


def with_scripts(environment: Mapping[str, str], paths: list[Path]) -> dict[str, str]:
    """An environment whose PATH has the programs of those packages, such as ninja."""
    places = [place for path in paths for place in (path / "bin", *path.glob("*.data/scripts"))]
    places = [place for place in places if place.is_dir()]
    for place in places:
        for script in place.iterdir():
            script.chmod(script.stat().st_mode | 0o111)  # a zip has no permissions
    search = [*(str(place) for place in places), environment.get("PATH", "")]
    return {**environment, "PATH": os.pathsep.join(search)}
