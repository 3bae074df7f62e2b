"""Every notebook runs from top to bottom in a fresh namespace (no jupyter needed), prints what is stored in it, and
holds no error, no machine's paths and nothing large.

02 is stored with a trained checkpoint and runs here with a policy it trains itself: it prints in the same cells, and
its own asserts hold. 03 needs matplotlib and is left out without it.
"""
import contextlib
import copy
import io
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CPU_SECONDS = 120  # of one notebook; the slowest takes about 20


def stored_text(cell: dict) -> str:
    return "".join(part for o in cell["outputs"] if o["output_type"] == "stream" and o["name"] == "stdout"
                   for part in ([o["text"]] if isinstance(o["text"], str) else o["text"]))


def code_cells(path: Path) -> list[dict]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS and all(any(stored_text(c) for c in code_cells(path)) for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_form(path):
    raw = path.read_text(encoding="utf-8")
    notebook = json.loads(raw)
    assert len(raw) < 1_000_000 and notebook["nbformat"] == 4 and notebook["cells"][0]["cell_type"] == "markdown"
    for place in ("/home/", "/root/", "/Users/", "/tmp/", "C:\\\\"):
        assert place not in raw, place
    cells = code_cells(path)
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))  # run once, in order
    for cell in cells:
        assert all(o["output_type"] != "error" and o.get("name") != "stderr" for o in cell["outputs"])


def run(path: Path, monkeypatch, study: str = "") -> list[str]:
    """What each code cell prints, in a fresh namespace and the notebook's folder, within the CPU time it may take."""
    for name in ("SLCA_CHECKPOINT", "SLCA_STUDY"):
        monkeypatch.delenv(name, raising=False)
    if study:
        monkeypatch.setenv("SLCA_STUDY", study)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if "import matplotlib" in path.read_text(encoding="utf-8"):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(path.parent)
    state, namespace, started, texts = torch.get_rng_state(), {"__name__": "__main__"}, time.process_time(), []
    try:
        for number, cell in enumerate(code_cells(path), 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), namespace)
            texts.append(printed.getvalue())
    finally:
        torch.set_rng_state(state)
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    assert time.process_time() - started < CPU_SECONDS
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_and_prints_what_is_stored(path, monkeypatch):
    printed, stored = run(path, monkeypatch), [stored_text(c) for c in code_cells(path)]
    if path.stem == "02_one_rollout":
        printed, stored = (list(map(bool, texts)) for texts in (printed, stored))
    for number, (new, old) in enumerate(zip(printed, stored, strict=True), 1):
        assert new == old, f"cell {number}"


def test_pictures_are_stored():
    """Three coloured views of the rollouts, without scripts; four figures of the study."""
    views, figures = ([o["data"][kind] for c in code_cells(FOLDER / name) for o in c["outputs"]
                       if kind in o.get("data", {})] for name, kind in (("02_one_rollout.ipynb", "text/html"),
                                                                        ("03_study.ipynb", "image/png")))
    assert len(views) == 3 and len(figures) == 4
    for view in map("".join, views):
        assert "<script" not in view and view.count("<span") == view.count("</span>") > 50
    assert "unified (GRPO)" in "".join(views[1]) and "routed (SLCA)" in "".join(views[1])


def test_small_study_is_small_and_whole():
    path = FOLDER / "study.json"
    study = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000 and "/" not in path.read_text(encoding="utf-8")
    assert {"slca", "grpo", "sft"} <= study["conditions"].keys()
    for name, condition in study["conditions"].items():
        steps = {len(run_["curves"].get("success", ())) for run_ in condition["runs"].values()}
        assert len(condition["runs"]) >= 2 and steps == {0 if name == "sft" else 100}, name


def test_study_notebook_takes_other_studies(tmp_path, monkeypatch):
    """Two files; a condition without RL, one without runs, seeds and steps that are missing, no leakage columns."""
    study = json.loads((FOLDER / "study.json").read_text(encoding="utf-8"))
    found = study["conditions"]
    for name in ("toolpo_rule", "both"):
        found[name] = {"runs": {}}
    del found["grpo"]["runs"]["1"], found["sft"]
    for run_ in found["slca"]["runs"].values():
        run_["curves"] = {k: v[:-3] for k, v in run_["curves"].items()}
    for run_ in (r for c in found.values() for r in c["runs"].values()):
        for name in ("leak_share", "leak_flips"):
            run_["curves"].pop(name, None)
    other = copy.deepcopy(study)
    other["conditions"] = {"sft": {"settings": {}, "runs": copy.deepcopy(found["slca"]["runs"])}}
    for run_ in other["conditions"]["sft"]["runs"].values():
        run_ |= {"curves": {}, "columns": {}, "reach": {}, "grad_norm": {"std": None, "mean": None}}
    for name, tree in (("a.json", study), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(tree), encoding="utf-8")
    files = os.pathsep.join(str(tmp_path / name) for name in ("a.json", "b.json"))
    printed = run(FOLDER / "03_study.ipynb", monkeypatch, files)
    first = [line.split(maxsplit=1) for line in printed[0].splitlines()]
    assert [first[0], first[1], first[-1]] == [["slca", "seeds 0, 1, 2, 3, 4; 97 RL steps"],
                                               ["grpo", "seeds 0, 2, 3, 4; 100 RL steps"],
                                               ["sft", "seeds 0, 1, 2, 3, 4; 0 RL steps"]]
    assert "toolpo_rule" not in printed[0]
    assert "| sft | " in printed[1] and "do not share a seed" in "".join(printed)
