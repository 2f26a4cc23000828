"""``specdec train --target``: from a tiny target alone to a head that drafts, resumes and keeps the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_chat import write_chat_target
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specdec_hf import DSparkConfig, DSparkDraftModel, MedusaHead, cli, enable_speculation, last_speculation
from specdec_hf.training.default_recipe import Request, head_fields, make_recipe, train_target
from specdec_hf.training.kinds import kind_of, load_head
from specdec_hf.training.store import Sequence, TokenStore

runner = CliRunner()
QUICK = ["--max-new-tokens", "60", "--max-prompt-tokens", "100", "--batch-size", "16"]


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat") / "tiny-chat"
    write_chat_target(place)
    return place


def invoke(*options: Any) -> Any:
    return runner.invoke(cli.app, [str(option) for option in options])


def drafted_with(source: Path, head: Any, question: str) -> tuple[list[int], list[int], float]:
    """Plain tokens, drafted tokens, tau."""
    target, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"do_sample": False, "max_new_tokens": 48}
    plain = target.generate(**inputs, **settings)[0].tolist()
    drafted = enable_speculation(target).generate(**inputs, **settings, assistant_model=head)[0].tolist()
    stats = last_speculation(target)
    assert stats is not None
    return plain, drafted, stats.mean_accepted_length


def test_from_nothing_to_a_head_that_drafts(chat_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("train", "--target", chat_target, "--output", out, "--max-tokens", 900, "--steps", 120, *QUICK,
               "--set", "batch_size=8", "--set", "num_anchors=16", "--set", "validation=4")  # fmt: skip
    done = invoke(*command)
    assert done.exit_code == 0, (done.output, done.exception)
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recipe["strategy"] == "dspark" and recipe["data"]["self_written"] == 64
    plain, drafted, tau = drafted_with(
        chat_target, DSparkDraftModel.from_pretrained(out / "head"), "how many owls live in oslo?"
    )
    assert drafted == plain
    assert tau > 1.5
    record = json.loads((out / "head" / "training.json").read_text())
    assert record["data"]["target"] == "tiny-chat" and record["data"]["temperature"] == 0.7
    assert not list(out.rglob("*.tmp"))

    # Again: nothing is written anew; other options are refused; the recipe alone does the same.
    before = (out / "head" / "model.safetensors").read_bytes()
    assert invoke(*command).exit_code == 0
    assert (out / "head" / "model.safetensors").read_bytes() == before
    refused = invoke(*command, "--no-thinking")
    assert "does not read enable_thinking" in str(refused.exception)
    refused = invoke(*command, "--seed", 3)
    assert "is of another run (data, train differ)" in str(refused.exception)
    assert invoke("train", out / "recipe.yaml", out).exit_code == 0


def test_fine_tuning_of_every_kind(chat_target: Path, tmp_path: Path) -> None:
    def request(**changes: Any) -> Request:
        return Request(
            str(chat_target), steps=2, max_tokens=200, data={"sampling": {"batch_size": 16, "max_new_tokens": 60}},
            train={"batch_size": 2, "num_anchors": 4, "validation": 2}, **changes,
        )  # fmt: skip

    for kind in ("medusa", "early_exit", "dspark"):
        train_target(request(strategy=kind), tmp_path / kind)
        first = tmp_path / kind / "head"
        assert kind_of(str(first)) == kind
        train_target(request(init_head=str(first)), tmp_path / f"{kind}-more")
        one, more = load_head(str(first)), load_head(str(tmp_path / f"{kind}-more" / "head"))
        assert type(one) is type(more) and one.config.vocab_size == more.config.vocab_size
        plain, drafted, _ = drafted_with(chat_target, more, "how many cats live in rome?")
        assert drafted == plain
    assert isinstance(load_head(str(tmp_path / "medusa" / "head")), MedusaHead)
    with pytest.raises(ValueError, match="head of the kind 'medusa'"):
        make_recipe(request(init_head=str(tmp_path / "medusa" / "head"), strategy="dspark"))
    with pytest.raises(ValueError, match="keeps its shape"):
        make_recipe(request(init_head=str(tmp_path / "medusa" / "head"), head={"block_size": 3}))

    # A head of another vocabulary is refused before anything is written.
    other = AutoConfig.from_pretrained(chat_target)
    other.vocab_size = 99
    DSparkDraftModel(DSparkConfig.for_target(other, num_hidden_layers=1, markov_rank=4)).save_pretrained(tmp_path / "h")
    with pytest.raises(ValueError, match="vocab"):
        train_target(request(init_head=str(tmp_path / "h")), tmp_path / "refused")
    assert not (tmp_path / "refused" / "texts").exists()


def test_a_mask_token_that_occurs_in_the_texts_is_refused(chat_target: Path, tmp_path: Path) -> None:
    request = Request(
        str(chat_target), steps=2, max_tokens=100, head={"mask_token_id": 2},
        data={"sampling": {"batch_size": 16, "max_new_tokens": 60}},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"mask_token_id=2: the texts have this token \d+ times.*leave mask_token_id"):
        train_target(request, tmp_path / "out")
    assert not (tmp_path / "out" / "head").exists()
    assert TokenStore(tmp_path / "out" / "texts").load()
    train_target(replace(request, head={}, train={"batch_size": 2}), tmp_path / "out")  # the texts are used again
    assert (tmp_path / "out" / "head").exists()


def test_shapes_follow_the_target() -> None:
    def config(layers: int, vocabulary: int, width: int) -> Any:
        return AutoConfig.for_model(
            "llama", num_hidden_layers=layers, vocab_size=vocabulary, hidden_size=width, num_attention_heads=4
        )

    assert head_fields(config(30, 49_152, 576)) == {
        "draft_vocab_size": 12_288, "num_hidden_layers": 2, "block_size": 5, "markov_rank": 72,
    }  # fmt: skip
    assert head_fields(config(36, 151_936, 2_560)) == {
        "draft_vocab_size": 32_768, "num_hidden_layers": 3, "block_size": 7, "markov_rank": 256,
    }  # fmt: skip
    assert head_fields(config(4, 260, 64)) == {"num_hidden_layers": 1, "block_size": 5, "markov_rank": 64}
    assert head_fields(config(4, 32_000, 64), "medusa") == {"draft_vocab_size": 8_192}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train"], "nothing to train"),
        (["train", "r.yaml", "out", "--steps", "5"], "--steps goes with --target"),
        (["train", "r.yaml", "out", "--target", "x"], "leave one out"),
        (["train", "--target", "x"], "goes with --output"),
        (["train", "--target", "TARGET", "--output", "OUT", "--head", "block_size"], "NAME=VALUE"),
        (["train", "--target", "TARGET", "--output", "OUT", "--head", "block_sise=3"], "did you mean"),
        (["train", "--target", "TARGET", "--output", "OUT", "--set", "max_step=3"], "did you mean 'max_steps'"),
    ],
)
def test_bad_options(options: list[str], message: str, chat_target: Path, tmp_path: Path) -> None:
    names = {"TARGET": str(chat_target), "OUT": str(tmp_path / "out")}
    done = invoke(*(names.get(option, option) for option in options))
    assert message in str(done.exception)
    assert not (tmp_path / "out" / "texts").exists()


def test_texts_that_are_written_already(chat_target: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    done = invoke("data", "--target", chat_target, "--output", texts, "--self-written", 10, *QUICK)
    assert done.exit_code == 0, (done.output, done.exception)
    command = ("train", "--target", chat_target, "--output", tmp_path / "out", "--texts", texts, "--steps", 2,
               "--set", "batch_size=2", "--set", "num_anchors=4")  # fmt: skip
    done = invoke(*command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "texts: 10" in done.output
    assert (tmp_path / "out" / "head").is_dir() and not (tmp_path / "out" / "texts").exists()
    assert "--temperature beside --texts" in str(invoke(*command, "--temperature", 0.5).exception)
    store = TokenStore(tmp_path / "foreign", {"target": "other"})
    store.append([Sequence(torch.arange(280, 300), torch.ones(20).bool(), 0)], {0})
    refused = invoke(*command[:4], tmp_path / "no", "--texts", tmp_path / "foreign", "--steps", 2)
    assert "ids up to 299, but the target's vocabulary has 260" in str(refused.exception)
    assert "was written by 'other', not by 'tiny-chat'" in refused.output
    assert not (tmp_path / "no" / "head").exists()
    assert "holds no texts" in str(invoke(*command[:6], tmp_path / "no", *command[7:]).exception)


def test_many_tokens_need_many_prompts(chat_target: Path) -> None:
    recipe = make_recipe(Request(str(chat_target), max_tokens=120_000, data={"system_prompt": "be kind"}))
    assert recipe["data"]["self_written"] == 1_000 and recipe["train"]["max_steps"] == 800
    assert recipe["data"]["sampling"] == {"max_new_tokens": 256, "max_prompt_tokens": 230}
