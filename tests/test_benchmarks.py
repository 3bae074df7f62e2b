"""Each benchmark script runs in its --quick form, alone, and ends in one line of JSON. No speed is judged here."""
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slca.products import bf16_runs

FOLDER = Path(__file__).parent / "benchmarks"
RATIO = {"paired", "medians"}
DTYPES = ["fp32"] + ["bf16"] * bf16_runs(torch.device("cpu"))


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)


def quick(name: str, *flags: str, peers: tuple[str, ...] = ()) -> dict:
    for peer in peers:
        if importlib.util.find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed")
    done = run(str(FOLDER / f"{name}.py"), "--quick", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["quick"] and result["threads"] == 1 and result["pairs"] == 1 and result["torch"]
    return result


def test_rollout():
    result = quick("rollout", peers=("transformers",))
    assert set(result["machine"]) == {"memory", *DTYPES}
    assert [found["batch"] for found in result["decode"]] == [1, 4]
    for found in result["decode"]:
        assert all(found[label].keys() == RATIO | {"total"} for label in (*DTYPES, "best"))
        assert all(0 < row["of roofline"] and 0 < row["tokens/s"] for row in found["rows"])
    (found,) = result["groups"]
    for label in (*DTYPES, "best"):
        assert found[label]["peer"].keys() == found[label]["every row"].keys() == RATIO


def test_multiturn():
    (found,) = quick("multiturn", peers=("transformers",))["episodes"]
    assert all(found[label].keys() == RATIO for label in (*DTYPES, "best"))


def test_step_against_trl():
    steps = quick("step", peers=("transformers", "trl"))["steps"]
    assert [found["precision"] for found in steps] == DTYPES
    assert all(found[key].keys() == RATIO for found in steps for key in ("total", "rollout", "update"))


def test_learner_alone():
    result = quick("step", "--scaling", "--memory")
    assert all(found["ratio"] > 0 for found in result["scaling"]) and result["memory"]["ratio"] > 0
    own, dense = (result["memory"][side]["grad_norm"] for side in ("own", "dense"))
    assert own == pytest.approx(dense, rel=1e-4)  # the same update


def test_convert():
    done = run(str(FOLDER / "convert.py"), "--rows", "20", "--repeats", "1")
    assert done.returncode == 0 and done.stdout.startswith("20 rows, "), done.stderr


@pytest.mark.parametrize("name", ["rollout", "multiturn", "step"])
def test_a_missing_peer_is_named(name):
    hide = f"import runpy, sys; sys.argv = ['{name}.py', '--quick']; sys.path.insert(0, {str(FOLDER)!r}); " \
           "import importlib.util as u; find = u.find_spec; " \
           "u.find_spec = lambda n, *a: None if n in ('transformers', 'trl') else find(n, *a); " \
           f"runpy.run_path({str(FOLDER / name)!r} + '.py', run_name='__main__')"
    done = run("-c", hide)
    assert done.returncode == 1 and 'pip install -e ".[bench]"' in done.stderr, done.stderr


def test_serve():
    (found,) = quick("serve")["throughput"]
    assert found["ratio"].keys() == RATIO
