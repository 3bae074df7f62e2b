"""Proves: README's worked diff for a new advantage applies to this tree; its test is green with it, red without.

Where the diff no longer applies, the code around it has moved: make it anew from a tree in which its test passes.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = "Change the estimator"


def the_diff() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^#+ {SECTION}\n.*?^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section '{SECTION}' with a diff"
    return found[1]


def copy_of_the_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "slca", folder / "slca", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    return folder


def run(command: list[str], folder: Path, **more) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1",
                        "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # inside a repository git would skip the files
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, **more)


def test_the_readmes_diff_applies_and_its_test_turns_green(tmp_path):
    diff = the_diff()
    tool = ["git", "apply"] if shutil.which("git") else ["patch", "-p1"] if shutil.which("patch") else None
    if tool is None:
        pytest.skip("neither git nor patch is there to apply it")
    with_it, without = (copy_of_the_package(tmp_path / name) for name in ("with", "without"))
    applied = run(tool, with_it, input=diff)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    name, = re.findall(r"^\+\+\+ b/(tests/\S+)$", diff, re.MULTILINE)
    shutil.copy(with_it / name, without / name)
    option, = re.findall(r'"advantage\.estimator=(\w+)"', diff)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    before = run(pytest_, without)
    assert before.returncode == 1, before.stdout + before.stderr
    assert f"advantage.estimator: found '{option}', expected one of" in before.stdout
    after = run(pytest_, with_it)
    assert after.returncode == 0, after.stdout + after.stderr  # it is not 0 without a test either
