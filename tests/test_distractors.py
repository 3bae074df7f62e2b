"""Proves: padded tasks are nested, repeatable and fair to own tools; hard means nearest; the suite skips and resumes.

Nearest by hand on a catalogue of four tools, TF-IDF weights against numbers worked out by hand, the paired comparison
on made-up scores, and `evaluate.py --suite distractors` from a fresh tiny policy to its record, cut off and gone on
with.
"""
from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slca import chat
from slca.config import load_config
from slca.data import DataError, Task
from slca.data.distractors import by_embeddings, load_catalogue, pad_tools, task_text, tfidf, words
from slca.data.source import world_split
from slca.data.vocabulary import world_tokenizer
from slca.evaluation import distractors
from slca.evaluation.distractors import conditions, finished, restricted, restricted_table, run_condition, table
from slca.model import ModelConfig, new_policy
from slca.weights import load_policy, save_policy

ROOT = Path(__file__).parents[1]
CATALOGUE = load_catalogue(ROOT / "tests" / "data" / "toucan_tools.jsonl")


def tool(name: str, description: str = "", **parameters) -> dict:
    return {"type": "function", "function": {"name": name, "description": description,
                                             "parameters": parameters or {"type": "object", "properties": {}}}}


def task(name: str = "t", tools=(), question: str = "What is the weather in Paris?") -> Task:
    return Task(name, [{"role": "user", "content": question}], list(tools))


def names(t: Task) -> list[str]:
    return t.allowed_tools


OWN = [tool("get_weather", "Weather of a city"), tool("get_time", "Local time of a city")]
FOUR = [tool("bank-transfer", "Send money to an account"), tool("sky-forecast", "Weather forecast of a city"),
        tool("mail-send", "Send a letter"), tool("clock-now", "Time in a zone")]
TINY = [tool(f"shop-item_{word}", f"Look the {word} up") for word in
        ("bread", "salt", "rice", "milk", "tea", "soap", "corn", "jam")]


# --- catalogue -------------------------------------------------------------------------------------------------------

def test_the_sample_of_toucans_catalogue():
    rows = [json.loads(x) for x in (ROOT / "tests" / "data" / "toucan_tools.jsonl").read_text().splitlines()]
    assert len(CATALOGUE) == len(rows) == 32 and CATALOGUE[0] == {"type": "function", "function": {
        "name": "clear-thought-collaborativereasoning", "description": rows[0]["description"],
        "parameters": rows[0]["parameters"]}}
    assert all(t["function"].keys() == {"name", "description", "parameters"} for t in CATALOGUE)


def write(path: Path, *rows) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_rows_of_all_forms_and_of_one_name(tmp_path):
    found = load_catalogue(write(tmp_path / "c.jsonl", {"server": "My Own Server", "name": "Look_up", "x": 1},
                                 tool("a", "first"), {"name": "a", "description": "second"}, {"name": "b"}))
    assert [(t["function"]["name"], t["function"]["description"]) for t in found] == [
        ("my-own-server-Look_up", ""), ("a", "first"), ("b", "")]
    assert found[2] == tool("b")


@pytest.mark.parametrize("row, field, expected", [
    ("{", "", "JSON"), ([1], "", "a tool"), ({"function": 3}, "function", "a tool"), ({"server": "s"}, "name", "text"),
    ({"function": {"name": ""}}, "function.name", "not empty"), ({"name": "a", "server": 3}, "server", "no such key"),
    ({"name": "a", "description": ["x"]}, "description", "text or null"),
    ({"type": "function", "function": {"name": "a", "parameters": "{}"}}, "function.parameters", "a JSON schema")])
def test_a_bad_row_is_named(tmp_path, row, field, expected):
    path = write(tmp_path / "c.jsonl", tool("good"), row)
    with pytest.raises(DataError) as error:
        load_catalogue(path)
    assert (error.value.row, error.value.field, error.value.file) == (2, field, str(path))
    assert f"row 2{', ' + field if field else ''}: expected " in str(error.value) and expected in str(error.value)


def test_an_empty_catalogue(tmp_path):
    with pytest.raises(DataError, match="at least one tool"):
        load_catalogue(write(tmp_path / "c.jsonl"))


# --- padding ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["random", "hard"])
def test_nested_repeatable_and_with_the_own_tools(how):
    """The tools of a small K are those of a larger one with some left out, order included."""
    t, near = task("q7", OWN), tfidf(CATALOGUE)
    rows = {k: pad_tools(t, CATALOGUE, k, how, 3, near) for k in (4, 9, 20, 34)}
    for k, padded in rows.items():
        assert len(padded.tools) == k == len(set(names(padded))) and all(own in padded.tools for own in OWN)
        assert padded == pad_tools(task("q7", OWN), list(CATALOGUE), k, how, 3)  # a near of its own
        assert (padded.id, padded.messages) == (t.id, t.messages)
        assert names(padded) == [n for n in names(rows[34]) if n in names(padded)]
    assert t.tools == OWN  # untouched
    others = [pad_tools(t, CATALOGUE, 9, how, 4, near), pad_tools(task("q8", OWN), CATALOGUE, 9, how, 3, near)]
    assert all(names(other) != names(rows[9]) for other in others)
    if how == "random":
        assert all(set(names(other)) != set(names(rows[9])) for other in others)


def test_own_tools_stand_anywhere_and_every_distractor_comes():
    """300 tasks of two own tools among six: a place's share is 1/3 +- 4 sd; each of 32 tools is drawn 37.5 times."""
    rows = [names(pad_tools(task(str(i), OWN), CATALOGUE, 6)) for i in range(300)]
    places = [sum(row[p] in ("get_weather", "get_time") for row in rows) / 300 for p in range(6)]
    assert all(abs(share - 1 / 3) < 4 * math.sqrt(2 / 9 / 300) for share in places)
    drawn = [sum(t["function"]["name"] in row for row in rows) for t in CATALOGUE]
    assert sum(drawn) == 1200 and all(abs(n - 37.5) < 4 * math.sqrt(37.5) for n in drawn)


def test_these_tools_for_ever():
    """Golden: other draws would part every earlier figure from every later one."""
    assert names(pad_tools(task("q7", OWN), CATALOGUE, 5, "random", 3)) == GOLDEN


GOLDEN = ["get_weather", "quickchart-server-generate_chart", "automated-ui-debuger-and-tester-ui_workflow_validator",
          "fetch-server-fetch_html", "get_time"]


def test_no_name_twice_and_no_copy_of_an_own_tool():
    own, twin = CATALOGUE[3], tool("elsewhere-copy", "")
    twin["function"] |= {key: own["function"][key] for key in ("description", "parameters")}
    changed = tool(CATALOGUE[5]["function"]["name"], "the same name, another tool")
    t = task("q", [own, changed])
    for how in ("random", "hard"):
        padded = pad_tools(t, [*CATALOGUE, twin], 32, how)
        assert len(set(names(padded))) == 32 and "elsewhere-copy" not in names(padded) and changed in padded.tools
    with pytest.raises(ValueError, match="33 tools asked for, but to its own 2 the catalogue of 33 has only 30 others"):
        pad_tools(t, [*CATALOGUE, twin], 33)


def test_enough_tools_already():
    t = task("q", CATALOGUE[:5])
    assert pad_tools(t, CATALOGUE, 5) is t and pad_tools(t, CATALOGUE, 3) is t and pad_tools(t, [], 0) is t
    with pytest.raises(ValueError, match="how 'near': expected random or hard"):
        pad_tools(t, CATALOGUE, 9, "near")


# --- nearness --------------------------------------------------------------------------------------------------------

def test_words():
    assert words("getUserName get_user_name2, HTTP-Größe: 東京") == [
        "get", "user", "name", "get", "user", "name2", "http", "größe", "東京"]


def test_tfidf_by_hand():
    """Three tools; "a" in all of them weighs ln(4/4) = 0, "b" in two ln(4/3), "c" in one ln(4/2), twice 1 + ln 2."""
    near = tfidf([tool("a", "b"), tool("a", "b c c"), tool("a", "a")])
    b, c, twice = math.log(4 / 3), math.log(2), math.log(2) * (1 + math.log(2))
    second = math.hypot(b, twice)
    assert near("b") == pytest.approx([1, b / second, 0])
    assert near("B c, unknown") == pytest.approx([b / math.hypot(b, c), (b * b + c * twice) / math.hypot(b, c) / second,
                                                  0])
    assert near("a unknown").tolist() == [0, 0, 0]


def test_nearest_by_hand():
    """A question about the weather, a weather tool and a clock: forecast and clock before money and letters."""
    t = task("q", OWN)
    assert set(names(pad_tools(t, FOUR, 3, "hard"))) - set(names(t)) == {"sky-forecast"}
    assert set(names(pad_tools(t, FOUR, 4, "hard"))) - set(names(t)) == {"sky-forecast", "clock-now"}
    assert names(pad_tools(task("q", [], "Send some money"), FOUR, 1, "hard")) == ["bank-transfer"]
    assert set(names(pad_tools(task("q", [], "Send some money"), FOUR, 2, "hard"))) == {"bank-transfer", "mail-send"}


def test_hard_ones_are_nearer_than_random_ones():
    near = tfidf(CATALOGUE)
    at = {t["function"]["name"]: i for i, t in enumerate(CATALOGUE)}
    means = {"hard": [], "random": []}
    for i, own in enumerate(CATALOGUE):
        t = task(str(i), [own], own["function"]["description"][:80])
        for how, found in means.items():
            scores = near(task_text(t))
            found.append(np.mean([scores[at[n]] for n in names(pad_tools(t, CATALOGUE, 6, how, 0, near))
                                  if n not in names(t)]))
    assert all(h >= r for h, r in zip(means["hard"], means["random"], strict=True))
    assert np.mean(means["hard"]) > 1.5 * np.mean(means["random"]) > 0


class Letters:
    """One id a letter, ids 0 to 25."""

    def encode_untrusted(self, text):
        return [ord(c) - 97 for c in text.lower() if "a" <= c <= "z"]


def test_embeddings_by_hand():
    """Letters a and b point one way each; centred, a tool of a's and one of b's are opposite."""
    policy = new_policy(ModelConfig(vocab_size=26, hidden_size=4, num_attention_heads=1, num_key_value_heads=1,
                                    intermediate_size=4, num_hidden_layers=1))
    with torch.no_grad():
        policy.model.embed_tokens.weight.zero_()
        policy.model.embed_tokens.weight[0, 0] = policy.model.embed_tokens.weight[1, 1] = 1
    near = by_embeddings([tool("aa", "a"), tool("b", "bb")], policy, Letters())
    assert near("a") == pytest.approx([1, -1]) and near("bbb") == pytest.approx([-1, 1])
    assert near("aaab") == pytest.approx([1, -1])  # means (.75, .25) less the centre (.5, .5)


# --- the suite -------------------------------------------------------------------------------------------------------

def entry(success: dict[int, float], **other) -> dict:
    scores = {"task": list(success), "success": list(success.values()), "no_call": [None] * len(success)}
    n = len(success)
    metrics = {"success": sum(success.values()) / n, "n": n} if n else None
    return {"metrics": metrics, "skipped": 4 - n, "prompt_tokens": 10.0, "scores": scores if n else {}} | other


def test_the_paired_comparison_by_hand():
    """Tasks 1 and 3 are in both: 1/2 against 0; the changes are 0 and -1, their mean -.5 +- 1.96 * .7071 / sqrt 2."""
    entries = {"own": entry({0: 1, 1: 0, 3: 1}), "random 9": entry({1: 0, 2: 1, 3: 0}), "hard 9": entry({})}
    found = restricted(entries)
    assert found["tasks"] == [1, 3] and found["n"] == 2
    assert found["metrics"] == {"own": {"success": 0.5, "no_call": 0, "n": 2},
                                "random 9": {"success": 0, "no_call": 0, "n": 2}}
    assert found["success_change"] == {"own": [0, 0], "random 9": [-0.5, pytest.approx(0.98)]}
    assert "over the 2 tasks" in restricted_table(found) and "-0.500 +- 0.980" in restricted_table(found)
    lines = [line.split() for line in table(entries).splitlines()]
    assert lines[2][:3] == ["own", "0.667", "-"] and lines[2][-3:] == ["3", "1", "10"]
    assert lines[4][:3] == ["hard", "9", "-"] and lines[4][-3:-1] == ["0", "4"]
    apart = restricted({"own": entry({0: 1}), "random 9": entry({1: 1})})
    assert apart["n"] == 0 and "no task" in restricted_table(apart) and restricted({})["n"] == 0
    assert restricted({"own": entry({0: 1})})["success_change"] == {"own": [0, None]}


def test_the_conditions_in_order():
    assert list(conditions([50, 0, 20, 20], ["hard", "random"])) == ["own", "hard 20", "hard 50", "random 20",
                                                                     "random 50"]
    assert conditions([7], ["hard"]) == {"hard 7": ("hard", 7)}


@pytest.fixture(scope="module")
def tokenizer():
    return world_tokenizer(examples=150)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("distractors") / "policy"
    policy = new_policy(ModelConfig(vocab_size=tokenizer.size, hidden_size=32, intermediate_size=48,
                                    num_hidden_layers=1))
    save_policy(policy, folder, tokenizer)
    return folder


SETTINGS = ["threads=1", "precision=fp32", "data.eval_tasks=4", "eval.max_response_tokens=6"]


def test_prompts_over_the_limit_are_counted(checkpoint, tokenizer):
    """Padding makes prompts longer; with the limit between the lengths some are skipped, with a tiny one all are."""
    policy, cfg = load_policy(checkpoint), load_config([], SETTINGS)
    tasks = sorted(world_split(cfg, "heldout").tasks(40), key=lambda t: bool(t.gold_calls))[:1]
    tasks += [t for t in world_split(cfg, "heldout").tasks(6) if t.gold_calls][:3]
    own = run_condition(policy, tokenizer, tasks, TINY, "own", 0, cfg)
    five = run_condition(policy, tokenizer, tasks, TINY, "random", 5, cfg)
    assert own["scores"]["task"] == five["scores"]["task"] == [0, 1, 2, 3] and five["skipped"] == 0
    assert five["prompt_tokens"] > own["prompt_tokens"] + 50 and five["metrics"]["n"] == 4
    assert own["metrics"]["gold_calls_per_task"] == five["metrics"]["gold_calls_per_task"]
    assert own["larger"] == five["larger"] == 0
    assert run_condition(policy, tokenizer, tasks, TINY, "random", 2, cfg)["larger"] == 4
    assert run_condition(policy, tokenizer, tasks, TINY, "random", 3, cfg)["larger"] == 0  # three are three
    limit = int(five["prompt_tokens"])  # the mean: some tasks are below, some over
    some = run_condition(policy, tokenizer, tasks, TINY, "random", 5,
                         load_config([], [*SETTINGS, f"eval.max_prompt_tokens={limit}"]))
    assert some["skipped"] + some["metrics"]["n"] == 4 and 0 < some["skipped"] < 4 and some["prompt_tokens"] <= limit
    assert some["prompt_tokens"] <= some["prompt_tokens_max"] <= limit < five["prompt_tokens_max"]
    padded = [pad_tools(t, TINY, 5) for t in tasks]
    lengths = [len(chat.render(t.messages, t.tools, tokenizer, parallel="list")) for t in padded]
    short = [i for i, n in enumerate(lengths) if n <= limit]
    assert some["scores"]["task"] == short != list(range(len(short)))
    assert some["scores"]["process"] == [five["scores"]["process"][i] for i in some["scores"]["task"]]
    due = [None if not t.gold_calls else 1.0 for t in tasks]  # six tokens are no call
    assert five["scores"]["no_call"] == due and None in due and five["metrics"]["no_call"] == 1
    assert five["scores"]["fmt"] == [None] * 4 and five["metrics"]["fmt"] is None
    assert restricted({"own": own, "five": five})["metrics"]["five"]["fmt"] is None and " - " in table({"five": five})
    none = run_condition(policy, tokenizer, tasks, TINY, "hard", 5, load_config([], [*SETTINGS,
                                                                                     "eval.max_prompt_tokens=20"]))
    assert (none["skipped"], none["metrics"], none["prompt_tokens"], none["scores"]) == (4, None, None, {})
    json.dumps([own, five, some, none])


def evaluate(*args) -> None:
    spec = importlib.util.spec_from_file_location("evaluate_script", ROOT / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, args)])
        module.main()


def test_the_suite_from_a_checkpoint_to_its_record_cut_off_and_gone_on_with(checkpoint, tmp_path, monkeypatch, capsys):
    out, catalogue = tmp_path / "new" / "d.json", write(tmp_path / "c.jsonl", *TINY)
    args = ["--suite", "distractors", "--checkpoint", checkpoint, "--catalogue", catalogue, "--out", out]
    settings = ["--set", *SETTINGS]
    ran, plain = [], distractors.run_condition

    def counted(*given, crash_at=""):
        ran.append((given[4], given[5]))
        if crash_at == given[4]:
            raise RuntimeError("power cut")
        return plain(*given)

    monkeypatch.setattr(distractors, "run_condition", lambda *given: counted(*given, crash_at="hard"))
    with pytest.raises(RuntimeError, match="power cut"):
        evaluate(*args, "--k", 0, 4, 5, *settings)
    partial = json.loads(out.read_text())
    assert list(partial["conditions"]) == ["own", "random 4", "random 5"] and partial["restricted"]["n"] == 4

    monkeypatch.setattr(distractors, "run_condition", counted)
    ran.clear(), capsys.readouterr()
    evaluate(*args, "--k", 0, 4, 5, *settings)
    text, record = capsys.readouterr().out, json.loads(out.read_text())
    assert ran == [("hard", 4), ("hard", 5)] and f"random 4: taken from {out}" in text
    assert list(record["conditions"]) == ["own", "random 4", "random 5", "hard 4", "hard 5"]
    assert all(record["conditions"][name] == e for name, e in partial["conditions"].items())
    assert list(record["restricted"]["metrics"]) == list(record["conditions"]) and record["restricted"]["n"] == 4
    assert "over the 4 tasks kept under every condition" in text and "Prompt tokens" in text
    assert record["data"] == "embedded world, held out" and record["depends_on"]["config"]["data"]["eval_tasks"] == 4

    ran.clear()
    evaluate(*args, "--k", 5, 6, "--how", "hard", *settings)  # another K beside the old ones
    more = json.loads(out.read_text())
    assert ran == [("hard", 6)] and list(more["conditions"]) == [*record["conditions"], "hard 6"]
    assert list(more["restricted"]["metrics"]) == ["hard 5", "hard 6"]

    ran.clear()
    before = out.read_text()
    for other, what in (([*settings, "rollout.max_tool_chars=99", "eval.success_threshold=0.5"],
                         "different in config: eval.success_threshold, rollout.max_tool_chars; name"),
                        ([*settings, "data.eval_tasks=5"], "different in tasks_sha256; config: data.eval_tasks;"),
                        ([*settings, "--temperature", 1], "different in temperature;"),
                        ([*settings, "--nearest", "embeddings"], "different in nearest;")):
        with pytest.raises(ValueError, match=what):
            evaluate(*args, *other, "--k", 4)
    write(catalogue, *TINY, tool("one more"))
    with pytest.raises(ValueError, match="different in catalogue_sha256;"):
        evaluate(*args, *settings, "--k", 4)
    assert not ran and out.read_text() == before


def test_without_the_config_by_embeddings_and_a_catalogue_that_is_too_small(checkpoint, tmp_path, capsys, monkeypatch):
    args = ["--suite", "distractors", "--checkpoint", checkpoint, "--catalogue", write(tmp_path / "c.jsonl", *TINY)]
    evaluate(*args, "--k", 4, "--how", "hard", "--nearest", "embeddings", "--set", *SETTINGS, "data.eval_tasks=2")
    assert "hard 4" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(distractors, "run_condition", None)  # none is begun
        with pytest.raises(ValueError, match="12 tools asked for, but to its own 3 the catalogue of 8 has only 8 oth"):
            evaluate(*args, "--k", 4, 12, "--set", *SETTINGS)
    for wrong in (["--suite", "distractors", "--checkpoint", checkpoint], [*args, "--k", -1],
                  ["--suite", "toucan", "--checkpoint", checkpoint, "--k", 4]):
        with pytest.raises(SystemExit):
            evaluate(*wrong)


def test_a_record_of_something_else(tmp_path):
    for text in ("{", "[]", '{"suite": "toucan", "metrics": {}}', '{"conditions": {}, "depends_on": null}'):
        (tmp_path / "o.json").write_text(text)
        with pytest.raises(ValueError, match="o.json: expected the record of a distractor suite"):
            finished(tmp_path / "o.json", {"temperature": 0.0})
    (tmp_path / "o.json").write_text("")
    assert finished(tmp_path / "o.json", {}) == finished(tmp_path / "none.json", {}) == {}


def test_other_weights_are_another_checkpoint(checkpoint, tmp_path):
    cfg = load_config()

    def of(folder, tasks):
        return distractors.identity(folder, tasks, TINY, cfg, 0.0, "tfidf")
    copy = tmp_path / "copy"
    copy.mkdir()
    for p in checkpoint.iterdir():
        (copy / p.name).write_bytes(p.read_bytes())
    one, two = [task("q", OWN)], [task("q", OWN[:1])]
    assert of(checkpoint, one) == of(copy, one)
    assert of(copy, two)["tasks_sha256"] != of(copy, one)["tasks_sha256"]
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert of(copy, one)["checkpoint_sha256"] != of(checkpoint, one)["checkpoint_sha256"]


@pytest.mark.parametrize("words, named", [
    (("distractors", "--catalogue", "c", "--subset", "simple"), "--subset"), (("toucan", "--k", 5), "--k"),
    (("toucan", "--limit", 5), "--limit"), (("bfcl", "--agent", "gold"), "--agent"),
    (("tau2", "--how", "hard", "--subset", "java"), "--how, --subset"), (("bfcl", "--user-name", "x"), "--user-name")])
def test_options_of_another_suite_are_refused(words, named, capsys):
    with pytest.raises(SystemExit):
        evaluate("--checkpoint", "nowhere", "--suite", *words)
    assert f"{named}: not for --suite {words[0]}" in capsys.readouterr().err
