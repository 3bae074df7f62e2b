"""Reading tasks: the authors' two preview rows become the right tasks, every form of gold calls is told apart, and each
malformed row is refused with its file, row and field. `data/SOURCES.md` says where the rows are from."""
from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from slca.data import DataError, Task, load_tasks
from slca.data.toucan import gold_form

DATA = Path(__file__).parent / "data"
RL = json.loads((DATA / "toucan_rl_row.jsonl").read_text())
SFT = json.loads((DATA / "toucan_sft_row.jsonl").read_text())
SFT["messages"] = json.loads(SFT["messages"])
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
PLAIN = {"messages": [{"role": "user", "content": "1 + 2?"},
                      {"role": "assistant", "content": None,
                       "tool_calls": [{"id": "c1", "type": "function",
                                       "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
                      {"role": "tool", "tool_call_id": "c1", "content": "3"},
                      {"role": "assistant", "content": "It is 3."}], "tools": [TOOL]}
SAVED = {"id": "t", "messages": [{"role": "user", "content": "hi"}], "tools": [], "gold_calls": []}


def load(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return load_tasks(path, **options)


def edit(row, value, *keys):
    """A copy of the row with the value at the keys; `...` deletes."""
    row = copy.deepcopy(row)
    at = row
    for key in keys[:-1]:
        at = at[key]
    if value is ...:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return row


def gold_row(gold):
    return edit(RL, gold, "reward_model", "ground_truth", "gold_tool_calls")


def test_rl_preview():
    with pytest.warns(UserWarning, match="1 of 1 tasks are not nested by step.*1 of them are names"):
        task, = load_tasks(DATA / "toucan_rl_row.jsonl")
    server = "shadcn/ui-component-reference-server-"
    assert [m["role"] for m in task.messages] == ["system", "user"]
    assert task.messages[0]["content"] == ("You have access to the following tools:\n\n"
                                           "Use them when appropriate to help answer the user's questions.")
    assert task.question == RL["reward_model"]["ground_truth"]["question_content"]
    assert task.allowed_tools == RL["reward_model"]["ground_truth"]["allowed_tools"]
    assert [call["name"].removeprefix(server) for call in task.gold_calls[0]] == [
        "search_components", "search_components", "list_shadcn_components", "get_component_examples",
        "get_component_examples"]
    assert len(task.gold_calls) == 1 and task.subset == "tool_call" and task.id == "toucan_rl_row-1"


def test_sft_preview():
    task, = load_tasks(DATA / "toucan_sft_row.jsonl")
    assert task.id == "05f7077a-7c40-5721-b033-8f0d6d72a708" and task.subset == "single-turn-diversify"
    assert [[(c["name"], c["arguments"]) for c in step] for step in task.gold_calls] == [
        [("united-states-weather-get_current_weather", {"location": "42.3601,-71.0589"}),
         ("united-states-weather-get_current_weather", {"location": "41.8781,-87.6298"})],
        [("advanced-calculator-server-add", {"a": 70, "b": 72})],
        [("advanced-calculator-server-div", {"a": 142, "b": 2})]]
    roles = [m["role"] for m in task.demonstration]
    assert roles == ["assistant", "tool", "tool", "assistant", "tool", "assistant", "tool", "assistant"]
    first, second, third = (m for m in task.demonstration if m.get("tool_calls"))
    assert first["content"].startswith("I'll help you") and first["tool_calls"] == task.gold_calls[0]
    assert second["content"].startswith("Now let me") and third["content"] == ""  # a call without text before it
    assert task.answer == task.demonstration[-1]["content"] and task.answer.startswith("## Cross-Country")
    assert task.messages == [{"role": "user", "content": SFT["question"]}]


def test_openai_rows_and_the_last_user_turn(tmp_path):
    longer = edit(PLAIN, [*PLAIN["messages"], {"role": "user", "content": "and 4?"},
                          {"role": "assistant", "content": "That needs no tool: 7."}], "messages")
    short, long = load(tmp_path, PLAIN, "", longer)
    assert short.gold_calls == [[{"name": "add", "arguments": {"a": 1, "b": 2}}]] and short.answer == "It is 3."
    assert long.question == "and 4?" and long.gold_calls == [] and len(long.messages) == 5
    assert long.messages[1]["tool_calls"] == short.gold_calls[0]  # the earlier turn is context
    assert (short.id, long.id) == ("rows-1", "rows-3")  # line numbers


def test_saved_tasks_come_back_equal_and_ids_are_unique(tmp_path):
    task, = load_tasks(DATA / "toucan_sft_row.jsonl")
    task.facts = ["71.0"]
    row = dataclasses.asdict(task)
    first, second = load(tmp_path, row, row)
    assert first == task
    assert second == dataclasses.replace(task, id=f"{task.id}#2")
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert load_tasks(tmp_path / "rows.json") == [task]


A, B = {"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}


@pytest.mark.parametrize(("gold", "form", "steps"), [
    ([[A, B], [A]], "nested", [[A, B], [A]]),
    ([[], [{}], [A, {}]], "nested", [[A]]),
    ([A, B], "flat", [[A, B]]),
    (["b", "b"], "names", [[B, B]]),
    ([["b"], ["b"]], "names", [[B], [B]]),
    ([[{"name": "a", "arguments": '{"x": 1}'}]], "nested", [[A]]),
    ([[{"name": "b", "arguments": None}], [{"name": "b"}]], "nested", [[B], [B]]),
    (json.dumps([[A], [B]]), "nested", [[A], [B]]),
    ([], "empty", []), (None, "empty", []), ("null", "empty", [])])
def test_gold_forms(tmp_path, gold, form, steps):
    assert gold_form(gold) == form
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task, = load(tmp_path, gold_row(gold))
    assert task.gold_calls == steps
    assert len(caught) == (form in ("flat", "names"))


def sft(*messages):
    return edit(SFT, [{"role": role, "content": content} for role, content in messages], "messages")


CALL = ("tool_call", "{'name': 'add', 'arguments': '{}'}")
TRUTH = ("reward_model", "ground_truth")
GOLD = "reward_model.ground_truth.gold_tool_calls"
WRONG = [  # row, field, part of the message
    ("{", "", "JSON"), ("[1]", "", "an object"), ({"a": 1}, "", "reward_model"),
    (edit(RL, ..., *TRUTH), "reward_model.ground_truth", "mapping"),
    (edit(RL, "{", *TRUTH), "reward_model.ground_truth", "JSON"),
    (edit(RL, ..., "prompt"), "prompt", "list of messages"),
    (edit(RL, [{"role": "system", "content": "x"}], "prompt"), "prompt", "user's turn"),
    (edit(RL, 3, "prompt", 1, "content"), "prompt[1].content", "text"),
    (edit(RL, "boss", "prompt", 1, "role"), "prompt[1].role", "tool_response"),
    (edit(RL, "[{]", "tools"), "tools", "JSON"), (edit(RL, "{}", "tools"), "tools", "list of tool schemas"),
    (edit(RL, [{"function": {}}], "tools"), "tools[0]", "with a name"),
    (edit(RL, [{"name": "x", "parameters": []}], "tools"), "tools[0].parameters", "JSON schema"),
    (edit(RL, ["other"], *TRUTH, "allowed_tools"), "reward_model.ground_truth.allowed_tools", "names of tools"),
    (edit(RL, ..., *TRUTH, "gold_tool_calls"), GOLD, "list of steps"),
    (gold_row("[{"), GOLD, "JSON"),
    (gold_row({"name": "a"}), GOLD, "list of steps"),
    (gold_row([[A], B]), GOLD, "steps (lists) only"),
    (gold_row([[A, {"arguments": {}}]]), GOLD + "[0][1]", "with a name"),
    (gold_row([[{"name": "a", "arguments": "{x"}]]), GOLD + "[0][0].arguments", "JSON"),
    (gold_row([[{"name": "a", "arguments": "[1]"}]]), GOLD + "[0][0].arguments", "object"),
    (edit(SFT, "[", "messages"), "messages", "JSON"), (sft(("assistant", "hi")), "messages", "user turn"),
    (sft(("user", "q")), "messages", "reply"), (sft(("user", "q"), ("assistant", " ")), "messages", "reply"),
    (sft(("user", "q"), CALL, ("tool_response", "1")), "messages", "reply"),
    (sft(("user", "q"), CALL), "messages", "results of the last 1"),
    (sft(("user", "q"), CALL, ("assistant", "a")), "messages[2]", "results of 1 calls"),
    (sft(("user", "q"), CALL, CALL, ("tool_response", "1"), CALL), "messages[4]", "results of 1 calls"),
    (sft(("user", "q"), ("tool_response", "1")), "messages[1]", "a call that this result answers"),
    *((sft(("user", "q"), ("tool_call", text)), "messages[1].content", part) for text, part in [
        ("{'name': ", "Python literal"), ("['add']", "Python literal"), ("{'arguments': '{}'}", "with a name"),
        ("__import__('os').system('true')", "Python literal"), ("{'name': f'{1}'}", "Python literal"),
        ("[" * 5000, "open brackets"), ("'" + "x" * 300_000, "characters")]),
    (sft(("user", "q"), ("tool_call", "{'name': 'add', 'arguments': '{x'}")), "messages[1].content.arguments", "JSON"),
    (edit(PLAIN, "add", "messages", 1, "tool_calls"), "messages[1].tool_calls", "a list"),
    (edit(PLAIN, None, "messages", 3, "content"), "messages[3].content", "text"),
    ({**SAVED, "surprise": 1}, "surprise", "only the keys"), ({**SAVED, "id": 3}, "id", "text"),
    ({**SAVED, "facts": [1]}, "facts", "list of texts"), ({**SAVED, "messages": []}, "messages", "user's turn"),
]


@pytest.mark.parametrize(("row", "field", "part"), WRONG, ids=range(len(WRONG)))
def test_a_malformed_row_is_refused_with_its_place(tmp_path, row, field, part):
    with pytest.raises(DataError) as error:
        load(tmp_path, PLAIN, "", row)
    found = error.value
    assert (found.row, found.field) == (3, field) and part in found.expected
    assert "rows.jsonl, row 3" in str(found) and field in str(found)
    with pytest.warns(UserWarning, match="1 rows left out; the first: .*row 3"):
        assert len(load(tmp_path, PLAIN, "", row, bad_rows="skip")) == 1


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("not parquet")
    for name, part in (("absent.jsonl", "exists"), ("a.csv", ".jsonl"), ("object.json", "list"),
                       ("latin.jsonl", "UTF-8"), ("empty.jsonl", "one usable row")):
        with pytest.raises(DataError, match=part):
            load_tasks(tmp_path / name)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)  # as if it were not installed
    with pytest.raises(DataError, match=r'pip install -e "\.\[parquet\]"'):
        load_tasks(tmp_path / "bad.parquet")


def test_parquet_gives_the_same_tasks(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [PLAIN | {"messages": [{k: v for k, v in m.items() if k != "tool_calls"} for m in PLAIN["messages"][:1]]
                     + [{"role": "assistant", "content": "3"}]}, gold_row([[A, {"name": "c", "arguments": {"y": 2}}]])]
    rows[1]["extra_info"] = None
    for row in rows:  # structs in lists get the union of their keys: x of the second call is a null, not an argument
        path = tmp_path / "rows.parquet"
        parquet.write_table(pa.Table.from_pylist([row]), path)
        expected, = load(tmp_path, row)
        assert load_tasks(path) == [dataclasses.replace(expected, id="rows-1")]
    assert isinstance(expected, Task) and expected.gold_calls[0][1]["arguments"] == {"y": 2}


def test_a_folder_is_its_files_and_a_byte_order_mark_is_no_error(tmp_path):
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}],
                      "tools": []})
    (tmp_path / "b.jsonl").write_text(row + "\n")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\n")
    (tmp_path / "notes.txt").write_text("no rows")
    assert [t.id.split("-")[0] for t in load_tasks(tmp_path)] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder with .jsonl, .json or .parquet files"):
        load_tasks(tmp_path / "empty")
