"""From sampled ids to text as it grows, and where a stop string cuts it. Pure.

Ids come one by one, characters do not: a character may take several ids, a stop string begins in one id and ends in
another, and an id may hold the end of a stop string and more. What is handed out is never taken back. How the ids were
chunked on their way changes nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3
"""A character of UTF-8 has four bytes at most, so the last three may be the beginning of one."""
_CONTEXT = 8
"""Ids in front of the new ones that are decoded again with them: they hold the beginning of a character that goes on,
and some tokenizers write a word's space by what is before it."""
_LONGEST_WINDOW = 24


class StopMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A stop string in the output.

    Attributes:
        text: the string.
        start_token, end_token: output tokens `[start_token, end_token)` hold it; the first may hold text before it, the
            last is the end of the output.
    """

    text: str
    start_token: int
    end_token: int


class Detokenizer:
    """Text of ids as they come; what was returned stays true whatever comes next.

    Args:
        decode: the text of ids.

    Attributes:
        unfinished: whether the last ids may be the beginning of a character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._done = 0  # characters of the window's text that were handed out
        self.unfinished = False

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        self._window.extend(ids)
        text = self._decode(self._window)
        unfinished = min(len(text) - len(text.rstrip(_BROKEN)), _UNFINISHED)
        stable = max(len(text) - unfinished, self._done)
        new, self._done, self.unfinished = text[self._done : stable], stable, unfinished > 0
        if len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._done = max(len(self._decode(self._window)) - unfinished, 0)
        return new

    def finish(self) -> str:
        """Return what is left once no more ids come."""
        text = self._decode(self._window)
        rest, self._done, self.unfinished = text[self._done :], max(self._done, len(text)), False
        return rest


class StopFinder:
    """Lets text through up to the stop string that is complete first; keeps back what may become one.

    Args:
        stops: not empty ones.

    Example:
        >>> finder = StopFinder(["END"])
        >>> finder.push("so E"), finder.push("N"), finder.push("D."), finder.found
        ('so ', '', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        self._held = ""
        self.passed = 0
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return what surely belongs to the reply."""
        text = self._held + text
        cut = self._first_end(text)
        if cut is not None:
            start, self.found = cut
            self._held = ""
        else:
            start = len(text) - self._held_back(text)
            self._held = text[start:]
        self.passed += start
        return text[:start]

    def finish(self) -> str:
        """Return what was kept back once no more text comes."""
        rest, self._held = self._held, ""
        self.passed += len(rest)
        return rest

    def _first_end(self, text: str) -> tuple[int, str] | None:
        """Return where the stop string that ends first begins; of several that end there, the longest."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _held_back(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ReplyText:
    """The text of one sample while it grows.

    Args:
        decode: the text of ids, without special tokens.
        stops: strings that end it.

    Attributes:
        match: the stop string that ended it; what comes after is not looked at.
    """

    def __init__(self, decode: Decode, *, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._finder = StopFinder(stops) if stops else None
        # Half characters decoded after each token: the odd half is a character that it begins and does not end.
        self._ends: list[int] = []
        self._decoded = 0
        self.match: StopMatch | None = None

    def push(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text that these ids complete and that surely belongs to the reply."""
        if self._finder is None:
            return self._detokenizer.push([int(token) for token in ids])
        out: list[str] = []
        for token in ids:
            if self.match is not None:
                break
            self._ends.append(0)
            out.append(self._take(self._finder, self._detokenizer.push([int(token)])))
        return "".join(out)

    def finish(self) -> str:
        """Return what is left once no more ids come."""
        if self.match is not None:
            return ""
        rest = self._detokenizer.finish()
        if self._finder is None:
            return rest
        text = self._take(self._finder, rest) if rest else ""
        return text if self.match is not None else text + self._finder.finish()

    def _take(self, finder: StopFinder, decoded: str) -> str:
        """Return what the text of the newest token lets through."""
        self._decoded += len(decoded)
        self._ends[-1] = 2 * self._decoded + self._detokenizer.unfinished
        text = finder.push(decoded)
        if finder.found is not None:
            start = bisect.bisect_right(self._ends, 2 * finder.passed)
            self.match = StopMatch(text=finder.found, start_token=start, end_token=len(self._ends))
        return text
