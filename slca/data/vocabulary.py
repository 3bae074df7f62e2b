"""The embedded world's tokenizer: a byte-level BPE of about a thousand entries, trained in seconds by seed.

Two choices make copying learnable for a small model. A name (a capitalised word) or a number never joins its
neighbours, so a value has the same tokens (two a name, one a digit) in the question, in the JSON of a call and in a
result. And the fixed phrases of the chat template are single entries, as they nearly are in a large vocabulary.
"""
from __future__ import annotations

from slca import chat
from slca.data.world import World
from slca.tokenizer import Tokenizer, train_bpe

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIXED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
PHRASES = (
    # the system turn
    f"system\n{chat.DEFAULT_SYSTEM}", chat.TOOLS_BEFORE, *chat.TOOLS_AFTER.replace("</tool_call>", "<tool_call>")
    .split("<tool_call>"), '\n{"type": "function", "function": {"name": "', '", "description": "',
    '", "parameters": {"type": "object", "properties": {"', '": {"type": "string"}', '": {"type": "integer"}',
    '": {"type": "string", "enum": ["', '"]}}, "required": ["', '}, "required": ["', '"]}}}', '", "',
    # calls and turns
    '\n{"name": "', '\n[{"name": "', '", "arguments": {"', '"}}, {"name": "', '}}, {"name": "', '"}}\n', "}}\n",
    '"}}]\n', "}}]\n", "user\n", "assistant\n", "user\n<tool_response>\n", "\n</tool_response>",
    "\n</tool_response>\n<tool_response>\n",
)
# a capitalised syllable | other capitals | a word with the space before it | a space, a line end, a tag's start |
# punctuation
PATTERN = r"[A-Z][a-z]?[aeiou]|[A-Z][a-z]*|[ _]?[a-z]+| |\n|<|[^A-Za-z0-9 \n<]+(?: [^A-Za-z0-9 \n<]+)*"


def world_tokenizer(vocab_size: int = 1024, seed: int = 0, examples: int = 3000) -> Tokenizer:
    """Train on the training split's dialogues in both forms of parallel calls. Raises ValueError: size too small."""
    phrases = sorted({p for p in PHRASES if p} - set(FIXED))

    def texts():
        for i, task in enumerate(World("train", seed).tasks(examples)):
            yield chat.render_text(task.messages + task.demonstration, task.tools, add_generation_prompt=False,
                                   parallel=("list", "blocks")[i % 2])

    return train_bpe(texts(), vocab_size, SPECIAL, FIXED, PATTERN, phrases)
