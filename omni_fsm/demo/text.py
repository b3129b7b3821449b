"""Text between thinker and talker: token ids to text pieces, pieces to clauses, a clause to what can be spoken."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

MIN_CLAUSE_CHARS: Final = 12
"""A clause end before this many characters is passed over, so that "Yes," is spoken with what follows it."""

MAX_CLAUSE_CHARS: Final = 160
"""A clause is cut here, at a space if there is one: about 12 s of sound, 12 MB of frames."""

_CLAUSE_END = re.compile(r"""[.,;:!?]+["'\u201d\u2019)\]]*(?=\s)""")
_INCOMPLETE = "\ufffd"  # what a decoder gives for bytes that are no character, or not one yet


@dataclass(slots=True)
class TextPieces:
    """One request's token ids so far and how much of their text was given out. The pieces, joined, are the full decode.

    Attributes:
        token_ids: All ids so far, at most the request's ``max_new_tokens``.
        sent_chars: Characters of their text that were given out as pieces.
    """

    token_ids: list[int] = field(default_factory=list)
    sent_chars: int = 0

    def push(self, token_id: int, decode: Callable[[Sequence[int]], str]) -> str:
        """Add one id; give the text that is certain now, "" while a character's bytes are incomplete.

        A byte-level tokenizer may spread one character over several ids, so an end that decodes to U+FFFD is held back.
        """
        self.token_ids.append(token_id)
        return self._text_after(decode(self.token_ids).rstrip(_INCOMPLETE))

    def flush(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Give what was held back, after the last id; "" if nothing was."""
        return self._text_after(decode(self.token_ids))

    def _text_after(self, text: str) -> str:
        piece = text[self.sent_chars :]
        self.sent_chars += len(piece)
        return piece


@dataclass(slots=True)
class ClauseBuffer:
    """One request's text that is not spoken yet. Clauses depend on the text alone, not on how it came in pieces.

    A clause ends at ``.,;:!?`` (and closing quotes or brackets) before whitespace or at the end of the text.

    >>> buffer = ClauseBuffer()
    >>> buffer.push("Yes, it is Paris,"), buffer.push(" the capital of"), buffer.flush()
    ([], ['Yes, it is Paris,'], ['the capital of'])

    Attributes:
        waiting: Text without a certain clause end; at most ``MAX_CLAUSE_CHARS`` characters between two pushes.
    """

    waiting: str = ""

    def push(self, piece: str) -> list[str]:
        """Add text; give the clauses that it completed, stripped, in order. An end needs the whitespace after it."""
        clauses = []
        self.waiting = (self.waiting + piece).lstrip()
        while (end := _first_end(self.waiting)) > 0:
            clauses.append(self.waiting[:end].rstrip())
            self.waiting = self.waiting[end:].lstrip()
        return clauses

    def flush(self) -> list[str]:
        """Give the rest as one clause after the last push, or an empty list; the buffer is empty after it."""
        rest, self.waiting = self.waiting.rstrip(), ""
        return [rest] if rest else []


def _first_end(text: str) -> int:
    """Give where the first clause of ``text`` ends, 0 if it has no certain end yet. ``text`` has no leading space."""
    for match in _CLAUSE_END.finditer(text[: MAX_CLAUSE_CHARS + 1]):
        if match.end() >= MIN_CLAUSE_CHARS:
            return match.end()
    if len(text) <= MAX_CLAUSE_CHARS:
        return 0
    spaces = [at for at in range(MIN_CLAUSE_CHARS, MAX_CLAUSE_CHARS + 1) if text[at].isspace()]
    return spaces[-1] if spaces else MAX_CLAUSE_CHARS


def speakable(clause: str) -> str:
    """Give the clause with every digit as 0 to 9 and compatibility forms replaced: what the talker's reader accepts.

    >>> speakable("x² is over ٣")
    'x2 is over 3'
    """
    text = unicodedata.normalize("NFKC", clause)
    return "".join(str(unicodedata.digit(char)) if char.isdigit() else char for char in text)
