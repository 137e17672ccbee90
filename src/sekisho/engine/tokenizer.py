"""Text to tokens and back, for one model folder.

Encoding and chat templates are those of ``transformers``: same text, same ids. Decoding is done
here, from the bytes of single tokens, because an answer is shown while it grows:

* a token may end inside a UTF-8 sequence; nothing of that sequence is shown before its end;
* a stop string may begin in one token and end in another; what may yet become one is held back.

(`tokenizers.decoders.DecodeStream` decodes a growing window again for each token, and refuses some
token sequences that a model can well emit.)

The text of special tokens inside a prompt or a message ("<|im_end|>") becomes those special tokens,
as in transformers and vLLM. So an author can forge roles within a prompt that is all his own; it
gives him nothing of another tenant, as scopes and pages do not depend on tokens. Whoever puts
foreign text into his prompts (retrieval, mail) filters it before.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from sekisho.engine.spec import ModelError


class TemplateError(ValueError):
    """The chat template refuses these messages, or there is no template; one line, for clients."""


class Tokenizer:
    """The tokenizer of one model; safe to share between threads, as it keeps no request's state.

    ``vocab_size`` counts the tokenizer's ids, added tokens included; a model's logits may be padded
    beyond it.
    """

    def __init__(self, pretrained: Any) -> None:
        """``pretrained`` is a transformers tokenizer with a ``tokenizers`` backend.

        Raises:
            ModelError: its decoder is none of the kinds that this module reads.
        """
        self._pretrained = pretrained
        self._backend: tokenizers.Tokenizer = pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._to_bytes, self.leading_spaces = _read_decoder(
            json.loads(self._backend.to_str())["decoder"]
        )
        self._pieces: dict[int, bytes] = {}
        self.special_ids = frozenset(
            token
            for token, added in self._backend.get_added_tokens_decoder().items()
            if added.special
        )
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = bool(pretrained.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the model wants around it.

        Raises:
            ValueError: ``text`` has a lone surrogate, so it is no Unicode text.
        """
        return self._encode(text, True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. The template writes
        the special tokens, so that none is added.

        Raises:
            TemplateError: no template, or it refuses the messages (roles, types, missing keys).
            ValueError: lone surrogates.
        """
        if not self.has_chat_template:
            raise TemplateError("the model has no chat template")
        try:
            text = self._pretrained.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode()  # raises for a lone surrogate
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for, perhaps part of a UTF-8 sequence; of a special
        token its name; empty for an id that the tokenizer doesn't have.

        Raises:
            ValueError: a negative id.
        """
        piece = self._pieces.get(token)
        if piece is None:
            if token < 0:
                raise ValueError(f"token id {token} is negative")
            name = self._backend.id_to_token(token)
            piece = b"" if name is None else self._to_bytes(name)
            self._pieces[token] = piece
        return piece


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder, from ``tokenizer.json`` and the files beside
    it. Nothing is downloaded, and no code of the folder is run.

    Raises:
        ModelError: files are missing or broken, or of a kind that is not supported.
    """
    from transformers import AutoTokenizer  # seconds of import

    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        pretrained = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot load the tokenizer in {folder}: {first_line}") from error
    return Tokenizer(pretrained)


class Detokenizer:
    """The text of one answer, token by token.

    The deltas of `push` and `flush`, joined, are the whole answer decoded without special tokens
    (bytes that are no UTF-8 become U+FFFD), cut before the stop string that begins first in it.
    That does not depend on where tokens begin and end. One difference from the library: among byte
    tokens of a SentencePiece model a broken one becomes U+FFFD alone, and not the whole run.

    Attributes:
        stopped: a stop string was found; nothing more comes.
    """

    __slots__ = ("_end", "_held", "_leading_spaces", "_stops", "_tokenizer", "_utf8", "stopped")

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        """Raises ValueError for an empty stop string."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = tokenizer.leading_spaces
        self._stops = [_StopString(text) for text in stop]
        self._held = ""
        self._end = 0  # characters decoded so far; the held ones are the last of them
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain, possibly none."""
        if self.stopped or token in self._tokenizer.special_ids:
            return ""
        return self._release(self._utf8.decode(self._tokenizer.piece(token)), last=False)

    def flush(self) -> str:
        """The rest, when the answer ends for another reason than a stop string. Sets ``stopped``
        if a stop string was in what was held back."""
        if self.stopped:
            return ""
        return self._release(self._utf8.decode(b"", final=True), last=True)

    def _release(self, text: str, last: bool) -> str:
        """Take new text in, give out what no stop string can reach any more: all, if ``last``."""
        while self._leading_spaces and text:
            self._leading_spaces -= 1
            text = text.removeprefix(" ")
        if not self._stops:
            return text
        self._held += text
        self._end += len(text)
        for stop in self._stops:
            stop.scan(text, self._end)
        # A whole stop string ends the answer only when no other one may still begin before it.
        open_stops = [] if last else [stop.begin(self._end) for stop in self._stops]
        found = [stop.start for stop in self._stops if stop.start is not None]
        limit = min(open_stops + found, default=self._end)
        self.stopped = limit in found
        keep = limit - (self._end - len(self._held))
        released, self._held = self._held[:keep], self._held[keep:]
        return released


class _StopString:
    """Looks for one stop string in text that comes in parts (Knuth, Morris, Pratt): constant time
    a character, however long the string."""

    __slots__ = ("_fallback", "_matched", "_text", "start")

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("stop: empty string")
        self._text = text
        self._matched = 0  # characters of the stop string that the text now ends with
        self.start: int | None = None  # where it was found, in characters of the whole text
        # _fallback[n]: of the first n + 1 characters, the longest end that is a beginning too
        self._fallback = [0] * len(text)
        matched = 0
        for index in range(1, len(text)):
            matched = self._advance(matched, text[index])
            self._fallback[index] = matched

    def _advance(self, matched: int, character: str) -> int:
        while matched and self._text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self._text[matched] == character else 0

    def scan(self, text: str, end: int) -> None:
        """Read ``text``, whose last character is the ``end``-th of the whole."""
        if self.start is not None:
            return
        for index, character in enumerate(text, start=1):
            self._matched = self._advance(self._matched, character)
            if self._matched == len(self._text):
                self.start = end - len(text) + index - self._matched
                return

    def begin(self, end: int) -> int:
        """Where the stop string begins, or may begin, in a text of ``end`` characters."""
        return end - self._matched if self.start is None else self.start


def _read_decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """How this tokenizer's token names become bytes, and how many leading spaces are dropped from
    a text: for ``decoder`` of ``tokenizer.json``.

    Two kinds exist among the supported models: byte level (GPT-2, Llama 3, Qwen, GLM) and
    SentencePiece with byte fallback (Llama 2, Mistral).
    """
    if decoder is None:
        raise ModelError("the tokenizer has no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, 0
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3] if len(steps) > 3 else {"start": 0, "stop": 0}
        is_plain = replace["pattern"] == {"String": "▁"} and replace["content"] == " "
        if is_plain and strip["stop"] == 0 and strip.get("content", " ") == " ":
            return _sentence_piece, strip["start"]
    raise ModelError(f"the tokenizer's decoder {'+'.join(kinds)} is not supported")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map: a byte that prints in Latin-1 is its own character; the other bytes, in
    order, are the characters from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(name: str) -> bytes:
    # An added token is written as it is; most of them are ASCII, where both readings agree.
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in name])
    except KeyError:
        return name.encode()


def _sentence_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.replace("▁", " ").encode()
