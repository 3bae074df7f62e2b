"""Proves that the tests would notice: each fault below, planted alone in a copy of the tree, turns its tests red.

    python tests/mutants.py [NAME ...] [--fast] [--jobs N] [--list]

The listed tests are run once without a fault first, and must be green. A fault is killed where pytest reports a failed
test; one that survives, cannot be imported, hangs, or whose line has changed in the meantime makes the exit status 1.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TREE = ("slca", "tests", "configs", "train.py", "evaluate.py", "setup.py", "pyproject.toml", "README.md")
PATIENCE = 600  # seconds a fault may keep its tests busy
# Faults run in fresh processes. Where they can be forked, torch and pytest are imported only once for all of them.
PROCESSES = get_context("forkserver" if sys.platform == "linux" else "spawn")


def mutated(m: Mutant, root: Path = ROOT) -> str:
    """The text of its file with the fault. ValueError unless there is exactly one place for it."""
    text = (root / "slca" / f"{m.part}.py").read_text(encoding="utf-8")
    if text.count(m.old) != 1:
        raise ValueError(f"its text occurs {text.count(m.old)} times in slca/{m.part}.py: {m.old}")
    return text.replace(m.old, m.new)


def nodes(mutants: list[Mutant]) -> list[str]:
    return list(dict.fromkeys(f"tests/{node}" for m in mutants for node in m.tests.split()))


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Python tells compiled files from newer sources by size and second only, and a fault may change neither
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def copied(tree: Path) -> Path:
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, tree)
    return tree


def run_pytest(tree: Path, args: list[str]) -> None:
    """In a process of its own: run the tests of the copy, and exit with 100 + pytest's status."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests"))]
    with open(tree / "output", "w", encoding="utf-8") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    import pytest
    import torch

    torch.set_num_threads(1)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *args])
    import slca
    if Path(slca.__file__).parent != tree / "slca":  # an editable install must not come first
        sys.exit(f"the tests have imported {slca.__file__}")
    sys.exit(100 + status)


def status_of(tree: Path, args: list[str]) -> int | None:
    """pytest's status, below zero where it did not get to the end, None after PATIENCE."""
    process = PROCESSES.Process(target=run_pytest, args=(tree, args))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode - 100


def trial(m: Mutant, trees: SimpleQueue) -> tuple[str, float]:
    """-> (killed | SURVIVED | BROKEN: no test ran | HUNG | STALE: ..., seconds)"""
    tree, start = trees.get(), time.perf_counter()
    path = tree / "slca" / f"{m.part}.py"
    plain = path.read_text(encoding="utf-8")
    try:
        write(path, mutated(m, tree))
        status = status_of(tree, nodes([m]))
        verdict = {1: "killed", 0: "SURVIVED", None: "HUNG"}.get(status, "BROKEN: no test ran")
    except ValueError as e:
        verdict = f"STALE: {e}"
    finally:
        write(path, plain)
        trees.put(tree)
    return verdict, time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--fast", action="store_true", help=f"only {', '.join(FAST)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    args = parser.parse_args(argv)
    wanted = [*args.names, *(FAST if args.fast else ())]
    if unknown := set(wanted) - {m.name for m in MUTANTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not wanted or m.name in wanted]
    if args.list:
        for m in chosen:
            print(f"{m.name:28} slca/{m.part + '.py':15} {m.tests}")
        return 0
    start, survived = time.perf_counter(), 0
    PROCESSES.set_forkserver_preload(["numpy", "pytest", "torch"])
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue = SimpleQueue()
        for job in range(max(1, args.jobs)):
            trees.put(copied(Path(folder, str(job)).resolve()))
        tree = Path(folder, "0").resolve()
        if status_of(tree, nodes(chosen)) != 0:
            print((tree / "output").read_text(encoding="utf-8"), "the tests fail without any fault", sep="\n")
            return 1
        print(f"green    {time.perf_counter() - start:5.1f} s  without any fault", flush=True)
        with ThreadPoolExecutor(max(1, args.jobs)) as pool:
            for m, (verdict, seconds) in zip(chosen, pool.map(lambda m: trial(m, trees), chosen), strict=True):
                survived += verdict != "killed"
                print(f"{verdict:8} {seconds:5.1f} s  {m.name}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults killed in {time.perf_counter() - start:.0f} s")
    return int(survived > 0)
