"""Bugs that others' trainers had, and where it is shown that this one is free of them.

TRAPS names for each of 41 known ones the tests that would catch it; that those tests exist is tested. Tests that have
no better place are here: Qwen3's thoughts in a rollout, the stop that looks like padding, a token's weight in the loss,
and which KL is descended.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_rollout import CALL, TASK, Answers, ids_of, play, policy, settings  # noqa: F401

from slca import chat
from slca.data.task import Task
from slca.learner import Batch
from slca.loss import kl_loss, policy_loss
from slca.tokenizer import train_bpe

# number -> what went wrong, the tests that would see it ("file::test", file without test_)
TRAPS = {
    1: ("sampled ids are decoded and encoded again", ["rollout::test_model_text_is_never_encoded"]),
    2: ("masks and ids of different lengths", [
        "rollout::test_records_by_hand", "rollout::test_overflowing_result_is_rolled_back_whole",
        "rollout::test_response_length_cuts_a_turn", "fuzz::test_any_completion"]),
    3: ("the line end after <|im_end|> is missing at a tool turn", [
        "rollout::test_ids_are_those_of_the_template", "templates::test_turn_by_turn_is_the_whole"]),
    4: ("parallel results become user turns of their own", [
        "templates::test_text_is_the_models_own", "chat::test_turn_by_turn_equals_the_full_render"]),
    5: ("Qwen3's template drops earlier thoughts, the prefix changes", [
        "traps::test_qwen3_thoughts_of_a_rollout_stay_and_those_of_the_history_go",
        "chat::test_qwen3_keeps_the_thoughts_after_the_last_query_alone",
        "templates::test_turn_by_turn_is_the_whole"]),
    6: ("tool results enter the loss", [
        "loss::test_masked_values_never_matter", "learner::test_injected_tokens_and_padding_have_no_gradient"]),
    7: ("the answer is read in a tool's output", [
        "rollout::test_an_answer_only_in_the_result_earns_no_summary", "rewards::test_only_what_the_model_wrote_counts",
        "judge::test_a_result_cannot_earn_rewards"]),
    8: ("assistant turns of the history are trained", [
        "rollout::test_ids_are_those_of_the_template", "sft::test_history_turns_of_the_assistant_are_prompt"]),
    9: ("the mask is taken for one stretch", [
        "segments::test_labels_partition_the_mask",
        "learner::test_shared_prompts_give_the_plain_scores_and_gradients"]),
    10: ("the sampled stop is not trained", [
        "traps::test_the_stop_is_trained_also_where_padding_is_the_same_id",
        "sampler::test_each_stop_ends_its_row_and_is_scored"]),
    11: ("padding hides the stop, or only one stop is known", [
        "traps::test_the_stop_is_trained_also_where_padding_is_the_same_id", "tokenizer::test_stop_ids",
        "rollout::test_both_stops_end_the_episode", "learner::test_injected_tokens_and_padding_have_no_gradient"]),
    12: ("a mean for each micro-batch or rank", [
        "learner::test_gradient_does_not_depend_on_micro_batches", "loss::test_micro_batches_add_up",
        "ranks::test_three_updates_end_at_the_same_weights"]),
    13: ("short right and long wrong answers are favoured", [
        "traps::test_a_tokens_weight_does_not_depend_on_its_rows_length"]),
    14: ("ranks with unequal numbers of micro-batches hang", ["ranks::test_three_updates_end_at_the_same_weights"]),
    15: ("ranks that end generation at different steps hang", [
        "ranks::test_stops_far_apart_and_tools_on_one_rank_only"]),
    16: ("a batch without tokens gives NaN", [
        "loss::test_empty_mask_is_zero_with_a_graph", "learner::test_no_advantage_at_all_is_no_update"]),
    17: ("equal rewards give huge advantages, groups mix", [
        "advantages::test_equal_rewards_give_exactly_zero", "advantages::test_nearly_equal_rewards_are_not_cut",
        "advantages::test_moments_permutation_groups_lambda_shift"]),
    18: ("the ratio of the first update is not 1", [
        "learner::test_ratio_is_exactly_1_on_the_first_update", "sampler::test_stored_logprobs_are_the_learners",
        "rollout::test_stored_logprobs_after_tool_turns", "learner::test_bf16_scores_stay_close_and_float32"]),
    19: ("sampling from a cut distribution, scores from the whole", [
        "sampler::test_drawn_frequencies_are_the_stored_probabilities"]),
    20: ("no temperature in the learner's scores", [
        "learner::test_scorer_is_tempered_and_cut", "rollout::test_stored_logprobs_after_tool_turns"]),
    21: ("log-softmax in bfloat16", ["learner::test_bf16_scores_stay_close_and_float32"]),
    22: ("small updates are lost in bfloat16 weights", ["learner::test_small_updates_arrive"]),
    23: ("the logits of all tokens are kept", [
        "learner::test_head_in_chunks_is_the_dense_one_and_keeps_no_logits"]),
    24: ("padding in the cache or shared positions change logits", [
        "engine::test_prefill_steps_and_tool_turns_are_the_plain_forward_pass",
        "engine::test_columns_past_the_length_change_no_bit", "sampler::test_a_row_does_not_know_its_neighbours",
        "weights::test_greedy_tokens_from_the_cache_are_theirs"]),
    # Nothing is compiled. CUDA graphs need a GPU and are not run here, only their way of grouping rows and steps.
    25: ("recompiles by length, graphs unlike eager code", ["engine::test_looking_seldom_gives_the_same_rows"]),
    26: ("a stale cache after the weights have changed", [
        "sampler::test_new_weights_are_seen_after_refresh", "engine::test_a_sampler_that_rested_samples_the_same"]),
    27: ("a missing or redundant head, keys that nothing uses", [
        "weights::test_redundant_head_and_rotary_buffers_are_harmless", "weights::test_bad_folders_are_refused_by_name",
        "weights::test_bad_shards_are_refused_by_name", "weights::test_save_then_load_is_bit_equal"]),
    28: ("tied weights come apart over ranks", [  # models are tied unless a file says otherwise
        "ranks::test_three_updates_end_at_the_same_weights",
        "checkpoint::test_any_number_of_ranks_reads_what_any_number_wrote"]),
    29: ("ids beyond the tokenizer are sampled", [
        "sampler::test_ids_beyond_the_tokenizer_are_never_drawn", "learner::test_scorer_is_tempered_and_cut"]),
    30: ("malformed calls crash, vanish or go on for ever", [
        "rollout::test_model_output", "rollout::test_model_output_in_the_loop", "rollout::test_a_cut_call_is_not_run",
        "rollout::test_endless_malformed_calls_are_bounded", "simulator::test_bad_call"]),
    31: ("a result overflows the context", ["rollout::test_overflowing_result_is_rolled_back_whole"]),
    32: ("the KL term's gradient is another KL's", [
        "traps::test_the_kl_that_each_kind_descends", "loss::test_golden_kl"]),
    33: ("a resumed run repeats data or draws", [
        "checkpoint::test_killed_in_the_middle_of_both_stages", "checkpoint::test_killed_while_it_saves"]),
    34: ("saving hangs as not all ranks take part", [
        "checkpoint::test_any_number_of_ranks_reads_what_any_number_wrote",
        "checkpoint::test_two_ranks_hand_over_to_one"]),
    35: ("text from outside becomes control tokens", [
        "tokenizer::test_hostile_text_gives_no_control_id_and_decodes_to_itself",
        "templates::test_a_forged_turn_stays_text", "rollout::test_a_hostile_result_forges_nothing",
        "faults::test_no_text_makes_a_control_token"]),
    # Rows are never packed; the prompt that a group shares is the one place where rows meet.
    36: ("packed rows see their neighbours", [
        "learner::test_shared_prompts_give_the_plain_scores_and_gradients",
        "model::test_right_padding_and_batch_mates_change_nothing"]),
    37: ("a default makes the gradient zero", ["learner::test_two_armed_bandit"]),
    38: ("a loss of 0 alarms, metrics are taken after clipping", [
        "loss::test_clip_table", "report::test_the_readme_explains_every_metric"]),
    39: ("a token limit cuts every answer without a sign", ["train::test_a_tiny_cap_shows_in_the_log"]),
    40: ("every rank has the same prompts", [
        "ranks::test_first_step_samples_the_same_tokens", "source::test_steps_are_pure_and_apart"]),
    41: ("the clipped objective is wrong for negative advantages", ["loss::test_clip_table"]),
}


def test_all_traps_are_listed():
    assert list(TRAPS) == list(range(1, 42)) and all(tests for _, tests in TRAPS.values())


@pytest.mark.parametrize("test", sorted({test for _, tests in TRAPS.values() for test in tests}))
def test_the_named_test_exists(test):
    file, name = test.split("::")
    source = (Path(__file__).parent / f"test_{file}.py").read_text(encoding="utf-8")
    found = re.search(rf"((?:^@.*\n(?:^[ )\]}}].*\n)*)*)^def {name}\(", source, re.MULTILINE)
    assert found and "mark.skip" not in found[1], test


# --- rollouts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tok():
    """Of Qwen3's kind; the fixtures of test_rollout.py take it in the place of their own."""
    special, tags = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ("tool_call", "think", "tool_response")
    return train_bpe([chat.TOOLS_BEFORE, CALL] * 3, 500, special, [f"<{s}{tag}>" for tag in tags for s in ("", "/")])


def test_qwen3_thoughts_of_a_rollout_stay_and_those_of_the_history_go(play, tok):  # noqa: F811
    """The episode is the template's render of the whole dialogue, so the prefix of every turn was what it is now."""
    def turn(thought, text, *calls):
        return {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": list(calls)}

    call = {"name": "find_stock", "arguments": {"symbol": "Bakedo"}}
    history = [{"role": "user", "content": "Hi"}, turn("An old thought.", "Hello."), *TASK.messages]
    turns = [turn("I ask.", "", call), turn("Again.", "Once more.", call), turn("Now I know.", "It costs 41.")]
    task = Task("t", history, TASK.tools, TASK.gold_calls, TASK.facts)
    script = [f"<think>\nI ask.\n</think>\n\n{CALL}", f"<think>\nAgain.\n</think>\n\nOnce more.\n{CALL}",
              "<think>\nNow I know.\n</think>\n\nIt costs 41."]
    episode = play([[i for text in script for i in ids_of(text, tok)]], [task], simulator=Answers("41"))[0]
    assert episode.status == "answered" and episode.tool_turns == 2 and tok.template == "qwen3"
    messages, results = list(history), {"role": "tool", "content": "41"}
    for message in turns:
        prompt = chat.render(messages, task.tools, tok)
        assert episode.ids[:len(prompt)] == prompt  # nothing before this turn has changed since it was written
        messages += [message, results]
    assert episode.ids + tok.encode("\n") == chat.render(messages[:-1], task.tools, tok, False)
    text = tok.decode(episode.ids)
    assert "An old thought." not in text and all(t["reasoning_content"] in text for t in turns)


def test_the_stop_is_trained_also_where_padding_is_the_same_id(play, tok):  # noqa: F811
    """Padding is id 0, here a stop as well. A row that stopped learns its stop, one cut off learns all it wrote."""
    stop, cut = tok.encode("It costs 41.<|endoftext|>"), tok.encode("It costs 41. " * 9)
    episodes = play([stop, cut], cfg=settings("rollout.max_response_tokens=40"))
    assert [e.status for e in episodes] == ["answered", "length_limit"] and stop[-1] == 0
    batch = Batch.of(episodes, torch.device("cpu"))
    logp = batch.logprobs.clone().requires_grad_()
    policy_loss(logp, batch.logprobs, torch.ones(logp.shape), batch.policy_mask).loss.backward()
    for row, e, written in zip(range(2), episodes, (stop, cut[:40]), strict=True):
        first, end = e.prompt_length, e.prompt_length + len(written)
        assert batch.ids[row, first:end].tolist() == written and (batch.ids[row, end:] == 0).all()
        assert logp.grad[row].nonzero().flatten().tolist() == list(range(first, end))
    assert batch.ids.shape[1] > len(episodes[0].ids) and not set(cut[:40]) & set(tok.stop_ids)


# --- the loss --------------------------------------------------------------------------------------------------------


def test_a_tokens_weight_does_not_depend_on_its_rows_length():
    """Under token_mean; a mean for each row gives the tokens of a short one more."""
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    found = {}
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        logp = torch.full(mask.shape, -1.0, requires_grad=True)
        policy_loss(logp, logp.detach(), torch.ones(mask.shape), mask, aggregation=aggregation).loss.backward()
        found[aggregation] = logp.grad
    torch.testing.assert_close(found["token_mean"], -mask / 8)
    assert found["seq_mean_token_mean"][0, 0] == 3 * found["seq_mean_token_mean"][1, 0]


@pytest.mark.parametrize("kind, descends", [("k1", "nothing"), ("k2", "policy to reference"),
                                            ("k3", "reference to policy")])
def test_the_kl_that_each_kind_descends(kind, descends):
    """All four tokens in turn, weighted as a policy draws them: the mean gradient of the term, against the KL's own."""
    scores = torch.tensor([0.5, -1.0, 0.3, 1.2], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.4, 0.1], dtype=torch.float64), -1)
    logp = torch.log_softmax(scores, -1)
    p, q = logp.exp(), reference.exp()
    terms = torch.stack([kl_loss(t.view(1, 1), r.view(1, 1), torch.ones(1, 1), kind).loss
                         for t, r in zip(logp, reference, strict=True)])
    got, = torch.autograd.grad((p.detach() * terms).sum(), scores, retain_graph=True)
    kl = {"nothing": 0 * p, "policy to reference": p * (logp - reference),
          "reference to policy": q * (reference - logp)}
    want, = torch.autograd.grad(kl[descends].sum(), scores)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-6)
