"""A copy of the repository that faults are planted in, and pytest's runs there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import plugin

# Not the list itself: its own test would catch every fault.
_LEFT_OUT = ("tests/faults/", "tests/unit/test_suite.py")
_HANGS_S = 400  # a test that takes so long hangs: its process ends
_HANGS = ["-o", f"faulthandler_timeout={_HANGS_S}", "-o", "faulthandler_exit_on_timeout=true"]


@dataclass(frozen=True)
class Run:
    """One run of pytest.

    Args:
        code: its exit status; None: it was stopped, as it took too long.
        notes: of the plugin.
        output: the end of what it printed.
    """

    code: int | None
    notes: list[dict[str, Any]]
    output: str

    def tests(self, what: str) -> list[str]:
        return [note["test"] for note in self.notes if note["what"] == what]


class Tree:
    """A copy of the tree in `root`, as it is: changes that are not committed are in it too."""

    def __init__(self, root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megacompile-faults-")
        self.root, self._others = Path(self._folder.name) / "tree", Path(self._folder.name)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            source, copy = root / name, self.root / name
            if not name.startswith(_LEFT_OUT) and os.path.lexists(source):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        shutil.copy2(plugin.__file__, self.root / "_faults_plugin.py")

    def close(self) -> None:
        self._folder.cleanup()

    @contextmanager
    def changed(self, path: str, source: str) -> Iterator[None]:
        """For its duration a file is another one."""
        before = (self.root / path).read_text()
        self.write(path, source)
        try:
            yield
        finally:
            self.write(path, before)

    def write(self, path: str, source: str) -> None:
        """Change a file, and forget what was compiled from it: mtimes are too coarse."""
        file = self.root / path
        file.write_text(source)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def pytest(
        self, arguments: Sequence[str], *, tests: Sequence[str] = (), limit_s: float | None = None
    ) -> Run:
        """Run pytest: `tests` alone, if given, in their order."""
        notes, output, selected = (self._others / name for name in ("notes", "output", "tests"))
        notes.write_text("")
        selected.write_text("".join(f"{test}\n" for test in tests))
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # no failure of other runs
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            plugin.NOTES: str(notes),
        }
        if tests:
            environment[plugin.SELECTED] = str(selected)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_HANGS]
        command += ["-p", "_faults_plugin", *arguments]
        with output.open("w") as sink:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # children that outlive it too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        return Run(code, lines, output.read_text(errors="replace")[-4000:])
