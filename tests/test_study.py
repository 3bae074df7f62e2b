"""Proves: a study runs what its file says and nothing else, goes on after a kill, and its tables are right by hand.

The arithmetic against known values (t quantiles, Tables 21 and 22: W27), the strictness of the file, the plan of
supervised runs, then whole studies with a stub in the place of the processes (skip, go on, refuse, fail, stop), the
processes' signals and lock, and one study with the real train.py, cut very short.
"""
from __future__ import annotations

import csv
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slca import study
from slca.config import load_config, save_config, to_dict
from slca.stats import (
    build_tables,
    cell,
    cell_text,
    csv_text,
    effects,
    first_step,
    half_up,
    interval,
    markdown,
    mean_std,
    run_record,
    t_quantile,
    t_share,
)
from slca.study_plan import Job, StudyError, changed, jobs, plan, read_study, settings

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
TINY = str(ROOT / "configs" / "tiny.yaml")
METRICS = ("name_f1", "arg_match", "parallel", "process", "summary", "success", "no_call", "redundant_calls",
           "calls_per_task", "gold_calls_per_task", "tool_turns", "n")
TWO = """title: Two
conditions:
  slca: {advantage: {estimator: slca}}
  grpo: {advantage: {estimator: grpo}}
"""


def study_file(folder: Path, text: str = TWO) -> Path:
    path = folder / "two.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- arithmetic ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("df, level, t", [(1, .95, 12.7062), (2, .95, 4.3027), (3, .95, 3.1824), (4, .95, 2.7764),
                                          (9, .95, 2.2622), (30, .95, 2.0423), (1000, .95, 1.9623), (2, .99, 9.9248),
                                          (5, .90, 2.0150)])
def test_t_quantiles_of_the_printed_tables(df, level, t):
    assert t_quantile(df, level) == pytest.approx(t, abs=6e-5)
    assert t_share(t_quantile(df, level), df) == pytest.approx(level, abs=1e-12)


def test_mean_std_and_interval_by_hand():
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**.5))  # squares 4 + 1 + 9, over 2
    assert mean_std([5.0]) == (5.0, None) and mean_std([]) == (None, None) and interval([5.0]) == (None, None)
    low, high = interval([1.0, 2.0, 6.0])  # half width 4.3027 x sqrt(7/3)
    assert (low, high) == (pytest.approx(3 - 6.5724, abs=1e-4), pytest.approx(3 + 6.5724, abs=1e-4))
    assert interval([2.0, 2.0]) == (2.0, 2.0)


def test_rounding_is_decimal_and_half_up():
    assert [str(half_up(x, 2)) for x in (0.795, 5.505, 0.325, 2.5, -0.005)] == ["0.80", "5.51", "0.33", "2.50", "-0.01"]
    assert str(half_up((0.791 + 0.7915) / 2, 4)) == "0.7913"  # the float is 0.79124999999999998


def test_the_text_of_a_cell():
    assert cell_text(cell("a", "m", {0: 0.5, 1: 0.7})) == "0.6000 ± 0.1414"
    assert cell_text(cell("a", "m", {0: 0.5})) == "0.5000"
    assert cell_text(cell("a", "m", {0: 20, 1: None, 2: 40}, 1)) == "30.0 ± 14.1 (2 of 3)"
    assert cell_text(cell("a", "m", {0: None, 1: None})) == "-"
    assert cell_text(cell("a", "m", {0: 0.01, 1: 0.03}, difference=True)) == "+0.0200 [-0.1071, +0.1471]"
    assert cell_text(cell("a", "m", {0: -0.00001}, difference=True)) == "0.0000"


def test_first_step_at_a_level():
    rows = [{"step": s, "success": x, **({"val_success": v} if v is not None else {})}
            for s, x, v in ((1, .2, None), (2, 1.0, .5), (3, .9, None), (4, .8, .8), (5, .8, .7))]
    assert first_step(rows, "val_success", .8, 1) == 4 and first_step(rows, "val_success", .9, 1) is None
    assert first_step(rows, "success", .7, 3) == 3 and first_step(rows, "success", .9, 3) == 4  # means .7, .9, .833
    assert first_step(rows, "success", .1, 6) is None  # fewer steps than the mean is over


def record(success: float, **more) -> dict:
    """A run as `run_record` reads it; all metrics alike."""
    return {"greedy": dict.fromkeys(METRICS, success), "sampled": dict.fromkeys(METRICS, success / 2),
            "grad_norm": {"std": success, "mean": 2 * success}, "columns": {"leak_share": success},
            "curves": {"step": [1]}, "reach": {"val_success": {"0.8": 10}, "success": {"0.8": None}}} | more


@pytest.mark.parametrize("cells, expected", [((79.13, 77.21, 79.02, 78.30), (1.32, 0.49, 1.20)),
                                             ((69.77, 68.72, 69.84, 69.30), (0.80, 0.33, 0.51)),
                                             ((41.02, 33.95, 41.36, 37.42), (5.51, 1.91, 3.13))])
def test_w27_factor_effects_from_runs_whose_means_are_table_21(cells, expected):
    names = ("slca", "s_to_t", "t_to_s", "both")
    runs = {name: {s: record((x + d) / 100) for s, d in ((0, -1), (1, 0), (2, 1))}
            for name, x in zip(names, cells, strict=True)}
    runs["both"][7] = record(0.0)  # a seed that the other cells lack does not count
    found = [c for c in effects(runs, "greedy") if c["metric"] == "Success"]
    assert [c["condition"] for c in found] == ["close_s_to_t", "open_t_to_s", "interaction"]
    assert tuple(c["mean"] for c in found) == expected
    del runs["t_to_s"]
    assert effects(runs, "greedy") == []


def test_tables_by_hand():
    runs = {"slca": {0: record(.8), 1: record(.9), 2: record(.7)}, "grpo": {0: record(.7), 1: record(.6)},
            "sft": {0: record(.1, curves={}, columns={}, reach={})}, "later": {}}
    tables = build_tables(runs, {"slca": "slca", "grpo": "slca", "sft": "slca", "later": "slca"})

    def text(table: str, condition: str, metric: str) -> str:
        return next(cell_text(c) for c in tables[table] if (c["condition"], c["metric"]) == (condition, metric))

    assert text("Metrics, greedy", "slca", "Success") == "0.8000 ± 0.1000"
    assert text("Metrics, sampled", "grpo", "No-call") == "0.3250 ± 0.0354"
    # -.1 and -.3: mean -.2, std .1414, half width 12.7062 x .1
    assert text("Paired differences, greedy", "grpo - slca", "Process") == "-0.2000 [-1.4706, +1.0706]"
    assert text("Paired differences, greedy", "sft - slca", "Calls") == "-0.7000"
    assert text("Gradient norm over the RL steps", "slca", "mean") == "1.6000 ± 0.2000"
    assert text("Gradient norm over the RL steps", "grpo - slca", "std") == "-0.2000 [-1.4706, +1.0706]"
    assert text("First RL step at a success of", "grpo", "0.8, validation") == "10.0 ± 0.0"
    assert text("First RL step at a success of", "grpo", "0.8, training, mean of 5") == "-"
    columns = "Columns of metrics.jsonl, mean over the RL steps"
    assert text(columns, "grpo", "leak_share") == "0.6500 ± 0.0707"
    assert text(columns, "grpo - slca", "leak_share") == "-0.2000 [-1.4706, +1.0706]"
    assert not any("Factor" in title for title in tables)
    assert "sft" not in {c["condition"] for c in tables["Gradient norm over the RL steps"]}

    page = markdown("Title", "Note.", tables)
    assert page.startswith("# Title\n\nNote.\n\n## Metrics, greedy\n\n|  | Name F1 | ArgMatch |")
    assert "| slca | 0.8000 ± 0.1000 |" in page
    lines = list(csv.DictReader(csv_text(tables).splitlines()))
    line = next(x for x in lines if (x["table"], x["condition"], x["metric"]) == ("Metrics, greedy", "grpo", "Success"))
    assert line["n"] == "2" and float(line["mean"]) == pytest.approx(.65) and line["values"] == "0:0.7 1:0.6"
    assert len(lines) == sum(map(len, tables.values()))


def test_the_distractors_table_has_a_row_a_method_and_a_column_a_size():
    entries = {"own": dict.fromkeys(METRICS, .7), "hard 150": None}
    tables = build_tables({"slca": {0: record(.7, evaluate=entries)}}, {"slca": "slca"})
    assert [(c["condition"], c["metric"], cell_text(c)) for c in tables["Success by number of tools"]] == [
        ("slca", "own", "0.7000"), ("slca", "hard 150", "-")]


def test_a_run_s_record_is_read_from_its_files(tmp_path):
    m = dict.fromkeys(METRICS, .5)
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": 60.0, "after_rl": m, "after_rl_sampled": m}))
    rows = [{"phase": "sft", "step": 1, "grad_norm": 99.0}] + [
        {"phase": "rl", "step": s, "grad_norm": g, "success": x, "leak_share": g / 10, "fmt": 1.0, "loss": None}
        for s, g, x in ((1, 1.0, .5), (2, 2.0, .9), (3, 6.0, .9))]
    rows[2]["val_success"] = 0.75
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = run_record(tmp_path, "after_rl", ["fmt"], [0.7])
    assert found["grad_norm"] == {"std": pytest.approx(7**.5), "mean": 3.0} and found["wall_s"] == 60.0
    assert found["columns"] == {"fmt": 1.0, "leak_share": pytest.approx(.3), "success": pytest.approx(2.3 / 3)}
    assert found["reach"] == {"val_success": {"0.7": 2}, "success": {"0.7": None}}
    assert found["curves"]["step"] == [1, 2, 3] and found["curves"]["val_success"] == [None, 0.75, None]
    with pytest.raises(ValueError, match="summary.json.*after_sft"):
        run_record(tmp_path, "after_sft")


# --- the file and the plan -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("base", ["tiny", "smollm2-135m", "qwen2.5-7b"])
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_fits_every_base(path, base):
    found = read_study(path)
    cfg = load_config([ROOT / "configs" / f"{base}.yaml"])
    planned = plan(found, path, cfg, Path("/x"), [0])
    assert len(planned) > 1
    for name, runs in planned.items():
        assert [run.stage for run in runs[0]] == ["after_sft"] * (len(runs[0]) - (name != "sft")) + (
            ["after_rl"] if name != "sft" else [])


def test_there_is_a_study_for_every_comparison():
    assert {path.stem for path in STUDIES} >= {
        "methods", "ablations", "summary_ablation", "process_weights", "reward_ratio", "support_control", "distractors",
        "execution_reward", "simulator", "toolpo_outcome", "judge_noise", "variants", "credit"}


@pytest.mark.parametrize("text, parts", [
    ("title: [", ["cannot be read as YAML"]),
    ("- 1", ["the file", "mapping"]),
    (TWO + "seeds: 3\n", ["seeds", "one of the keys title, conditions"]),
    (TWO + "  grpo: {}\n", ["written twice"]),
    ("title: A\n", ["conditions", "a mapping of names"]),
    ("title: A\nconditions: {}\n", ["conditions"]),
    ("conditions: {a: {}}\n", ["title", "None", "text"]),
    ("title: A\nconditions: {a: null}\n", ["conditions.a", "a mapping of settings"]),
    ("title: A\nconditions: {../a: {}}\n", ["conditions", "letters"]),
    ("title: A\nconditions: {a: {rl: {sttps: 3}}}\n", ["conditions.a", "rl.sttps", "steps"]),
    ("title: A\nconditions: {a: {rl: {steps: many}}}\n", ["conditions.a", "rl.steps", "'many'", "whole number"]),
    ("title: A\nconditions: {a: {rl.steps: 3}}\n", ["conditions.a", "rl.steps", "nested"]),
    ("title: A\nconditions: {a: {rl: 3}}\n", ["conditions.a", "rl", "a mapping"]),
    ("title: A\nconditions: {a: {seed: 3}}\n", ["conditions.a", "seed", "--seeds"]),
    ("title: A\nconditions: {sft: {rl: {steps: 3}}}\n", ["conditions.sft", "another name"]),
    ("title: A\nconditions: {a: {rl: {enabled: false}, sft: {enabled: false}}}\n", ["conditions.a", "rl.enabled"]),
    ("title: A\nconditions: {a: {advantage: {estimator: grpo, routing: [[1, 0], [0, 0]]}}}\n",
     ["conditions.a", "advantage.routing"]),
    (TWO + "reference: slcaa\n", ["reference", "slca, grpo"]),
    (TWO + "reference: {grpo: other}\n", ["reference", "slca, grpo"]),
    (TWO + "paper: two\n", ["paper", "'two'", "number"]),
    (TWO + "evaluate: {suite: bfcl}\n", ["evaluate", "toucan or distractors"]),
    (TWO + "evaluate: {suite: distractors}\n", ["evaluate", "catalogue"]),
    (TWO + "evaluate: {suite: toucan, k: [20]}\n", ["evaluate", "distractors"]),
    (TWO + "evaluate: {suite: distractors, catalogue: a, k: 20}\n", ["evaluate.k", "20", "list"]),
    (TWO + "evaluate: {suite: toucan, seed: 1}\n", ["evaluate.seed", "one of the keys"]),
    (TWO + "evaluate: {suite: distractors, catalogue: a, k: [x, -3]}\n", ["evaluate.k", "whole numbers from 0"]),
    (TWO + "evaluate: {suite: distractors, catalogue: a, how: [foo]}\n", ["evaluate.how", "random, hard"]),
    (TWO + "evaluate: {suite: toucan, temperature: -1}\n", ["evaluate.temperature", "from 0 on"]),
    (TWO + "evaluate: {suite: toucan, temperature: true}\n", ["evaluate.temperature", "from 0 on"]),
    (TWO + "reference: [slca]\n", ["reference", "a mapping of conditions"]),
    ("title: A\nconditions: {tables.md: {}}\n", ["conditions", "but for study.json"]),
    ("title: A\nconditions: {a: {rl: {enabled: false}, simulator: {seed: 3}}}\n", ["simulator.seed", "without RL"]),
])
def test_what_is_wrong_in_a_file_is_named_before_anything_runs(tmp_path, monkeypatch, text, parts):
    monkeypatch.setattr(study, "run_process", lambda *a: pytest.fail("something ran"))
    path = study_file(tmp_path, text)
    with pytest.raises(StudyError) as error:
        study.main([str(path), "--out", str(tmp_path / "out")])
    assert all(part in str(error.value) for part in [str(path), *parts]), str(error.value)
    assert not (tmp_path / "out").exists()


def test_conditions_share_a_supervised_run_where_sft_reads_the_same():
    text = {"title": "A", "reference": {}, "evaluate": None, "conditions": {
        "a": {"advantage": {"estimator": "grpo"}}, "b": {"sft": {"lr": 0.02}},
        "c": {"sft": {"lr": 0.02}, "rl": {"steps": 7}}, "d": {"data": {"flaws": {"omit": 0.5}}},
        "e": {"sft": {"lr": 0.01}},  # the base's own value
        "f": {"rl": {"enabled": False}}, "g": {"sft": {"enabled": False}},
        "h": {"advantage": {"estimator": "rltr"}, "sft": {"target": "planner"}, "eval": {"summariser": "{sft}"}}}}
    base = load_config([TINY])
    found = {name: by_seed[4] for name, by_seed in plan(text, "f", base, Path("/s"), [4]).items()}
    first = {name: runs[0].name for name, runs in found.items()}
    assert first["a"] == first["e"] == first["f"] == "sft" and len(found["f"]) == 1
    assert first["b"] == first["c"] != "sft" and first["b"].startswith("sft-") and first["d"] not in ("sft", first["b"])
    assert [run.name for run in found["g"]] == ["g"] and found["g"][0].cfg.model.path is None
    shared, own, h = found["h"]
    assert shared == found["a"][0] and own.name.startswith("sft-") and own.name != first["b"]
    assert h.cfg.eval.summariser == "/s/sft/seed4/checkpoints/after_sft"
    assert h.cfg.model.path == f"/s/{own.name}/seed4/checkpoints/after_sft" and h.starts == (shared.folder, own.folder)
    sft, rl = found["c"]
    assert changed(base, sft.cfg) == {"seed": 4, "sft.lr": 0.02, "rl.enabled": False}
    assert changed(base, rl.cfg) == {"seed": 4, "sft.lr": 0.02, "sft.enabled": False, "rl.steps": 7,
                                     "model.path": f"/s/{first['b']}/seed4/checkpoints/after_sft"}
    commands = {job.label: job.command for job in jobs(text, {"c": {4: found["c"]}}, base, [TINY], ["sft.lr=0.01"],
                                                       [4], 2)}
    command = commands["c, seed 4"]
    assert command[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                            str(ROOT / "train.py")]
    assert command[7:11] == ["--config", TINY, "--set", "sft.lr=0.01"] and command[-1] == "--resume"
    assert load_config([TINY], command[10:command.index("--out")]) == rl.cfg


# --- whole studies, with a stub for the processes --------------------------------------------------------------------

class Stub:
    """In the place of `run_process`: leaves what train.py and evaluate.py leave, and notes what was asked for."""

    def __init__(self, monkeypatch):
        self.ran, self.fail, self.cut, self.stop = [], set(), set(), set()
        monkeypatch.setattr(study, "run_process", self)

    def __call__(self, command, log, forwarding, done, cores):
        def after(flag):
            values = command[command.index(flag) + 1:] if flag in command else []
            return values[:next((i for i, v in enumerate(values) if v.startswith("--")), len(values))]
        out = Path(after("--out")[0])
        log.parent.mkdir(parents=True, exist_ok=True)
        cfg = load_config(after("--config"), after("--set"))
        name = str(out.relative_to(out.parents[1]))
        log.write_bytes(f"doing {name}\rdone {name}\nlast words of {name}\n\n".encode())
        self.ran.append(name)
        if command[1].endswith("evaluate.py"):
            out.write_text(json.dumps({"metrics": dict.fromkeys(METRICS, .25), "temperature": 0.0,
                                       "config": to_dict(cfg)}))
            return 0
        save_config(cfg, out / "config.yaml")
        if name in self.stop:
            raise study.Stopped("SIGTERM")
        if name in self.fail:
            return 3
        if name in self.cut:
            self.cut.remove(name)
            return 0
        stage = "after_rl" if cfg.rl.enabled else "after_sft"
        value = cfg.seed / 10 + (0.5 if cfg.advantage.estimator == "slca" else 0.25)
        m = dict.fromkeys(METRICS, value)
        (out / "summary.json").write_text(json.dumps(
            {"seed": cfg.seed, "wall_s": 60.0, stage: m, f"{stage}_sampled": m}))
        (out / "metrics.jsonl").write_text("".join(json.dumps(
            {"phase": "rl", "step": s, "grad_norm": s * value, "success": value}) + "\n" for s in (1, 2, 3)))
        return 0


def test_a_study_runs_once_and_leaves_its_tables(tmp_path, monkeypatch, capsys):
    stub, path, out = Stub(monkeypatch), study_file(tmp_path, TWO + "  sft: {rl: {enabled: false}}\n"), tmp_path / "o"
    args = [str(path), "--out", str(out), "--seeds", "1", "0"]
    assert study.main([*args, "--seeds", "0", "1"]) == 0
    assert stub.ran == ["sft/seed0", "slca/seed0", "grpo/seed0", "sft/seed1", "slca/seed1", "grpo/seed1"]
    shown = capsys.readouterr().out
    assert "sft: the supervised run of slca, grpo, sft" in shown
    assert "[1/6] sft, seed 0: 0.0 min; 5 to go, more than 1.0 min" in shown  # of RL runs nothing is known yet
    assert "[3/6] grpo, seed 0: 0.0 min; 3 to go, about 3.0 min" in shown
    found = json.loads((out / "study.json").read_text())
    assert found["conditions"]["slca"]["runs"]["1"]["greedy"]["success"] == 0.6
    assert found["conditions"]["grpo"]["settings"] == {"advantage": {"estimator": "grpo"}}
    page = (out / "tables.md").read_text()
    assert "| grpo - slca | -0.2500 [-0.2500, -0.2500] |" in page and "| slca | 0.5500 ± 0.0707 |" in page
    assert (out / "tables.csv").read_text().startswith("table,condition,metric,n,mean,std,low,high,values\n")

    stub.ran.clear()
    assert study.main(args) == 0 and stub.ran == []  # all is there
    assert capsys.readouterr().out.count("finished already") == 6
    assert study.main([*args, "--seeds", "2", "--only", "grpo"]) == 0 and stub.ran == ["sft/seed2", "grpo/seed2"]
    assert "Finished runs, by seed: slca: 0 1; grpo: 0 1 2; sft: 0 1 2" in (out / "tables.md").read_text()


def test_tables_alone_run_nothing(tmp_path, monkeypatch, capsys):
    stub, path = Stub(monkeypatch), study_file(tmp_path)
    with pytest.raises(StudyError, match="no finished run"):
        study.main([str(path), "--out", str(tmp_path / "o"), "--tables"])
    study.main([str(path), "--out", str(tmp_path / "o"), "--seeds", "0"])
    stub.ran.clear()
    assert study.main([str(path), "--out", str(tmp_path / "o"), "--tables", "--columns", "success"]) == 0
    assert stub.ran == [] and "| slca | 0.5000 |" in capsys.readouterr().out.split("Columns of metrics.jsonl")[1]
    with pytest.raises(StudyError, match="--columns sucess"):
        study.main([str(path), "--out", str(tmp_path / "o"), "--tables", "--columns", "sucess"])
    with pytest.raises(StudyError, match="--only ppo"):
        study.main([str(path), "--out", str(tmp_path / "o"), "--only", "ppo"])


def test_a_cut_off_run_is_gone_on_with(tmp_path, monkeypatch, capsys):
    stub, path, out = Stub(monkeypatch), study_file(tmp_path), tmp_path / "o"
    stub.stop = {"slca/seed0"}
    assert study.main([str(path), "--out", str(out), "--seeds", "0"]) == 130
    assert stub.ran == ["sft/seed0", "slca/seed0"] and "stopped by SIGTERM" in capsys.readouterr().out
    stub.ran.clear(), stub.stop.clear()
    assert study.main([str(path), "--out", str(out), "--seeds", "0"]) == 0
    assert stub.ran == ["slca/seed0", "grpo/seed0"] and "slca, seed 0: goes on" in capsys.readouterr().out


def test_a_failed_run_is_shown_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    stub, path, out = Stub(monkeypatch), study_file(tmp_path), tmp_path / "o"
    stub.fail, stub.cut = {"slca/seed0", "sft/seed1"}, {"grpo/seed0"}
    assert study.main([str(path), "--out", str(out), "--seeds", "0", "1", "2"]) == 1
    assert stub.ran == ["sft/seed0", "slca/seed0", "grpo/seed0", "sft/seed1", "sft/seed2", "slca/seed2", "grpo/seed2"]
    shown = capsys.readouterr().out
    assert "slca, seed 0: FAILED (exit status 3)" in shown
    assert "log.txt:\n    done slca/seed0\n    last words of slca/seed0\n[3/9]" in shown
    assert "grpo, seed 0: FAILED (exit status 0)" in shown  # it ended without a result
    assert "slca, seed 1: not run" in shown and shown.rstrip().endswith("grpo, seed 1: not run")
    assert "Finished runs, by seed: slca: 2; grpo: 2" in (out / "tables.md").read_text()


def test_a_run_of_another_configuration_is_refused_with_its_keys(tmp_path, monkeypatch):
    stub, path, out = Stub(monkeypatch), study_file(tmp_path), tmp_path / "o"
    args = [str(path), "--out", str(out), "--seeds", "0"]
    assert study.main([*args, "--set", "rl.steps=5"]) == 0
    stub.ran.clear()
    with pytest.raises(StudyError) as error:
        study.main([*args, "--set", "rl.steps=6", "sft.lr=0.02"])
    text = str(error.value)
    assert "slca/seed0: " in text and "rl.steps: 5 there, 6 here" in text and "sft.lr: 0.01 there, 0.02 here" in text
    assert "grpo/seed0: " in text and "model.path" not in text and stub.ran == []
    assert study.main([*args, "--set", "rl.steps=5", "threads=3", "log.keep_rollouts=0"]) == 0  # change no number
    moved = tmp_path / "moved"
    out.rename(moved)
    assert study.main([str(path), "--out", str(moved), "--seeds", "0", "--set", "rl.steps=5"]) == 0 and stub.ran == []
    (moved / "slca/seed0/config.yaml").write_text("rl: {stepps: 3}")
    with pytest.raises(StudyError, match="slca/seed0.*stepps"):
        study.main([str(path), "--out", str(moved), "--seeds", "0", "--set", "rl.steps=5"])


def test_every_finished_run_is_evaluated_alike(tmp_path, monkeypatch, capsys):
    text = ("title: A\nevaluate: {suite: toucan}\nconditions:\n  a: {simulator: {seed: 1}, rl: {steps: 3}}\n"
            "  sft: {rl: {enabled: false}}\n")
    stub, path, out = Stub(monkeypatch), study_file(tmp_path, text), tmp_path / "o"
    assert study.main([str(path), "--out", str(out), "--seeds", "0"]) == 0
    assert stub.ran == ["sft/seed0", "a/seed0", "seed0/evaluate-toucan.json", "seed0/evaluate-toucan.json"]
    config = json.loads((out / "a/seed0/evaluate-toucan.json").read_text())["config"]
    assert config["simulator"]["seed"] == 0 and config["rl"]["steps"] == 3
    assert "| a | 0.2500 |" in (out / "tables.md").read_text().split("Evaluated with the base's simulator")[1]
    stub.ran.clear()
    assert study.main([str(path), "--out", str(out), "--seeds", "0"]) == 0 and stub.ran == []
    path.write_text(text.replace("toucan}", "toucan, temperature: 1.0}"))
    assert study.main([str(path), "--out", str(out), "--seeds", "0"]) == 1  # the stub measures at 0
    assert stub.ran == ["seed0/evaluate-toucan.json"] * 2


def test_a_missing_catalogue_ends_the_study_before_it_begins(tmp_path, monkeypatch):
    stub, path = Stub(monkeypatch), ROOT / "configs" / "studies" / "distractors.yaml"
    with pytest.raises(StudyError, match="nowhere.jsonl.*--catalogue"):
        study.main([str(path), "--out", str(tmp_path), "--catalogue", "nowhere.jsonl"])
    with pytest.raises(StudyError, match="--catalogue.*distractors"):
        study.main([str(study_file(tmp_path)), "--out", str(tmp_path / "o"), "--catalogue", "nowhere.jsonl"])
    assert stub.ran == []


# --- processes -------------------------------------------------------------------------------------------------------

SAVES = """import os, signal, sys, time
def end(number, frame):
    print("saved", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)
print("ready", os.getpgrp() == os.getpid(), flush=True)  # no signal of the terminal's
time.sleep(30)
"""


def wait_for(path: Path, text: str) -> None:
    end = time.time() + 20
    while not (path.is_file() and text in path.read_text()):
        assert time.time() < end, f"no {text!r} in {path}"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_run_once_and_is_waited_for(tmp_path, number):
    log = tmp_path / "log.txt"

    def send() -> None:
        wait_for(log, "\nready")
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=send).start()
    with pytest.raises(study.Stopped, match=number.name), study.Forwarding() as forwarding:
        study.run_process([sys.executable, "-c", SAVES], log, forwarding)
    assert log.read_text().splitlines()[-2:] == ["ready True", f"saved {int(number)}"]
    assert signal.getsignal(number) is before


def test_output_and_status_of_a_process(tmp_path):
    log, forwarding = tmp_path / "log.txt", study.Forwarding()
    assert study.run_process([sys.executable, "-c", "import sys; print('one'); sys.exit('two')"], log, forwarding) == 1
    assert study.run_process([sys.executable, "-c", "print('three')"], log, forwarding) == 0
    lines = log.read_text().splitlines()
    assert [x for x in lines if not x.startswith("$ ")] == ["one", "two", "three"] and len(lines) == 5
    assert study.tail(log, 1) == "    three"


def test_a_run_that_a_killed_study_left_behind_is_waited_for(tmp_path, capsys):
    log = tmp_path / "log.txt"
    left = ("import sys, fcntl, subprocess; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
            "subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(1.5); print(2)'], "
            "stdout=f)")
    subprocess.run([sys.executable, "-c", left, str(log)], check=True)  # the parent is gone, its child goes on
    wait_for(log, "1")
    assert study.run_process([sys.executable, "-c", "print('after')"], log, study.Forwarding()) == 0
    assert "waits for a process" in capsys.readouterr().out
    assert [x for x in log.read_text().splitlines() if not x.startswith("$ ")] == ["1", "2", "after"]


def test_what_was_waited_for_may_have_done_it(tmp_path):
    log = tmp_path / "log.txt"
    with log.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        assert study.run_process([sys.executable, "-c", "print('again')"], log, study.Forwarding(), lambda: True) == 0
    assert log.read_text() == ""


MEETS = """import os, sys, time
from pathlib import Path
here, *others = map(Path, sys.argv[1:])
assert all((p / "done").exists() for p in others if p.name[0] == here.name[0]), "what it goes on from is not there"
(here / "begun").touch()
end = time.time() + 20
while not all((p / "begun").exists() for p in others) and time.time() < end:
    time.sleep(0.02)
(here / "done").write_text(f"{sorted(os.sched_getaffinity(0))} {time.time() < end}")
"""


def meeting(root: Path, name: str, needs: list[str], meets: list[str], code: str = MEETS, kind: str = "rl") -> Job:
    """A job that waits for those of `meets` to begin, so it only succeeds beside them."""
    folder = root / name
    command = [sys.executable, "-c", code, *(str(root / n) for n in (name, *needs, *meets))]
    return Job(name, kind, folder, tuple(root / n for n in needs), command, folder / "log.txt",
               (folder / "done").exists)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_runs_side_by_side_have_a_core_each_and_what_they_need(tmp_path, capsys):
    """a1 goes on from a0, b1 from b0; the two lines run beside each other, not one after the other."""
    todo = [meeting(tmp_path, "a0", [], ["b0"]), meeting(tmp_path, "a1", ["a0"], ["b1"]),
            meeting(tmp_path, "b0", [], ["a0"]), meeting(tmp_path, "b1", ["b0"], ["a1"])]
    assert study.run_all(todo, 2) == []
    cores = {job.label: (job.folder / "done").read_text().rsplit(" ", 1) for job in todo}
    assert all(met == "True" for _, met in cores.values()), capsys.readouterr().out
    assert cores["a0"][0] != cores["b0"][0] and cores["a1"][0] != cores["b1"][0]
    half = len(os.sched_getaffinity(0)) / 2
    assert all(half - 1 < len(json.loads(c)) < half + 1 for c, _ in cores.values())
    assert study.run_all(todo, 2) == [] and "[4/4] b1: finished already" in capsys.readouterr().out


def test_a_signal_ends_the_wait_for_a_process_of_another_study(tmp_path):
    """Nothing is begun once the lock is free."""
    job = meeting(tmp_path, "a", [], [])
    job.folder.mkdir()
    with job.log.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(study.Stopped, match="SIGINT"):
            study.run_all([job])
    assert job.log.read_text() == ""


def test_a_failed_evaluation_spoils_no_checkpoint(tmp_path):
    run = meeting(tmp_path, "a0", [], [])
    bad = run._replace(label="of a0", kind="evaluate", needs=(run.folder,), log=run.folder / "evaluate.txt",
                       command=[sys.executable, "-c", "import sys; sys.exit(3)"], done=lambda: False)
    assert study.run_all([run, bad, meeting(tmp_path, "a1", ["a0"], [])]) == ["of a0: exit status 3"]
    assert (tmp_path / "a1" / "done").exists()


def test_a_failure_ends_its_own_line_alone(tmp_path):
    todo = [meeting(tmp_path, "a0", [], [], "import sys; sys.exit(3)"), meeting(tmp_path, "a1", ["a0"], []),
            meeting(tmp_path, "b0", [], []), meeting(tmp_path, "b1", ["b0"], [])]
    assert study.run_all(todo, min(2, len(os.sched_getaffinity(0)))) == ["a0: exit status 3", "a1: not run"]
    assert (tmp_path / "b1" / "done").exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_signal_ends_all_that_run_and_begins_no_other(tmp_path):
    todo = [meeting(tmp_path, name, [], [], SAVES) for name in ("a", "b", "c")]

    def send() -> None:
        for name in ("a", "b"):
            wait_for(tmp_path / name / "log.txt", "\nready")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(study.Stopped, match="SIGTERM"):
        study.run_all(todo, 2)
    for name in ("a", "b"):
        assert (tmp_path / name / "log.txt").read_text().splitlines()[-1] == f"saved {int(signal.SIGTERM)}"
    assert not (tmp_path / "c").exists()


def test_settings_reach_yaml_as_they_are():
    values = {"model.path": "r😀/é \"x\"", "loss.clip_low": 0.1}
    base = load_config([], settings(values | {"data.sft": None}))
    assert base.model.path == values["model.path"] and base.loss.clip_low == 0.1
    assert settings({"loss.dual_clip": math.inf}) == ["loss.dual_clip=.inf"]


def test_tables_alone_refuse_runs_of_another_configuration(tmp_path):
    path = study_file(tmp_path)
    folder = tmp_path / "out" / "slca" / "seed0"
    folder.mkdir(parents=True)
    save_config(load_config([], ["rl.steps=7"]), folder / "config.yaml")
    with pytest.raises(StudyError, match="rl.steps: 7 there, 100 here"):
        study.main([str(path), "--out", str(tmp_path / "out"), "--tables"])


def test_a_study_with_the_real_train(tmp_path):
    small = """threads=1 precision=fp32 model.hidden_size=32 model.intermediate_size=48 model.num_layers=1
        data.eval_tasks=4 data.validation_tasks=2 rollout.max_response_tokens=24 eval.max_response_tokens=16
        eval.every=1 sft.max_steps=4 sft.rows_per_step=4 sft.gate_every=4 sft.decay_steps=1 sft.warmup_steps=1
        rl.steps=1 rl.prompts_per_step=2 rl.prompts_per_update=2 rl.group_size=2""".split()
    out, path = tmp_path / "o", study_file(tmp_path, TWO.replace("  slca: {advantage: {estimator: slca}}\n", ""))
    command = [sys.executable, "-m", "slca.study", str(path), "--seeds", "3", "--out", str(out), "--set", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    logs = "".join(p.read_text() for p in out.glob("*/*/log.txt"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "[2/2] grpo, seed 3" in done.stdout and "## Metrics, sampled" in done.stdout
    found = json.loads((out / "study.json").read_text())["conditions"]["grpo"]["runs"]["3"]
    assert found["greedy"]["n"] == 4 and found["curves"]["step"] == [1]
    kept = load_config([out / "grpo/seed3/config.yaml"])
    assert kept.seed == 3 and kept.advantage.estimator == "grpo" and not kept.sft.enabled
    assert kept.model.path == str((out / "sft/seed3/checkpoints/after_sft").resolve())
