"""Configuration: every kind of mistake is refused with its key and source, presets hold the paper's arithmetic, and
files, overrides and saved configs resolve to the same tree."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slca.config import ConfigError, describe, leaves, load_config, override, save_config, to_dict, validate
from slca.settings import Config

PRESETS = Path(__file__).parents[1] / "configs"
PAPER = ("qwen2.5-3b", "qwen2.5-7b", "qwen3-8b")

WRONG = [  # override, parts of the message
    ("rl.group_size=1", ["rl.group_size", "1", ">= 2"]),
    ("rl.group_sise=8", ["rl.group_sise", "unknown key", "group_size"]),
    ("rl.steps=true", ["rl.steps", "True", "whole number"]),
    ("seed=1.0", ["seed", "1.0", "whole number"]),
    ("seed=null", ["seed", "None"]),
    ("rl.lr=fast", ["rl.lr", "'fast'", "a number > 0"]),
    ("rl.lr=true", ["rl.lr", "True", "a number"]),
    ('rl.lr="1e-4"', ["rl.lr", "'1e-4'"]),  # quoted, so text
    ("rl.lr=.nan", ["rl.lr", "nan"]),
    ("rl.grad_clip=.inf", ["rl.grad_clip", "inf"]),
    ("model.path=3", ["model.path", "3", "text or null"]),
    ("advantage.divide_by_std=1", ["advantage.divide_by_std", "1", "true or false"]),
    ("precision=fp16", ["precision", "fp16", "fp32, bf16"]),
    ("chat.parallel=[list]", ["chat.parallel", "one of list, blocks"]),
    ("loss.segment_weights=[1]", ["loss.segment_weights", "a list of 2"]),
    ("loss.segment_weights=[1, x]", ["loss.segment_weights[1]", "'x'"]),
    ("advantage.routing=[[1, 0], 0]", ["advantage.routing[1]", "a list of 2"]),
    ("advantage.routing=[[.nan, 0], [0, 1]]", ["advantage.routing[0][0]", "nan"]),
    ("rl=3", ["rl", "3", "a mapping"]),
    ("rl=null", ["rl", "None", "a mapping"]),
    ("data.flaws.omit=1.5", ["data.flaws.omit", "1.5", "<= 1"]),
    ("rollout.temperature=0", ["rollout.temperature", "> 0"]),
    ("loss.dual_clip=1", ["loss.dual_clip", "> 1"]),
    ("seed", ["--set seed", "a.b=value"]),
    ("rl..lr=1", ["--set rl..lr=1", "a.b=value"]),
    ("seed=[", ["--set seed=[", "YAML"]),
    ("data.mix={single: 1, single: 0}", ["single", "twice"]),
    # combinations
    ("rl.prompts_per_update=5", ["rl.prompts_per_update", "divisor", "rl.prompts_per_step = 16"]),
    ("data.mix.single=0.5", ["data.mix", "sum to 1", "1.22"]),
    ("data.kind=toucan", ["data.train", "toucan"]),
    ("data.train=x.jsonl", ["data.train", "x.jsonl", "world"]),
    ("rl.steps=null", ["rl.steps", "world"]),
    ("model.num_heads=3", ["model.num_heads", "128"]),
    ("model.num_kv_heads=3", ["model.num_kv_heads", "model.num_heads = 4"]),
    ("chat.parallel=blocks", ["reward.parallel_rule", "first_turn"]),
    ("reward.mix={process: 0, summary: 0}", ["reward.mix", "not both 0"]),
    ("sft.max_steps=null", ["sft.max_steps", "epochs"]),
    ("advantage.reward_ratio=2", ["advantage.reward_ratio", "grpo"]),
    ("loss.norm_length=100", ["loss.norm_length", "seq_sum_over_constant"]),
    ("loss.segment_weights=[1, 2]", ["loss.segment_weights", "segment_mean"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG, ids=[text for text, _ in WRONG])
def test_a_wrong_setting_is_refused_with_its_key(text, parts):
    with pytest.raises(ConfigError) as error:
        load_config([], [text])
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(("text", "part"), [("rl: {lr: fast}", "rl.lr"), ("rl: [", "YAML"), ("- 1", "mapping"),
                                            ("rl: {lr: 1}\nrl: {lr: 2}", "twice"), ("yes: 1", "unknown key"),
                                            ("data: {mix: {single: 1}}", "data.mix")])
def test_the_message_names_the_file(tmp_path, text, part):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="wrong.yaml") as error:
        load_config([file])
    assert part in str(error.value)
    with pytest.raises(ConfigError, match="absent.yaml"):
        load_config([tmp_path / "absent.yaml"])


@pytest.mark.parametrize(("text", "value"), [
    ("rl.lr=1e-4", 1e-4), ("rl.lr=3E+1", 30.0), ("rl.lr=1", 1.0), ("loss.norm_length=8_192", 8192),
    ("model.path=a=b", "a=b"), ("model.path=null", None), ("loss.segment_weights=[1, 2]", (1.0, 2.0)),
    ("advantage.routing=[[1, 1], [0, 1]]", ((1.0, 1.0), (0.0, 1.0)))])
def test_overrides_become_the_field_type(text, value):
    more = {"loss.norm": ["loss.aggregation=seq_sum_over_constant"], "loss.segm": ["loss.aggregation=segment_mean"]}
    config = load_config([], [text, *more.get(text[:9], [])])
    for part in text.split("=")[0].split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nrl: {lr: 1e-3, steps: 7}\nreward: {weights: {format: 0.2}}")
    (tmp_path / "b.yaml").write_text("rl: {steps: 8, epochs: 2}\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "empty.yaml"], ["rl.epochs=3", "seed=2"])
    assert (config.seed, config.rl.lr, config.rl.steps, config.rl.epochs) == (2, 1e-3, 8, 3)
    assert (config.reward.weights.format, config.reward.weights.name) == (0.2, 0.25)  # sections merge
    assert load_config([tmp_path / "b.yaml", tmp_path / "a.yaml"]).rl.steps == 7
    assert override(config, ["rl.lr=1"]).rl == replace(config.rl, lr=1.0)


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load_and_save_as_resolved(preset, tmp_path):
    config = load_config([preset])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config
    assert load_config([tmp_path / "config.yaml"], ["seed=5"]) == replace(config, seed=5)


@pytest.mark.parametrize("name", PAPER)
def test_paper_presets_hold_the_paper_arithmetic(name):
    config = load_config([PRESETS / f"{name}.yaml"])
    rl = config.rl
    assert (rl.rollouts_per_step, rl.updates_per_step, rl.rollouts_per_update) == (2048, 4, 512)
    assert (rl.steps_per_epoch(31_818), rl.planned_steps(31_818)) == (248, 248)
    assert replace(rl, epochs=2).planned_steps(31_818) == 496
    assert replace(rl, steps=9).planned_steps(31_818) == 9
    assert config.rollout.max_prompt_tokens + config.rollout.max_response_tokens == 32_768 == config.micro_batch_tokens
    assert (config.loss.kl_coef, config.loss.kl_kind, rl.lr, config.precision) == (0.001, "k3", 1e-6, "bf16")
    assert (config.sft.rows_per_step, config.sft.epochs, config.sft.max_steps) == (32, 2, None)
    weights = to_dict(config.reward.weights)
    assert weights == {"format": 0.10, "name": 0.25, "key": 0.15, "value": 0.20, "parallel": 0.30}
    assert sum(weights.values()) == pytest.approx(1)


def test_defaults_are_valid_and_every_field_has_its_sentence():
    assert validate(Config()) == load_config()
    text = describe()
    for path, _, field in leaves():
        assert f"{path} = " in text
        assert len(field.metadata["doc"]) > 10 and field.metadata["doc"].endswith("."), path
    assert "rl.group_size = 8  (a whole number >= 2)" in text


def test_a_tree_built_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="rl.group_size"):
        validate(replace(Config(), rl=replace(Config().rl, group_size=1)))
