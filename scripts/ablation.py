"""Train the same head in several variants on the same texts, and compare what they would accept. See --help.

Every variant of the YAML file starts anew, with the recipe's seed, and sees the same texts in the same order. Compared
is the expected accepted length on held-out texts: 1 + the sum over places of the product of mean acceptances up to
there (bonus counted, sampling at temperature 1, drafts from true prefixes). Results are written after each variant, and
a variant that has its result is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML of specdec train; its section train is the base")
    parser.add_argument("texts", type=Path, help="directory of texts, e.g. OUTPUT/texts of specdec train")
    parser.add_argument("output", type=Path, help="directory for features, heads and results.json")
    parser.add_argument("--variants", type=Path, default=Path(__file__).parents[1] / "configs" / "ablation.yaml")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def changed(values: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """A recipe's section train with a variant's fields; ``a.b`` is field b of section a, ``None`` leaves it out."""
    result = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for name, value in variant.items():
        section, _, field = name.rpartition(".")
        place = result.setdefault(section, {}) if section else result
        if value is None:
            place.pop(field, None)
        else:
            place[field] = value
    return result


def expected_length(trainer_module: Any, texts: Any, batch_size: int = 4) -> tuple[float, list[float]]:
    """Expected accepted length on a data set, and the mean acceptance at each place given that it is reached."""
    import torch

    from specdec_hf.training.rows import collate

    sums, count = None, 0
    with torch.no_grad():
        for start in range(0, len(texts), batch_size):
            batch = collate([texts[index] for index in range(start, min(start + batch_size, len(texts)))])
            found = trainer_module(**batch)["acceptance"].double()
            sums, count = found if sums is None else sums + found, count + 1
    means = (sums / count).tolist()
    length, chance = 1.0, 1.0
    for mean in means:
        chance *= mean
        length += chance
    return length, means


def main() -> None:
    """Train and compare."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM

    from specdec_hf.default_target import fetch_default_target
    from specdec_hf.training.features import FeatureCache
    from specdec_hf.training.rows import TextDataset, load_texts, split_texts
    from specdec_hf.training.trainer import TrainConfig, TrainingModule, train

    options = arguments()
    torch.set_num_threads(options.threads)
    recipe = yaml.safe_load(options.recipe.read_text(encoding="utf-8"))
    source = recipe["target"]
    source = fetch_default_target(print).path if source == "default" else source
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    variants = yaml.safe_load(options.variants.read_text(encoding="utf-8"))
    options.output.mkdir(parents=True, exist_ok=True)
    results_file = options.output / "results.json"
    results = json.loads(results_file.read_text(encoding="utf-8")) if results_file.is_file() else {}
    base = {**recipe["train"], "max_steps": options.steps, "save_steps": 10**6, "logging_steps": 25}
    for number, (name, variant) in enumerate(variants.items()):
        if name in results:
            continue
        values = changed(base, variant or {})
        values.update(data=str(options.texts), output=str(options.output / f"variant-{number}"))
        values.update(feature_cache=str(options.output / "features"))
        config = TrainConfig(**values)
        began = time.perf_counter()
        head, figures = train(target, config, say=print)
        seconds = time.perf_counter() - began
        texts = load_texts(config.data, config.max_length, target.config.vocab_size)
        mass_of = head.config.vocab_size if head.config.has_reduced_vocab else None
        cache = FeatureCache(config.feature_cache, texts, head.config.target_layer_ids, target, mass_of)
        held_out = split_texts(texts, config.validation, config.seed)[1]
        module = TrainingModule(head.eval(), target, replace(config, sample_slots=False)).eval()
        length, means = expected_length(module, TextDataset(texts, held_out, 64, config.seed, cache))
        results[name] = {
            "expected_length": length, "acceptance": means, "seconds": seconds, "changes": variant or {},
            "parameters": sum(p.numel() for p in head.parameters()), "coverage": figures["coverage"],
        }  # fmt: skip
        results_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"{name}: {length:.3f}, {', '.join(f'{mean:.2f}' for mean in means)}; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
