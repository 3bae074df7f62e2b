"""Proves: the evaluation's metrics are the hand-made means, and the paper's table arithmetic comes out (W27, W28).

Success is a threshold with a tolerance on the process score under the paper's weights, whatever weights trained.
"""
from __future__ import annotations

import pytest

from slca.config import load_config
from slca.data import Task
from slca.evaluation.metrics import (
    by_subset,
    factor_effects,
    means,
    metrics,
    pass_hat_k,
    pooled_mean,
    values_right,
    well_formed,
)
from slca.judge import RulesJudge, score_episodes
from slca.rollout import Episode

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
GOLD = [[{"name": "f", "arguments": {"a": 1}}]]


def block(*arguments) -> str:
    """One block with a call of f for each argument object."""
    calls = ", ".join(f'{{"name": "f", "arguments": {a}}}' for a in arguments)
    return f"<tool_call>[{calls}]</tool_call>"


def episode(kind, gold, *turns, tool_turns=0) -> Episode:
    e = Episode(Task("t", [{"role": "user", "content": "?"}], [TOOL], gold, ["41"], subset=kind), 0, 0, [], 0, [], [])
    e.turns, e.tool_turns = list(turns), tool_turns
    return e


def scored(*changes):
    found = [
        episode("call", GOLD, ("assistant", block('{"a": 1}')), ("tool", "41"), ("assistant", "It is 41, I see."),
                tool_turns=1),
        episode("call", GOLD, ("assistant", block('{"a": 1}', '{"a": 1}')), ("tool", "41"), ("tool", "41"),
                ("assistant", "No figure is known."), tool_turns=1),
        episode("call", GOLD, ("assistant", "It is 41, I guess.")),
        episode("chat", [], ("assistant", "Hello to you, 41.")),
    ]
    score_episodes(found, RulesJudge(), load_config([], list(changes)).reward)
    return found


def test_metrics_by_hand():
    """One perfect rollout, one that calls twice (name 2/3, parallel 0), one omission, one correct abstention (.90)."""
    twice = 0.1 + 0.25 * 2 / 3 + 0.15 + 0.2
    want = {"name_f1": (1 + 2 / 3 + 0 + 1) / 4, "arg_match": 3 / 4, "parallel": 2 / 4,
            "process": (1 + twice + 0 + 0.9) / 4, "summary": 1 / 4, "success": 2 / 4, "no_call": 1 / 3, "n": 4,
            "redundant_calls": 1 / 4, "calls_per_task": 3 / 4, "gold_calls_per_task": 3 / 4, "tool_turns": 2 / 4}
    assert metrics(scored()) == pytest.approx(want)
    kinds = by_subset(scored())
    assert kinds["chat"]["success"] == 1 and kinds["chat"]["no_call"] == 0 and kinds["call"]["no_call"] == 1 / 3
    assert means(values_right(scored())) == {"sft_copy": 1.0}  # both that call have it right; the omission is left out


def test_well_formed_calls():
    """Three of four that write a call tag: right, one of two blocks no JSON, a block that is never closed."""
    found = [episode("call", GOLD, ("assistant", text)) for text in (
        block('{"a": 1}'), block('{"a": 1}') + block('{"a": '), "<tool_call>[", "It is 41, I guess.")]
    score_episodes(found, RulesJudge(), load_config().reward)
    assert well_formed(found) == {"fmt": (1.5, 3)} and means(well_formed(found[3:])) == {"fmt": 0.0}


def test_success_has_a_tolerance():
    """.1 + .25 + .15 + .1 + .3 is below .9 in floats and a success all the same: one of two values is wrong here."""
    gold = [[{"name": "f", "arguments": {"a": 1, "b": 2}}]]
    e = episode("call", gold, ("assistant", block('{"a": 1, "b": 3}')), ("tool", "41"), ("assistant", "It is 41."))
    score_episodes([e], RulesJudge(), load_config().reward)
    assert e.rewards.process < 0.9 and metrics([e])["success"] == 1
    assert metrics([e], 0.91)["success"] == 0


def test_process_is_reported_with_the_papers_weights():
    """Training without HierR (all weights 0) still reports the process score."""
    off = scored(*(f"reward.weights.{k}=0" for k in ("format", "name", "key", "value", "parallel")))
    assert [e.rewards.process for e in off] == [0, 0, 0, 0]
    assert metrics(off)["process"] == metrics(scored())["process"] > 0


@pytest.mark.parametrize("cells, effects", [
    ((79.13, 77.21, 79.02, 78.30), (1.32, 0.49, 1.20)),  # Toucan
    ((69.77, 68.72, 69.84, 69.30), (0.80, 0.33, 0.51)),  # BFCL
    ((41.02, 33.95, 41.36, 37.42), (5.51, 1.91, 3.13)),  # tau^2
])
def test_w27_factor_effects(cells, effects):
    assert tuple(factor_effects(*cells).values()) == effects


def test_w28_aggregates():
    assert round(pooled_mean([(0.8583, 1150), (0.6936, 1351), (0.0600, 600)]), 4) == 0.6321  # BFCL, GRPO 3B
    tau = pooled_mean([(6 / 44, 44), (46 / 116, 116), (68 / 3 / 116, 116)])  # SFT 3B, three runs
    assert tau == pytest.approx((6 + 46 + 68 / 3) / 276) and round(tau, 4) == 0.2705
    assert 119_279 - 40_000 - 1_038 - 4_000 == 74_241 == 42_423 + 31_818
    assert load_config([], ["rl.prompts_per_step=128", "rl.prompts_per_update=32"]).rl.steps_per_epoch(31_818) == 248


def test_w26_pass_hat_k():
    assert pass_hat_k(5, 2, 2) == pytest.approx(.1)
    assert [pass_hat_k(4, 3, k) for k in (1, 2, 3, 4)] == [.75, .5, .25, 0]
    with pytest.raises(ValueError, match="k is 5"):
        pass_hat_k(4, 3, 5)
