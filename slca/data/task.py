"""The one record of a problem: what the policy sees, and what it is scored against."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Task:
    """One user turn to be answered, with its gold calls.

    messages: chat history up to and with the user turn ({"role", "content", optional "tool_calls"}).
    tools: OpenAI function schemas, {"type": "function", "function": {"name", "description", "parameters"}}.
    gold_calls: nested by step, each call {"name": str, "arguments": dict}; calls of one step are due in parallel.
    facts: values a full reply has to name (strings); empty when they are not known.
    answer: a reference reply, or "".
    subset: the task's kind, for metrics by kind.
    demonstration: the messages that follow `messages` in a supervised example (assistant, tool, assistant ...).
    """

    id: str
    messages: list[dict]
    tools: list[dict]
    gold_calls: list[list[dict]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    answer: str = ""
    subset: str = ""
    demonstration: list[dict] = field(default_factory=list)

    @property
    def allowed_tools(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def shown_tools(self) -> list[dict]:
        """The tools as a prompt prints them: a result's schema is for the simulator, and long."""
        hidden = ("output_schema", "outputSchema")
        return [{**tool, "function": {k: v for k, v in tool["function"].items() if k not in hidden}}
                for tool in self.tools]

    @property
    def question(self) -> str:
        """The text of the last user turn."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")
