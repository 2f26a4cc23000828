"""How far the writing of texts is: a bar, an estimate of time and size from the first part, and whether it all fits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BYTES_PER_TOKEN = 5
"""int32 id and uint8 mask, see :mod:`specdec_hf.training.store`."""
_BYTES_PER_TEXT = 64


class Progress:
    """Told of every part before it is written.

    Args:
        place: directory that texts are written to, there or not yet.
        prompts: that are left to answer.
        tokens: answer tokens that are wanted; ``None``: no limit but the prompts.
        say: called with the estimate, and with a line a part.
        bar: whether to show a bar where the terminal can (it is left out where standard error is no terminal).
    """

    def __init__(
        self, place: Path, prompts: int, tokens: int | None, say: Callable[[str], None], bar: bool = True
    ) -> None:
        from tqdm import tqdm

        self.place, self.prompts, self.tokens, self.say = place, prompts, tokens, say
        self.answered = self.written = self.stored = 0
        self.began = time.monotonic()
        total, unit = (prompts, "prompts") if tokens is None else (tokens, "tokens")
        self._bar: Any = tqdm(total=total, unit=unit, desc="texts", disable=None if bar else True, smoothing=0)

    def part(self, prompts: int, answer_tokens: int, all_tokens: int) -> None:
        """A part is about to be written.

        Args:
            prompts: that it answers (with those whose answers are left out).
            answer_tokens: in it. all_tokens: with those of the prompts.

        Raises:
            OSError: what is still to come does not fit on the disk (told once, from the first part).
        """
        first = self.answered == 0
        self.answered += prompts
        self.written += answer_tokens
        self.stored += all_tokens
        if first:
            self._estimate()
        self._bar.update(prompts if self.tokens is None else answer_tokens)
        limit = "" if self.tokens is None else f" of {self.tokens:,}"
        if self._bar.disable:
            self.say(f"{self.written:,}{limit} answer tokens, {self.answered:,} of {self.prompts:,} prompts")

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def _estimate(self) -> None:
        seconds = max(time.monotonic() - self.began, 1e-6)
        share = self.prompts / max(self.answered, 1)
        if self.tokens is not None and self.written:
            share = min(share, self.tokens / self.written)
        share = max(share, 1.0)
        size = int(share * (BYTES_PER_TOKEN * self.stored + _BYTES_PER_TEXT * self.answered)) + 65_536
        self.say(
            f"{self.written / seconds:,.0f} answer tokens a second; about {spoken(share * seconds - seconds)} more and "
            f"{size / 1e6:,.1f} MB for {share * self.written:,.0f} answer tokens"
        )
        above = next(folder for folder in (self.place, *self.place.resolve().parents) if folder.is_dir())
        free = shutil.disk_usage(above).free
        if free < size:
            raise OSError(
                f"{self.place}: the texts need about {size:,} bytes and the disk has {free:,} free; free some room, "
                "name another directory, or ask for fewer tokens (--max-tokens)"
            )


def spoken(seconds: float) -> str:
    """A time in words."""
    for size, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
