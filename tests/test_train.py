"""Proves: `train.py` runs from nothing to a report, leaves what the contract names, and `evaluate.py` reads it.

A very small run in this process: summary.json and metrics.jsonl hold exactly the documented keys, the same seed gives
the same numbers, GRPO and both kinds of old log-probabilities run, a dry run writes no checkpoint, a folder that is
not empty is refused, --resume takes finished stages, a loss that is not finite stops the run with the batch saved, and
a token limit that cuts every rollout shows in the log.
"""
from __future__ import annotations

import functools
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slca.config import load_config
from slca.data import Task
from slca.data.vocabulary import world_tokenizer
from slca.report import read_metrics, undocumented
from slca.rewards import HierR
from slca.rollout import Episode
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy

ROOT = Path(__file__).parents[1]
SETTINGS = """threads=1 precision=fp32 seed=3 model.hidden_size=32 model.intermediate_size=48 model.num_layers=2
    data.eval_tasks=4 data.validation_tasks=2 rollout.max_response_tokens=40 eval.max_response_tokens=24 eval.every=1
    sft.max_steps=10 sft.rows_per_step=4 sft.gate_every=5 sft.decay_steps=2 sft.warmup_steps=2
    rl.steps=2 rl.prompts_per_step=4 rl.prompts_per_update=2 rl.group_size=3 rl.warmup_steps=1""".split()
NO_SFT = ["sft.enabled=false", "rl.steps=1"]
M = {"name_f1", "arg_match", "parallel", "process", "summary", "success", "no_call", "redundant_calls",
     "calls_per_task", "gold_calls_per_task", "tool_turns", "n"}
TIMES = {"time_s", "rollout_s", "learn_s", "tok_s", "peak_memory_gb"}


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train, evaluation = script("train"), script("evaluate")
plain_scores = train.score_episodes


def scores_that_differ(episodes, *args) -> None:
    """Rewards of an untrained policy are all alike, which would leave the update with nothing to do."""
    plain_scores(episodes, *args)
    for e in episodes:
        name, summary = 0.25 * (len(set(e.ids)) % 4), 0.25 * (e.ids[-1] % 4)
        process = 0.25 * name  # the weight of the name score
        e.rewards = replace(e.rewards, fmt=0, name=name, key=0, value=0, parallel=0, process=process, summary=summary,
                            total=process + summary, omission=False)


train.score_episodes = scores_that_differ
train.world_tokenizer = functools.cache(functools.partial(world_tokenizer, examples=150))


def call(module, *args) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, args)])
        module.main()


def run(folder: Path, *settings: str, flags=()) -> Path:
    call(train, "--out", folder, *flags, "--set", *SETTINGS, *settings)
    return folder


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("train") / "base")


def test_what_a_run_leaves(base):
    assert {p.name for p in base.iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json", "rollouts",
                                                "checkpoints", "report.html"}
    found = summary(base)
    assert list(found) == ["seed", "wall_s", "before", "after_sft", "after_sft_sampled", "after_rl", "after_rl_sampled"]
    assert found["seed"] == 3 and found["wall_s"] > 0
    for stage in list(found)[2:]:
        assert found[stage].keys() == M and found[stage]["n"] == 4
    assert found["before"]["gold_calls_per_task"] == found["after_rl"]["gold_calls_per_task"] > 0
    assert load_config([base / "config.yaml"]) == load_config([ROOT / "configs" / "tiny.yaml"], SETTINGS)


def test_metrics_are_documented_and_complete(base):
    rows = read_metrics(base)
    assert undocumented(rows) == []
    assert [(r["phase"], r["step"]) for r in rows] == [("sft", i + 1) for i in range(10)] + [("rl", 1), ("rl", 2)]
    assert [r["step"] for r in rows if "sft_copy" in r] == [5, 10]
    for r in rows[10:]:
        assert {"reward", "process", "loss", "grad_norm", "logprob_gap", "val_success", "entropy"} <= r.keys()
        assert all(v is not None for v in r.values())
        assert 0 < r["logprob_gap"] < 1e-5 and r["logprob_gap_max"] < 1e-4 and r["grad_norm"] > 0
        assert r["reward"] == pytest.approx(r["process"] + r["summary"])
    lr = load_config([base / "config.yaml"]).sft.lr
    assert [r["lr"] / lr for r in rows[:10]] == pytest.approx([0.5] + [1] * 8 + [0.5])  # warm-up, flat, decay


def test_checkpoints_and_rollouts_can_be_read(base):
    assert {p.name for p in (base / "checkpoints").iterdir()} == {"after_sft", "after_rl"}
    policies = [load_policy(base / "checkpoints" / name) for name in ("after_sft", "after_rl")]
    tokenizer = load_tokenizer(base / "checkpoints" / "after_rl")
    assert tokenizer.size == policies[1].config.vocab_size
    records = json.loads((base / "rollouts" / "step_00002.json").read_text())
    assert [r["rank"] for r in records] == ["best", "worst"]
    assert records[0]["scores"]["total"] >= records[1]["scores"]["total"]
    for r in records:
        assert len({len(r[k]) for k in ("ids", "tokens", "labels", "policy_mask", "logprobs", "advantages")}) == 1
        assert tokenizer.decode(r["ids"]) and not any(r["policy_mask"][:r["prompt_length"]])


def test_same_seed_same_numbers(base, tmp_path):
    again = run(tmp_path / "again")
    a, b = ([{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(f)] for f in (base, again))
    assert a == b
    assert {**summary(base), "wall_s": 0} == {**summary(again), "wall_s": 0}
    weights = [load_policy(f / "checkpoints" / "after_rl").state_dict() for f in (base, again)]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    other = read_metrics(run(tmp_path / "other", "seed=4", *NO_SFT))
    assert other[0]["response_tokens"] != a[10]["response_tokens"] or other[0]["entropy"] != a[10]["entropy"]


@pytest.mark.parametrize("settings", [
    ["advantage.estimator=grpo", "rl.prompts_per_update=4"],
    ["loss.old_logprobs=sampler", "loss.kl_coef=0.1", "rl.prompts_per_update=4"],
    ["chat.parallel=blocks", "reward.parallel_rule=first_turn", "advantage.segmenter=strict", "precision=bf16"],
], ids=["grpo", "sampler's log-probabilities and KL", "blocks, strict, bf16"])
def test_other_conditions_run(tmp_path, settings):
    folder = run(tmp_path / "run", *settings, "sft.enabled=false", "rl.steps=2", "rl.lr=0.01")
    rows = read_metrics(folder)
    assert [r["phase"] for r in rows] == ["rl", "rl"] and undocumented(rows) == []
    gap = 0.05 if "precision=bf16" in settings else 1e-5
    assert all(r["grad_norm"] > 0 and 0 < r["logprob_gap"] < gap for r in rows)
    assert (rows[1]["kl"] > 0) == ("loss.kl_coef=0.1" in settings)
    if "rl.prompts_per_update=4" in settings:  # one update a step: the ratio is 1, or off by what the sampler is
        assert (rows[0]["approx_kl"] == 0) == ("loss.old_logprobs=sampler" not in settings)
    if "advantage.estimator=grpo" in settings:  # one stream: all tokens of a rollout have one advantage
        for r in json.loads((folder / "rollouts" / "step_00001.json").read_text()):
            assert len({a for a, m in zip(r["advantages"], r["policy_mask"], strict=True) if m}) == 1
    assert list(summary(folder)) == ["seed", "wall_s", "before", "after_rl", "after_rl_sampled"]


def test_each_step_has_its_own_prompts_stream_and_rows(tmp_path, monkeypatch):
    keys, prompts, rows, roll, update = [], [], [], train.rollout, train.policy_update

    def watch_rollout(policy, tokenizer, tasks, simulator, cfg, size, key, *args, **more):
        keys.append(key), prompts.append([t.id for t in tasks])
        return roll(policy, tokenizer, tasks, simulator, cfg, size, key, *args, **more)

    def watch_update(policy, reference, found, batch, part, *args):
        rows.append(list(part))
        return update(policy, reference, found, batch, part, *args)
    monkeypatch.setattr(train, "rollout", watch_rollout)
    monkeypatch.setattr(train, "policy_update", watch_update)
    run(tmp_path / "run", "sft.enabled=false", "rl.steps=3", "eval.every=0")
    assert keys == [(3, 0), (3, 1), (3, 2)] and rows == [list(range(6)), list(range(6, 12))] * 3
    assert len({i for step in prompts for i in step}) == 12


def test_grpo_reward_ratio_by_hand():
    """total = ratio * process + summary, where an omission keeps its penalty."""
    scores = [HierR(process=0.5, summary=0.25, total=0.75), HierR(process=0.2, summary=1.0, total=1.2),
              HierR(total=-0.5, omission=True)]
    episodes = [Episode(Task(str(i), [], []), 0, i, [1, 2], 1, [0, 1], [0.0, -1.0], [0, 2], rewards=r)
                for i, r in enumerate(scores)]
    cfg = load_config([], ["advantage.estimator=grpo", "advantage.reward_ratio=3", "advantage.divide_by_std=false"])
    got = train.estimate(episodes, train.Batch.of(episodes, torch.device("cpu")), cfg).tokens
    total = torch.tensor([3 * 0.5 + 0.25, 3 * 0.2 + 1.0, -0.5])
    torch.testing.assert_close(got[:, 1], total - total.mean(), rtol=1e-5, atol=1e-6)


def test_dry_run_writes_no_checkpoint(tmp_path, capsys):
    folder = run(tmp_path / "dry", flags=["--dry-run"])
    out = capsys.readouterr().out
    for text in ("demonstration 3", "prompt 3, first of 3 rollouts", "12 rollouts", "prompt tokens: mean",
                 "memory of a rank", "\n[2 x ", "<|im_start|>assistant"):
        assert text in out
    assert not folder.exists()


def test_profile_says_where_a_step_goes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.phases, "on", False)  # put back afterwards
    run(tmp_path / "run", "sft.enabled=false", "rl.steps=2", flags=["--profile"])
    shown = capsys.readouterr().out
    tables = shown.split("RL step ")[1:]
    rows = [{line.split("  ")[0]: line.split()[-5:] for line in table.splitlines() if "%" in line} for table in tables]
    assert len(rows) == 2
    for found in rows:
        assert {"prefill", "decode", "judge", "log-probabilities", "backward", "optimiser", "other"} <= set(found)
        assert int(found["prefill"][2]) > 0 and int(found["decode"][2]) > 0
        assert float(found["other"][0]) >= 0  # no phase is counted twice
        assert abs(sum(float(row[1].rstrip("%")) for row in found.values()) - 100) < 1


def test_folder_that_is_not_empty_is_refused(base):
    before = {p: p.stat().st_mtime_ns for p in base.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit, match="is not empty: give another --out, or --resume"):
        run(base)
    assert before == {p: p.stat().st_mtime_ns for p in base.rglob("*") if p.is_file()}


def test_resume_takes_finished_stages(base, capsys, monkeypatch):
    before, wall = read_metrics(base), summary(base)["wall_s"]
    weights = load_policy(base / "checkpoints" / "after_rl").state_dict()
    found = []
    monkeypatch.setattr(train.Run, "finish", lambda self, plain=train.Run.finish: found.append(self) or plain(self))
    run(base, flags=["--resume"])
    assert capsys.readouterr().out.count("weights taken from") == 2
    assert read_metrics(base) == before and summary(base)["wall_s"] >= wall
    assert all(torch.equal(v, weights[k]) for k, v in found[0].policy.state_dict().items())


def test_resume_is_refused_where_it_would_mix_runs(base, tmp_path):
    with pytest.raises(SystemExit, match="is a run of seed 3, not 4"):
        run(base, "seed=4", flags=["--resume"])
    with pytest.raises(SystemExit, match="--resume needs --out with the folder of an earlier run"):
        call(train, "--resume")


def test_resume_of_a_run_that_was_killed_before_it_began(tmp_path):
    assert len(read_metrics(run(tmp_path / "nothing", *NO_SFT, flags=["--resume"]))) == 1


def test_resume_goes_on_after_the_last_finished_stage(tmp_path, capsys):
    folder = run(tmp_path / "half", "rl.enabled=false", "sft.max_steps=2")
    assert list(summary(folder))[-1] == "after_sft_sampled"
    sft = summary(folder)["after_sft"]
    run(folder, "sft.max_steps=2", "rl.enabled=true", "rl.steps=1", flags=["--resume"])
    assert capsys.readouterr().out.count("weights taken from") == 1
    assert summary(folder)["after_sft"] == sft and "after_rl" in summary(folder)
    assert [r["phase"] for r in read_metrics(folder)] == ["sft", "sft", "rl"]


def test_loss_that_is_not_finite_stops_with_the_batch_saved(tmp_path, monkeypatch):
    plain = train.estimate

    def broken(episodes, batch, *more):
        a = plain(episodes, batch, *more)
        return a._replace(tokens=torch.where(batch.policy_mask == 1, float("nan"), a.tokens))
    monkeypatch.setattr(train, "estimate", broken)
    with pytest.raises(SystemExit, match=r"RL step 1: policy loss nan; the batch is in .*failed_batch.json"):
        run(tmp_path / "run", *NO_SFT)
    saved = json.loads((tmp_path / "run" / "failed_batch.json").read_text())
    assert len(saved) == 12 and all(r["ids"] and r["logprobs"] for r in saved)
    assert "after_rl" not in summary(tmp_path / "run")
    assert read_metrics(tmp_path / "run") == [{"phase": "rl", "step": 1, "nonfinite": 1}]


def test_sft_loss_that_is_not_finite_stops_with_the_rows_saved(tmp_path, monkeypatch):
    plain = train.sft_step

    def broken(policy, *args):
        with torch.no_grad():
            policy.model.norm.weight.fill_(float("nan"))
        return plain(policy, *args)
    monkeypatch.setattr(train, "sft_step", broken)
    with pytest.raises(SystemExit, match="SFT step 1: SFT loss nan; the batch is in .*failed_batch.json"):
        run(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "failed_batch.json").read_text())
    assert saved and all(len(r["ids"]) == len(r["weights"]) for r in saved)


def test_a_stage_cut_off_by_a_crash_is_done_again_without_double_lines(tmp_path, monkeypatch):
    def crash(self, tasks, temperature=0.0, plain=train.Run.evaluate):
        if "before" in self.summary:
            raise RuntimeError("power cut")
        return plain(self, tasks, temperature)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "evaluate", crash)
        with pytest.raises(RuntimeError, match="power cut"):  # after the SFT checkpoint, before its evaluation
            run(tmp_path / "run", "sft.scheduler=cosine", "sft.max_steps=2", "rl.enabled=false")
    run(tmp_path / "run", "sft.scheduler=cosine", "sft.max_steps=2", "rl.enabled=false", flags=["--resume"])
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2]
    assert "after_sft_sampled" in summary(tmp_path / "run")


def test_a_tiny_cap_shows_in_the_log(tmp_path):
    rows = read_metrics(run(tmp_path / "run", *NO_SFT, "rollout.max_response_tokens=2"))
    assert rows[0]["length_limit"] == 1.0 and rows[0]["response_tokens"] == 2.0 and rows[0]["success"] == 0


# ---- evaluate.py

def test_evaluate_repeats_the_runs_own_figures(base, tmp_path, capsys):
    """The embedded suite with the run's own configuration: the same greedy metrics as in its summary."""
    call(evaluation, "--suite", "toucan", "--checkpoint", base / "checkpoints" / "after_rl", "--out",
         tmp_path / "new" / "e.json")
    report = json.loads((tmp_path / "new" / "e.json").read_text())
    assert report["metrics"] == summary(base)["after_rl"] and report["skipped"] == 0
    assert report["config"]["seed"] == 3 and report["suite"] == "toucan" and report["temperature"] == 0
    assert sum(m["n"] for m in report["by_subset"].values()) == 4 and "Process" in capsys.readouterr().out


def test_evaluate_a_released_row(base, tmp_path):
    args = ["--suite", "toucan", "--checkpoint", base / "checkpoints" / "after_sft", "--data",
            ROOT / "tests" / "data" / "toucan_rl_row.jsonl", "--out", tmp_path / "e.json"]
    with pytest.raises(ValueError, match=r"none of 1 tasks has a prompt within 512 tokens \(eval.max_prompt_tokens\)"):
        call(evaluation, *args, "--set", "eval.max_prompt_tokens=512")
    call(evaluation, *args, "--set", "eval.max_response_tokens=8")
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["metrics"].keys() == M and report["metrics"]["n"] == 1
    assert report["metrics"]["gold_calls_per_task"] > 0 and report["data"].endswith("toucan_rl_row.jsonl")
