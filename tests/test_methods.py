"""What methods need of a run beyond an estimator: planner demonstrations, a frozen summariser, dynamic sampling."""
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_rollout
import torch
from test_learner import load_train
from test_model import drawn
from test_rollout import CALL, REPLY, ids_of, settings

from slca.advantages import Advantages
from slca.data.source import RL_TASKS, TaskSource
from slca.data.vocabulary import world_tokenizer
from slca.evaluation import toucan
from slca.evaluation.toucan import write_replies
from slca.model import ModelConfig
from slca.sft import PLANNED, demonstration_row, planner_task
from slca.simulator import Simulator
from slca.weights import save_policy

play, tok, policy = test_rollout.play, test_rollout.tok, test_rollout.policy
ROOT = Path(__file__).parent.parent


def test_a_planner_learns_the_calls_and_one_fixed_end(tok):
    plain, planner = (TaskSource(settings("sft.max_tokens=2000", f"sft.target={how}"), tok)
                      for how in ("all", "planner"))
    task = next(t for t in plain.world.tasks(50) if t.gold_calls and len(t.demonstration) > 1)
    changed = planner_task(task)
    assert changed.demonstration[:-1] == task.demonstration[:-1] and changed.messages == task.messages
    assert changed.demonstration[-1] == {"role": "assistant", "content": PLANNED} and changed.answer == task.answer
    row, whole = (demonstration_row(t, tok, "list", .1, 2000) for t in (changed, task))
    assert tok.decode(row.ids).endswith(f"{PLANNED}<|im_end|>") and len(row.ids) < len(whole.ids)
    assert any(tok.decode(r.ids).endswith(f"{PLANNED}<|im_end|>") for r in planner.demonstrations(0))
    assert not any(tok.decode(r.ids).endswith(f"{PLANNED}<|im_end|>") for r in plain.demonstrations(0))
    calling = replace(task, demonstration=task.demonstration[:1])  # one that ends on a call stays
    assert planner_task(calling) is calling


def test_a_frozen_summariser_writes_the_replies(play, tok, tmp_path, monkeypatch):
    save_policy(drawn(ModelConfig("qwen2", tok.size, 32, 48, 2, 4, 2)), tmp_path)
    tok.save(tmp_path)
    planned = play([ids_of(CALL, tok) + ids_of(PLANNED, tok), ids_of(REPLY, tok), ids_of(CALL, tok) * 9],
                   simulator=Simulator(lambda *_: "41"), cfg=settings("rollout.max_tool_turns=1"))
    before = [(list(e.ids), list(e.turns), e.status) for e in planned]
    monkeypatch.undo()  # from here on rows draw for themselves
    write_replies(planned, str(tmp_path), tok, 12)
    for e, (ids, turns, status) in zip(planned, before, strict=True):
        assert e.ids == ids and e.turns[:-1] == turns[:-1] and e.status == status
    replies = [e.turns[-1][1] for e in planned]
    assert replies[0] not in (PLANNED, "") and replies[1] != REPLY
    assert replies[2] == before[2][1][-1][1]  # cut off: not asked
    again = play([ids_of(CALL, tok) + ids_of("Other.", tok)], simulator=Simulator(lambda *_: "41"))
    monkeypatch.undo()
    write_replies(again, str(tmp_path), tok, 12)
    assert again[0].turns[-1][1] == replies[0]  # it reads what stood before the planner's end, not the end
    calling = play([ids_of(CALL, tok) + ids_of(PLANNED, tok)], simulator=Simulator(lambda *_: "41"))
    monkeypatch.undo()
    spoken = SimpleNamespace(ids=tok.encode(f"It is 41. {CALL}") + [tok.control["<|im_end|>"]])
    monkeypatch.setattr(toucan, "generate", lambda *_, **__: [spoken])
    write_replies(calling, str(tmp_path), tok, 12)
    assert calling[0].turns[-1] == ("assistant", "It is 41. ")  # a call of its own counts for nothing
    with pytest.raises(ValueError, match="they must be the same"):
        write_replies(again, str(tmp_path), world_tokenizer(600, 60), 12)


def test_spare_prompts_are_others(tok):
    source = TaskSource(settings("rl.prompts_per_step=4", "rl.prompts_per_update=4"), tok)
    spare, later = source.spare(3), source.prompts(3)
    assert len(spare) == 4 and not {t.id for t in spare} & {t.id for t in later}
    assert [t.id for t in spare] == [t.id for t in source.world.tasks(4, 2 * RL_TASKS + 12)]


@pytest.mark.parametrize("method", [["advantage.estimator=rltr", "sft.target=planner", "log.stream_gradients=2"],
                                    ["advantage.estimator=toolpo", "loss.surrogate=gspo", "loss.clip_low=3e-4",
                                     "loss.clip_high=4e-4", "loss.importance_cap=2.0"]], ids=["rltr", "toolpo_gspo"])
def test_a_short_run_of_each(method, tmp_path):
    short = ["sft.max_steps=2", "sft.warmup_steps=1", "sft.decay_steps=1", "rl.steps=2", "rl.prompts_per_step=4",
             "rl.prompts_per_update=2", "rl.group_size=4", "data.eval_tasks=4", "data.validation_tasks=4",
             "eval.every=0", "threads=1", "rollout.max_response_tokens=60", "eval.max_response_tokens=60"]
    run = subprocess.run([sys.executable, str(ROOT / "train.py"), "--out", str(tmp_path / "run"), "--set", *short,
                          *method], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = [r for r in rows if r["phase"] == "rl"][-1]
    assert {"leak_flips", "leak_share", "loss", "judge_agreement"} <= last.keys()
    assert ("grad_cosine" in last) == ("log.stream_gradients=2" in method)
    assert ("outcome" in last) == ("advantage.estimator=toolpo" in method)


def test_dead_groups_give_way_to_living_ones(tmp_path, monkeypatch):
    """Of four groups two have no signal; of the two sampled instead one has: it alone moves in."""
    train = load_train()
    cfg = settings("sft.enabled=false", "rl.prompts_per_step=4", "rl.prompts_per_update=4", "rl.group_size=2",
                   "rl.dynamic_sampling=true", "data.eval_tasks=4", "data.validation_tasks=4", "threads=1")
    run, asked = train.Run(cfg, tmp_path / "run", torch.device("cpu")), {}

    def rollout(policy, tokenizer, tasks, simulator, cfg, size, key, temperature, sampler, numbers):
        asked.update(ids=[t.id for t in tasks], key=key, numbers=numbers)
        return [f"new {n} {m}" for n in numbers for m in range(size)]

    def advantages(*alive):
        tokens = torch.tensor([[float(a)] for a in alive for _ in range(2)])
        return Advantages(tokens, tokens[:, 0], tokens[:, 0])

    monkeypatch.setattr(train, "rollout", rollout)
    monkeypatch.setattr(train, "score_episodes", lambda *_: None)
    monkeypatch.setattr(train.Run, "credited", lambda self, found: (None, advantages(0, 1)))
    old = [f"old {g} {m}" for g in range(4) for m in range(2)]
    got = run.with_signal(list(old), advantages(1, 0, 1, 0), 7, [0, 1, 2, 3], None)
    assert got == old[:6] + ["new 3 0", "new 3 1"]
    assert asked["numbers"] == [1, 3] and asked["key"] == (0, 7, 1)
    assert asked["ids"] == [run.tasks.spare(7)[i].id for i in (1, 3)]
    asked.clear()
    assert run.with_signal(list(old), advantages(1, 1, 1, 1), 7, [0, 1, 2, 3], None) == old and not asked


def test_two_ranks_with_everything_on(tmp_path):
    """Dynamic sampling and stream gradients are collectives too: two ranks, sharded, end under a time limit."""
    short = ["sft.max_steps=1", "sft.warmup_steps=1", "sft.decay_steps=0", "rl.steps=2", "rl.prompts_per_step=2",
             "rl.prompts_per_update=2", "rl.group_size=2", "data.eval_tasks=4", "data.validation_tasks=4",
             "eval.every=0", "threads=1", "rollout.max_response_tokens=40", "eval.max_response_tokens=40", "shard=true",
             "rl.dynamic_sampling=true", "log.stream_gradients=1"]
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                          str(ROOT / "train.py"), "--out", str(tmp_path / "run"), "--set", *short],
                         capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and "grad_cosine" in last
