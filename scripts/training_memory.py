"""Peak memory and time of one training step: this package's objective beside a naive one. See --help.

Head only, random features, float32 on the CPU. Each variant runs in a process of its own; the naive one makes all
logits [slots, V] of draft and target at once, as the formulas are written.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=2_560)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--naive-anchors", type=int, help="fewer for the naive variant, where memory is short")
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--length", type=int, default=2_048, help="tokens of the text")
    parser.add_argument("--chunk", type=int, default=256, help="slots whose logits are alive at a time")
    parser.add_argument("--variant", choices=("chunked", "naive"), help="this process's; default: start one for each")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, float | str | int]:
    """One step of one variant: peak resident memory in all and above what is held before the step (GB), seconds."""
    import torch
    from transformers import Qwen3Config

    from specdec_hf import DSparkConfig, DSparkDraftModel
    from specdec_hf.training.losses import LossWeights, draw_anchors
    from specdec_hf.training.objective import DSparkObjective

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=3 * options.width, num_hidden_layers=36,
        num_attention_heads=options.width // 80, num_key_value_heads=options.width // 320, head_dim=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    target = head_of_target(config)
    head = DSparkDraftModel(DSparkConfig.for_target(config, block_size=options.block))
    objective = DSparkObjective(head, target, LossWeights(), options.anchors, options.chunk)
    ids = torch.randint(options.vocab, (1, options.length))
    mask = torch.ones_like(ids)
    taps = torch.randn(1, options.length, len(head.config.target_layer_ids) * options.width)
    last = torch.randn(1, options.length, options.width)
    anchors = draw_anchors(mask, options.anchors)
    before = resident()
    start, busy = time.perf_counter(), time.process_time()
    if options.variant == "chunked":
        loss = objective(ids, mask, taps, last, anchors=anchors).total
    else:
        loss = naive_loss(objective, ids, mask, taps, last, anchors)
    loss.backward()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    norm = torch.stack([p.grad.norm() for p in head.parameters() if p.grad is not None]).norm()
    return {"variant": options.variant, "anchors": options.anchors, "peak": peak, "step": peak - before,
            "seconds": seconds, "cpu": busy, "loss": float(loss.detach()), "gradient": float(norm)}  # fmt: skip


def head_of_target(config):
    """The part of a target that training a head needs besides features: embeddings, which are its lm_head too."""
    import torch

    class Target(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.dtype = config, torch.float32
            self.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
            self.lm_head.weight = self.embeddings.weight

        def get_input_embeddings(self):
            return self.embeddings

        def get_output_embeddings(self):
            return self.lm_head

    with torch.no_grad():
        target = Target()
        target.embeddings.weight.mul_(0.02)
    return target


def naive_loss(objective, ids, mask, taps, last, anchors):
    """The same loss, all slots at once, left to autograd."""
    import torch
    import torch.nn.functional as F

    from specdec_hf.training.losses import make_blocks, slot_weights

    head, weights = objective.head, objective.weights
    blocks = make_blocks(ids, mask, *anchors, head.max_draft_tokens)
    hidden, latent, confidence = objective.features(blocks, ids, taps)
    logits = head.project_logits(hidden) + head.markov_head.markov_w2(latent)
    with torch.no_grad():
        target_probs = objective.target_logits(last[0][blocks.sources]).softmax(-1)
    distance = (logits.softmax(-1) - target_probs).abs().sum(-1)
    ce = F.cross_entropy(logits.flatten(0, -2), blocks.labels.flatten(), reduction="none").view_as(distance)
    survival = 1 - 0.5 * distance.detach()
    doubt = F.binary_cross_entropy_with_logits(confidence, survival, reduction="none")
    slots = slot_weights(blocks.valid, weights.decay)
    return (slots * (weights.ce * ce + weights.tv * distance + weights.confidence * doubt)).sum() / slots.sum()


def resident() -> float:
    """Resident memory now, GB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e9


def main() -> None:
    """Run one variant, or both in turn."""
    options = arguments()
    if options.variant:
        print(json.dumps(measure(options)))
        return
    rows = []
    for variant, anchors in (("chunked", options.anchors), ("naive", options.naive_anchors or options.anchors)):
        command = [sys.executable, __file__, "--variant", variant, "--anchors", str(anchors)]
        for name in ("vocab", "width", "block", "length", "chunk"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{variant} ended with {done.returncode} (killed for memory?): {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        print(
            f"{variant:8} {anchors:4} anchors: peak {row['peak']:6.2f} GB, {row['step']:6.2f} GB of it by the step; "
            f"{row['seconds']:6.1f} s, {row['cpu']:6.1f} s of processor time; "
            f"loss {row['loss']:.6f}, gradient {row['gradient']:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
