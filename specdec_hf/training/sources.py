"""Where prompts come from: JSONL files, a data set of the Hub, docstrings, or the target itself. No answers here.

A prompt is a list of messages that ends with a user's turn; an empty list stands for a text from its very beginning,
which is what a base model writes.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..prompts import Conversation, conversation_of, read_conversations
from .data import Messages, Sampling, normalised

CODE_PROMPT = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n\n```"
COLUMNS = ("messages", "turns", "conversation", "prompt", "question", "instruction", "query", "text")
"""Columns of a data set that are looked for, in this order, where none is named."""


@dataclass(frozen=True)
class TextSettings:
    """What the target is to write; the section ``data`` of a recipe.

    Attributes:
        texts: directory of texts that are written already (``specdec data``); no other field but this one then.
        prompts: JSONL files, relative to the recipe.
        exclude: JSONL files whose prompts must not be learned from (evaluation sets).
        dataset: name of a data set on the Hub (extra ``data``).
        dataset_column: its column with a text, a list of turns or a list of messages; ``None`` looks for one.
        dataset_split: its split.
        docstring_prompts: so many code tasks from Python's standard library.
        self_written: so many user turns that the target writes itself; of a base model, so many texts from the start.
        max_prompts: take so many prompts of files and data set at most.
        max_tokens: answer tokens in all; ``None``: until all prompts are answered.
        system_prompt: put before prompts that have no system message of their own.
        thinking: ``enable_thinking`` of the chat template; ``None`` leaves it to the template.
        endpoint: address of an OpenAI-compatible server that answers instead of a model on this machine.
        endpoint_model: its name for the target; ``None`` asks.
        api_key_variable: environment variable with the server's key.
        concurrency: requests at a time.
        sampling: fields of :class:`~specdec_hf.training.data.Sampling`.
    """

    texts: str | None = None
    prompts: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    dataset: str | None = None
    dataset_column: str | None = None
    dataset_split: str = "train"
    docstring_prompts: int = 0
    self_written: int = 0
    max_prompts: int | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None
    thinking: bool | None = None
    endpoint: str | None = None
    endpoint_model: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 16
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: it must be at least 1; raise it, or leave it out for no limit")
        for name in ("docstring_prompts", "self_written"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: a number of prompts is not negative; correct it")
        if self.texts is not None:
            if others := [name for name in self._given() if name != "texts"]:
                raise ValueError(
                    f"{others[0]}={getattr(self, others[0])!r} beside texts={self.texts!r}: these are written already; "
                    "leave one out"
                )
        elif not (self.prompts or self.dataset or self.docstring_prompts or self.self_written):
            raise ValueError(
                "no prompts: name files (prompts) or a data set (dataset), or let the target write its own "
                "(self_written: how many)"
            )
        _known(self.sampling, Sampling, "sampling")
        self.draws()

    def _given(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        given = {}
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            if value is not default and value != default:
                given[item.name] = value
        return given

    def draws(self) -> Sampling:
        """``sampling`` as what it describes."""
        return Sampling(**self.sampling)

    @classmethod
    def of(cls, section: dict[str, Any]) -> TextSettings:
        """From a recipe's section. Raises ValueError for an unknown field (the nearest one is given)."""
        _known(section, cls, "the section data")
        return cls(**{name: value for name, value in section.items() if value is not None})

    def described(self, base: Path) -> dict[str, Any]:
        """For the provenance: flat, files by name and digest. ``base`` is where relative files lie."""
        told = self._given()
        for name in ("sampling", "max_tokens", "concurrency", "api_key_variable", "endpoint"):
            told.pop(name, None)  # more tokens are no other texts, nor are they from another address
        for name in ("prompts", "exclude"):
            if getattr(self, name):
                told[name] = ", ".join(_digest(base / one) for one in getattr(self, name))
        return told


def _known(given: dict[str, Any], kind: Any, section: str) -> None:
    names = [item.name for item in fields(kind)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
            raise ValueError(f"{name!r} is not a field of {section}; {hint}")


def _digest(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: name a JSONL file, relative to the recipe or whole")
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"


def given_prompts(settings: TextSettings, base: Path, chat: bool) -> list[Messages]:
    """Prompts of files, data set and docstrings, each once, without those of the excluded files.

    Args:
        settings: see there.
        base: directory that files are relative to.
        chat: the target has a chat template.

    Raises:
        ValueError: an unreadable line or row (named), chats for a target without a chat template, or nothing left.
        FileNotFoundError: no such file.
        ImportError: ``datasets`` is not installed.
    """
    held_out = {
        normalised(message["content"])
        for path in settings.exclude
        for conversation in read_conversations(base / path)
        for turn in conversation.turns
        for message in turn.messages
    }
    found: dict[str, Messages] = {}
    for conversation in _conversations(settings, base):
        if conversation.chat and not chat:
            raise ValueError(
                f"{conversation.source} is a chat (messages), but the target has no chat template to pass it on with; "
                'give lines {"turns": ["..."]}, whose text is continued, or name the target\'s chat-tuned model'
            )
        messages = conversation.turns[0].messages
        text = "\n".join(message["content"] for message in messages if message["role"] != "system")
        if held_out.isdisjoint({normalised(text), *(normalised(one["content"]) for one in messages)}):
            found.setdefault(normalised(text), messages)
        if settings.max_prompts is not None and len(found) >= settings.max_prompts:
            break
    if not found and (settings.prompts or settings.dataset):
        raise ValueError(
            "no prompt is left: the files or the data set are empty, or all of their prompts are in the excluded files"
        )
    for text in docstring_prompts(settings.docstring_prompts, settings.draws().seed):
        found.setdefault(normalised(text), [{"role": "user", "content": text}])
    return list(found.values())


def _conversations(settings: TextSettings, base: Path) -> Iterator[Conversation]:
    for path in settings.prompts:
        yield from read_conversations(base / path)
    if settings.dataset is not None:
        yield from dataset_conversations(settings.dataset, settings.dataset_column, settings.dataset_split)


def dataset_conversations(name: str, column: str | None = None, split: str = "train") -> Iterator[Conversation]:
    """Rows of a data set of the Hub, read one by one as they are needed.

    Args:
        name: ``org/name``, or a directory that ``datasets`` can read.
        column: with a text, a list of turns or a list of messages; ``None``: the first of ``COLUMNS`` that is there.
        split: which part.

    Raises:
        ImportError: ``datasets`` is not installed.
        ValueError: no such column, or a row of another shape (named).
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"dataset={name!r} needs the library datasets; pip install 'specdec_hf[data]', or give JSONL files"
        ) from error
    for number, row in enumerate(load_dataset(name, split=split, streaming=True)):
        chosen = column or next((one for one in COLUMNS if one in row), None)
        if chosen is None or chosen not in row:
            raise ValueError(
                f"dataset {name}: there is no column {column or ' or '.join(COLUMNS)}; name one of "
                f"{', '.join(map(str, row))} with --dataset-column (data.dataset_column in a recipe)"
            )
        value, source = row[chosen], f"dataset {name}, row {number}"
        if isinstance(value, str):
            value = [value]
        is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        yield conversation_of({"messages" if is_chat else "turns": value}, source, source)


def docstring_prompts(count: int, seed: int = 0) -> list[str]:
    """Code tasks: signatures and docstrings of public functions of Python's standard library, without their bodies.

    Args:
        count: how many at most; those with doctests come first.
        seed: of the choice.
    """
    found: list[tuple[bool, str]] = []
    files: Iterable[Path] = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")) if count else []
    for file in files:
        if "site-packages" in file.parts or "test" in file.parts or file.stat().st_size > 400_000:
            continue
        try:
            text = file.read_text(encoding="utf-8")
            nodes = ast.parse(text).body
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = text.split("\n")
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and len(node.body) > 1:
                docstring = ast.get_docstring(node, clean=False)
                if docstring and 60 < len(docstring) < 900:
                    head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                    found.append((">>>" not in docstring, CODE_PROMPT.format(head)))
    random.Random(seed).shuffle(found)
    found.sort(key=lambda item: item[0])
    return [prompt for _, prompt in found[:count]]
