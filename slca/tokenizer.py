"""Text <-> ids: one interface over `tokenizer.json` and sentencepiece (`sentencepiece_tokenizer.py`); a BPE trainer.

Its point is the guard: text from users, tools and files can never become a control token. A *control token* here is
every added token, special or not (Qwen's `<tool_call>` is not special and still is one), and with sentencepiece every
control or user-defined piece. The model's unknown token is none: it stands for text no vocabulary entry covers.

Left out: no BOS or EOS is put around a text, no padding or truncation, no tokens that only `tokenizer_config.json` or
`added_tokens.json` name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

Span = tuple[str, bool]  # text, trusted

QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
QWEN25, QWEN3 = "qwen2.5", "qwen3"  # chat templates
OTHER_STOPS = ("</s>", "<|eot_id|>", "<|end_of_text|>", "<eos>")  # only where no configuration names a stop


class Tokenizer:
    """What both kinds share; `load_tokenizer` and `train_bpe` make one.

    Attributes: `control` (control token text -> id), `size` (largest id + 1; ids from there on mean nothing and are
    never to be sampled), `stop_ids` (ids that end a turn, the configured end-of-text first).
    """

    control: dict[str, int]
    size: int
    stop_ids: tuple[int, ...]
    _own_stop: int | None = None  # the end of text that the vocabulary file itself names

    def _setup(self, control: dict[str, int], glued: Iterable[int], size: int, folder: Path | None) -> None:
        self.control, self.size = control, size
        self._glued = frozenset(glued)  # control ids after which a piece of text does not count as a text's start
        self._control_ids = frozenset(control.values())
        # Longest first: of two control tokens that start at one place the longer wins, as in the tokenizers library.
        names = sorted(control, key=len, reverse=True)
        self._control_re = re.compile("|".join(map(re.escape, names))) if names else None
        self.config = read_json(folder / "tokenizer_config.json") if folder else {}
        self.stop_ids = _stop_ids(self, folder)
        self._plain: dict[bool, Callable[[str], list[int]]] = {}

    # What a kind of tokenizer brings: the library's own encoding, one that knows no control token, the way back.
    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _encode_found(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """ids, and the (start, end) of the control tokens in the text."""
        raise NotImplementedError

    def _make_plain(self, fresh: bool) -> Callable[[str], list[int]]:
        """An encoding that knows no control token; `fresh`: of a text's start, where some models put a space."""
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def token_to_id(self, token: str) -> int | None:
        raise NotImplementedError

    def id_to_token(self, i: int) -> str:
        """The vocabulary's own name of a token; "" for an id it does not know."""
        raise NotImplementedError

    @property
    def template(self) -> str:
        """The chat template of the vocabulary: "qwen3" where `<think>` and `<tool_response>` are both control tokens.

        Else "qwen2.5": Qwen2.5 and SmolLM2 have neither, the embedded world has the first alone. The vocabulary
        decides, not a template in a configuration file: it is what a policy was trained with, and what export keeps.
        """
        return QWEN3 if {"<think>", "<tool_response>"} <= self.control.keys() else QWEN25

    def encode(self, text: str) -> list[int]:
        """Ids of trusted text: control tokens written in it become their ids."""
        return self._encode(_no_surrogates(text))

    def encode_untrusted(self, text: str) -> list[int]:
        """Ids of text that may hold anything: no control id comes out, and decoding gives the text back.

        (Back up to what the tokenizer's own normaliser changes, Unicode NFC with Qwen's.)
        """
        text = _no_surrogates(text)
        ids = self._encode(text)
        return ids if self._control_ids.isdisjoint(ids) else self._encode_plain(text)

    def encode_spans(self, spans: Iterable[Span]) -> list[int]:
        """Ids of the spans' joined text, where a control token counts only if it lies wholly in trusted spans.

        Spans leave no trace of their own: pieces may run across a border, so without hostile text the ids are those
        of `encode` on the whole.
        """
        spans = [(_no_surrogates(text), trusted) for text, trusted in spans]
        whole = "".join(text for text, _ in spans)
        runs = _trusted_runs(spans)
        ids, found = self._encode_found(whole)
        if all(any(a <= start and end <= b for a, b in runs) for start, end in found):
            return ids
        # Someone smuggled a control token in: take only those of the trusted runs, all else is plain text.
        ids, done, fresh = [], 0, True
        for a, b in runs:
            for match in self._control_re.finditer(whole[a:b]):
                control = self.control[match.group()]
                ids += [*self._encode_plain(whole[done : a + match.start()], fresh), control]
                done, fresh = a + match.end(), control not in self._glued
        return ids + self._encode_plain(whole[done:], fresh)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, control tokens shown. Ids outside [0, size) are skipped; broken UTF-8 gives U+FFFD."""
        return self._decode([i for i in map(int, ids) if 0 <= i < self.size])

    def _encode_plain(self, text: str, fresh: bool = True) -> list[int]:
        if not text:
            return []
        if fresh not in self._plain:  # made when the first hostile text comes: most runs never see one
            self._plain[fresh] = self._make_plain(fresh)
        ids = self._plain[fresh](text)
        assert self._control_ids.isdisjoint(ids), "a control token got through the guard"
        return ids

    def save(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer, its configuration and its stop ids; `load_tokenizer(folder)` gives the same again.

        transformers 5 reads a trained one alike too, but for AutoTokenizer next to a `config.json` of model_type
        "qwen2": there it splits words by Qwen's own pattern, whatever the file says (PreTrainedTokenizerFast does not).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self.config) or self._new_config()
        write_json(folder / "tokenizer_config.json", config)
        path = folder / "generation_config.json"
        write_json(path, {**read_json(path), "eos_token_id": list(self.stop_ids)})
        self._save_vocabulary(folder)

    def _new_config(self) -> dict:
        raise NotImplementedError

    def _save_vocabulary(self, folder: Path) -> None:
        raise NotImplementedError


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, through the tokenizers library."""

    def __init__(self, backend, folder: Path | None = None):
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        unknown = getattr(backend.model, "unk_token", None)
        control = {str(t.content): i for i, t in backend.get_added_tokens_decoder().items() if t.content != unknown}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._names = {i: name for name, i in control.items()}
        self._setup(control, control.values(), max(vocabulary.values(), default=-1) + 1, folder)

    def _encode(self, text):
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_found(self, text):
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, found = encoding.ids, []
        if self._control_ids.isdisjoint(ids):
            return ids, found
        for i, (start, end) in zip(ids, encoding.offsets, strict=True):
            if i in self._control_ids:
                # A token with lstrip or rstrip also covers white space around it, which may be someone else's.
                at = text.find(self._names[i], start, end)
                found.append((at, at + len(self._names[i])) if at >= 0 else (start, end))
        return ids, found

    def _make_plain(self, fresh):
        """The same model without added tokens, and with no way to reach a control token's entry by merging either."""
        from tokenizers import Tokenizer as Backend

        data = json.loads(self._backend.to_str())
        data["added_tokens"] = []
        model = data["model"]
        hidden = {name: f"\U0010fffe{i}" for name, i in self.control.items()}  # no text holds this noncharacter name
        if isinstance(model["vocab"], dict):
            model["vocab"] = {hidden.get(name, name): i for name, i in model["vocab"].items()}
        else:  # unigram: a list of [piece, score]
            model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
        if "merges" in model:
            pairs = (m if isinstance(m, list) else m.split(" ") for m in model["merges"])
            model["merges"] = [m for m in pairs if hidden.keys().isdisjoint((m[0], m[1], m[0] + m[1]))]
        text = json.dumps(data)
        if not fresh:  # Metaspace's "first" means the text's own start
            text = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        plain = Backend.from_str(text)
        return lambda text: plain.encode(text, add_special_tokens=False).ids

    def _decode(self, ids):
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_to_id(self, token):
        return self._backend.token_to_id(token)

    def id_to_token(self, i):
        return self._backend.id_to_token(i) or ""

    def _new_config(self):
        eos = self._backend.id_to_token(self.stop_ids[0]) if self.stop_ids else None
        pad = "<|endoftext|>" if "<|endoftext|>" in self.control else eos
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": False,
        }

    def _save_vocabulary(self, folder):
        replace_file(folder / "tokenizer.json", self._backend.to_str(pretty=True).encode())


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a model folder, a `tokenizer.json` or a sentencepiece `.model` file.

    The `*_config.json` files next to it name its stop ids. FileNotFoundError: nothing there; ValueError: not one.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))]
        file = next((f for f in files if f.is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{path}: no tokenizer.json and no sentencepiece *.model in this folder")
    elif path.is_file():
        file = path
    else:
        raise FileNotFoundError(f"{path}: no such tokenizer file or folder")
    raw = file.read_bytes()
    if file.suffix == ".model":
        from slca.sentencepiece_tokenizer import SentencePieceTokenizer

        try:
            return SentencePieceTokenizer(raw, file.parent)
        except (RuntimeError, OSError, IndexError) as error:
            raise ValueError(f"{file}: not a sentencepiece model ({error})") from error
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(raw.decode())
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: not a tokenizer.json ({error})") from error
    return JsonTokenizer(backend, file.parent)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    fixed: Sequence[str] = (),
    pattern: str | None = None,
    phrases: Sequence[str] = (),
) -> Tokenizer:
    """Byte-level BPE learnt from texts; the same input gives the same tokenizer.

    Ids: `special_tokens` first, then the 256 bytes and the merges, then `phrases`, then `fixed` (added tokens that are
    not special). A phrase is one entry wherever it stands in a text: a word that need not be reached by merges.
    `pattern` is the regular expression whose matches become words (None: GPT-2's); digits always stand alone.
    `vocab_size` counts everything and is a ceiling: a small corpus has fewer merges. ValueError: too small a size.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    tokens = [*special_tokens, *fixed]
    if len(set(tokens)) < len(tokens) or "" in tokens:
        raise ValueError(f"special_tokens and fixed must be different and not empty: {tokens}")
    if vocab_size < 256 + len(tokens) + len(phrases):
        raise ValueError(f"vocab_size {vocab_size} is under the 256 bytes + {len(tokens) + len(phrases)} named tokens")
    if phrases:
        longest_first = [re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True)]
        pattern = "|".join(longest_first + ([pattern] if pattern else []))
    backend = Backend(models.BPE(ignore_merges=bool(phrases)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        ([pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else [])
        + [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(fixed) - len(phrases),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        # The trainer does not cut at added tokens: left in, they would be learnt as merges that plain text then takes.
        names = sorted([*tokens, *phrases], key=len, reverse=True)
        cut = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        for text in texts:
            yield from filter(None, cut.split(text))

    backend.train_from_iterator(pieces(), trainer)
    if phrases:
        data, letters = json.loads(backend.to_str()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for phrase in phrases:
            data["model"]["vocab"].setdefault(letters.pre_tokenize_str(phrase)[0][0], len(data["model"]["vocab"]))
        backend = Backend.from_str(json.dumps(data))
    backend.add_tokens([AddedToken(t, normalized=False) for t in fixed])
    return JsonTokenizer(backend)


def _trusted_runs(spans: list[Span]) -> list[tuple[int, int]]:
    """(start, end) of the stretches of trusted text, neighbours joined."""
    runs, at = [], 0
    for text, trusted in spans:
        end = at + len(text)
        if trusted and text:
            runs.append((runs.pop()[0], end) if runs and runs[-1][1] == at else (at, end))
        at = end
    return runs


def _no_surrogates(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no text and which no tokenizer takes."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def _stop_ids(tokenizer: Tokenizer, folder: Path | None) -> tuple[int, ...]:
    found = []
    name = tokenizer.config.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if isinstance(name, str):
        found.append(tokenizer.token_to_id(name))
    for file in ("generation_config.json", "config.json"):
        ids = read_json(folder / file).get("eos_token_id") if folder else None
        found += ids if isinstance(ids, list) else [ids]
    found += [tokenizer._own_stop, *map(tokenizer.token_to_id, QWEN_STOPS)]
    good = [i for i in found if isinstance(i, int) and 0 <= i < tokenizer.size]
    if not good:
        good = [tokenizer.control[name] for name in OTHER_STOPS if name in tokenizer.control]
    return tuple(dict.fromkeys(good))


def read_json(path: Path) -> dict:
    """The object in a JSON file, {} if there is no such file. ValueError: not JSON, or not an object."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a JSON object expected, found {type(data).__name__}")
    return data


def write_json(path: Path, data: dict) -> None:
    replace_file(path, (json.dumps(data, ensure_ascii=False, indent=2) + "\n").encode())


def replace_file(path: Path, raw: bytes) -> None:
    """Write under another name, then rename: a reader sees the old file or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(raw)
    os.replace(part, path)
