"""Does the speculators library load our exports and compute our logits? Run where both packages can be imported:

    pip install torch==2.13.0 && pip install torch==2.13.0 speculators==0.9.0   # an environment of its own
    pip uninstall -y torchvision torchaudio torchcodec   # where they are built for another torch
    PYTHONPATH=. python scripts/check_speculators.py

Exports the golden heads (DSpark of each Markov kind, a reduced vocabulary, DFlash), loads each with the library's own
`from_pretrained`, runs its own training forward at fixed anchors and compares logits and confidences with ours.
Printed with speculators 0.9.0, transformers 5.19.0, torch 2.13 on a CPU, float32: the largest difference is below 1e-5
for all of them (2.4e-6, of logits up to 5.7), and one projection of the export scaled by 1.01 makes it 0.016 or more.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
TARGET = str(GOLDEN / "deepspec" / "target")
TOLERANCE = 1e-5


def theirs(directory: str, taps: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor, last: torch.Tensor) -> Any:
    """Logits [N, K, Vd] and confidence logits [N, K] or None, of the library's own forward."""
    import speculators.models.dflash.core as dflash
    import speculators.models.dspark.core as dspark
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # its default compiles flex attention
    model = SpeculatorModel.from_pretrained(directory, config=config).float().eval()
    module = dspark if config.speculators_model_type == "dspark" else dflash
    seen: dict[str, torch.Tensor] = {}

    def metrics(logits: torch.Tensor, targets: torch.Tensor, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor, dict]:
        seen["logits"] = logits
        if module is dspark:
            seen["confidence"] = rest[0]
        return logits.sum(), {}

    saved = module.compute_metrics, dflash.select_anchors
    module.compute_metrics = metrics
    dflash.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    try:
        with torch.no_grad():
            ones = torch.ones_like(ids)
            model(taps, ids, ones, last, torch.zeros_like(ids), max_anchors=len(anchors), loss_config={})
    finally:
        module.compute_metrics, dflash.select_anchors = saved
    shape = (len(anchors), config.block_size)
    confidence = seen.get("confidence")
    return seen["logits"].view(*shape, -1), None if confidence is None else confidence.view(shape)


def compare(name: str, own: str, folder: str) -> float:
    """Export a head, run both, print and return the largest difference."""
    from transformers import AutoModelForCausalLM

    from specdec_hf import DSparkDraftModel
    from specdec_hf.interop.convert import convert

    out = f"{folder}/{name}-speculators"
    convert(own, out, "speculators", TARGET)
    head = DSparkDraftModel.from_pretrained(own).eval()
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    head.bind(target)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (1, 40), generator=generator)
    anchors = torch.tensor([7, 12, 20, 31])
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1] for layer in head.config.target_layer_ids], dim=-1)
        ours = head(ids, taps, anchors[None])
        logits, confidence = theirs(out, taps, ids, anchors, states[-1])
    skipped = head.config.block_size - head.max_draft_tokens  # the library computes the anchor's slot always
    worst = float((ours.logits[0] - logits[:, skipped:]).abs().max())
    if confidence is not None:
        worst = max(worst, float((ours.confidence_logits[0] - confidence[:, skipped:]).abs().max()))
    size = float(logits.abs().max())
    print(f"{name:<10} largest difference {worst:.1e}, logits {tuple(logits.shape)} up to {size:.1f}", flush=True)
    return worst


def main() -> int:
    """Compare all; the exit status."""
    from specdec_hf.interop.convert import convert

    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("vanilla", "gated", "rnn"):
            convert(str(GOLDEN / "deepspec" / kind), f"{folder}/{kind}")
            worst = max(worst, compare(kind, f"{folder}/{kind}", folder))
        convert(str(GOLDEN / "speculators" / "reduced"), f"{folder}/reduced")
        worst = max(worst, compare("reduced", f"{folder}/reduced", folder))
        worst = max(worst, compare("dflash", _dflash(folder), folder))
    print("all within 1e-5" if worst < TOLERANCE else f"WRONG: {worst:.1e} is above {TOLERANCE}")
    return int(worst >= TOLERANCE)


def _dflash(folder: str) -> str:
    """The golden head's backbone as DFlash: no Markov and no confidence head, only mask slots predict."""
    from specdec_hf import DSparkConfig

    config = DSparkConfig.from_pretrained(
        f"{folder}/vanilla", markov_rank=0, enable_confidence_head=False, sample_from_anchor=False
    )
    tensors = load_file(f"{folder}/vanilla/model.safetensors")
    out = Path(folder, "dflash")
    config.save_pretrained(out)
    kept = {name: one for name, one in tensors.items() if not name.startswith(("markov_head", "confidence_head"))}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


if __name__ == "__main__":
    sys.exit(main())
