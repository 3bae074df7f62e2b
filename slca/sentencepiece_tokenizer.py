"""The tokenizer of a sentencepiece `.model`, behind the interface of `slca/tokenizer.py`, which loads it."""
from __future__ import annotations

import re
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from slca.tokenizer import Tokenizer, replace_file

CONTROL, USER_DEFINED = 3, 4  # SentencePiece.Type in sentencepiece_model.proto


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`. `encode` also reads control pieces such as `</s>`, which the library alone does not."""

    def __init__(self, proto: bytes, folder: Path | None = None):
        self._proto = proto
        self._backend = sp = _sentencepiece(proto)
        size = sp.get_piece_size()
        self._own_stop = sp.eos_id()  # -1: none
        kinds = _piece_kinds(proto)
        fixed = {i for i in range(size) if kinds[i] == USER_DEFINED}
        control = {sp.id_to_piece(i): i for i in range(size) if kinds[i] in (CONTROL, USER_DEFINED)}
        self._setup(control, fixed, size, folder)
        names = [name for name, i in control.items() if i not in fixed]
        self._cut = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        self._cuts = bool(names)

    def _encode(self, text):
        if not self._cuts:
            return self._backend.encode(text)
        ids = []
        for k, part in enumerate(self._cut.split(text)):
            ids += [self.control[part]] if k % 2 else self._backend.encode(part)
        return ids

    def _encode_found(self, text):
        found = self._control_re.finditer(text) if self._control_re else ()
        return self._encode(text), [match.span() for match in found]

    def _make_plain(self, fresh):
        # A control piece is never matched in a text, a user-defined one always: make the second kind the first.
        proto = _piece_kinds(self._proto, change=(USER_DEFINED, CONTROL))
        # Protobuf merges what is appended: field 3 (normalizer_spec) with its field 3 (add_dummy_prefix) false.
        return _sentencepiece(proto if fresh else proto + b"\x1a\x02\x18\x00").encode

    def _decode(self, ids):
        # The library drops control pieces, and one leading space a call: decode what lies between them.
        text, part = [], []
        for i in [*ids, None]:
            if i is None or (i in self._control_ids and i not in self._glued):
                text.append(self._backend.decode(part) if part else "")
                text.append("" if i is None else self._backend.id_to_piece(i))
                part = []
            else:
                part.append(i)
        return "".join(text)

    def token_to_id(self, token):
        i = self._backend.piece_to_id(token)
        return i if self._backend.id_to_piece(i) == token else None

    def id_to_token(self, i):
        return self._backend.id_to_piece(i) if i < self._backend.get_piece_size() else ""

    def _new_config(self):
        sp = self._backend
        ids = {"bos_token": sp.bos_id(), "eos_token": sp.eos_id(), "pad_token": sp.pad_id(), "unk_token": sp.unk_id()}
        names = {key: sp.id_to_piece(i) for key, i in ids.items() if i >= 0}
        return {"tokenizer_class": "LlamaTokenizer", **names, "clean_up_tokenization_spaces": False}

    def _save_vocabulary(self, folder):
        replace_file(folder / "tokenizer.model", self._proto)


def _sentencepiece(proto: bytes):
    if not proto:
        raise RuntimeError("the file is empty")
    return SentencePieceProcessor(model_proto=proto)


def _piece_kinds(proto: bytes, change: tuple[int, int] | None = None):
    """The type of every piece; with `change` (old, new) instead the model's bytes with pieces of one type made another.

    Read from the protobuf bytes by hand, as the library hands out neither a setter nor the user-defined type: field 1
    of the model is a piece, whose field 3 is its type (absent: 1, normal).
    """
    kinds, out, at = [], bytearray(proto), 0
    while at < len(proto):
        field, start, end = _field(proto, at)
        if field == 1:
            kind, inner = 1, start
            while inner < end:
                number, value, after = _field(proto, inner)
                if number == 3:
                    kind = proto[value]
                    if change and kind == change[0]:
                        out[value] = change[1]
                inner = after
            kinds.append(kind)
        at = end
    return bytes(out) if change else kinds


def _field(raw: bytes, at: int) -> tuple[int, int, int]:
    """Field number at a place of protobuf bytes, and the start and end of its value."""
    key, at = _varint(raw, at)
    match key & 7:
        case 0:
            return key >> 3, at, _varint(raw, at)[1]
        case 1:
            return key >> 3, at, at + 8
        case 2:
            length, at = _varint(raw, at)
            return key >> 3, at, at + length
        case 5:
            return key >> 3, at, at + 4
    raise RuntimeError(f"protobuf wire type {key & 7}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (raw[at] & 127) << shift
        if raw[at] < 128:
            return value, at + 1
        at, shift = at + 1, shift + 7
