"""Two ranks are one: the same prompts, draws, losses and weights as a single process, and nothing hangs.

Runs tests/ranks_worker.py in processes of its own, alone and under torchrun with gloo; every run has a timeout.
Tolerances: 1e-6 for losses, 2e-5 for weights after three updates, since sums over ranks round differently.
"""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slca import ranks
from slca.report import read_metrics

WORKER, ROOT = Path(__file__).with_name("ranks_worker.py"), Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def start(*command: str | Path, count: int = 1, timeout: int = 240) -> str:
    ahead = [sys.executable] if count == 1 else TORCHRUN
    done = subprocess.run([*ahead, *map(str, command)], env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def updates(tmp_path_factory) -> dict[int, Path]:
    folders = {n: tmp_path_factory.mktemp(f"ranks{n}") for n in (1, 2)}
    start(WORKER, "updates", folders[1])
    start(WORKER, "updates", folders[2], folders[1] / "episodes.json", count=2)
    return folders


CASES = ["one", "two", "many", "idle rank", "kl and two updates", "idle rank, kl", "whole"]


@pytest.mark.parametrize("case", CASES)
def test_first_step_samples_the_same_tokens(updates, case):
    one, two = (json.loads((updates[n] / "episodes.json").read_text())[case][0] for n in (1, 2))
    assert [(e["group"], e["member"], e["ids"]) for e in one] == [(e["group"], e["member"], e["ids"]) for e in two]
    assert len({tuple(e["ids"]) for e in one}) == len(one)  # and no two rollouts are the same
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(torch.tensor(a["logprobs"]), torch.tensor(b["logprobs"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_three_updates_end_at_the_same_weights(updates, case):
    one, two = (json.loads((updates[n] / "found.json").read_text())[case] for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys() and a["grad_norm"] > 1e-3
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-5)
        assert max(a["logprob_gap_max"], b["logprob_gap_max"]) < 1e-4  # the sampler of a replay had other weights
        assert all(math.isclose(a[k], b[k], rel_tol=1e-4, abs_tol=1e-6) for k in a if "logprob_gap" not in k)
    weights = [load_file(updates[n] / f"{case}.safetensors") for n in (1, 2)]
    assert weights[0].keys() == weights[1].keys()
    for name, t in weights[0].items():
        torch.testing.assert_close(weights[1][name], t, rtol=0, atol=2e-5)


def test_mixed_precision_is_close_to_one_ranks_autocast(updates):
    """Gathered weights in bfloat16, gradients summed and weights kept in float32."""
    one, two = (json.loads((updates[n] / "found.json").read_text())["bf16"] for n in (1, 2))
    exact = json.loads((updates[1] / "found.json").read_text())["one"]
    for a, b, c in zip(one, two, exact, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.05) and a["grad_norm"] != c["grad_norm"]
    weights = [load_file(updates[n] / "bf16.safetensors") for n in (1, 2)]
    for name, t in weights[0].items():
        assert t.dtype == weights[1][name].dtype == torch.float32
        gap = (weights[1][name] - t).abs()
        assert gap.max() < 2 * 3 * 2e-4 and gap.mean() < 1e-4  # AdamW's steps are 2e-4, whatever the gradient's size


def test_micro_batches_change_nothing(updates):
    losses = [json.loads((updates[1] / "found.json").read_text())[case][0] for case in ("one", "two", "many")]
    assert len({round(row["loss"], 6) for row in losses}) == 1
    assert len({round(row["grad_norm"], 4) for row in losses}) == 1


def test_stops_far_apart_and_tools_on_one_rank_only(tmp_path):
    """Rank 0 writes three calls and a long reply, rank 1 two tokens a rollout; both then learn from their share."""
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        start(WORKER, "scripted", folder, count=count, timeout=120)
        found.append(json.loads((folder / "found.json").read_text()))
    assert found[0]["episodes"] == found[1]["episodes"]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
    turns = {e["group"]: e["tool_turns"] for e in found[0]["episodes"]}
    assert turns == {0: 3, 1: 0, 2: 3, 3: 0}
    lengths = {e["group"]: sum(e["policy_mask"]) for e in found[0]["episodes"]}
    assert lengths[1] == 2 and lengths[0] > 50


def test_a_run_on_two_ranks_writes_one_log(tmp_path):
    """train.py itself, both stages: files as from one rank, a line a step, numbers in float32 as one rank's."""
    settings = """shard=true threads=1 precision=fp32 seed=3 model.num_layers=2
        model.hidden_size=32 model.intermediate_size=48
        data.eval_tasks=5 data.validation_tasks=3 rollout.max_response_tokens=24 eval.max_response_tokens=16
        eval.every=1 sft.max_steps=4 sft.rows_per_step=5 sft.gate_every=2 sft.decay_steps=2 sft.warmup_steps=2
        rl.steps=2 rl.prompts_per_step=3 rl.prompts_per_update=3 rl.group_size=3 rl.warmup_steps=1""".split()
    rows = []
    for count in (1, 2):
        start(ROOT / "train.py", "--out", tmp_path / str(count), "--set", *settings, count=count)
        rows.append(read_metrics(tmp_path / str(count)))
        assert (tmp_path / str(count) / "report.html").stat().st_size > 1000
    times = {"time_s", "rollout_s", "learn_s", "tok_s", "peak_memory_gb"}
    assert [(r["phase"], r["step"]) for r in rows[1]] == [("sft", i) for i in (1, 2, 3, 4)] + [("rl", 1), ("rl", 2)]
    for a, b in zip(rows[0][:5], rows[1][:5], strict=True):  # then a draw may differ
        assert a.keys() == b.keys()
        assert all(math.isclose(a[k], b[k], rel_tol=1e-3, abs_tol=1e-5) for k in a.keys() - times - {"phase"}), (a, b)
    saved = [load_file(tmp_path / str(n) / "checkpoints" / "after_sft" / "model.safetensors") for n in (1, 2)]
    assert all(torch.allclose(saved[1][k], t, rtol=0, atol=1e-4) for k, t in saved[0].items())


def test_rows_are_dealt_out_so_that_no_rank_waits(monkeypatch):
    sizes = [500, 1400, 1000, 1050, 90, 800]
    assert sorted(ranks.level_share(sizes)) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(ranks, "world", lambda: 2)
    dealt = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        dealt.append(ranks.level_share(sizes))
    assert dealt == [[1, 5, 0], [3, 2, 4]]  # 2700 against 2140 tokens; every second one by length: 2900 and 1940
    assert sorted(sum(dealt, [])) == [0, 1, 2, 3, 4, 5]


def test_one_rank_needs_no_process_group():
    assert ranks.world() == 1 and ranks.rank() == 0 and ranks.share(3) == [0, 1, 2]
    assert ranks.all_sum({"a": 1.5}) == {"a": 1.5} and ranks.gather({"x": None}) == [{"x": None}]
