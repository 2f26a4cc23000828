"""A small draft model for ``speculative="draft_model"`` from the target's own first layers. See --help.

The first layers, the final norm and the (shared) embeddings of the target make a smaller model of the same class, with
the same token ids; it is then trained on the texts that ``specdec train`` or ``specdec data`` had the target write.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", help="directory of texts")
    parser.add_argument("output", type=Path, help="directory of the draft model")
    parser.add_argument("--target", default="default", help="name or directory; default: the embedded model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def first_layers(target: Any, count: int) -> Any:
    """A copy of a target with its first decoder layers alone.

    Raises:
        ValueError: the target has not more than so many.
    """
    from torch import nn

    from specdec_hf.targets import decoder_layers

    layers = decoder_layers(target)
    if not 0 < count < len(layers):
        raise ValueError(f"layers={count}: the target has {len(layers)}; a draft model needs fewer, and at least 1")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    kept = nn.ModuleList(list(layers)[:count])
    owner = next(module for module in target.modules() for child in module.children() if child is layers)
    name = next(name for name, child in owner.named_children() if child is layers)
    setattr(owner, name, kept)
    try:
        small = type(target)(config)
        small.load_state_dict(target.state_dict())
    finally:
        setattr(owner, name, layers)
    return small


def main() -> None:
    """Cut, train, save."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from specdec_hf.default_target import fetch_default_target
    from specdec_hf.hardware import emulates_bfloat16
    from specdec_hf.training.rows import load_texts

    options = arguments()
    torch.set_num_threads(options.threads)
    source = fetch_default_target(print).path if options.target == "default" else options.target
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = first_layers(target, options.layers)
    rows = [
        {"input_ids": text.ids.tolist(), "labels": torch.where(text.mask.bool(), text.ids.long(), -100).tolist()}
        for text in load_texts(options.texts, options.max_length, target.config.vocab_size)
    ]
    settings = TrainingArguments(
        output_dir=str(options.output / "run"), num_train_epochs=options.epochs, learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch_size, warmup_steps=10, lr_scheduler_type="cosine", logging_steps=10,
        save_strategy="no", report_to=[], dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="group_by_length", bf16=torch.cuda.is_available() or not emulates_bfloat16(),
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer))
    trainer.train()
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{model.num_parameters() / 1e6:.0f} M parameters in {options.output}")


if __name__ == "__main__":
    main()
