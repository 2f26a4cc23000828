"""The README is true: its Python runs (with tiny models in place of the Hub's), its commands and files exist.

Configurations below ``configs/`` are read here too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
import yaml

import specdec_hf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tiny_target: Any, byte_tokenizer: Any) -> None:
    """Whatever name is loaded: a tiny model, its head, a tokenizer of bytes."""
    target = tiny_target("qwen3", vocab_size=259, eos_token_id=None)
    config = specdec_hf.DSparkConfig.for_target(target.config, num_hidden_layers=1, block_size=4, markov_rank=8)

    def load_head(*names: Any, dtype: Any = None, **settings: Any) -> Any:
        return specdec_hf.DSparkDraftModel(config).to(dtype or torch.float32).eval()

    def load_target(*names: Any, **settings: Any) -> Any:
        return tiny_target("qwen3", vocab_size=259, eos_token_id=None)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_target)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *names, **settings: byte_tokenizer)
    monkeypatch.setattr(specdec_hf.DSparkDraftModel, "from_pretrained", load_head)


@pytest.mark.usefixtures("no_hub")
def test_python_blocks_run_in_order_and_tell_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    for text in blocks("python"):
        try:
            exec(compile(text, "README.md", "exec"), names)
        except Exception as error:
            error.add_note(f"in this block of README.md:\n{text}")
            raise
    model, head, inputs = names["model"], names["head"], names["inputs"]
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    drafted = model.generate(**inputs, assistant_model=head, do_sample=False, max_new_tokens=24)
    assert greedy.equal(drafted)
    assert type(names["plain"]).generate is transformers.GenerationMixin.generate, "disable_speculation left something"
    assert isinstance(names["new_head"], specdec_hf.DSparkDraftModel)

    # The sample strategy, as if its file were there.
    module = ModuleType("specdec_hf.drafters.repeat")
    drafter = names["Repeat"]
    drafter.__module__ = module.__name__
    module.Repeat = drafter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(specdec_hf.drafters, "available", lambda: ["dspark", "repeat"])
    assert greedy.equal(model.generate(**inputs, speculative="repeat", do_sample=False, max_new_tokens=24))
    stats = specdec_hf.last_speculation(model)
    assert stats is not None
    assert stats.strategy == "repeat"
    assert stats.drafted > 0


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_commands_exist() -> None:
    for line in "\n".join(blocks("bash")).splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["bash"]:
            assert (ROOT / words[1]).is_file(), line
        elif words:
            assert words[0] in {"specdec", "pip"}, f"not tried by any test: {line}"
    opening = README.split("## Use it")[0]
    assert opening.index("bash scripts/quickstart.sh") < opening.index("bash scripts/test.sh")
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_file_is_listed_and_every_listed_file_exists() -> None:
    listed = set(re.findall(r"^\| `((?:specdec_hf|tests|scripts|configs)/[\w./]*)`", README, flags=re.MULTILINE))
    for name in listed:
        assert (ROOT / name).exists(), f"README lists {name}, which is not there"
    package = ROOT / "specdec_hf"
    present = {f"specdec_hf/{path.name}" for path in package.glob("*.py")} - {"specdec_hf/__init__.py"}
    present |= {f"specdec_hf/{path.parent.name}/" for path in package.glob("*/*.py")}
    assert present <= listed, f"missing in the README's list of files: {sorted(present - listed)}"


def test_knobs_named_are_knobs() -> None:
    from specdec_hf.options import KNOBS, field_names

    section = README.split("## Knobs")[1].split("## ")[0]
    for name in (*KNOBS, *field_names()):
        assert f"`{name}`" in section, f"{name} is not explained under Knobs"
    theirs = section.split("The rest is in")[0]
    for name in re.findall(r"^\| `(\w+)` \|", theirs, flags=re.MULTILINE):
        assert hasattr(transformers.GenerationConfig(), name), f"{name} is not a name of transformers"


def test_configurations_parse() -> None:
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path.name
    for text in blocks("yaml"):
        assert yaml.safe_load(text) is not None


def test_no_path_of_one_machine() -> None:
    for text in (
        README,
        *(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").iterdir() if path.is_file()),
    ):
        assert not re.search(r"(?<![\w.])/(?:work|root|home|opt|tmp)/", text)
