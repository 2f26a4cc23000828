"""Answers from an OpenAI-compatible server (vLLM, SGLang, ...) that runs the target: many at once, with retries.

It knows messages and texts; what becomes of them is not known here. Standard library alone, so no client is needed.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

Messages = list[dict[str, str]]


class Reply(NamedTuple):
    """What the server answered.

    Attributes:
        text: the answer, without the token that ends a turn.
        stopped: the answer ended by itself, not at the most tokens.
    """

    text: str
    stopped: bool


@dataclass(frozen=True)
class Endpoint:
    """A server and how it is asked.

    Attributes:
        url: with or without ``/v1`` at its end, e.g. ``http://localhost:8000``.
        model: name that the server knows the target by; ``None`` asks it for its only one.
        api_key_variable: environment variable with the key; nothing is sent where it is not set.
        concurrency: requests at a time.
        retries: further tries of a request that failed for want of the server (no connection, 429, 5xx).
        pause: seconds before the first further try; doubled each time.
        timeout: seconds for one answer.
    """

    url: str
    model: str | None = None
    api_key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 16
    retries: int = 5
    pause: float = 1.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint={self.url!r}: it must begin with http:// or https://, as in http://localhost:8000"
            )
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(
                f"concurrency={self.concurrency!r}, retries={self.retries!r}: at least 1 request at a time and no "
                "negative number of further tries; correct them"
            )

    @property
    def base(self) -> str:
        """Address up to and with ``/v1``."""
        stem = self.url.rstrip("/")
        return stem if stem.endswith("/v1") else stem + "/v1"

    def model_name(self) -> str:
        """The model's name, asked of the server where it was not given.

        Raises:
            ValueError: the server has none or several.
            OSError: it cannot be reached.
        """
        if self.model is not None:
            return self.model
        listed = self._ask("/models", None)
        names = [item.get("id") for item in listed.get("data") or [] if isinstance(item, dict)]
        if len(names) != 1:
            raise ValueError(
                f"{self.base} serves {len(names)} models ({', '.join(map(str, names)) or 'none'}); name the target "
                "with --endpoint-model (data.endpoint_model in a recipe)"
            )
        return str(names[0])

    def chat(self, model: str, messages: Messages, options: dict[str, Any]) -> Reply:
        """One answer.

        Args:
            model: as :meth:`model_name` gives it.
            messages: the conversation up to the answer.
            options: further fields of the request: ``temperature``, ``max_tokens``, ``seed``, ...

        Raises:
            ValueError: the server refuses the request, or answers in another form.
            OSError: it cannot be reached, or fails again and again.
        """
        answer = self._ask("/chat/completions", {"model": model, "messages": messages, **options})
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.base}/chat/completions answers {str(answer)[:200]!r}, which has no choices[0].message.content; "
                "name an OpenAI-compatible server"
            ) from error
        if reasoning:
            raise ValueError(
                f"{self.base} takes the thinking out of its answers, so the target's own text is not known; start the "
                "server without a reasoning parser, or write without thinking (--no-thinking)"
            )
        return Reply(text, choice.get("finish_reason") == "stop")

    def run(self, jobs: Iterable[tuple[int, Messages, dict[str, Any]]]) -> Iterator[tuple[int, Reply]]:
        """Answers to jobs (number, messages, options) in the order of arrival. Raises as :meth:`chat` does."""
        model = self.model_name()
        waiting: dict[Future[Reply], int] = {}
        source = iter(jobs)
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            more = True
            while more or waiting:
                while more and len(waiting) < self.concurrency:
                    job = next(source, None)
                    if job is None:
                        more = False
                        break
                    waiting[pool.submit(self.chat, model, job[1], job[2])] = job[0]
                if waiting:
                    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_variable):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, headers)
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {error.read(300).decode(errors='replace').strip()}"
                if error.code != 429 and error.code < 500:
                    raise ValueError(f"{self.base}{path} refuses the request with {reason}") from error
            except ValueError as error:
                raise ValueError(
                    f"{self.base}{path} does not answer in JSON ({error}); is it an API server?"
                ) from error
            except OSError as error:  # no connection, a broken one, or time is up
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise OSError(
            f"{self.base}{path} failed {self.retries + 1} times, the last time with {reason}; texts written so far are "
            "kept: start the server and give the same command again"
        )
