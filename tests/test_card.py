"""Model cards say what is known and nothing else; a head warns of a target that is not the one it records."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from specdec_hf import DSparkConfig, DSparkDraftModel
from specdec_hf.heads._card import read_record, render_card
from specdec_hf.interop.push import build_repository


def config_for(target: Any, **overrides: Any) -> DSparkConfig:
    fields: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, **overrides}
    return DSparkConfig.for_target(target.config, **fields)


def test_what_is_not_known_is_said_to_be_so(tiny_target: Any) -> None:
    text = render_card(config_for(tiny_target(), target_name_or_path="./local"), "org/head", "float32")
    card = ModelCard(text)
    assert card.data.tags == ["speculative-decoding", "dspark"]
    assert card.data.base_model is None
    assert card.data.license is None
    for words in ("Not recorded by a name on the Hub", "## Training\n\nNot recorded.", "Not measured"):
        assert words in text
    assert "local" not in text


def test_what_is_known_is_in_it(tiny_target: Any) -> None:
    config = config_for(
        tiny_target(),
        target_name_or_path="Qwen/Qwen3-4B",
        target_revision="abc",
        confidence_temperatures=[1.0, 1.5, 2.0, 2.5],
    )
    training = {
        "data": {"prompts": "3 files", "thinking": False, "system_prompt": "be | brief", "temperature": 0.7},
        "config": {"learning_rate": 6e-4, "data": "/data/somewhere/prompts", "parts": [1]},
        "figures": {"texts": 12, "answer_tokens": 3456},
    }
    evaluation = {
        "results": [{"data": "gsm8k", "temperature": 0, "answers": 40, "tau": 3.214}],
        "provenance": {
            "command": "specdec eval --limit 40",
            "date": "2026-11-30",
            "versions": {"torch": "2.13.0"},
            "machine": {"processor": "a processor"},
        },
    }
    text = render_card(config, "org/head", "bfloat16", training, evaluation, "mit")
    card = ModelCard(text)
    assert card.data.base_model == "Qwen/Qwen3-4B"
    assert card.data.license == "mit"
    for words in (
        "revision `abc`",
        "| learning_rate | 0.0006 |",
        "| thinking | False |",
        "| system_prompt | be \\| brief |",
        "| temperature | 0.7 |",
        "| data | prompts |",
        "| answer_tokens | 3456 |",
        "| gsm8k | 0 | 40 | 3.21 |",
        "specdec eval --limit 40",
        "temperatures 1, 1.5, 2, 2.5",
        'custom_generate="org/head"',
    ):
        assert words in text
    assert "/data/somewhere" not in text


def test_its_code_compiles(tiny_target: Any) -> None:
    text = render_card(config_for(tiny_target()), "org/head", "float32")
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_repository_holds_what_is_needed_and_no_more(tiny_target: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    target = tiny_target(vocab_size=259)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    head = tmp_path / "head"
    DSparkDraftModel(config_for(target)).save_pretrained(head)
    (head / "training.json").write_text(json.dumps({"figures": {"texts": 7}}))
    (head / "optimizer.pt").write_bytes(b"\x80")
    (head / ".env").write_text("TOKEN=1")
    out = tmp_path / "out"
    out.mkdir()
    build_repository(str(head), "org/head", str(out), str(tmp_path / "target"))
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "custom_generate", "training.json"} <= names
    assert not names & {"optimizer.pt", ".env"}
    assert "| texts | 7 |" in (out / "README.md").read_text()
    compile((out / "custom_generate" / "generate.py").read_text(), "generate.py", "exec")
    assert (out / "custom_generate" / "requirements.txt").read_text().startswith("specdec_hf")


def test_records_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read_record(str(tmp_path), "training.json") is None
    (tmp_path / "training.json").write_text("[1]")
    assert read_record(str(tmp_path), "training.json") is None
    (tmp_path / "training.json").write_text("{")
    assert read_record(str(tmp_path), "training.json") is None


@pytest.mark.parametrize(
    ("name", "commit", "message"),
    [
        ("org/other", "a", "for org/model, and this is org/other"),
        ("org/model", "b", "revision a of org/model, and this is b"),
        ("Org/Model", "a", None),
        ("org/model", None, None),
        ("/data/model", "b", None),
        ("", "b", None),
    ],
)
def test_binding_compares_the_recorded_target(tiny_target: Any, name: str, commit: str, message: str | None) -> None:
    target = tiny_target()
    head = DSparkDraftModel(config_for(target, target_name_or_path="org/model", target_revision="a"))
    target.config._name_or_path, target.config._commit_hash = name, commit
    if message is not None:
        with pytest.warns(UserWarning, match=message):
            head.bind(target)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.bind(target)


def test_for_target_records_name_and_commit(tiny_target: Any) -> None:
    target = tiny_target()
    target.config._name_or_path, target.config._commit_hash = "org/model", "a" * 40
    config = config_for(target)
    assert (config.target_name_or_path, config.target_revision) == ("org/model", "a" * 40)
