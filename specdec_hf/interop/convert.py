"""``specdec convert``: a head from one layout to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .formats import FORMATS, Answers
from .reading import read_head
from .target import Target
from .writing import write_head


def convert(
    source: str,
    out: str,
    to: str = "specdec",
    target: str | None = None,
    answers: Answers | None = None,
    hub: dict[str, Any] | None = None,
) -> list[str]:
    """Read a head in any known layout and write it in another; weights stay bit for bit.

    Args:
        source: directory or Hub repository; its layout is told from the fields of ``config.json``.
        out: directory to make; it must not exist or be empty.
        to: ``specdec``, ``deepspec``, ``speculators`` or ``zlab``.
        target: the head's target, directory or repository. Needed for speculators, and to write borrowed embeddings.
        answers: what the file does not say.
        hub: ``revision``, ``token``, ``subfolder`` of the head, as in ``from_pretrained``.

    Returns:
        What a user should know about the result, a sentence each; empty if nothing.

    Raises:
        ValueError: see :func:`~specdec_hf.interop.reading.read_head` and
            :func:`~specdec_hf.interop.writing.write_head`. OSError: a place that cannot be read or written.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r}: it must be one of {', '.join(FORMATS)}")
    answers = answers or Answers()
    chosen = Target(target) if target is not None else None
    if chosen is not None:
        answers = replace(answers, vocab_size=chosen.text.vocab_size)
    head = read_head(source, answers, hub)
    if chosen is not None:
        chosen.check(head.config)
        head.config.num_target_layers = chosen.text.num_hidden_layers
        head.config.target_name_or_path = target
        head.config._check()
    mask_row = answers.mask_token_id if head.layout == "specdec" else None
    return [*head.notes, *write_head(head, out, to, chosen, mask_row)]


def run_convert(
    source: str,
    out: str | None,
    to: str,
    target: str | None,
    answers: Answers,
    hub: dict[str, Any],
    check: bool,
    prompts: list[str] | list[list[int]],
    say: Callable[[str], None],
) -> None:
    """The command: convert where ``out`` is given, measure where ``check`` is asked for; ``say`` gets each line.

    Raises:
        ValueError: neither of the two, ``check`` without a target, and what :func:`convert` raises.
    """
    if check and target is None:
        raise ValueError("--check measures with the target: give --target MODEL")
    if out is None and not check:
        raise ValueError(
            "give a directory to write to (specdec convert IN OUT), or --check --target MODEL to measure IN"
        )
    if out is not None:
        if Path(out).resolve() == Path(source).resolve():
            raise ValueError(f"{out} is the source itself; give another directory")
        for line in convert(source, out, to, target, answers, hub):
            say(f"note: {line}")
        say(f"{source} -> {out} ({to})")
    if check:
        from .check import check_head

        assert target is not None
        said = check_head(out or source, target, Answers() if out else answers, {} if out else hub, prompts or None)
        say(said.report())
