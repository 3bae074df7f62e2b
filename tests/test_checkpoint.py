"""A run that was killed goes on bit for bit from its last good checkpoint; what is damaged or foreign is refused.

Kills are real (SIGKILL in a process of its own) at chosen moments: in a step, while tensors are written, before and
after the rename. Twenty kills at random moments: `pytest -m slow tests/test_checkpoint.py`.
"""
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import TIMES, call, train

from slca import checkpoint, ranks
from slca.config import load_config, to_dict
from slca.model import ModelConfig, new_policy
from slca.optim import optimizers
from slca.report import read_metrics
from slca.settings import OptimConfig
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy

ROOT = Path(__file__).parents[1]
SETTINGS = """threads=1 precision=fp32 seed=3 model.hidden_size=32 model.intermediate_size=48 model.num_layers=2
    data.eval_tasks=2 data.validation_tasks=2 rollout.max_response_tokens=32 eval.max_response_tokens=16 eval.every=0
    sft.max_steps=5 sft.rows_per_step=4 sft.gate_every=2 sft.copy_gate=0 sft.curriculum_fraction=0 sft.decay_steps=3
    sft.warmup_steps=2 rl.steps=6 rl.prompts_per_step=4 rl.prompts_per_update=2 rl.group_size=3 rl.warmup_steps=1
    loss.kl_coef=0.1 checkpoint.sft_every=2 checkpoint.rl_every=3""".split()
# a process of its own: train.py that kills itself the COUNT-th time FUNCTION of MODULE is called, before or after it
KILLER = """
import functools, importlib, os, signal, sys
sys.path[:0] = [{tests!r}, {root!r}]
from test_train import train
module = train if {module!r} == "train" else importlib.import_module({module!r})
plain, left = getattr(module, {function!r}), [{count}]
def deadly(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0 and not {after}: os.kill(os.getpid(), {sign})
    found = plain(*args, **kwargs)
    if left[0] == 0 and {after}: os.kill(os.getpid(), {sign})
    return found
setattr(module, {function!r}, deadly)
train.main()
"""


def run(folder: Path, *settings: str, flags=("--resume",)) -> Path:
    call(train, "--out", folder, *flags, "--set", *SETTINGS, *settings)
    return folder


def killed(folder: Path, module: str, function: str, count: int, after=False, sign=signal.SIGKILL, settings=()) -> str:
    """Start or resume the run and kill it there -> what it printed."""
    code = KILLER.format(tests=str(ROOT / "tests"), root=str(ROOT), module=module, function=function, count=count,
                         after=after, sign=int(sign))
    done = subprocess.run([sys.executable, "-c", code, "--out", str(folder), "--resume", "--set", *SETTINGS,
                           *settings],
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240)
    assert done.returncode == (-9 if sign == signal.SIGKILL else 128 + sign), done.stderr[-3000:]
    return done.stdout + done.stderr


def numbers(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(folder)]


def same(a: Path, b: Path) -> None:
    """Metrics, rollouts' tokens and weights, bit for bit."""
    assert numbers(a) == numbers(b)
    for step in range(1, 7):
        one, two = (json.loads((f / "rollouts" / f"step_{step:05d}.json").read_text()) for f in (a, b))
        assert one == two
    for name in ("after_sft", "after_rl"):
        one, two = (load_file(f / "checkpoints" / name / "model.safetensors") for f in (a, b))
        assert all(torch.equal(t, two[k]) for k, t in one.items())
    one, two = ({**json.loads((f / "summary.json").read_text()), "wall_s": 0} for f in (a, b))
    assert one == two


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("checkpoint") / "straight")


def folders(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_the_last_ones_are_kept(straight):
    assert folders(straight) == ["after_rl", "after_sft", "rl-000003", "rl-000006", "sft-000002", "sft-000004"]
    assert {p.name for p in (straight / "checkpoints" / "rl-000006").iterdir()} >= {
        "rank-00000.safetensors", "state.json", "tokenizer.json"}


def test_killed_in_the_middle_of_both_stages(straight, tmp_path):
    folder = tmp_path / "run"
    killed(folder, "train", "sft_step", 4)  # after the checkpoint of step 2
    assert folders(folder) == ["sft-000002"]
    killed(folder, "train", "rollout", 5)  # in RL step 5, after the checkpoint of step 3
    assert folders(folder)[:2] == ["after_sft", "rl-000003"]
    same(run(folder), straight)


def test_the_seconds_before_a_kill_count(tmp_path, monkeypatch):
    """What summary.json says at the kill is the time up to the last checkpoint, and what a resumed run adds to."""
    plain, path, walls = train.sft_step, tmp_path / "run" / "summary.json", []

    def slow(*args):
        walls.append(json.loads(path.read_text())["wall_s"])
        if len(walls) == 4:  # the checkpoint is of step 2
            raise KeyboardInterrupt
        time.sleep(0.3)
        return plain(*args)
    monkeypatch.setattr(train, "sft_step", slow)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    assert walls[3] >= walls[0] + 0.5  # 2 x .3, in tenths


@pytest.mark.parametrize("function, count, after", [
    ("save_file", 3, True), pytest.param("save_file", 3, False, marks=pytest.mark.slow),
    ("publish", 4, False), pytest.param("publish", 4, True, marks=pytest.mark.slow)],
    ids=["after the tensors", "before the tensors", "before the rename", "after the rename"])
def test_killed_while_it_saves(straight, tmp_path, function, count, after):
    """The third save is RL's of step 3, the fourth folder to be published too (after_sft is one)."""
    folder = shutil.copytree(straight, tmp_path / "run")
    for name in folders(folder):
        shutil.rmtree(folder / "checkpoints" / name)
    killed(folder, "slca.checkpoint", function, count, after)
    assert ("rl-000003" in folders(folder)) == (function == "publish" and after)
    same(run(folder), straight)
    assert not [name for name in folders(folder) if "unfinished" in name]


def test_a_damaged_checkpoint_is_passed_over_and_named(straight, tmp_path, capsys):
    for i, harm in enumerate((flip_a_byte, cut_the_state, lose_a_file)):
        folder = shutil.copytree(straight, tmp_path / str(i))
        shutil.rmtree(folder / "checkpoints" / "after_rl")
        harm(folder / "checkpoints" / "rl-000006")
        same(run(folder), straight)
        said = capsys.readouterr().out
        assert "checkpoint skipped: " in said and "rl-000006" in said and "goes on after step 3" in said


def flip_a_byte(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut_the_state(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text()[:-40])


def lose_a_file(folder: Path) -> None:
    (folder / "rank-00000.safetensors").unlink()


def test_another_configuration_is_refused_by_its_keys(straight, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "after_rl")
    before = (folder / "config.yaml").read_text()
    with pytest.raises(checkpoint.CheckpointError, match="rl.lr: 0.0002 there, 0.1 here.*rl.warmup_steps") as error:
        run(folder, "rl.lr=0.1", "rl.warmup_steps=3", "log.keep_rollouts=2", "threads=2")
    assert "threads" not in str(error.value) and "keep_rollouts" not in str(error.value)
    assert (folder / "config.yaml").read_text() == before  # or the next --resume would be refused too


def test_what_was_passed_over_does_not_count_as_kept(straight, tmp_path, capsys):
    folder = shutil.copytree(straight, tmp_path / "run")
    for name in ("after_rl", "rl-000003"):
        shutil.rmtree(folder / "checkpoints" / name)
    flip_a_byte(folder / "checkpoints" / "rl-000006")
    killed(folder, "train", "rollout", 5, settings=["checkpoint.keep=1"])  # in step 5, all over again
    assert folders(folder)[-3:] == ["rl-000003", "sft-000002", "sft-000004"]
    same(run(folder), straight)


@pytest.mark.parametrize("change", [
    {"files": []}, {"files": {}}, {"files": {"../../../config.yaml": {"bytes": 1, "crc32": 1}}}, {"step": "6"},
    {"step": -5}, {"config": None}, {"extra": []}], ids=str)
def test_a_state_of_wrong_types_is_a_damaged_one(straight, tmp_path, change):
    folder = shutil.copytree(straight / "checkpoints" / "rl-000006", tmp_path / "rl-000006")
    state = json.loads((folder / "state.json").read_text())["state"] | change
    (folder / "state.json").write_text(json.dumps({"crc32": checkpoint._state_crc(state), "state": state}))
    with pytest.raises(checkpoint.CheckpointError, match="rl-000006: state.json is not that of a checkpoint"):
        checkpoint.read_state(folder)
    assert checkpoint.latest(tmp_path, "rl", lambda text: None) is None


def test_files_that_the_state_does_not_name_are_not_read(straight, tmp_path):
    folder = shutil.copytree(straight / "checkpoints" / "rl-000006", tmp_path / "rl-000006")
    shutil.copy(folder / "rank-00000.safetensors", folder / "rank-00001.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="not those that state.json names"):
        checkpoint.read_state(folder)


def test_a_finished_run_says_that_it_is(straight, tmp_path, capsys):
    folder = shutil.copytree(straight, tmp_path / "run")
    before = (folder / "config.yaml").read_text()
    run(folder, "rl.steps=9")
    assert "warning: RL ended with 6 steps; to go on to 9 remove" in capsys.readouterr().out
    assert (folder / "config.yaml").read_text() == before
    with pytest.raises(ValueError, match="is of another shape"):
        run(folder, "model.hidden_size=64")
    shutil.rmtree(folder / "checkpoints" / "after_rl")
    run(folder, "rl.steps=7")  # and then it does go on
    assert [r["step"] for r in read_metrics(folder) if r["phase"] == "rl"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_torn_summary_is_made_anew(straight, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run")
    (folder / "summary.json").write_text('{"seed": 3, "wal')
    same(run(folder), straight)


def test_nothing_is_unpickled_in_a_resume(straight, tmp_path, monkeypatch):
    folder = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "after_rl")

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    same(run(folder), straight)


def test_a_signal_ends_after_the_step_with_a_checkpoint(straight, tmp_path):
    folder = tmp_path / "run"
    said = killed(folder, "train", "sft_step", 5, sign=signal.SIGINT)
    assert "SIGINT: stopped after sft step 5, saved in" in said and "sft-000005" in folders(folder)
    said = killed(folder, "train", "rollout", 4, sign=signal.SIGTERM)
    assert "SIGTERM: stopped after rl step" in said
    same(run(folder), straight)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(straight, tmp_path, monkeypatch, capsys):
    folder, plain, calls = tmp_path / "run", checkpoint.save_file, []

    def full(tensors, path, metadata=None):
        calls.append(path)
        if "rl-000003" in str(path):
            raise OSError(28, "No space left on device")
        plain(tensors, path, metadata)
    monkeypatch.setattr(checkpoint, "save_file", full)
    run(folder)
    assert "warning: rl step 3 could not be saved" in capsys.readouterr().out
    assert [row["save_failures"] for row in read_metrics(folder) if row["phase"] == "rl"] == [0, 0, 0, 1, 1, 1]
    assert "rl-000006" in folders(folder) and "rl-000003" not in folders(folder)
    weights = [load_file(f / "checkpoints" / "after_rl" / "model.safetensors") for f in (folder, straight)]
    assert all(torch.equal(t, weights[1][k]) for k, t in weights[0].items())


def test_a_read_only_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        run(tmp_path / "file" / "run")


def test_the_export_is_the_policy(straight, tmp_path):
    checkpoint.export(straight / "checkpoints" / "rl-000006", tmp_path / "out")
    one, two = load_policy(tmp_path / "out"), load_policy(straight / "checkpoints" / "after_rl")
    assert all(torch.equal(t, two.state_dict()[k]) for k, t in one.state_dict().items())
    assert load_tokenizer(tmp_path / "out").size == one.config.vocab_size


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("writers, readers", [(1, 3), (3, 1), (2, 5), (4, 3)])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path, monkeypatch, kind, writers, readers):
    """Ranks played in turn: each writes and reads the rows that FSDP would give it, the last ones none at all."""
    policy = new_policy(ModelConfig("qwen2", 41, 32, 48, 2, 4, 2), 1)
    found = optimizers(policy, kind, 1e-2, 0.1, (0.9, 0.99), 1e-3)
    for p in policy.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    for optimizer in found:
        optimizer.step()
    want = dict(checkpoint.tensors(policy, found))
    folder = tmp_path / "rl-000001"
    folder.mkdir()
    files = {}
    for r in range(writers):
        monkeypatch.setattr(ranks, "rank", lambda r=r: r)
        monkeypatch.setattr(ranks, "world", lambda: writers)
        own, rows = {}, {}
        for name, t in want.items():
            if t.ndim and name != "rng.torch":
                a, b = checkpoint.own_rows(t.shape[0])
                own[name], rows[name] = t[a:b].contiguous(), [a, *t.shape]
            elif r == 0:
                own[name], rows[name] = t, [0, *t.shape]
        path = folder / f"rank-{r:05d}.safetensors"
        checkpoint.save_file(own, path, metadata={"rows": json.dumps(rows)})
        files[path.name] = {"bytes": path.stat().st_size, "crc32": checkpoint.crc(path)}
    state = {"phase": "rl", "step": 1, "config": {}, "model": {}, "extra": {}, "files": files}
    (folder / "state.json").write_text(json.dumps({"crc32": checkpoint._state_crc(state), "state": state}))
    assert checkpoint.read_state(folder) == state
    with checkpoint._Shards(folder) as shards:
        for name, t in want.items():
            pieces = []
            for r in range(readers) if t.ndim and name != "rng.torch" else ():
                monkeypatch.setattr(ranks, "rank", lambda r=r: r)
                monkeypatch.setattr(ranks, "world", lambda: readers)
                pieces.append(shards.rows_of(name, checkpoint.own_rows(t.shape[0])))
            assert torch.equal(torch.cat(pieces) if pieces else shards.rows_of(name, None), t), name


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_moments_are_read_to_the_cpu(straight, offload):
    """Not by way of the device, which may have no room for them: here the policy is on one that holds nothing."""
    folder = straight / "checkpoints" / "rl-000006"
    policy = load_policy(straight / "checkpoints" / "after_rl").to("meta")
    found = optimizers(policy, "adamw", 1e-2, 0.1, (0.9, 0.99), options=OptimConfig("fp32", offload))
    checkpoint.load(folder, policy, found)
    moments = {s["exp_avg"].device.type for s in found[0].state.values()}
    assert moments == {"cpu" if offload else "meta"}
    if offload:
        state = found[0].state[policy.model.norm.weight]
        with checkpoint._Shards(folder) as shards:
            assert torch.equal(state["exp_avg"], shards.rows_of("optim.0.model.norm.weight.exp_avg", None))


def test_two_ranks_hand_over_to_one(straight, tmp_path):
    """Stopped on two ranks, gone on with on one: within the tolerance of sums over ranks."""
    folder, settings = tmp_path / "run", ["rl.enabled=false", "sft.optimizer=adamw", "sft.lr=1e-3", "shard=true"]
    script = tmp_path / "train_as_here.py"  # with this file's small tokenizer
    script.write_text(f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]\n"
                      "from test_train import train\ntrain.main()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script),
               "--out", str(folder), "--set", *SETTINGS, *settings]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    last = folder / "checkpoints" / "sft-000004"
    assert len(list(last.glob("rank-*.safetensors"))) == 2
    two = load_policy(folder / "checkpoints" / "after_sft").state_dict()
    shutil.rmtree(folder / "checkpoints" / "after_sft")
    run(folder, *settings)
    one = load_policy(folder / "checkpoints" / "after_sft").state_dict()
    for name, t in one.items():
        torch.testing.assert_close(t, two[name], rtol=0, atol=2e-5)
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path):
    """Every restart goes on, and the end is that of the run nobody disturbed. Kills fall anywhere, the start too."""
    settings = [*SETTINGS, "sft.max_steps=40", "rl.steps=30"]
    command = [sys.executable, str(ROOT / "train.py"), "--resume", "--set", *settings, "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begin = time.time()
    assert subprocess.run([*command, str(tmp_path / "a")], env=environment, capture_output=True).returncode == 0
    whole, draw, kills = time.time() - begin, random.Random(5), 0
    for _ in range(400):
        process = subprocess.Popen([*command, str(tmp_path / "b")], env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        try:
            _, errors = process.communicate(timeout=draw.uniform(0.1, 0.6) * whole if kills < 20 else None)
            assert process.returncode == 0, errors.decode()[-3000:]
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    print(f"{kills} kills")
    assert kills >= 20
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    a, b = (load_file(tmp_path / f / "checkpoints" / "after_rl" / "model.safetensors") for f in "ab")
    assert all(torch.equal(t, b[k]) for k, t in a.items())


def test_a_run_says_what_it_holds(straight):
    state = checkpoint.read_state(straight / "checkpoints" / "rl-000006")
    assert state["config"] == json.loads(json.dumps(to_dict(load_config([straight / "config.yaml"]))))
    assert (state["phase"], state["step"]) == ("rl", 6)
