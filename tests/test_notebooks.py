"""Every notebook runs from top to bottom in a fresh namespace (no jupyter needed), prints what is stored in it, and
holds no error, no machine's paths and nothing large.
"""
import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_and_prints_what_is_stored(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    state, namespace = torch.get_rng_state(), {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(path), 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), namespace)
            assert printed.getvalue() == stored_text(cell), f"cell {number}"
    finally:
        torch.set_rng_state(state)
