"""Token trees: what follows from each drafted node's parent. A chain is the tree in which every node has one child.

Letters in the shapes: B rows, N drafted nodes. A *column* is a place in the block that the target reads: column 0 is
the anchor, column i + 1 is node i. Tree attention: Miao et al., "SpecInfer", arXiv 2305.09781; Cai et al., "Medusa",
arXiv 2401.10774. Rank 0: knows neither models nor caches.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """The shape of one round's trees. Made by `TokenTree.of`.

    Args:
        parents: LongTensor [B, N], index of each node's parent among the nodes, -1 = child of the anchor.
        depths: LongTensor [B, N], 1 for the anchor's children.
        ancestors: bool [B, N + 1, N + 1], True where column c (last) is column r (second) itself or stands above it.
        depth: depth of the deepest node, 0 without nodes.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    depth: int

    @classmethod
    def of(cls, parents: Tensor, device: torch.device | None = None) -> TokenTree:
        """The trees that `parents` (LongTensor [B, N]) describes, tensors on `device`; one wait if parents are not
        on the CPU.

        Raises:
            ValueError: a node does not stand behind its parent.
        """
        host = parents.cpu()
        batch, count = host.shape
        if bool((host >= torch.arange(count)).any()) or bool((host < -1).any()):
            raise ValueError(
                f"parents={host.tolist()}: each node must stand behind its parent, and -1 names the anchor's children."
            )
        rows = torch.arange(batch)
        ancestors = torch.eye(count + 1, dtype=torch.bool).repeat(batch, 1, 1)
        for node in range(count):
            ancestors[:, node + 1] |= ancestors[rows, host[:, node] + 1]
        depths = ancestors.sum(dim=-1)[:, 1:] - 1
        depth = int(depths.max()) if count else 0
        device = parents.device if device is None else device
        return cls(parents.to(device), depths.to(device), ancestors.to(device), depth)

    @property
    def steps(self) -> Tensor:
        """LongTensor [B, N + 1]: each column's distance from the anchor, which is what positions count."""
        return torch.nn.functional.pad(self.depths, (1, 0))

    @property
    def paths(self) -> Tensor:
        """LongTensor [B, N + 1, depth]: the nodes from the anchor's child down to each column's node.

        Entries beyond a column's own depth are -1.
        """
        batch, columns, _ = self.ancestors.shape
        result = self.parents.new_full((batch, columns, self.depth + 1), -1)
        at = self.steps[:, None, :].expand(-1, columns, -1)
        # Everything that is no ancestor is written to one place more, and cut off; so is the anchor, at place 0.
        at = torch.where(self.ancestors, at - 1, self.depth)
        at[:, :, 0] = self.depth
        nodes = (torch.arange(columns, device=at.device) - 1).expand(batch, columns, -1)
        return result.scatter_(2, at, nodes)[:, :, : self.depth]

    def depth_of(self, row: int, count: int) -> int:
        """The depth of a row's first `count` nodes."""
        return int(self.depths[row, :count].max()) if count else 0

    def leaves(self) -> Tensor:
        """bool [B, N]: nodes without children."""
        return ~(self.ancestors.sum(dim=1)[:, 1:] > 1)


def chain_parents(batch: int, count: int, device: torch.device | None = None) -> Tensor:
    """The parents [B, N] of a chain: -1, 0, 1, ..."""
    return (torch.arange(count, device=device) - 1).expand(batch, -1)


def first_path(parents: list[int]) -> list[int]:
    """Of one tree's parents: the nodes of the path that always takes the first child."""
    path, at = [], -1
    for node, parent in enumerate(parents):
        if parent == at:
            path.append(node)
            at = node
    return path


def best_tree(accuracies: list[list[float]], nodes: int) -> list[tuple[int, ...]]:
    """The tree of candidates that is expected to accept most tokens with so many nodes.

    A node is named by the ranks on its way: ``(0, 2)`` is the third guess at depth 2 below the best one at depth 1. Its
    chance is taken as the product of its ranks' accuracies, so the best tree holds the nodes of the highest products
    (Cai et al., "Medusa", arXiv 2401.10774, section 2.3.3).

    Args:
        accuracies: per depth, per rank: how often the token there was that guess. Rising ones within a depth count as
            the lowest before them, as siblings are drawn in order.
        nodes: how many, at least 1; fewer come back if there are no more.

    Returns:
        Paths of ranks by falling chance, each behind its parent and its better siblings: its first n are the best tree
        of n nodes.
    """
    falling = [[min(depth[: rank + 1]) for rank in range(len(depth))] for depth in accuracies]
    waiting: list[tuple[float, tuple[int, ...], float]] = [(-falling[0][0], (0,), 1.0)]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < nodes:
        minus, path, above = heapq.heappop(waiting)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(falling[depth - 1]):
            heapq.heappush(waiting, (-above * falling[depth - 1][rank + 1], (*path[:-1], rank + 1), above))
        if depth < len(falling) and falling[depth]:
            heapq.heappush(waiting, (minus * falling[depth][0], (*path, 0), -minus))
    return chosen


def chance_of(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    """The chance that `best_tree` takes a node to have."""
    chance = 1.0
    for depth, rank in enumerate(path):
        chance *= min(accuracies[depth][: rank + 1])
    return chance


def parents_of(paths: list[tuple[int, ...]]) -> list[int]:
    """Parents, as in `TokenTree`, of nodes that are named by their paths; each must stand behind its parent."""
    place = {path: node for node, path in enumerate(paths)}
    return [place[path[:-1]] if len(path) > 1 else -1 for path in paths]
