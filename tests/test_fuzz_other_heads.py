"""As ``test_fuzz_files``, for the other heads with files: early exit, Medusa, and Medusa's published layout.

Fixed seeds; each case changes a good ``config.json`` whose weights stay as they are, so no case may take more memory
than those weights, run code of the repository, or leave its directory.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fuzz_files import ALLOWED, LIMIT, Touch, damaged, header, peak
from transformers import AutoModel

from specdec_hf import EarlyExitConfig, EarlyExitHead, MedusaConfig, MedusaHead

V, D = 96, 32
KINDS = ("early_exit", "medusa", "published")


def write(kind: str, folder: Path) -> type[Any]:
    """A good head of this kind in `folder`; the class that reads it."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    reduced = {"vocab_size": V, "draft_vocab_size": 48, "hidden_size": D}
    if kind == "early_exit":
        head: Any = EarlyExitHead(EarlyExitConfig(**reduced, num_target_layers=6, exit_layers=[1, 3], adapter_size=16))
    elif kind == "medusa":
        shares = [[0.5, 0.2], [0.4, 0.1]]
        head = MedusaHead(MedusaConfig(**reduced, medusa_num_heads=2, has_lm_head=True, rank_accuracies=shares))
    else:
        published = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"}
        (folder / "config.json").write_text(json.dumps(published))
        save_file(published_tensors(), folder / "medusa_lm_head.safetensors")
        return MedusaHead
    head.set_draft_vocabulary(torch.arange(48))
    head.save_pretrained(folder)
    return type(head)


def published_tensors() -> dict[str, torch.Tensor]:
    shapes = {"0.linear.weight": (D, D), "0.linear.bias": (D,), "1.weight": (V, D)}
    return {f"{head}.{name}": torch.randn(shape) for head in range(2) for name, shape in shapes.items()}


def refused(reader: type[Any], folder: Path, match: str | None = None) -> None:
    before = peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ALLOWED, match=match):
            reader.from_pretrained(folder)
    assert peak() - before < LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_configurations_give_errors(kind: str, tmp_path: Path) -> None:
    reader = write(kind, tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    random_, before, count = random.Random(kind), peak(), 0
    for _ in range(80):
        fields = damaged(good, random_)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        try:
            reader.from_pretrained(tmp_path)
        except ALLOWED as error:
            assert str(error), fields
            count += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{json.dumps(fields)[:2000]}") from error
    assert count > 20, "hardly anything was refused: the cases are too tame"
    assert peak() - before < LIMIT


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{", "\x00\x01", '{"a":' * 3_000, "[" * 100_000])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_configuration(kind: str, text: str, tmp_path: Path) -> None:
    reader = write(kind, tmp_path)
    (tmp_path / "config.json").write_text(text)
    refused(reader, tmp_path)


HUGE: list[tuple[str, dict[str, Any]]] = [
    ("early_exit", {"num_target_layers": 4_096, "exit_layers": list(range(1, 4_096)), "hidden_size": 65_536}),
    ("early_exit", {"num_target_layers": 10**9}),
    ("early_exit", {"adapter_size": 1_048_576, "hidden_size": 65_536}),
    ("early_exit", {"vocab_size": 2**24, "draft_vocab_size": 2**24 - 1}),
    ("early_exit", {"exit_layers": [-1]}),
    ("medusa", {"medusa_num_heads": 64, "medusa_num_layers": 64, "hidden_size": 65_536, "rank_accuracies": None}),
    ("medusa", {"vocab_size": 2**24, "draft_vocab_size": 2**24, "hidden_size": 65_536}),
    ("medusa", {"medusa_num_heads": -2}),
    ("medusa", {"medusa_num_heads": 10**9, "rank_accuracies": None}),
    ("published", {"medusa_num_heads": 64, "medusa_num_layers": 64}),
    ("published", {"medusa_num_heads": 10**9}),
    ("published", {"medusa_num_layers": 10**9}),
    ("published", {"medusa_num_heads": -1}),
    ("published", {"medusa_num_heads": True}),
]


@pytest.mark.parametrize(("kind", "sizes"), HUGE, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(HUGE)])
def test_huge_and_negative_sizes_allocate_nothing(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    reader = write(kind, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **sizes}))
    refused(reader, tmp_path)


def test_a_published_head_of_wide_projections_is_compared_before_it_is_made(tmp_path: Path) -> None:
    """One real projection, 64 of which the configuration tells: 64 x 16 MB must not be allocated to find that out."""
    write("published", tmp_path)
    wide = {"0.0.linear.weight": torch.zeros(64, 64), "0.0.linear.bias": torch.zeros(64)}
    save_file({**wide, "0.1.weight": torch.zeros(65_536, 64)}, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 64, "medusa_num_layers": 1}))
    refused(MedusaHead, tmp_path, "missing")


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_pickles_are_not_read(kind: str, name: str, tmp_path: Path) -> None:
    head, trap = tmp_path / "head", tmp_path / "sprung"
    reader = write(kind, head)
    (head / "model.safetensors").unlink()
    (head / name).write_bytes(pickle.dumps(Touch(trap)))
    refused(reader, head, "pickle")
    assert not trap.exists()


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_a_published_pickle_runs_nothing(name: str, tmp_path: Path) -> None:
    head, trap = tmp_path / "head", tmp_path / "sprung"
    write("published", head)
    (head / "medusa_lm_head.safetensors").unlink()
    for data in (pickle.dumps(Touch(trap)), pickle.dumps({"0.1.weight": Touch(trap)})):
        (head / name).write_bytes(data)
        refused(MedusaHead, head)
    torch.save({"0.1.weight": Touch(trap)}, head / name)
    refused(MedusaHead, head)
    assert not trap.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_a_repository_is_not_run(kind: str, tmp_path: Path) -> None:
    head, trap = tmp_path / "head", tmp_path / "sprung"
    reader = write(kind, head)
    for name in ("modeling.py", "configuration.py", "custom_generate.py"):
        (head / name).write_text(f"open({str(trap)!r}, 'w')\nclass Head: pass\nclass Config: pass\n")
    remote = {"AutoModel": "modeling.Head", "AutoConfig": "configuration.Config"}
    fields = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**fields, "auto_map": remote}))
    reader.from_pretrained(head)
    if kind != "published":
        assert type(AutoModel.from_pretrained(head, trust_remote_code=False)) is reader
    assert not trap.exists()


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/hostname", "", 5, None, ["a"], "a\x00.safetensors"])
def test_an_index_cannot_leave_its_directory(kind: str, shard: Any, tmp_path: Path) -> None:
    head = tmp_path / "head"
    reader = write(kind, head)
    (head / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"d2t": shard}}))
    refused(reader, head)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 16, header({"d2t": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}, b"\0" * 4)],
    ids=["empty", "junk", "huge"],
)
def test_hostile_safetensors(kind: str, data: bytes, tmp_path: Path) -> None:
    reader = write(kind, tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(data)
    refused(reader, tmp_path, "safetensors")


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("value", [-(2**40), -1, 2**40, 2**62])
def test_tables_cannot_point_outside(kind: str, value: int, tmp_path: Path) -> None:
    reader = write(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] = torch.full_like(tensors["d2t"], value)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused(reader, tmp_path, "draft vocabulary")


def test_a_table_that_is_right_is_read(tmp_path: Path) -> None:
    for kind in KINDS:
        head = write(kind, tmp_path / kind).from_pretrained(tmp_path / kind)
        assert copy.deepcopy(head).config.to_dict() == head.config.to_dict()
