"""From scored rollouts to advantages: what each estimator and option makes of the same step, by hand and in limits."""
import copy
import json
from dataclasses import replace

import pytest
import test_rollout
import torch
from test_rollout import TOOL, ids_of, settings

from slca import credit, judge, learner
from slca.advantages import grpo_advantages, slca_advantages, turn_advantages
from slca.config import ConfigError, load_config
from slca.credit import estimate, leakage, turn_index, turn_scores
from slca.data.task import Task
from slca.judge import LLMJudge, RulesJudge, checker_votes, score_episodes, solved
from slca.learner import Batch, gradient_angles, stream_gradients
from slca.rewards import HierR
from slca.rollout import Episode

play, tok, policy = test_rollout.play, test_rollout.tok, test_rollout.policy


def close(got, want):
    got, want = (torch.as_tensor(x, dtype=torch.float32) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def call(*symbols):
    calls = [{"name": "find_stock", "arguments": {"symbol": s}} for s in symbols]
    return f"<tool_call>\n{json.dumps(calls if len(calls) > 1 else calls[0])}\n</tool_call>"


GOLD = [[{"name": "find_stock", "arguments": {"symbol": s}} for s in ("Ba", "Mi")]]
TASK = Task("t", [{"role": "user", "content": "What do Ba and Mi cost?"}], [TOOL], GOLD)
REPLY = "Both of them cost about the same."
SCRIPTS = [[call("Ba", "Mi"), REPLY], [call("Ba"), call("Mi"), REPLY], [call("Ba"), call("Ba"), "Ba is cheap, yes."],
           ["They cost nothing."]]


@pytest.fixture
def step(play, tok):
    """step(*settings) -> four scored rollouts of one prompt: right, serial, a call twice, none; and their batch."""
    def run(*overrides, task=TASK, scripts=SCRIPTS):
        cfg = settings(*overrides)
        episodes = play([[i for text in turns for i in ids_of(text, tok)] for turns in scripts],
                        tasks=[task], cfg=cfg, group_size=len(scripts))
        score_episodes(episodes, RulesJudge(), cfg.reward)
        return episodes, Batch.of(episodes, torch.device("cpu")), cfg
    return run


def of(found, batch, b, label):
    """The advantage of a rollout's tokens of a segment, which has to be one number."""
    values = found.tokens[b][batch.labels[b] == label].unique()
    assert len(values) == 1
    return float(values)


def test_the_default_is_slca(step):
    episodes, batch, cfg = step()
    scores = [e.rewards for e in episodes]
    want = slca_advantages(batch.labels, [0] * 4, [s.process for s in scores], [s.summary for s in scores],
                           [s.total for s in scores], [float(s.omission) for s in scores])
    assert torch.equal(estimate(episodes, batch, cfg).tokens, want.tokens) and scores[3].omission


def test_toolpo(step):
    episodes, batch, cfg = step("advantage.estimator=toolpo", "reward.outcome=all_gold")
    found = estimate(episodes, batch, cfg)
    outcome = torch.tensor([.866024, .866024, -.866024, -.866024])  # solved: 1, 1, 0, 0
    close(found.summary, outcome)
    action = [.577348, .577348, -1.154697, 0]  # 2 of 2, 2 of 2, 1 of 2; the last makes no call
    close(found.tool, action)
    close([of(found, batch, b, 1) for b in range(3)], outcome[:3] + torch.tensor(action[:3]))
    close([of(found, batch, b, 2) for b in range(4)], outcome)


def test_toolpo_by_a_judge_and_the_executed_reward(step):
    episodes, batch, cfg = step("advantage.estimator=toolpo")
    verdicts = solved(episodes, RulesJudge(), 1.0)
    assert verdicts[3] == 0 and set(verdicts) <= {0.0, 1.0}
    close(estimate(episodes, batch, cfg, RulesJudge()).summary,
          grpo_advantages(batch.policy_mask, [0] * 4, verdicts).tool)
    episodes, batch, cfg = step("reward.tool=executed", "reward.outcome=all_gold")
    found = estimate(episodes, batch, cfg)
    close(found.tool, [.577348, .577348, -1.154697, 0])
    close(found.summary, estimate(episodes, batch, settings()).summary)
    cfg = settings("reward.tool=executed", "reward.outcome=all_gold", "advantage.estimator=grpo")
    totals = [1 + episodes[0].rewards.summary, 1 + episodes[1].rewards.summary, episodes[2].rewards.summary, -.5]
    close(estimate(episodes, batch, cfg).tokens, grpo_advantages(batch.policy_mask, [0] * 4, totals).tokens)


def test_a_judge_is_asked_for_an_outcome_once(step):
    """Estimate and leakage both need it, and a run logs it; a model could answer another time otherwise."""
    episodes, batch, cfg = step("reward.tool=executed")
    asked = []

    class Writer:
        def texts(self, chats):
            asked.append(len(chats))
            return ["Solved"] * len(chats)

    judge = LLMJudge(Writer())
    estimate(episodes, batch, cfg, judge)
    credit.leakage(episodes, batch, cfg, judge)
    assert sum(asked) == 3 and [e.outcome for e in episodes] == [1, 1, 1, 0] and credit.uses_outcome(cfg)
    assert not credit.uses_outcome(settings()) and step()[0][0].outcome is None


def test_rltr_trains_the_calls_alone(step):
    episodes, batch, cfg = step("advantage.estimator=rltr", "rollout.malformed_call=observe")
    found = estimate(episodes, batch, cfg, RulesJudge())
    assert float(found.tokens[batch.labels == 2].abs().max()) == 0
    # complete, complete, and incomplete with a call twice: 1, 1, -0.1
    close([of(found, batch, b, 1) for b in range(3)], [.577349, .577349, -1.154698])


def test_votes_of_a_model_and_of_noisy_rules(step):
    episodes, _, cfg = step("advantage.estimator=rltr")
    asked = []

    class Writer:
        def texts(self, chats, temperature=None, salt=""):
            asked.append((len(chats), temperature, salt))
            return ["1" if salt == "vote 0" else "no digit" if salt == "vote 1" else None for _ in chats]

    assert credit.votes(episodes, cfg, LLMJudge(Writer())) == [[1, None, None]] * 3 + [[]]
    assert asked == [(3, 0.7, f"vote {k}") for k in range(3)]  # none is asked about an omission
    clean = checker_votes(RulesJudge(), ["q"] * 200, [str(i) for i in range(200)], [1.0] * 200, 3)
    noisy = checker_votes(RulesJudge(.3, 5), ["q"] * 200, [str(i) for i in range(200)], [1.0] * 200, 3)
    assert clean == [[1, 1, 1]] * 200 and abs(sum(map(sum, noisy)) / 600 - .7) < .06
    assert noisy == checker_votes(RulesJudge(.3, 5), ["q"] * 200, [str(i) for i in range(200)], [1.0] * 200, 3)


def test_a_model_that_is_unsure_is_asked_again(step):
    episodes, *_ = step()
    rounds = []

    class Writer:
        def texts(self, chats):
            rounds.append([c[-1]["content"] for c in chats])
            return [["Solved", "Unsure", None][i % 3] for i in range(len(chats))] if len(rounds) == 1 else ["solved."]

    assert solved(episodes, LLMJudge(Writer()), 1.0) == [1, 1, 0, 0]
    assert len(rounds[0]) == 3 and rounds[1] == [judge.ASK_AGAIN]


def test_gdpo_and_mt_grpo_run_on_the_same_step(step):
    episodes, batch, cfg = step("advantage.estimator=gdpo")
    found = estimate(episodes, batch, cfg)
    assert abs(float(found.tool.mean())) < 1e-6 and abs(float(found.tool.std()) - 1) < 1e-3
    close(found.tokens, torch.where(batch.policy_mask == 1, found.tool[:, None], 0.0))
    cfg = settings("advantage.estimator=mt_grpo")
    found = estimate(episodes, batch, cfg)
    close([of(found, batch, b, 1) for b in range(3)], (found.tool + found.summary)[:3])
    close([of(found, batch, b, 2) for b in range(4)], found.summary)


def test_summary_credit_of_omissions_alone(step):
    """Table 16, second row (W7): only the rollout without calls keeps its summary advantage."""
    episodes, batch, cfg = step("advantage.summary_credit=omissions")
    found, plain = estimate(episodes, batch, cfg), estimate(episodes, batch, settings())
    assert [of(found, batch, b, 2) for b in range(4)] == [0, 0, 0, of(plain, batch, 3, 2)]
    assert torch.equal(found.tokens[batch.labels == 1], plain.tokens[batch.labels == 1])


def test_overlong_rollouts_lose(step):
    episodes, batch, _ = step()
    plain = estimate(episodes, batch, settings())
    cfg = settings("reward.overlong_buffer=600")  # all of max_response_tokens: the longer the worse
    found = estimate(episodes, batch, cfg)
    assert episodes[1].response_length > episodes[0].response_length
    assert plain.tool[0] - plain.tool[1] < found.tool[0] - found.tool[1]
    low = [Episode(TASK, 0, i, [0] * (2 + n), 2, [1, 0, 1], [0.0] * 3, rewards=HierR(process=.1, summary=.1, total=.2))
           for i, n in enumerate((350, 450, 250, 100))]  # totals below 0 by their length alone are no omissions
    rows = torch.tensor([[1, 0, 2]] * 4)
    short = Batch(rows, rows, torch.tensor([[1, 0, 1]] * 4), None, [3] * 4, [0] * 4, [0] * 4)
    order = estimate(low, short, settings("reward.overlong_buffer=600")).tool.argsort().tolist()
    assert order == [1, 0, 2, 3]
    assert torch.equal(estimate(episodes, batch, settings("reward.overlong_buffer=1")).tokens, plain.tokens)


# ---- turns

def test_turn_scores_sum_to_the_process_score(step):
    episodes, batch, cfg = step()
    for e in episodes[:3]:
        assert sum(turn_scores(e, cfg)) == pytest.approx(e.rewards.process, abs=1e-12)
    right, serial, twice = (turn_scores(e, cfg) for e in episodes[:3])
    assert right == pytest.approx([1.0, 0.0])
    # one of two calls in the first step: .1 + .25 * 2/3 + (.15 + .2) / 2; then both, but one a turn: .7
    assert serial == pytest.approx([.1 + .5 / 3 + .175, .7 - (.1 + .5 / 3 + .175), 0.0])
    assert twice == pytest.approx([serial[0], .25 / 3 + .15 / 2, 0.0])  # again: a name and a key that gold still wants
    none = Episode(Task("n", TASK.messages, [TOOL]), 0, 0, [], 0, [], [], turns=[("assistant", call("Ba")),
                                                                              ("tool", "x"), ("assistant", REPLY)])
    assert turn_scores(none, cfg) == pytest.approx([.45 - .9, 0])  # a needless call costs


def test_turn_advantages_by_hand():
    labels = torch.tensor([[1, 1, 0, 1, 0, 2], [1, 0, 2, 2, 0, 0], [2, 2, 0, 0, 0, 0]])
    index = turn_index(labels)
    assert index.tolist() == [[0, 0, -1, 1, -1, -1], [0, -1, -1, -1, -1, -1], [-1] * 6]
    got = turn_advantages(index, [[.6, .1, .3], [.8, .2], [.9]], ["a", "a", "a"])
    x = .707102  # first turns: .6 and .8; second: .1, and 0 of the one that had ended; the third rollout has no turn
    close(got, [[-x, -x, 0, .707097, 0, 0], [x, 0, 0, 0, 0, 0], [0] * 6])
    assert float(turn_advantages(index, [[.6, .1], [.8], []], ["a", "b", "b"])[1].abs().max()) == 0  # alone
    with pytest.raises(ValueError, match="scores for"):
        turn_advantages(index, [[.6], [.8], []], ["a"] * 3)
    two = torch.tensor([[1, 0, 1, 0, 2]] * 4)  # equal rollouts have nothing to learn, however their parts differ
    assert not turn_advantages(turn_index(two), [[.742, .258]] * 4, ["a"] * 4).any()
    got = turn_advantages(turn_index(two), [[.742, .258]] * 2 + [[.742, 0.0]] * 2, ["a"] * 4)
    assert got[:, 0].tolist() == [0] * 4 and (got[:, 2] > 0).tolist() == [True, True, False, False]


def test_turn_credit_leaves_the_summary_stream(step):
    episodes, batch, cfg = step("advantage.turn_credit=true")
    found, plain = estimate(episodes, batch, cfg), estimate(episodes, batch, settings())
    assert torch.equal(found.tokens[batch.labels == 2], plain.tokens[batch.labels == 2])
    index = turn_index(batch.labels)
    serial = [found.tokens[1][index[1] == k].unique() for k in (0, 1)]
    assert all(len(x) == 1 for x in serial) and serial[0] != serial[1]  # each turn its own
    one = [SCRIPTS[0], [call("Ba"), REPLY], [call("Mi"), REPLY]]  # where each has one call turn, nothing changes
    episodes, batch, cfg = step("advantage.turn_credit=true", scripts=one)
    close(estimate(episodes, batch, cfg).tokens, estimate(episodes, batch, settings()).tokens)


def test_abstention_credit_acts_where_no_call_is_due(step):
    scripts = [["Good morning to you too."], [call("Ba"), REPLY]]
    episodes, batch, cfg = step("advantage.abstention_credit=true", task=Task("n", TASK.messages, [TOOL]),
                                scripts=scripts)
    plain = estimate(episodes, batch, settings())
    found = estimate(episodes, batch, cfg)
    assert [e.rewards.process for e in episodes] == pytest.approx([.9, .45])
    close([float(found.tokens[b][batch.policy_mask[b] == 1].unique()) for b in (0, 1)], [.707105, -.707105])
    assert of(plain, batch, 0, 2) <= 0  # the paper's rules: a reply without a call has nothing to gain
    episodes, batch, cfg = step("advantage.abstention_credit=true")
    assert torch.equal(estimate(episodes, batch, cfg).tokens, estimate(episodes, batch, settings()).tokens)


# ---- diagnostics

def test_leakage_on_w3():
    """Four rollouts of W3: the unified advantage turns the sign on the tool tokens of the first, second and fourth."""
    rows = zip([.65, 1, 1, 1], [1, .25, .5, .25], strict=True)
    episodes = [Episode(TASK, 0, i, [0] * 3, 0, [1, 0, 1], [0.0] * 3, labels=[1, 0, 2],
                        rewards=HierR(process=p, summary=s, total=p + s)) for i, (p, s) in enumerate(rows)]
    found = leakage(episodes, Batch.of(episodes, torch.device("cpu")), load_config())
    assert found["leak_flips"] == (3.0, 4.0)
    t, s = torch.tensor([.65, 1, 1, 1]), torch.tensor([1, .25, .5, .25])
    t, s = (t - t.mean()).abs(), (s - s.mean()).abs()
    assert found["leak_share"] == pytest.approx((float((s / (t + s)).sum()), 4.0), abs=1e-6)
    batch = Batch.of(episodes, torch.device("cpu"))
    five = leakage(episodes, batch, load_config([], ["advantage.estimator=grpo", "advantage.reward_ratio=5"]))
    assert five["leak_flips"] == (0.0, 4.0)  # W6: from a ratio of 1.9 on the first rollout keeps its sign
    assert five["leak_share"] == pytest.approx((float((s / (5 * t + s)).sum()), 4.0), abs=1e-6)
    heavy = [replace(e, rewards=replace(e.rewards, total=5 * e.rewards.process + e.rewards.summary)) for e in episodes]
    assert leakage(heavy, batch, load_config([], ["reward.mix.process=5"])) == five


def test_stream_gradients_are_those_of_the_loss(step, tok, policy):
    episodes, batch, cfg = step("micro_batch_tokens=10000")
    batch.advantages = estimate(episodes, batch, cfg).tokens
    own, rows = copy.deepcopy(policy).requires_grad_(True), range(4)
    found = stream_gradients(own, batch, rows, tok.size, cfg)
    assert all(p.grad is None for p in own.parameters())
    grads = []
    for labels in ((1,), (2,), (1, 2)):
        alone = torch.where(torch.isin(batch.labels, torch.tensor(labels)), batch.advantages, 0.0)
        learner.accumulate(own, None, batch, rows, alone, tok.size, cfg)
        grads.append(torch.cat([p.grad.flatten() for p in own.parameters()]))
        own.zero_grad(set_to_none=True)
    tool, summary, both = grads
    close(both, tool + summary)  # the streams add up to the update
    assert found["grad_norm_tool"] == pytest.approx(float(tool.norm()), rel=1e-4)
    assert found["grad_norm_summary"] == pytest.approx(float(summary.norm()), rel=1e-4)
    assert found["grad_cosine"] == pytest.approx(float(torch.cosine_similarity(tool, summary, 0)), abs=1e-4)
    assert gradient_angles([None], [torch.ones(2)]) == {"grad_norm_tool": 0, "grad_norm_summary": 2 ** .5,
                                                         "grad_cosine": 0}


# ---- configuration

@pytest.mark.parametrize("wrong, words", [
    ("advantage.turn_credit=true", "advantage.turn_credit"), ("advantage.summary_credit=omissions", "summary_credit"),
    ("advantage.abstention_credit=true", "abstention_credit"), ("reward.tool=executed", "reward.tool"),
    ("reward.outcome=process", "reward.outcome"), ("reward.checker_votes=5", "reward.checker_votes")])
def test_settings_that_an_estimator_does_not_read(wrong, words):
    estimator = "toolpo" if "reward.tool" in wrong else "grpo"
    with pytest.raises(ConfigError, match=words):
        load_config([], [f"advantage.estimator={estimator}", wrong])


@pytest.mark.parametrize("wrong, words", [
    (["advantage.turn_credit=true", "advantage.routing=[[1, 1], [0, 1]]"], "advantage.routing"),
    (["advantage.estimator=gdpo", "rl.dynamic_sampling=true"], "rl.dynamic_sampling"),
    (["advantage.turn_credit=true", "reward.tool=executed"], "reward.tool"),
    (["advantage.turn_credit=true", "reward.overlong_buffer=9"], "reward.overlong_buffer"),
    (["reward.overlong_buffer=321"], "at most rollout.max_response_tokens = 320"),
    (["advantage.estimator=gdpo", "advantage.eps=0.1"], "advantage.eps"),
    (["loss.surrogate=cispo", "loss.dual_clip=2"], "loss.dual_clip")])
def test_settings_that_do_not_go_together(wrong, words):
    with pytest.raises(ConfigError, match=words):
        load_config([], wrong)
