"""Texts from settings to a store: every source of prompts, servers, kills, full disks, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from tiny_chat import sentences, write_chat_target
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specdec_hf import cli
from specdec_hf.training.data import Sampling, check_chat, normalised, prompt_ids, write_user_turns
from specdec_hf.training.endpoint import Endpoint
from specdec_hf.training.progress import Progress, spoken
from specdec_hf.training.sources import TextSettings, given_prompts
from specdec_hf.training.store import PROVENANCE, TokenStore
from specdec_hf.training.texts import make_texts

QUICK = {"max_new_tokens": 60, "max_prompt_tokens": 100, "batch_size": 8}
THINKS = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% if enable_thinking is false %}{{ 'no' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat") / "tiny-chat"
    write_chat_target(place)
    return place


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """24 different prompts."""
    file = tmp_path / "questions.jsonl"
    different = list(dict.fromkeys(question for question, _ in sentences(400)))[:24]
    file.write_text("\n".join(json.dumps({"turns": [one]}) for one in different))
    return file


def kept(place: Path) -> list[tuple[int, list[int]]]:
    return sorted((item.source, item.ids.tolist()) for item in TokenStore(place))


# -- sources ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_answers_to_a_file_s_prompts(chat_target: Path, questions: Path, tmp_path: Path) -> None:
    options = ["data", "--target", chat_target, "--output", tmp_path / "out", "--prompts", questions,
               "--system-prompt", "be brief", "--batch-size", 8, "--max-new-tokens", 60, "--seed", 3]  # fmt: skip
    done = CliRunner().invoke(cli.app, [str(option) for option in options])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "texts: 24" in done.output
    assert "answer tokens a second; about" in done.output and "MB for" in done.output
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    for item in TokenStore(tmp_path / "out"):
        assert tokenizer.decode(item.ids[~item.mask]).startswith("s:be brief\nu:how many ")
    made_by = TokenStore(tmp_path / "out").provenance
    assert made_by is not None
    assert made_by["system_prompt"] == "be brief" and made_by["seed"] == 3 and made_by["target"] == "tiny-chat"
    assert made_by["prompts"].startswith("questions.jsonl (") and str(tmp_path) not in json.dumps(made_by)


def test_nothing_given(chat_target: Path, tmp_path: Path) -> None:
    settings = TextSettings(self_written=12, sampling=QUICK)
    figures = make_texts(str(chat_target), tmp_path / "one", settings)
    assert figures["texts"] == 12
    make_texts(str(chat_target), tmp_path / "two", settings)
    assert kept(tmp_path / "one") == kept(tmp_path / "two"), "a fixed seed"
    prompts = [json.loads(line)[0]["content"] for line in (tmp_path / "one" / "prompts.jsonl").read_text().splitlines()]
    assert len({normalised(prompt) for prompt in prompts}) == 12
    assert all(prompt.startswith("how many ") for prompt in prompts)
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    ends = [tokenizer.decode(item.ids[item.mask]).endswith("today.<eos>") for item in TokenStore(tmp_path / "one")]
    assert sum(ends) >= 10


def test_base_models_continue_from_the_beginning(tmp_path: Path) -> None:
    write_chat_target(tmp_path / "base", chat=False)
    figures = make_texts(str(tmp_path / "base"), tmp_path / "out", TextSettings(self_written=30, sampling=QUICK))
    texts = list(TokenStore(tmp_path / "out"))
    assert 10 < figures["texts"] <= 30
    assert len({tuple(item.ids.tolist()) for item in texts}) == len(texts), "no text twice"
    for item in texts:
        assert item.ids[0] == 1 and item.mask.tolist() == [False] + [True] * (len(item.ids) - 1)
    tokenizer = make_tokenizer()
    tokenizer.bos_token = None
    assert prompt_ids(tokenizer, []) == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        prompt_ids(tokenizer, [])


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "prompt": "one one one"},
        {"id": 2, "prompt": "two two two"},
        {"id": 3, "prompt": "one one ONE"},
        {"id": 4, "prompt": "three"},
    ]
    asked: list[Any] = []
    module = ModuleType("datasets")
    module.load_dataset = lambda name, **settings: asked.append((name, settings)) or rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = given_prompts(TextSettings(dataset="org/set", max_prompts=2), tmp_path, True)
    assert [one[0]["content"] for one in found] == ["one one one", "two two two"]
    assert asked == [("org/set", {"split": "train", "streaming": True})]
    chat = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "no"}]
    rows[:] = [{"talk": chat}]
    settings = TextSettings(dataset="org/set", dataset_column="talk")
    assert given_prompts(settings, tmp_path, True) == [chat[:1]]
    with pytest.raises(ValueError, match=r"dataset org/set, row 0 is a chat.*no chat template"):
        given_prompts(settings, tmp_path, False)
    with pytest.raises(ValueError, match=r"there is no column messages or .*name one of talk with --dataset-column"):
        given_prompts(TextSettings(dataset="org/set"), tmp_path, True)
    rows[:] = [{"text": None}]
    with pytest.raises(ValueError, match="dataset org/set, row 0"):
        given_prompts(TextSettings(dataset="org/set"), tmp_path, True)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'specdec_hf\[data\]'"):
        given_prompts(TextSettings(dataset="org/set"), tmp_path, True)


def test_thinking_goes_through_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKS
    ids = [prompt_ids(tokenizer, [{"role": "user", "content": "hi"}], thinking=mode) for mode in (None, True, False)]
    assert [tokenizer.decode(one) for one in ids] == ["u:hi\na:", "u:hi\na:", "u:hi\na:no"]
    assert check_chat(tokenizer, thinking=False)
    assert TextSettings(self_written=1, thinking=False).described(Path()) == {"self_written": 1, "thinking": False}


# -- killed and started again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between parts", "between a part and its note", "while turns are written"])
def test_a_killed_run_goes_on(
    moment: str, chat_target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = moment == "while turns are written"
    settings = TextSettings(
        prompts=[] if own else [str(questions)], self_written=24 if own else 0,
        sampling={**QUICK, "batch_size": 2 if own else 8},
    )  # fmt: skip
    make_texts(str(chat_target), tmp_path / "whole", settings)

    class Killed(BaseException):
        pass

    calls: list[Any] = []
    replaced = {"between parts": (TokenStore, "append"), "between a part and its note": (TokenStore, "begin")}
    if own:
        import specdec_hf.training.data as module

        owner, name = module, "write_whole"
    else:
        owner, name = replaced[moment]
    original = getattr(owner, name)

    def dies(*arguments: Any) -> Any:
        calls.append(name)
        # begin: at the start, after part 1, after part 2; append: parts 1, 2; turns: after each few tries.
        if len(calls) == {"begin": 3, "append": 2, "write_whole": 2}[name]:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dies)
        with pytest.raises(Killed):
            make_texts(str(chat_target), tmp_path / "part", settings)
    before = kept(tmp_path / "part")
    assert bool(before) != own
    make_texts(str(chat_target), tmp_path / "part", settings)
    assert kept(tmp_path / "part") == kept(tmp_path / "whole")
    assert [one for one in kept(tmp_path / "part") if one in before] == before
    assert not list((tmp_path / "part").glob("*.tmp"))
    with pytest.raises(ValueError, match=r"made in another way \(.*seed"):
        make_texts(str(chat_target), tmp_path / "part", TextSettings(prompts=[str(questions)], sampling={"seed": 1}))


def test_more_tokens_can_be_asked_for_later(chat_target: Path, questions: Path, tmp_path: Path) -> None:
    few = make_texts(
        str(chat_target), tmp_path / "out", TextSettings(prompts=[str(questions)], max_tokens=100, sampling=QUICK)
    )
    assert 100 <= few["answer_tokens"] < 500
    more = TextSettings(prompts=[str(questions)], max_tokens=500, sampling=QUICK)
    assert 500 <= make_texts(str(chat_target), tmp_path / "out", more)["answer_tokens"] < 700
    parts = TokenStore(tmp_path / "out").parts()
    parts[0].unlink()  # as the message about an unreadable part advises
    again = make_texts(str(chat_target), tmp_path / "out", more)
    assert again["answer_tokens"] >= 500
    assert parts[0] not in TokenStore(tmp_path / "out").parts(), "a new part never takes the name of another"


def test_parts_are_written_by_time_too(
    chat_target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_hf.training.data.PART_SECONDS", 0.0)
    make_texts(str(chat_target), tmp_path / "out", TextSettings(prompts=[str(questions)], sampling=QUICK))
    assert len(TokenStore(tmp_path / "out").parts()) > 10


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_told_before_writing(
    chat_target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 9000, 9000))
    with pytest.raises(OSError, match=r"need about [\d,]+ bytes and the disk has 9,000 free.*fewer tokens"):
        make_texts(str(chat_target), tmp_path / "out", TextSettings(prompts=[str(questions)], sampling=QUICK))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["prompts.jsonl", PROVENANCE]
    monkeypatch.undo()
    make_texts(str(chat_target), tmp_path / "out", TextSettings(prompts=[str(questions)], sampling=QUICK))
    assert len(kept(tmp_path / "out")) == 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["good"]}\n\n{bad', r"p\.jsonl, line 3: not readable as JSON"),
        ('{"turn": ["good"]}', r"p\.jsonl, line 1: has the keys 'turn'"),
        ("", r"p\.jsonl holds no prompts"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"p\.jsonl, line 1: holds no user message"),
    ],
)
def test_bad_files(content: str, message: str, chat_target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        make_texts(str(chat_target), tmp_path / "out", TextSettings(prompts=[str(tmp_path / "p.jsonl")]))
    assert not (tmp_path / "out").exists()


def test_chats_need_a_chat_template(chat_target: Path, tmp_path: Path, tiny_target: Any) -> None:
    shutil.copytree(chat_target, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    tokenizer.chat_template = None
    for file in (tmp_path / "base").glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    file, base = str(tmp_path / "p.jsonl"), str(tmp_path / "base")
    for settings, message in (
        ({"prompts": [file]}, r"p\.jsonl:1 is a chat \(messages\), but the target has no chat template"),
        ({"self_written": 3, "system_prompt": "x"}, "system_prompt='x', but the target has no chat template"),
        ({"self_written": 3, "thinking": True}, "thinking=True, but the target has no chat template"),
        ({"self_written": 3, "endpoint": "http://x"}, "no chat template, so its answers cannot be put into tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            make_texts(base, tmp_path / "out", TextSettings(**settings))
    with pytest.raises(ValueError, match="does not read enable_thinking"):
        make_texts(str(chat_target), tmp_path / "out", TextSettings(self_written=3, thinking=True))
    tiny_target(vocab_size=90).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(chat_target).save_pretrained(tmp_path / "small")
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": ["zzzzz"]}))
    with pytest.raises(ValueError, match=r"the tokenizer gives the id \d+, but the target's vocabulary has 90"):
        make_texts(str(tmp_path / "small"), tmp_path / "out2", TextSettings(prompts=[str(tmp_path / "q.jsonl")]))
    assert not (tmp_path / "out").exists()


def test_a_target_that_writes_no_turns_says_so(tiny_target: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    target = tiny_target(vocab_size=260, spread=0.2)
    assert write_user_turns(target, byte_tokenizer, 2, Sampling(batch_size=4), max_tokens=30) == []
    target.save_pretrained(tmp_path / "t")
    byte_tokenizer.save_pretrained(tmp_path / "t")
    with pytest.raises(ValueError, match="wrote no user turn that can be used"):
        make_texts(str(tmp_path / "t"), tmp_path / "out", TextSettings(self_written=2, sampling={"batch_size": 4}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no prompts: name files"),
        ({"self_written": -1}, "self_written=-1"),
        ({"self_written": 1, "max_tokens": 0}, "max_tokens=0"),
        ({"self_writen": 1}, "did you mean 'self_written'"),
        ({"self_written": 1, "sampling": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"self_written": 1, "sampling": {"temperature": 0}}, "greedy_share=1"),
        ({"texts": "dir", "thinking": False}, "thinking=False beside texts"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextSettings.of(fields)


def test_estimates_in_words(tmp_path: Path) -> None:
    assert [spoken(one) for one in (5, 200, 9000, 400_000)] == ["5 seconds", "3.3 minutes", "2.5 hours", "4.6 days"]
    said: list[str] = []
    progress = Progress(tmp_path, prompts=100, tokens=4_000, say=said.append, bar=False)
    progress.part(10, 1_000, 2_000)
    assert "0.1 MB for 4,000 answer tokens" in said[0] and said[1] == "1,000 of 4,000 answer tokens, 10 of 100 prompts"


# -- a server ---------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers as the tiny target would, if it is not told to fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.failures: list[int] = []
        self.models = ["served"]
        self.answer: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(request)
        self.server.keys.append(self.headers.get("Authorization"))
        if self.server.failures:
            self.reply(self.server.failures.pop(0), {"error": "busy"})
            return
        if self.server.answer is not None:
            self.reply(200, self.server.answer)
            return
        words = request["messages"][-1]["content"].split()
        text = f"there are nine {words[2]} in {words[-1].rstrip('?')} today."
        self.reply(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def test_a_server_answers(
    server: Server, chat_target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # the target itself is not loaded
    monkeypatch.setattr("specdec_hf.training.endpoint.time.sleep", lambda seconds: None)
    server.failures = [503, 429]
    settings = TextSettings(
        prompts=[str(questions)], endpoint=server.url, api_key_variable="MY_KEY", concurrency=3, system_prompt="short",
        sampling={"max_new_tokens": 77, "max_prompt_tokens": 100, "greedy_share": 0.5},
    )  # fmt: skip
    figures = make_texts(str(chat_target), tmp_path / "out", settings)
    assert figures["texts"] == 24 and len(server.requests) == 26
    assert set(server.keys) == {"Bearer secret"}
    one = server.requests[0]
    assert one["model"] == "served" and one["max_tokens"] == 77
    assert [message["role"] for message in one["messages"]] == ["system", "user"]
    assert {request["temperature"] for request in server.requests} == {0.0, 0.7}
    assert "secret" not in (tmp_path / "out" / PROVENANCE).read_text()
    tokenizer = AutoTokenizer.from_pretrained(chat_target)
    item = next(iter(TokenStore(tmp_path / "out")))
    prompt, answer = tokenizer.decode(item.ids[~item.mask]), tokenizer.decode(item.ids[item.mask])
    assert prompt.startswith("s:short\nu:how many ") and prompt.endswith("?\na:")
    assert answer.startswith("there are nine ") and answer.endswith("today.")
    assert torch.equal(item.ids, tokenizer(prompt + answer, return_tensors="pt")["input_ids"][0])
    assert make_texts(str(chat_target), tmp_path / "out", settings) == figures
    assert len(server.requests) == 26, "nothing is asked twice"


def test_a_server_that_dies_loses_nothing(
    server: Server, chat_target: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_hf.training.endpoint.time.sleep", lambda seconds: None)
    settings = TextSettings(prompts=[str(questions)], endpoint=server.url, endpoint_model="m", concurrency=1)
    original = Endpoint.chat

    def until_ten(self: Endpoint, *arguments: Any) -> Any:
        if len(server.requests) == 10:
            server.failures = [500] * 6
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Endpoint, "chat", until_ten)
        with pytest.raises(OSError, match=r"failed 6 times, the last time with status 500.*same command again"):
            make_texts(str(chat_target), tmp_path / "out", settings)
    before = kept(tmp_path / "out")
    assert len(before) == 10
    make_texts(str(chat_target), tmp_path / "out", settings)
    assert len(kept(tmp_path / "out")) == 24 and [one for one in kept(tmp_path / "out") if one in before] == before


def test_wrong_servers(server: Server) -> None:
    chat: list[dict[str, str]] = [{"role": "user", "content": "how many owls live in oslo?"}]
    endpoint = Endpoint(server.url + "/v1/", retries=0, pause=0.0)
    assert endpoint.chat("m", chat, {}).text == "there are nine owls in oslo today."
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match=r"serves 2 models \(a, b\); name the target with --endpoint-model"):
        endpoint.model_name()
    server.failures = [404]
    with pytest.raises(ValueError, match="refuses the request with status 404"):
        endpoint.chat("m", chat, {})
    for answer, message in (
        ({"choices": []}, "OpenAI-compatible"),
        (b"<html>", "does not answer in JSON"),
        ({"choices": [{"message": {"content": "x", "reasoning_content": "hm"}}]}, "without a reasoning parser"),
    ):
        server.answer = answer
        with pytest.raises(ValueError, match=message):
            endpoint.chat("m", chat, {})
    with pytest.raises(OSError, match="failed 1 times"):
        Endpoint("http://127.0.0.1:9", retries=0).chat("m", chat, {})
    for fields, message in (({"url": "localhost:8000"}, "must begin with http"), ({"concurrency": 0}, "concurrency=0")):
        with pytest.raises(ValueError, match=message):
            Endpoint(**{"url": "http://x", **fields})


def test_the_data_sections_of_configs_are_read() -> None:
    import yaml

    folder = Path(__file__).parent.parent / "configs"
    sections = [yaml.safe_load(path.read_text(encoding="utf-8")).get("data") for path in folder.glob("*.yaml")]
    assert [TextSettings.of(section).max_tokens for section in sections if section]


def test_a_target_writes_in_the_type_of_its_file_where_that_is_fast(tmp_path, monkeypatch):
    from specdec_hf import hardware
    from specdec_hf.training.texts import writing_dtype

    config = types.SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(hardware, "emulates_bfloat16", lambda: False)
    assert writing_dtype(config, "cpu", tmp_path / "no") is torch.bfloat16
    assert writing_dtype(types.SimpleNamespace(dtype=torch.float16), "cpu", tmp_path / "no") is torch.float32
    assert writing_dtype(types.SimpleNamespace(dtype=None), "cuda", tmp_path / "no") is torch.float32
    monkeypatch.setattr(hardware, "emulates_bfloat16", lambda: True)
    assert writing_dtype(config, "cpu", tmp_path / "no") is torch.float32
    assert writing_dtype(config, "cuda", tmp_path / "no") is torch.bfloat16
    TokenStore(
        tmp_path / "store", {"target_dtype": "bfloat16"}
    ).begin()  # begun on another machine: it goes on as it began
    assert writing_dtype(config, "cpu", tmp_path / "store") is torch.bfloat16
