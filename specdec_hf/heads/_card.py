"""The model card of a head: made from what is known, never from guesses. What is not known is said to be so."""

from __future__ import annotations

import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi

from ._borrowed import hub_name
from ._dspark_config import DSparkConfig

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

TAGS = ("speculative-decoding", "dspark")
TRAINING_FILE = "training.json"
"""What training left beside the head, if it did: ``{"data": {...}, "config": {...}, "figures": {...}}``."""
EVALUATION_FILE = "eval.json"
"""What ``specdec eval`` wrote, if somebody put it beside the head."""


def render_card(
    config: DSparkConfig,
    repository: str,
    dtype: str,
    training: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    licence: str | None = None,
) -> str:
    """The README of a head's repository.

    Args:
        config: of the head.
        repository: its name on the Hub, e.g. ``org/head``.
        dtype: of the weights.
        training: contents of ``training.json``.
        evaluation: contents of ``eval.json`` (``specdec eval``).
        licence: identifier of its licence; ``None`` leaves the field out.
    """
    base = hub_name(config.target_name_or_path)
    front = ["library_name: transformers", "tags:", *(f"- {tag}" for tag in TAGS)]
    front += [f"base_model: {base}"] if base else []
    front += [f"license: {licence}"] if licence else []
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# {repository.split('/')[-1]}",
        "A DSpark draft head: `generate()` of its target needs fewer forwards with it, and returns the same. For "
        "`specdec_hf`.",
        "## Target\n\n" + _target(config, base),
        "## The head\n\n" + _shape(config, dtype),
        "## How to use it\n\n" + _use(repository, base),
        "## Training\n\n" + _training(training),
        "## Accepted length\n\n" + _evaluation(evaluation),
    ]
    return "\n\n".join(parts) + "\n"


def _target(config: DSparkConfig, base: str | None) -> str:
    if base is None:
        return (
            "Not recorded by a name on the Hub. It belongs to one model only: "
            f"{config.num_target_layers or 'an unrecorded number of'} layers, width {config.target_hidden_size}, "
            f"vocabulary {config.vocab_size}."
        )
    revision = f", revision `{config.target_revision}`" if config.target_revision else " (revision not recorded)"
    return (
        f"[{base}](https://huggingface.co/{base}){revision}: it reads the hidden states after layers "
        f"{config.target_layer_ids} (0-based). Another base or another revision gives drafts that are hardly accepted; "
        "the text stays right."
    )


def _shape(config: DSparkConfig, dtype: str) -> str:
    markov = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    temperatures = config.confidence_temperatures
    calibrated = "no" if temperatures is None else "temperatures " + ", ".join(f"{one:.3g}" for one in temperatures)
    rows = [
        ("tokens proposed per round", str(config.max_draft_tokens)),
        ("layers, width", f"{config.num_hidden_layers}, {config.hidden_size}"),
        ("parameters, without what it borrows", f"{config.parameter_count():,} (rounded up)"),
        ("number type", dtype),
        ("Markov head", markov),
        ("confidence head", "yes" if config.enable_confidence_head else "no"),
        ("calibrated", calibrated if config.enable_confidence_head else "has no confidence head"),
        ("draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size}"),
        ("embeddings, lm_head", " and ".join("own" if own else "the target's" for own in _owned(config))),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _owned(config: DSparkConfig) -> tuple[bool, bool]:
    return config.has_embed_tokens, config.has_lm_head


def _use(repository: str, base: str | None) -> str:
    target = f'"{base}"' if base else '"THE/TARGET"'
    return f'''```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from specdec_hf import DSparkDraftModel, enable_speculation, install, speculative_decoding

tokenizer = AutoTokenizer.from_pretrained({target})
model = AutoModelForCausalLM.from_pretrained({target}, dtype="auto")
inputs = tokenizer("Hello", return_tensors="pt")
head = DSparkDraftModel.from_pretrained("{repository}", dtype=model.dtype)

# 1. An enabled model.
out = enable_speculation(model).generate(**inputs, assistant_model=head, max_new_tokens=64)
# 2. The model as it is, with transformers' hook for decoding methods.
out = model.generate(**inputs, custom_generate=speculative_decoding(head), max_new_tokens=64)
# 3. Code that cannot be edited.
with install():
    out = model.generate(**inputs, assistant_model=head, max_new_tokens=64)
# 4. Plain transformers, with the code of this repository (it imports specdec_hf, which must be installed).
out = model.generate(**inputs, custom_generate="{repository}", trust_remote_code=True, max_new_tokens=64)
```

The fourth way needs the folder `custom_generate`, which `specdec push` uploads.'''


def _training(record: dict[str, Any] | None) -> str:
    if not record:
        return "Not recorded."
    lines = [f"As `{TRAINING_FILE}`, which training wrote beside the weights, says:", ""]
    for section in ("data", "config", "figures"):
        flat = record.get(section)
        if isinstance(flat, dict):
            rows = [(name, _cell(value)) for name, value in flat.items() if not isinstance(value, (dict, list))]
            lines += [f"| {section} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    return "\n".join(lines).rstrip()


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    # A path of the training machine tells a reader nothing and is nobody's business: its last part is enough.
    text = os.path.basename(text.rstrip("/")) if os.path.isabs(text) else text
    return text.replace("|", "\\|").replace("\n", " ")


def _evaluation(record: dict[str, Any] | None) -> str:
    """The tau table with its provenance."""
    rows = record.get("results") if record else None
    if not record or not isinstance(rows, list) or not rows:
        return "Not measured, or the measurement is not in this repository. `specdec eval` measures it on your prompts."
    lines = ["| data | temperature | answers | tau |", "|---|---|---|---|"]
    for row in rows:
        tau = row.get("tau")
        shown = "-" if tau is None else f"{tau:.2f}"
        lines.append(f"| {_cell(row.get('data'))} | {row.get('temperature')} | {row.get('answers')} | {shown} |")
    made = record.get("provenance") or {}
    machine = made.get("machine") or {}
    versions = made.get("versions") or {}
    lines += [
        "",
        "tau: tokens that one forward of the target yields, the bonus token counted; plain decoding has 1. "
        f"Measured with `{_cell(made.get('command', 'specdec eval'))}` on {made.get('date', 'an unrecorded date')}, "
        f"{machine.get('processor', 'an unrecorded machine')}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + ".",
    ]
    return "\n".join(lines)


def read_record(directory: str, name: str) -> dict[str, Any] | None:
    """A JSON object beside a head, ``None`` where there is none that can be read."""
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def forget_local_target(folder: str, known: str | None = None) -> None:
    """Keep only a name on the Hub as the target in ``folder``'s ``config.json``: a local path helps nobody.

    Args:
        known: another name for the target, e.g. the one a user gave.
    """
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    fields["target_name_or_path"] = hub_name(known) or hub_name(fields.get("target_name_or_path"))
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(fields, indent=2, sort_keys=True) + "\n")


class CardOnPush:
    """``push_to_hub`` of a head: transformers', with a card that says what the head is."""

    model_tags = list(TAGS)  # what save_pretrained(..., push_to_hub=True) writes into the card that transformers makes

    def push_to_hub(
        self: Any,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
        training: dict[str, Any] | None = None,
    ) -> CommitInfo:
        """Upload config, weights and a model card; arguments as in transformers, and ``training`` for the card.

        A card that the repository has already is left as it is. ``specdec push`` adds the target's tokenizer and the
        ``custom_generate`` folder.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            forget_local_target(folder)
            if not api.file_exists(repo_id, "README.md", revision=revision):
                card = render_card(self.config, repo_id, str(self.dtype).removeprefix("torch."), training)
                for tag in (*(self.model_tags or ()), *(tags or ())):
                    card = card.replace("tags:\n", f"tags:\n- {tag}\n", 1) if f"- {tag}\n" not in card else card
                with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
                    file.write(card)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload draft head",
                commit_description=commit_description,
            )
