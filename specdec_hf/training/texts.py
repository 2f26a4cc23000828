"""Texts for training from settings to a store: prompts once, then answers of the target, here or on a server.

Started again, it goes on where it was: prompts, the target's own turns and answers are kept as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import (
    Messages,
    Sampling,
    answer_jobs,
    check_chat,
    first_loop,
    keep_answers,
    provenance,
    turn_end,
    write_answers,
    write_user_turns,
    write_whole,
)
from .endpoint import Endpoint
from .progress import Progress
from .sources import TextSettings, given_prompts
from .store import TokenStore

PROMPTS = "prompts.jsonl"
TURNS = "own-turns.json"
OWN_PROMPTS = 2_000
"""User turns that a target writes itself where nobody says how many."""


def write_texts(
    name: str,
    tokenizer: Any,
    load: Callable[[], Any],
    settings: TextSettings,
    place: Path,
    base: Path = Path(),
    dtype: str = "float32",
    vocab_size: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TokenStore:
    """Fill a store as the settings say.

    Args:
        name: of the target, for the provenance.
        tokenizer: the target's.
        load: gives the target, when it is needed.
        settings: what to write.
        place: directory of the store.
        base: directory that files of the settings are relative to.
        dtype: of the target.
        vocab_size: of the target; ``None`` asks the loaded target.
        say: called with a line now and then.

    Raises:
        ValueError: prompts that cannot be read or put to this target, settings that it cannot follow, or another
            store in this place.
        OSError: no such file, no room, or the server is out of reach. What has been written stays, whole.
        ImportError: ``datasets`` is not installed.
    """
    chat = check_chat(tokenizer, settings.system_prompt, settings.thinking)
    if settings.endpoint is not None and not chat:
        raise ValueError(
            f"endpoint={settings.endpoint!r}, but the target's tokenizer has no chat template, so its answers cannot "
            "be put into tokens; leave the endpoint out, or name the target's chat-tuned model"
        )
    sampling = settings.draws()
    about = provenance(tokenizer, name, "as served" if settings.endpoint else dtype, settings.described(base), sampling)
    store = TokenStore(place, about)
    prompts = _prompts(tokenizer, load, settings, store, base, chat, say)
    written = sum(int(item.mask.sum()) for item in store)
    wanted = None if settings.max_tokens is None else settings.max_tokens - written
    left = len(prompts) - len(store.done)
    if left <= 0 or (wanted is not None and wanted <= 0):
        say(f"{place}: all texts are there")
        return store
    if written:
        say(f"{place} has {written:,} answer tokens; going on")
    progress = Progress(place, left, wanted, say)
    try:
        if settings.endpoint is None:
            say("the target answers")
            write_answers(
                load(), tokenizer, prompts, store, sampling, wanted, progress, 256, settings.system_prompt,
                settings.thinking,
            )  # fmt: skip
        else:
            size = vocab_size or load().config.get_text_config().vocab_size
            rows = served_answers(tokenizer, prompts, store, settings, size)
            keep_answers(rows, store, wanted, progress, 256, min(256, 4 * settings.concurrency))
    finally:
        progress.close()
    if not store.parts():
        raise ValueError(
            f"{place}: no answer was long enough to learn from, or no prompt fits max_prompt_tokens="
            f"{sampling.max_prompt_tokens}; give other prompts, or raise it"
        )
    return store


def _prompts(
    tokenizer: Any,
    load: Callable[[], Any],
    settings: TextSettings,
    store: TokenStore,
    base: Path,
    chat: bool,
    say: Callable[[str], None],
) -> list[Messages]:
    """Prompts of a store, as they were when it was begun."""
    file = store.path / PROMPTS
    if file.is_file():
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = given_prompts(settings, base, chat)
    if settings.self_written and not chat:
        prompts += [[]] * settings.self_written
    elif settings.self_written:
        say(f"the target writes {settings.self_written} user turns")
        turns = write_user_turns(
            load(), tokenizer, settings.self_written, settings.draws(), system_prompt=settings.system_prompt,
            place=store.path / TURNS, say=say,
        )  # fmt: skip
        say(f"{len(turns)} different ones can be used")
        prompts += [[{"role": "user", "content": text}] for text in turns]
    if not prompts:
        raise ValueError(
            "the target wrote no user turn that can be used (all too long, broken or repeating themselves); give "
            "prompts: JSONL files, or a data set"
        )
    store.begin()
    write_whole(file, "".join(json.dumps(prompt, ensure_ascii=True) + "\n" for prompt in prompts))
    return prompts


@dataclass
class ServedText:
    """An answer of a server, in tokens.

    Attributes:
        number: of its prompt.
        ids: prompt and answer.
        prompt_length: leading ids that are the prompt.
    """

    number: int
    ids: list[int]
    prompt_length: int


def served_answers(
    tokenizer: Any, prompts: list[Messages], store: TokenStore, settings: TextSettings, vocab_size: int
) -> Iterator[ServedText]:
    """Answers of the server, put into tokens as they would stand behind the prompt; loops are cut.

    A tokenizer may cut a text in another way than the target did when it wrote it; that is rare, and the text is the
    target's all the same.

    Raises:
        ValueError, OSError: see :class:`~specdec_hf.training.endpoint.Endpoint`.
    """
    assert settings.endpoint is not None
    sampling = settings.draws()
    server = Endpoint(settings.endpoint, settings.endpoint_model, settings.api_key_variable, settings.concurrency)
    end = turn_end(tokenizer)
    before: dict[int, list[int]] = {}

    def jobs() -> Iterator[tuple[int, Messages, dict[str, Any]]]:
        for number, ids, temperature, limit in answer_jobs(
            tokenizer, prompts, sampling, store.done, vocab_size, settings.system_prompt, settings.thinking
        ):
            before[number] = ids
            yield (
                number,
                _with_system(prompts[number], settings.system_prompt),
                _options(sampling, number, temperature, limit, settings.thinking),
            )

    for number, reply in server.run(jobs()):
        prompt = before.pop(number)
        answer = tokenizer(reply.text, add_special_tokens=False)["input_ids"]
        answer += [end] if reply.stopped and end is not None else []
        start = first_loop(answer)
        yield ServedText(number, prompt + (answer if start is None else answer[:start]), len(prompt))


def _with_system(messages: Messages, system_prompt: str | None) -> Messages:
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _options(sampling: Sampling, number: int, temperature: float, limit: int, thinking: bool | None) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": limit, "seed": sampling.seed + number}
    if thinking is not None:
        options["chat_template_kwargs"] = {"enable_thinking": thinking}
    return options


def make_texts(
    target: str, output: str | Path, settings: TextSettings, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """What ``specdec data`` does: load what is needed of a target, and fill a store.

    Args:
        target: name on the Hub or directory; ``default`` is the embedded SmolLM2-135M-Instruct.
        output: directory of the store.
        settings: what to write; files are relative to the current directory.
        say: called with a line now and then.

    Returns:
        Figures: texts, answer tokens, bytes on disk.

    Raises:
        As :func:`write_texts`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = resolve(target, say)
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = AutoConfig.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = writing_dtype(config, device, Path(output))
    loaded: list[Any] = []

    def load() -> Any:
        if not loaded:
            say(f"loading {target}")
            loaded.append(AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval())
        return loaded[0]

    store = write_texts(
        "default" if target == "default" else hub_or_last(target), tokenizer, load, settings, Path(output),
        dtype=str(dtype).removeprefix("torch."), vocab_size=config.get_text_config().vocab_size, say=say,
    )  # fmt: skip
    texts = list(store)
    return {
        "texts": len(texts),
        "answer_tokens": sum(int(item.mask.sum()) for item in texts),
        "bytes": sum(part.stat().st_size for part in store.parts()),
    }


def writing_dtype(config: Any, device: str, place: Path) -> Any:
    """The number type in which a target writes texts: that of a store which is there, else of the target's file.

    On a CPU that only emulates bfloat16 (or for files in float16), float32.

    Args:
        config: the target's configuration.
        device: `"cpu"`, `"cuda"`, ...
        place: directory of the store.
    """
    import torch

    from ..hardware import emulates_bfloat16

    known = (TokenStore(place).provenance or {}).get("target_dtype") if place.is_dir() else None
    if isinstance(known, str) and isinstance(getattr(torch, known, None), torch.dtype):
        return getattr(torch, known)
    own = getattr(config, "dtype", None) or torch.float32
    slow = device == "cpu" and (own != torch.bfloat16 or emulates_bfloat16())
    return torch.float32 if slow else own


def resolve(target: str, say: Callable[[str], None]) -> str:
    """What ``from_pretrained`` is given for a target's name."""
    if target != "default":
        return target
    from ..default_target import fetch_default_target

    return fetch_default_target(say).path


def hub_or_last(target: str) -> str:
    """A target's name as it may be told to others: of a directory its last part."""
    return Path(target).resolve().name if Path(target).exists() else target
