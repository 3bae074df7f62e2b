"""Proves: a step's tasks depend on (seed, step) alone, and files that cannot be trained on are refused by name.

Also: the curriculum's ends, pools of like length, epochs that shuffle anew, and rows that are left out are counted.
"""
from __future__ import annotations

import json
from dataclasses import asdict

import pytest

import slca.data.source as source
from slca.config import load_config
from slca.data import DataError
from slca.data.source import POOL_STEPS, TaskSource, world_split
from slca.data.vocabulary import world_tokenizer


@pytest.fixture(scope="module")
def tok():
    return world_tokenizer(examples=150)


def settings(*changes: str):
    return load_config([], ["data.eval_tasks=3", "data.validation_tasks=2", "sft.rows_per_step=4",
                            "rl.prompts_per_step=4", "rl.prompts_per_update=4", *changes])


@pytest.fixture
def files(tmp_path):
    """Two files of the world's tasks, as settings."""
    tasks = [asdict(t) for t in world_split(settings(), "train").tasks(6)]
    for name in ("rl", "sft"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    return ["data.kind=toucan", f"data.train={tmp_path / 'rl.jsonl'}", f"data.sft={tmp_path / 'sft.jsonl'}"]


def test_steps_are_pure_and_apart(tok):
    a, b = TaskSource(settings(), tok), TaskSource(settings(), tok)
    rows = [a.demonstrations(s) for s in range(2 * POOL_STEPS)]
    assert [b.demonstrations(s) for s in reversed(range(2 * POOL_STEPS))] == rows[::-1]
    assert [t.id for t in a.prompts(3)] == [t.id for t in b.prompts(3)]
    assert not {t.id for t in a.prompts(3)} & {t.id for t in a.prompts(4)}
    assert TaskSource(settings("seed=1"), tok).prompts(3)[0].messages != a.prompts(3)[0].messages


def test_a_pool_is_cut_into_steps_of_like_length(tok):
    pool = [[len(r.ids) for r in TaskSource(settings(), tok).demonstrations(s)] for s in range(POOL_STEPS)]
    assert sum(pool, []) != sorted(sum(pool, [])) and sum(sorted(pool), []) == sorted(sum(pool, []))


def test_a_step_of_files_mixes_short_and_long_rows(tok, files):
    """The stream's next rows as they come, whatever their length: no pool parts the short sets from the long ones."""
    tasks = TaskSource(settings(*files), tok)
    for step in range(3):
        rows = tasks.demonstrations(step)
        want = [tasks._row(t) for t in tasks._slice(tasks.sft, 4 * step, 4)]
        assert rows == want and len(rows) == 4


@pytest.mark.parametrize("fraction, want", [(0.0, [1.0, 1.0]), (0.5, [0.0, 8 / 50])])
def test_curriculum(tok, monkeypatch, fraction, want):
    seen, plain = [], source.curriculum_task
    monkeypatch.setattr(source, "curriculum_task", lambda w, i, p: seen.append(p) or plain(w, i, p))
    tasks = TaskSource(settings(f"sft.curriculum_fraction={fraction}", "sft.max_steps=100", "sft.decay_steps=10"), tok)
    for step in (0, 7, 8):
        tasks.demonstrations(step)
    assert seen == [want[0]] * 32 + [want[1]] * 32


def test_files_are_shuffled_anew_each_epoch(tok, files):
    tasks = TaskSource(settings(*files), tok)
    stream = [t.id for step in range(3) for t in tasks.prompts(step)]  # 12 prompts: two epochs of six
    assert sorted(stream[:6]) == sorted(stream[6:]) and stream[:6] != stream[6:] and len(set(stream)) == 6
    assert tasks.rl_steps() == 100 and len(tasks.demonstrations(5)) == 4


def test_rows_over_the_limits_are_left_out_and_counted(tok, files, capsys):
    lengths = sorted(len(r.ids) for s in range(POOL_STEPS) for r in TaskSource(settings(*files), tok).demonstrations(s))
    capsys.readouterr()
    tasks = TaskSource(settings(*files), tok)
    prompts = sorted(tasks._prompt_length(t) for t in tasks.train)
    cut = TaskSource(settings(*files, f"rollout.max_prompt_tokens={prompts[4]}", f"sft.max_tokens={prompts[3]}"), tok)
    said = capsys.readouterr().out
    over = sum(n > prompts[4] for n in prompts)
    assert len(cut.train) == 6 - over and (over == 0 or f"{over} of 6 prompts are over {prompts[4]} tokens" in said)
    assert "rows have no demonstration within" in said and 0 < len(cut.sft) < 6 and lengths[0] > 0
    lengths_of_six = [len(tasks._row(t).ids) for t in tasks.sft]
    TaskSource(settings(*files, f"sft.max_tokens={lengths[-1] - 1}"), tok)
    cut_off = lengths_of_six.count(lengths[-1])
    assert f"{cut_off} of 6 rows are over sft.max_tokens = {lengths[-1] - 1}" in capsys.readouterr().out
    TaskSource(settings(*files, f"sft.max_tokens={lengths[-1]}"), tok)
    assert "sft.max_tokens" not in capsys.readouterr().out  # the longest row just fits


def test_tables_and_validations_are_over_the_whole_file(tok, tmp_path, files):
    tasks = [asdict(t) for t in world_split(settings(), "heldout").tasks(10)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    ids = [t["id"] for t in tasks]
    source = TaskSource(settings(*files, f"data.heldout={tmp_path / 'heldout.jsonl'}", "data.eval_tasks=4"), tok)
    assert [t.id for t in source.heldout] == [ids[i] for i in (0, 2, 5, 7)]
    assert [t.id for t in source.validation] == [ids[i] for i in (0, 5)]
    source = TaskSource(settings(*files, f"data.heldout={tmp_path / 'heldout.jsonl'}", "data.eval_tasks=11"), tok)
    assert [t.id for t in source.heldout] == ids


@pytest.mark.parametrize("changes, words", [
    (["rollout.max_prompt_tokens=20"], r"rl.jsonl, rl.prompts_per_step: expected at most 0, as so many of 6 prompts"),
    (["rl.prompts_per_step=8", "rl.prompts_per_update=8"], r"expected at most 6, .* found 8"),
    (["sft.max_tokens=20"], r"sft.jsonl, sft.max_tokens: expected a row with a demonstration within 20 tokens"),
])
def test_files_that_cannot_be_trained_on(tok, files, changes, words):
    with pytest.raises(DataError, match=words):
        TaskSource(settings(*files, *changes), tok)


def test_the_world_needs_room_for_its_prompts(tok):
    with pytest.raises(DataError, match=r"embedded world, rollout.max_prompt_tokens: expected \d+ or more, found 30"):
        TaskSource(settings("rollout.max_prompt_tokens=30"), tok)
