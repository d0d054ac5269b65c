"""Standard attention: every step is a kernel of its own and leaves its matrix in slow memory.

    textbook   Dao et al. 2022, FlashAttention, Algorithm 0 (forward) and Algorithm 3 (appendix B.4, backward)
    eager      what PyTorch runs for `softmax(q @ k.mT * scale) @ v` on a GPU: scaling is a kernel, and the gradient of
               the softmax first writes the product of the weights and their gradient (aten/native/cuda/SoftMax.cu)

Each step reads every operand once and writes its result once. For a matrix product that means that the operand with
length_k rows (or the gradient with length_k rows) stays on the chip while rows of the other pass by; on a GPU the L2
cache does some of it, and what it does not is missing here.
"""

from __future__ import annotations

from onchip.model.loops import steps
from onchip.model.loops.arrays import declare
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape, cut


def forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """S = scale * Q K^T, P = softmax(S), O = P V."""
    declare(memory, shape, "scores", "weights", "out")
    _multiply_transposed(memory, shape, blocks, "query", "key", "scores", scale=shape.scale)
    for rows in cut(shape.length_q, blocks.rows):
        s = memory.load("scores", rows)
        memory.change(s, steps.softmax, exponentials=s.elements)
        memory.store("weights", s, rows)
        memory.free(s)
    _multiply(memory, shape, blocks, "weights", "value", "out")


def backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP)), dQ = scale * dS K, dK = scale * dS^T Q."""
    declare(memory, shape, "d_weights", "d_scores", "d_query", "d_key", "d_value")
    _sum_over_rows(memory, shape, blocks, "weights", "d_out", "d_value")
    _multiply_transposed(memory, shape, blocks, "d_out", "value", "d_weights")
    for rows in cut(shape.length_q, blocks.rows):
        p, d_weights = memory.load("weights", rows), memory.load("d_weights", rows)
        memory.change(d_weights, steps.softmax_gradient_of_rows, p)
        memory.store("d_scores", d_weights, rows)
        memory.free(p, d_weights)
    _multiply(memory, shape, blocks, "d_scores", "key", "d_query", scale=shape.scale)
    _sum_over_rows(memory, shape, blocks, "d_scores", "query", "d_key", scale=shape.scale)


def eager_forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """As `forward`, with scaling as a step between the product and the softmax."""
    declare(memory, shape, "scores", "scaled_scores", "weights", "out")
    _multiply_transposed(memory, shape, blocks, "query", "key", "scores")
    _scale(memory, shape, blocks, "scores", "scaled_scores")
    for rows in cut(shape.length_q, blocks.rows):
        s = memory.load("scaled_scores", rows)
        memory.change(s, steps.softmax, exponentials=s.elements)
        memory.store("weights", s, rows)
        memory.free(s)
    _multiply(memory, shape, blocks, "weights", "value", "out")


def eager_backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """As `backward`, with P * dP as a step before the gradient of the softmax, and scaling as one after it."""
    declare(memory, shape, "d_weights", "weighted", "d_scaled_scores", "d_scores", "d_query", "d_key", "d_value")
    _multiply_transposed(memory, shape, blocks, "d_out", "value", "d_weights")
    _sum_over_rows(memory, shape, blocks, "weights", "d_out", "d_value")
    for rows in cut(shape.length_q, blocks.rows):
        p, d_weights = memory.load("weights", rows), memory.load("d_weights", rows)
        memory.change(d_weights, lambda d_weights, p: p * d_weights, p)
        memory.store("weighted", d_weights, rows)
        memory.free(p, d_weights)
    for rows in cut(shape.length_q, blocks.rows):
        p, weighted = memory.load("weights", rows), memory.load("weighted", rows)
        memory.change(weighted, lambda weighted, p: weighted - p * weighted.sum(-1, keepdim=True), p)
        memory.store("d_scaled_scores", weighted, rows)
        memory.free(p, weighted)
    _scale(memory, shape, blocks, "d_scaled_scores", "d_scores")
    _multiply(memory, shape, blocks, "d_scores", "key", "d_query")
    _sum_over_rows(memory, shape, blocks, "d_scores", "query", "d_key")


def _multiply_transposed(
    memory: TwoLevelMemory, shape: Shape, blocks: Blocks, left: str, right: str, result: str, scale: float = 1.0
) -> None:
    """result = scale * left right^T, row block by row block; right stays on the chip."""
    resident = memory.load(right)
    for rows in cut(shape.length_q, blocks.rows):
        operand = memory.load(left, rows)
        product = memory.product(operand, resident, transpose_right=True, scale=scale)
        memory.store(result, product, rows)
        memory.free(operand, product)
    memory.free(resident)


def _multiply(
    memory: TwoLevelMemory, shape: Shape, blocks: Blocks, left: str, right: str, result: str, scale: float = 1.0
) -> None:
    """result = scale * left right, row block by row block; right stays on the chip."""
    resident = memory.load(right)
    for rows in cut(shape.length_q, blocks.rows):
        operand = memory.load(left, rows)
        product = memory.product(operand, resident, scale=scale)
        memory.store(result, product, rows)
        memory.free(operand, product)
    memory.free(resident)


def _sum_over_rows(
    memory: TwoLevelMemory, shape: Shape, blocks: Blocks, left: str, right: str, result: str, scale: float = 1.0
) -> None:
    """result = scale * left^T right, summed over row blocks; the result stays on the chip."""
    total = memory.constant(memory.arrays[result].rows, memory.arrays[result].columns, 0.0)
    for rows in cut(shape.length_q, blocks.rows):
        a, b = memory.load(left, rows), memory.load(right, rows)
        memory.add_product(total, a, b, transpose_left=True, scale=scale)
        memory.free(a, b)
    memory.store(result, total)
    memory.free(total)


def _scale(memory: TwoLevelMemory, shape: Shape, blocks: Blocks, source: str, result: str) -> None:
    for rows in cut(shape.length_q, blocks.rows):
        block = memory.load(source, rows)
        memory.change(block, lambda s: s * shape.scale)
        memory.store(result, block, rows)
        memory.free(block)
