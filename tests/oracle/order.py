"""The order of every reduction, spelled out slowly from its description: what the engine must give bit for bit."""

import numpy as np

from afflux.selftest.digest import SIZES as SIZES

LANES, BLOCK, SUPERBLOCK = 32, 2048, 65536


def block_sum(terms):
    """Lane sums in increasing order from +0.0, then lanes by halves."""
    padded = np.zeros(-(-len(terms) // LANES) * LANES)
    padded[: len(terms)] = terms
    lanes = np.zeros(LANES)
    for group in padded.reshape(-1, LANES):
        lanes = lanes + group
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def superblock_sum(terms):
    total = 0.0
    for start in range(0, len(terms), BLOCK):
        total = total + block_sum(terms[start : start + BLOCK])
    return total


def tree_sum(terms):
    """Neighbours are added level by level; a missing right neighbour adds nothing."""
    level = [superblock_sum(terms[i : i + SUPERBLOCK]) for i in range(0, len(terms), SUPERBLOCK)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0] if level else 0.0


def inner_product(x, y):
    """Products of float32 and bfloat16 values are exact in float64, those of float64 values are rounded."""
    return tree_sum(np.asarray(x, np.float64) * np.asarray(y, np.float64))
