"""`python -m tests.zoo`: compare every model of the zoo, and docs/zoo.md with what comes out."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.zoo import diffusion, of_torch, senses, texts
from tests.zoo.compare import Result, compare, count
from tests.zoo.entry import PACKAGES, Entry, Family, is_installed, prepare, version

prepare()  # before any other package imports torchvision

FILES = (texts, senses, of_torch, diffusion)
ENTRIES: dict[str, Entry] = {entry.name: entry for file in FILES for entry in file.ENTRIES}

INDUCTOR = 1e-3  # of the largest value: fused kernels add in another order
T = TypeVar("T")
PER_PROCESS = 12  # models; what a compiler keeps of them goes with the process


def run(function: Callable[[Entry], T], name: str) -> tuple[str, T | str]:
    """What a function gives of an entry, or the traceback where it fails; and the name."""
    torch.set_num_threads(1)
    try:
        return name, function(ENTRIES[name])
    except Exception:
        return name, traceback.format_exc()


def tolerance(entry: Entry, *, inductor: bool) -> float:
    """The largest error that is none."""
    rounds = entry.rounding.tolerance if entry.rounding else 0.0
    return INDUCTOR if inductor else rounds


def faults(entry: Entry, result: Result, *, gpu: bool = False, tiles: int = 1) -> list[str]:
    """What is wrong with an entry's result; on a GPU the numbers alone."""
    found = []
    may_be = tolerance(entry, inductor=gpu or tiles > 1)
    if result.error > may_be:
        found.append(f"{result.where} is off by {result.error:.1e}; may be {may_be:.0e}")
    if (result.breaks or result.streamed < 1) and not entry.note and not gpu:
        share = percent(result.streamed)
        found.append(f"{result.breaks} graph breaks, {share} streamed, and no `note` says why")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression: the models to compare")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md")
    parser.add_argument("--gpu", action="store_true", help="with Inductor on a GPU: that column")
    parser.add_argument("--tiles", type=int, default=1, help="so many; the page is left alone")
    parser.add_argument(
        "--lengths", action="store_true", help="count captures while sizes change; no page"
    )
    options = parser.parse_args(arguments)
    for package in PACKAGES:
        if not is_installed(package):
            print(f"{package} is not installed: its models are skipped")
    chosen = {n: e for n, e in ENTRIES.items() if e.is_there and re.search(options.only, n)}
    if options.lengths:
        return _count_all(chosen, options.jobs)
    results, failed = _compare_all(chosen, options.jobs, gpu=options.gpu, tiles=options.tiles)
    if options.tiles > 1:
        print(f"{len(results)} models compared in {options.tiles} tiles, {len(failed)} failed")
        return 1 if failed else 0
    text = PAGE.read_text() if PAGE.exists() else ""
    written = rows_of(text)
    rows = {}
    for name, result in results.items():
        row, before = row_of(chosen[name], result), written.get(name)
        if options.gpu and before is not None:
            rows[name] = before | {"Inductor": row["largest error"]}
        elif not options.gpu:
            rows[name] = row | ({"Inductor": before["Inductor"]} if before else {})
    if options.write:
        versions = versions_of(text) if options.gpu else _versions()
        text = page(rows, written, versions)
        PAGE.write_text(text)
    changed = changes(rows, text)
    for line in changed:
        print(f"docs/zoo.md: {line}")
    alike = options.gpu or versions_of(text) == _versions()
    if not alike:
        print(f"docs/zoo.md is of {versions_of(text)}; here are {_versions()}")
    spent_s = sum(result.time_s for result in results.values())
    print(
        f"{len(rows)} models compared in {spent_s:.0f} s of processor time, {len(failed)} failed, "
        f"{len(changed)} differ from the page"
    )
    return 1 if failed or (changed and alike) else 0


def _compare_all(
    chosen: dict[str, Entry], jobs: int, *, gpu: bool = False, tiles: int = 1
) -> tuple[dict[str, Result], list[str]]:
    """Results by name, in any order, and the names of those that failed. Ctrl-C ends it early."""
    results: dict[str, Result] = {}
    failed: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        how: dict[str, Any] = {"device": "cuda", "lowering": "inductor"} if gpu else {}
        one = functools.partial(compare, tiles=tiles, **how)
        for name, result in _each(one, chosen, jobs, failed):
            results[name] = result
            wrong = faults(chosen[name], result, gpu=gpu, tiles=tiles)
            print(
                f"{name:32} {result.breaks:3} breaks {result.stages:4} stages "
                f"{percent(result.streamed):>6} streamed  error {result.error:.1e} "
                f"{result.time_s:6.1f} s",
                *(f"    FAULT: {fault}" for fault in wrong),
                *(f"    {said}" for said in result.warned),
                sep="\n",
                flush=True,
            )
            failed += [name] if wrong else []
    return results, failed


def _count_all(chosen: dict[str, Entry], jobs: int) -> int:
    """Print the captures of each entry of transformers while sizes change; gives the exit code."""
    names = [name for name, entry in chosen.items() if entry.needs == "transformers"]
    more = 0
    failed: list[str] = []
    for _, result in _each(count, names, jobs, failed):
        more += result.is_more or not result.equal
        print(result.line(), *(f"    {why}" for why in result.why), sep="\n", flush=True)
    print(
        f"{len(names)} models: {more} capture more than torch.compile or differ, "
        f"{len(failed)} failed"
    )
    return 1 if more or failed else 0


def _each(
    function: Callable[[Entry], T], names: Iterable[str], jobs: int, failed: list[str]
) -> Iterator[tuple[str, T]]:
    """The names and results of a function in processes; the names of those that fail are noted."""
    one = functools.partial(run, function)
    with get_context("spawn").Pool(jobs, maxtasksperchild=PER_PROCESS) as pool:
        for name, result in pool.imap_unordered(one, names, chunksize=1):
            if isinstance(result, str):
                failed.append(name)
                print(f"{name}: FAILED\n{result}", flush=True)
            else:
                yield name, result


def _versions() -> str:
    """Of the packages whose models the zoo has, as they are here."""
    return ", ".join(f"{p} {version(p)}" for p in PACKAGES if is_installed(p))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
_MADE = "Made with "
COLUMNS = ("model", "graph breaks", "stages", "streamed", "largest error", "Inductor", "why")

INTRODUCTION = PAGE.read_text().partition("\n" + _MADE)[0]  # is written there alone


Row = dict[str, str]  # one line of the table, by column


def row_of(entry: Entry, result: Result) -> Row:
    """The line for an entry, without Inductor's error."""
    rounding = entry.rounding.why if entry.rounding and result.error else ""
    why = "; ".join(filter(None, (entry.note, rounding)))
    breaks = str(result.breaks) if result.breaks >= 0 else "no graph"
    error = f"1e{math.ceil(math.log10(result.error))}" if result.error else "0"  # rounded up
    cells = (entry.name, breaks, str(result.stages), percent(result.streamed), error, "", why)
    return dict(zip(COLUMNS, cells, strict=True))


def line(row: Row) -> str:
    """In Markdown."""
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row.values())}|"


def percent(share: float) -> str:
    """100 % only where it is all."""
    return f"{math.floor(share * 100)} %"


def page(rows: Mapping[str, Row], written: Mapping[str, Row], versions: str) -> str:
    """The whole of docs/zoo.md: these rows, and those that are on it of other models."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    merged = {name: rows.get(name, written.get(name)) for name in ENTRIES}
    parts = [INTRODUCTION, f"{_MADE}{versions}.\n"]
    for family in Family:
        table = [line(row) for n, row in merged.items() if row and ENTRIES[n].family is family]
        if table:
            parts += [f"## {family.value}\n", "\n".join([*head, *table]) + "\n"]
    return "\n".join(parts)


def versions_of(text: str) -> str:
    """The packages that a page was made with."""
    made = next((line for line in text.splitlines() if line.startswith(_MADE)), _MADE)
    return made.removeprefix(_MADE).removesuffix(".")


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a page, by model."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == len(COLUMNS) and cells[0] not in ("model", "---"):
            found[cells[0]] = dict(zip(COLUMNS, cells, strict=True))
    return found


def changes(found: Mapping[str, Row], text: str) -> list[str]:
    """How what was found differs from a page, one line each; errors that are not 0 may vary."""
    written = rows_of(text)
    said = []
    for name, row in found.items():
        if name not in written:
            said.append(f"{name}: not on the page")
        elif _facts(row) != _facts(written[name]):
            said.append(f"{name}: the page says {line(written[name])}, found {line(row)}")
    return said


def _facts(row: Row) -> tuple[str, ...]:
    facts = {**row, "largest error": "0" if row["largest error"] == "0" else "", "Inductor": ""}
    return tuple(facts.values())
