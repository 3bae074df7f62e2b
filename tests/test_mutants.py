"""Proves: the table of planted faults fits the code, and a quick sample of them turns tests red.

Every fault has exactly one place, compiles and names tests that exist; all parts are covered. In one run of the tool,
the quick faults are killed, while a change without effect survives and a line that is gone is reported.
"""
from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutants import FAST, MUTANTS, Mutant, main, mutated

PARTS = {"segments": 3, "rewards": 3, "advantages": 3, "loss": 3, "learner": 3, "sampler": 3, "rollout": 3}


@pytest.mark.parametrize("m", MUTANTS, ids=lambda m: m.name)
def test_a_fault_has_one_place_and_compiles(m):
    assert m.old != m.new and "\n" not in m.old
    compile(mutated(m), f"{m.part}.py", "exec")
    for test in m.tests:
        file, name = test.split("::")
        source = (Path(__file__).parent / f"test_{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {name.split('[')[0]}\(", source, re.MULTILINE), test


def test_every_part_has_faults():
    names, parts = [m.name for m in MUTANTS], Counter(m.part for m in MUTANTS)
    assert len(names) == len(set(names)) >= 40 and set(FAST) <= set(names)
    assert all(parts[part] >= least for part, least in PARTS.items()), parts


def test_quick_faults_are_killed_and_others_reported(monkeypatch, capsys):
    others = [Mutant("no-fault", "segments", "edges == 1", "edges == +1", ("segments::test_by_hand",)),
              Mutant("no-import", "segments", "def runs(", "def run(", ("segments::test_by_hand",)),
              Mutant("no-place", "segments", "is not there", "", ("segments::test_by_hand",))]
    monkeypatch.setattr(mutants, "MUTANTS", MUTANTS + others)
    assert main([*FAST, *(m.name for m in others)]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]  # seconds, s, verdict, ..., name
    assert {line[-1]: line[2] for line in lines} == dict.fromkeys(FAST, "killed") | {
        "no-fault": "SURVIVED", "no-import": "BROKEN", "no-place": "STALE"}
