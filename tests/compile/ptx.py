"""PTX without branches, run by 128 threads in numpy: what a compiled kernel computes, seen without a GPU.

Only the instructions that the kernels of tests/compile/test_dropout.py consist of are known; any other one raises.
A register is an array of 128 numbers in uint64, below 2**width; memory is an array of bytes with addresses from 0 on.
"""

import re

import numpy as np

THREADS = 128
LANE = np.arange(THREADS) % 32
SEPARATORS = re.compile(r",\s*(?![^{]*})")


def run(ptx, parameters, memory):
    """Run the kernel of a module by one block of 128 threads. `parameters` are its integers, in order."""
    Machine(parameters, memory).run(ptx)


def masked(value, width):
    return value & np.uint64((1 << width) - 1)


def signed(value, width):
    """The number as int64."""
    shift = np.int64(64 - width)
    return value.astype(np.int64) << shift >> shift


def halves(function, *words):
    """A function of 16-bit numbers, of both halves of words."""
    low = function(*(masked(word, 16) for word in words))
    high = function(*(word >> np.uint64(16) for word in words))
    return masked(low, 16) | masked(high, 16) << np.uint64(16)


def permute(a, b, selector):
    """prmt: four nibbles name bytes of b:a, or copy the sign of one."""
    both, result = a | b << np.uint64(32), np.zeros_like(a)
    for place in range(4):
        nibble = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        byte = np.where(nibble & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
        result |= byte << np.uint64(8 * place)
    return result


def turned_left(low, high, count):
    """shf.l.wrap: the high word of high:low, shifted left."""
    count = count & np.uint64(31)
    return masked((high << np.uint64(32) | low) << count >> np.uint64(32), 32)


def multiplied(a, b, kind, high, width):
    if kind == "wide":
        return masked(a, width) * masked(b, width)
    return masked(a, 32) * masked(b, 32) >> np.uint64(32) if high else a * b


class Machine:
    def __init__(self, parameters, memory):
        self.parameters, self.memory, self.registers = parameters, memory, {}

    def run(self, ptx):
        body = ptx[ptx.index("\n{") :]
        for line in re.sub(r"//.*", "", body[: body.index("ret;")]).splitlines():
            line = line.strip().strip("{}") if line.strip() in "{}" else line.strip()
            if line and not line.startswith((".", "$")):
                self.step(line.removesuffix(";"))

    def step(self, line):
        operation, rest = line.split(None, 1)
        word, *kinds = operation.split(".")
        width = int(re.sub(r"\D", "", kinds[-1].split("x")[0]) or 32)
        operands = [text.strip() for text in SEPARATORS.split(rest)]
        if word == "ld":
            self.load(kinds, width, operands)
        elif word == "st":
            self.store(width, operands)
        elif operands[0].startswith("{"):
            self.unpack(operands)
        else:
            self.registers[operands[0]] = self.computed(word, kinds, width, [self.read(text) for text in operands[1:]])

    def read(self, text):
        """A register, a number, the number of the thread, or two halves of a register."""
        if text.startswith("{"):
            low, high = (self.read(part.strip()) for part in text.strip("{}").split(","))
            return low | high << np.uint64(16)
        if text == "%tid.x":
            return np.arange(THREADS, dtype=np.uint64)
        if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", text):
            return np.full(THREADS, int(text, 0) % 2**64, dtype=np.uint64)
        return self.registers[text]

    def load(self, kinds, width, operands):
        into, place = operands[0].strip("{} "), operands[1].strip("[] ")
        if kinds[0] == "param":
            value = self.parameters[int(place.rsplit("_", 1)[1])] % 2**width
            self.registers[into] = np.full(THREADS, value, dtype=np.uint64)
        else:
            assert kinds[0] == "global"
            at = self.address(place)
            parts = [self.memory[at + byte].astype(np.uint64) << np.uint64(8 * byte) for byte in range(width // 8)]
            self.registers[into] = np.bitwise_or.reduce(parts)

    def store(self, width, operands):
        at, value = self.address(operands[0].strip("[] ")), self.read(operands[1].strip("{} "))
        for byte in range(width // 8):
            self.memory[at + byte] = value >> np.uint64(8 * byte) & np.uint64(255)

    def address(self, text):
        register, offset = (part.strip() for part in text.split("+"))
        return (self.registers[register] + np.uint64(int(offset))).astype(np.int64)

    def unpack(self, operands):
        """mov.b64 {_, high}, both."""
        low, high = (part.strip() for part in operands[0].strip("{}").split(","))
        assert low == "_"
        self.registers[high] = self.read(operands[1]) >> np.uint64(32)

    def computed(self, word, kinds, width, given):
        a, b, c = (*given, None, None, None)[:3]
        if "u16x2" in kinds:
            return halves({"min": np.minimum, "add": np.add}[word], a, b)
        if word == "mul":
            return masked(multiplied(a, b, kinds[0], kinds[0] == "hi", width), 64 if kinds[0] == "wide" else width)
        if word == "mad":
            assert kinds[0] == "wide"
            return multiplied(a, b, "wide", False, width) + c
        if word == "shr":
            value = signed(a, width) >> b.astype(np.int64) if kinds[0][0] == "s" else masked(a, width) >> b
            return masked(value.astype(np.uint64), width)
        if word == "setp":
            read = (lambda x: signed(x, width)) if kinds[1][0] == "s" else (lambda x: masked(x, width))
            compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "gt": np.greater}[kinds[0]]
            return compare(read(a), read(b))
        if word == "selp":
            return masked(np.where(c, a, b), width)
        if word == "shfl":
            assert kinds[:2] == ["sync", "bfly"]
            return a[np.arange(THREADS) - LANE + (LANE ^ b.astype(np.int64))]
        simple = {
            "mov": lambda: a, "cvt": lambda: a, "not": lambda: ~a, "neg": lambda: np.uint64(0) - a,
            "add": lambda: a + b, "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
            "shl": lambda: a << b, "bfe": lambda: a >> b & ((np.uint64(1) << c) - np.uint64(1)),
            "prmt": lambda: permute(a, b, c), "shf": lambda: turned_left(a, b, c),
        }  # fmt: skip
        if word == "cvt":
            width = min(int(kind[1:]) for kind in kinds)
        return masked(simple[word](), width)
