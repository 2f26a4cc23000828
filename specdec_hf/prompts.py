"""Prompts from JSONL files: conversations to be answered by a target. Rank 0.

A line is ``{"turns": ["first user turn", ...]}`` (the target answers each), or a chat, ``{"messages": [{"role": ...,
"content": ...}, ...]}``, whose assistant messages stand as the answers to what comes before them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPE = '{"turns": ["..."]} or {"messages": [{"role": "user", "content": "..."}]}'
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Turn:
    """What the target is to answer next.

    Attributes:
        messages: added to the conversation before the answer, at least one.
        answer: what the file gives as the answer, for the turns that follow; None: the target's own answer stands
        there.
    """

    messages: list[dict[str, str]]
    answer: str | None = None


@dataclass(frozen=True)
class Conversation:
    """One line of a file.

    Attributes:
        source: ``"name.jsonl:7"``, for messages.
        turns: at least one.
        chat: the line is a chat (``messages``), which only a chat template can pass on.
    """

    source: str
    turns: list[Turn]
    chat: bool = False


def read_conversations(path: Path | str, limit: int | None = None) -> list[Conversation]:
    """Read a JSONL file; empty lines are skipped.

    Args:
        path: the file, UTF-8.
        limit: read this many conversations from the start and no further; None = all.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is not readable (file and line number are named), or no line at all.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: name a JSONL file with lines like {SHAPE}")
    conversations: list[Conversation] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(conversations) >= limit:
                break
            if line.strip():
                where = f"{path}, line {number}"
                conversations.append(conversation_of(_parse(line, where), where, f"{path.name}:{number}"))
    if not conversations:
        raise ValueError(f"{path} holds no prompts: it needs at least one line like {SHAPE}")
    return conversations


def conversation_of(row: Any, where: str, source: str) -> Conversation:
    """A conversation from a row like ``SHAPE``.

    Args:
        row: a dict with ``turns`` or ``messages``.
        where: the row's place, for errors. source: its name, for messages.

    Raises:
        ValueError: the row has another shape.
    """
    return Conversation(source, _turns(row, where), chat=isinstance(row, dict) and not row.get("turns"))


def encode(tokenizer: Any, messages: list[dict[str, str]], thinking: bool | None = None) -> Any:
    """Token ids [1, L] of a conversation, ready for the target's answer.

    With a chat template: through it. Without: the contents alone, joined by line breaks, for the model to continue.

    Args:
        tokenizer: the target's.
        messages: roles and contents.
        thinking: the template's ``enable_thinking``; ``None`` leaves it to the template.

    Raises:
        ValueError: the chat template refuses these messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")["input_ids"]
    from jinja2.exceptions import TemplateError

    mode = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **mode
        )["input_ids"]
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the target's chat template refuses a conversation with the roles {roles}: {error}. Change the file to "
            "roles that this model knows (many know no system role)."
        ) from error


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not readable as JSON ({error}). Each line must be like {SHAPE}.") from error


def _turns(row: Any, where: str) -> list[Turn]:
    if isinstance(row, dict) and isinstance(row.get("turns"), list) and row["turns"]:
        for text in row["turns"]:
            _check_text(text, where)
        return [Turn([{"role": "user", "content": text}]) for text in row["turns"]]
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        return _chat_turns(row["messages"], where)
    found = f"the keys {', '.join(map(repr, row)) or '(none)'}" if isinstance(row, dict) else f"a {type(row).__name__}"
    raise ValueError(f"{where}: has {found}, but a line must be like {SHAPE}, neither list empty.")


def _chat_turns(messages: list[Any], where: str) -> list[Turn]:
    turns: list[Turn] = []
    pending: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: {message!r} is not a message; it needs a role ({', '.join(ROLES)}) and a content."
            )
        _check_text(message.get("content"), where)
        if message["role"] != "assistant":
            pending.append({"role": message["role"], "content": message["content"]})
        elif any(one["role"] == "user" for one in pending):
            turns.append(Turn(pending, message["content"]))
            pending = []
        elif turns:  # two answers in a row are one
            turns[-1] = Turn(turns[-1].messages, f"{turns[-1].answer}\n{message['content']}")
        else:
            pending.append({"role": "assistant", "content": message["content"]})
    if any(one["role"] == "user" for one in pending):
        turns.append(Turn(pending))
    if not turns:
        raise ValueError(f"{where}: holds no user message, so there is nothing to answer.")
    return turns


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {text!r} stands where a text is needed; it must be a string that is not empty.")
