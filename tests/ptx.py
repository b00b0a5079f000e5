"""Runs a kernel's PTX in Python: all threads of all ranks, interleaved at random, without a GPU.

Only what the library's kernels use; of matrix products those of BF16, summed in an order of NumPy's. Memory is
sequentially consistent and clocks stand still. A thread may be held up at every turn of a loop, at a barrier, and now
and then after a store that a peer polls.
"""

from __future__ import annotations

import functools
import random
import re
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

THREADS = 128
TURNS = 100_000
"""After so many a run hangs."""

Thread = Generator[bool, None, None]
Kernel = Callable[["Memory", "Cta", Sequence[int], int, int, int], Thread]
"""Memory, what the CTA shares, parameters, thread of the CTA, CTA, CTAs; yields whether it is at a barrier."""


@dataclass
class Memory:
    """Device memory of all ranks, at addresses from `START` up.

    Attributes:
      data: its bytes.
      multicast: address of a window whose stores go to ``targets``; 0: none.
      targets: addresses of what the window stands for.
    """

    START = 4096

    data: bytearray
    multicast: int = 0
    targets: list[int] = field(default_factory=list)
    end: int = START

    def allocate(self, size: int) -> int:
        start = -(-self.end // 256) * 256
        self.end = start + size
        assert self.end <= len(self.data)
        return start

    def load(self, address: int, size: int) -> int:
        return int.from_bytes(self.data[self._checked(address, size) : address + size], "little")

    def store(self, address: int, size: int, value: int) -> None:
        self._checked(address, size)
        self.data[address : address + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def load4(self, address: int) -> tuple[int, ...]:
        return struct.unpack_from("<4I", self.data, self._checked(address, 16))

    def store4(self, address: int, *words: int) -> None:
        struct.pack_into("<4I", self.data, self._checked(address, 16), *(word & 0xFFFF_FFFF for word in words))

    def store4_everywhere(self, address: int, *words: int) -> None:
        assert self.multicast
        for target in self.targets:
            self.store4(target + address - self.multicast, *words)

    def count(self, address: int, last: int) -> int:
        before = self.load(address, 4)
        self.store(address, 4, 0 if before >= last else before + 1)
        return before

    def set_bits(self, address: int, bits: int) -> int:
        before = self.load(address, 4)
        self.store(address, 4, before | bits)
        return before

    def _checked(self, address: int, size: int) -> int:
        assert address % size == 0 and address >= self.START and address + size <= self.end, f"address {address:#x}"
        return address


class Cta:
    """What the threads of a CTA share: words of memory, and what the lanes of its warps give each other."""

    WARP = 32

    def __init__(self, threads: int) -> None:
        self._words: dict[int, int] = {}
        self._offers: list[list[tuple[int, ...]]] = [[] for _ in range(threads)]
        self._products: dict[tuple[int, int], list[list[int]]] = {}

    def load(self, address: int) -> int:
        return self._words[address]

    def store(self, address: int, word: int) -> None:
        assert address % 4 == 0
        self._words[address] = word

    def load4(self, address: int) -> tuple[int, ...]:
        return tuple(self._words[address + at] for at in (0, 4, 8, 12))

    def store4(self, address: int, *words: int) -> None:
        for at, word in zip((0, 4, 8, 12), words, strict=True):
            self.store(address + at, word)

    def offer(self, thread: int, *words: int) -> None:
        self._offers[thread].append(words)

    def all_offered(self, thread: int) -> bool:
        """Whether every lane of the warp has come to the shuffle or the product at which ``thread`` is."""
        return min(map(len, self._warp(thread))) >= len(self._offers[thread])

    def take(self, thread: int, mask: int) -> int:
        return self._offers[thread ^ mask][len(self._offers[thread]) - 1][0]

    def take_product(self, thread: int) -> list[int]:
        """This lane's part of the warp's product, which the first lane to ask for it makes."""
        number = len(self._offers[thread]) - 1
        key = thread // self.WARP, number
        if key not in self._products:
            self._products[key] = _product([offers[number] for offers in self._warp(thread)])
        return self._products[key][thread % self.WARP]

    def _warp(self, thread: int) -> list[list[tuple[int, ...]]]:
        first = thread // self.WARP * self.WARP
        return self._offers[first : first + self.WARP]


def _product(lanes: list[tuple[int, ...]]) -> list[list[int]]:
    """``mma.m16n8k16`` of a warp: each lane's words of A, B and C to its words of A B + C.

    Lane ``4 g + t`` holds of A rows g and g + 8 and columns 2 t, 2 t + 1 and those 8 further on, of B such rows of
    column g, and of C columns 2 t, 2 t + 1 of rows g and g + 8.
    """
    words = np.array(lanes, np.uint32)
    halves = (words[:, :6].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    a = halves[:, :8].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
    b = halves[:, 8:].reshape(8, 4, 2, 2).transpose(2, 1, 3, 0).reshape(16, 8)
    c = words[:, 6:].copy().view(np.float32).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    each = (a @ b + c).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    return each.copy().view(np.uint32).tolist()


# ---- From PTX to Python ------------------------------------------------------------------------------------


def compile_ptx(text: str) -> Kernel:
    """The only entry of ``text`` as a Python generator: a jump is an assignment to ``block``."""
    blocks, labels = _blocks(text[text.index("{", text.index(".entry")) + 1 :])
    lines = ["def kernel(memory, cta, parameters, tid, ctaid, nctaid):", " block = 0", " while True:"]
    for number, block in enumerate(blocks):
        lines.append(f"  if block == {number}:")
        for line in block:
            guard, rest = re.fullmatch(r"(?:@(!?\S+)\s+)?(.*)", line).groups()
            condition = f"if {'not ' if guard.startswith('!') else ''}{_name(guard.lstrip('!'))}: " if guard else ""
            operation, *operands = _split(rest)
            lines += [f"   {condition}{code}" for code in _code(operation, operands, labels)]
            if operation.startswith("bra") and labels[operands[0]] <= number:
                lines.append("   yield False")
            if operation.startswith("bra") or operation == "ret":
                lines.append("   continue")
        if not block or not re.search(r"\b(bra|ret)\b", block[-1]):
            lines.append(f"   block = {number + 1}")
    scope = {"floats": _floats, "to_bf16": _to_bf16, "signed": _signed, "permuted": _permuted, "hold": _hold, "np": np}
    exec("\n".join(lines), scope)
    return scope["kernel"]


def _blocks(body: str) -> tuple[list[list[str]], dict[str, int]]:
    """Instructions from jump to jump, and at which block a label stands; a jump says first where to go otherwise."""
    blocks: list[list[str]] = [[]]
    labels = {}
    for line in re.sub(r"//.*|\.reg [^;]*;|^\s*[{}]\s*$|^\s*\.\w+.*$", "", body, flags=re.MULTILINE).splitlines():
        if label := re.match(r"\s*(\$\w+):", line):
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
            continue
        inline = re.fullmatch(r"\s*\{(.*;)\s*\}\s*", line)
        for text in (inline[1] if inline else line).split(";"):
            text = text.strip()
            if not text or text == "}":
                continue
            if re.match(r"(@\S+\s+)?bra\b", text):
                blocks[-1].append(f"next {len(blocks)}")
            blocks[-1].append(text)
            if re.match(r"(@\S+\s+)?(bra|ret)\b", text):
                blocks.append([])
    return blocks, labels


def _split(instruction: str) -> list[str]:
    """Operation and operands; what is in braces is one."""
    operation, *rest = instruction.split(None, 1)
    return [operation, *re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest[0] if rest else "")]


def _name(operand: str) -> str:
    operand = operand.strip()
    if re.fullmatch(r"0f[0-9a-fA-F]{8}", operand):
        return str(int(operand[2:], 16))
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
        return str(int(operand, 0))
    return operand.removeprefix("%").removesuffix(".x").replace(".", "_")


def _words(operand: str) -> str:
    return ", ".join(_name(word) for word in operand.strip("{} ").split(","))


def _address(operand: str) -> str:
    return re.sub(r"%", "", operand.strip().strip("[]"))


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "and", "or": "or", "xor": "!="}
_FLOATS = {"add": "np.add", "mul": "np.multiply", "div": "np.divide", "sqrt": "np.sqrt"}
_ARITHMETIC = {"add": "+", "sub": "-", "and": "&", "or": "|", "shl": "<<"}
_UNTIL_OFFERED = "while not cta.all_offered(tid): yield False"


def _code(operation: str, operands: list[str], labels: dict[str, int]) -> list[str]:
    """Lines of Python for one instruction; registers hold unsigned integers, floats their bits."""
    kind, *parts = operation.split(".")
    match kind:
        case "next":
            return [f"block = {operands[0]}"]
        case "bra":
            return [f"block = {labels[operands[0]]}"]
        case "ret":
            return ["return"]
        case "bar":
            return ["yield True"]
        case "griddepcontrol":
            return []
        case "ld" | "st" | "multimem" | "atom" | "red":
            return _memory_code(kind, parts, operands)
        case "shfl":
            into, word, mask, *_ = map(_name, operands)
            return [f"cta.offer(tid, {word})", _UNTIL_OFFERED, f"{into} = cta.take(tid, {mask})"]
        case "mma":
            into, *words = map(_words, operands)
            return [f"cta.offer(tid, {', '.join(words)})", _UNTIL_OFFERED, f"{into} = cta.take_product(tid)"]
        case "prmt":
            into, *values = map(_name, operands)
            return [f"{into} = permuted({', '.join(values)})"]
    type_ = parts[-1]
    if type_ == "pred":
        a, *b = map(_name, operands[1:])
        value = {"mov": f"bool({a})", "not": f"not {a}"}.get(kind) or f"bool({a}) {_LOGIC[kind]} bool({b[0]})"
        return [f"{_name(operands[0])} = {value}"]
    width = int(type_.removeprefix("bf16x2.").lstrip("busf"))
    mask = (1 << width) - 1
    if kind == "mov" and "{" in operands[0]:
        low, high = (_name(half) for half in operands[0].strip("{}").split(","))
        return [f"{low} = {_name(operands[1])} & 0xFFFF", f"{high} = {_name(operands[1])} >> 16"]
    if kind == "mov" and "globaltimer" in operands[1]:
        return [f"{_name(operands[0])} = 1"]
    if kind == "mov" and "{" in operands[1]:
        low, high = (_name(half) for half in operands[1].strip("{}").split(","))
        return [f"{_name(operands[0])} = {low} | {high} << 16"]
    into, *values = map(_name, operands)
    if type_[0] == "s":
        signed = [f"signed({value}, {32 if parts[0] == 'wide' else width})" for value in values]
    else:
        signed = [f"({value} & {mask})" for value in values]
    match kind, parts:
        case "setp", [compare, _]:
            return [f"{into} = {signed[0]} {_COMPARE[compare]} {signed[1]}"]
        case ("add" | "mul" | "div" | "sqrt"), (["f32"] | ["rn", "f32"]):
            return [f"{into} = floats({_FLOATS[kind]}, {', '.join(values)})"]
        case "cvt", ["rn", "f32", "s32"]:
            return [f"{into} = int(np.float32({signed[0]}).view(np.uint32))"]
        case "cvt", ["rn", "bf16x2", "f32"]:
            return [f"{into} = to_bf16({values[0]}) << 16 | to_bf16({values[1]})"]
        case "cvt", [to, _]:
            return [f"{into} = {signed[0]} & {(1 << int(to[1:])) - 1}"]
        case "mov", _ if "shmem" in operands[1]:
            value = "0"
        case "abs", _:
            value = f"abs({signed[0]})"
        case "mov", _:
            value = signed[0]
        case "not", _:
            value = f"~{values[0]}"
        case "selp", _:
            value = f"({values[0]} if {values[2]} else {values[1]})"
        case "shr", _:
            value = f"({signed[0]} >> {values[1]})"
        case "div", _:
            value = f"({signed[0]} // {signed[1]} if {signed[1]} else -1)"
        case "rem", _:
            value = f"({signed[0]} % {signed[1]})"
        case ("min" | "max"), _:
            value = f"{kind}({signed[0]}, {signed[1]})"
        case ("mul" | "mad"), [which, _]:
            value = f"({signed[0]} * {signed[1]})" + (f" >> {width}" if which == "hi" else "")
            mask = (1 << 64) - 1 if which == "wide" else mask
            value = f"(({value}) + {values[2]})" if kind == "mad" else f"({value})"
        case _:
            value = f"({values[0]} {_ARITHMETIC[kind]} ({values[1]}))"
    return [f"{into} = {value} & {mask}"]


def _memory_code(kind: str, parts: list[str], operands: list[str]) -> list[str]:
    polled = ["hold() and (yield False)"] if parts[:2] == ["relaxed", "sys"] else []
    if kind == "ld" and parts[0] == "param":
        return [f"{_name(operands[0])} = parameters[{re.search(r'param_([0-9]+)', operands[1])[1]}]"]
    if parts[:2] == ["shared", "v4"]:
        if kind == "ld":
            return [f"{_words(operands[0])} = cta.load4({_address(operands[1])})"]
        return [f"cta.store4({_address(operands[0])}, {_words(operands[1])})"]
    if parts[0] == "shared":
        load, place = kind == "ld", _address(operands[kind == "ld"])
        return [f"{_name(operands[0])} = cta.load({place})" if load else f"cta.store({place}, {_name(operands[1])})"]
    size = int(parts[-1].lstrip("busf")) // 8 if kind != "multimem" else 4
    if kind == "ld" and "v4" in parts:
        return [f"{_words(operands[0])} = memory.load4({_address(operands[1])})"]
    if kind == "ld":
        return [f"{_name(operands[0])} = memory.load({_address(operands[1])}, {size})"]
    if "v4" in parts:
        store = "store4_everywhere" if kind == "multimem" else "store4"
        return [f"memory.{store}({_address(operands[0])}, {_words(operands[1])})", *polled]
    if kind == "st":
        return [f"memory.store({_address(operands[0])}, {size}, {_name(operands[1])})"]
    if kind == "red":
        place = _address(operands[0])
        return [f"memory.store({place}, 4, memory.load({place}, 4) & {_name(operands[1])})"]
    method = "count" if "inc" in parts else "set_bits"
    return [f"{_name(operands[0])} = memory.{method}({_address(operands[1])}, {_name(operands[2])} & 0xFFFFFFFF)"]


def _signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> width - 1 else value


def _permuted(low: int, high: int, selector: int) -> int:
    """Of the eight bytes of two words those that the selector's digits name, the last one first."""
    both = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes((both[selector >> 4 * place & 7] for place in range(4)), "little")


@functools.lru_cache(1 << 16)  # threads beyond the end of a row all do the same
def _floats(operation: Callable, *bits: int) -> int:
    """An operation on FP32 numbers, rounded to nearest even; a NaN is the one that hardware makes."""
    with np.errstate(all="ignore"):
        result = operation(*(np.uint32(b).view(np.float32) for b in bits))
    return 0x7FFF_FFFF if np.isnan(result) else int(result.view(np.uint32))


def _to_bf16(bits: int) -> int:
    if bits & 0x7FFF_FFFF > 0x7F80_0000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


_random = random.Random()


def _hold() -> bool:
    return _random.random() < 0.02


# ---- Running -----------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """Of one kernel on one rank."""

    kernel: Kernel
    parameters: list[int]
    ctas: int
    threads: int = THREADS


class _Running:
    def __init__(self, memory: Memory, launch: Launch) -> None:
        threads = range(launch.threads)
        self.ctas = [
            dict(enumerate(launch.kernel(memory, shared, launch.parameters, tid, cta, launch.ctas) for tid in threads))
            for cta, shared in enumerate(Cta(launch.threads) for _ in range(launch.ctas))
        ]
        self.at_barrier: list[set[int]] = [set() for _ in self.ctas]

    def step(self) -> None:
        for threads, waiting in zip(self.ctas, self.at_barrier, strict=True):
            if _random.random() < 0.2:
                continue
            for tid in [tid for tid in threads if tid not in waiting]:
                try:
                    if next(threads[tid]):
                        waiting.add(tid)
                except StopIteration:
                    del threads[tid]
            if len(waiting) == len(threads):
                waiting.clear()

    @property
    def done(self) -> bool:
        return not any(self.ctas)


def run(memory: Memory, streams: Sequence[Sequence[Launch]], seed: int) -> None:
    """Runs each rank's launches, one after the other, beside those of the other ranks."""
    _random.seed(seed)
    waiting = [list(reversed(launches)) for launches in streams]
    running: list[_Running | None] = [None] * len(waiting)
    for _ in range(TURNS):
        if not any(waiting) and not any(running):
            return
        for rank in _random.sample(range(len(waiting)), len(waiting)):
            now = running[rank]
            if now is None and waiting[rank]:
                running[rank] = _Running(memory, waiting[rank].pop())
            elif now is not None and _random.random() < 0.7:
                now.step()
                if now.done:
                    running[rank] = None
    raise AssertionError("a launch waits for ever")
