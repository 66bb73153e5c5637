"""The inner loops of products keep everything in registers: what the compiler made of them is read and searched.

A sum that lives on the stack costs a load and a store for every line of weights, and no test of results would notice.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.kernels.variants import VARIANTS
from kit.compiled import HERE, LEVELS_HERE, NAMES, library_for

PRODUCTS = ("multiply_block<",)
NUM_FORMATS = 4
HEAD = re.compile(r"^[0-9a-f]+ <(.+)>:$")
LINE = re.compile(r"^ *([0-9a-f]+):\t(.+)$")
JUMP = re.compile(r"^(?:j\w+|b|b\.\w+|cbn?z\s.*,|tbn?z\s.*,)\s+([0-9a-f]+) <")
MULTIPLIES = re.compile(  # vectors, not the numbers of a loop
    r"(?:vfn?madd|vdpbf16|vpdpb|vpmadd|vpmull|tdpb)\w*\s|(?:f?mla|f?mul|smlal|smull|sdot)\w*\s+v"
)
STACK = re.compile(r"%[re]sp\b|\[sp\b")
FRAME = re.compile(r"%rbp\b|\[x29\b")  # registers like any other, unless a function has its frame there
MAKES_FRAME = re.compile(r"^mov\s+(?:%rsp,%rbp|x29, sp)|^add\s+x29, sp")


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str


@dataclass(frozen=True)
class Machinery:
    """A function as the processor sees it."""

    name: str
    code: list[Instruction]

    def innermost_loops(self) -> list[list[Instruction]]:
        """From where a jump leads back to, up to the jump; those that have no other loop within."""
        jumps = [(int(jump[1], 16), each.address) for each in self.code if (jump := JUMP.match(each.text))]
        spans = [(first, last) for first, last in jumps if self.code[0].address <= first <= last]
        inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        return [[each for each in self.code if first <= each.address <= last] for first, last in inner]

    def multiplying_loops(self) -> list[list[Instruction]]:
        return [loop for loop in self.innermost_loops() if any(MULTIPLIES.match(each.text) for each in loop)]

    def stack_accesses(self) -> Iterator[str]:
        """What the loops that multiply do with the stack."""
        framed = any(MAKES_FRAME.match(each.text) for each in self.code)
        for each in (each for loop in self.multiplying_loops() for each in loop):
            if STACK.search(each.text) or (framed and FRAME.search(each.text)):
                yield f"{self.name}: {each.text}"


def disassembled(text: str) -> list[Machinery]:
    """The functions of a listing that multiply."""
    found: list[Machinery] = []
    wanted = False
    for line in text.splitlines():
        if head := HEAD.match(line):
            wanted = any(name in head[1] for name in PRODUCTS)
            if wanted:
                found.append(Machinery(head[1], []))
        elif wanted and (part := LINE.match(line)):
            found[-1].code.append(Instruction(int(part[1], 16), part[2]))
    return found


def listing(path: Path, level: str) -> str:
    machine = next((variant.machine for variant in VARIANTS if variant.name == level), "")
    program = shutil.which(f"{machine}-linux-gnu-objdump") or shutil.which("objdump")
    if program is None:
        pytest.skip("no objdump here (Debian: binutils)")
    call = [program, "--disassemble", "--section=.text", "--demangle", "--no-show-raw-insn", "--wide", str(path)]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def check(path: Path, level: str) -> None:
    functions = disassembled(listing(path, level))
    formats = {name for each in functions for name in re.findall(r"multiply_block<\(forerun::Format\)(\d+)", each.name)}
    assert len(formats) >= NUM_FORMATS
    for each in functions:
        assert each.multiplying_loops(), f"{each.name} has no loop that multiplies"
    assert not [access for each in functions for access in each.stack_accesses()]


ELSEWHERE = [name for name in NAMES if name not in HERE]


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_no_inner_loop_touches_the_stack(level: str) -> None:
    """In the libraries that this run compiles for other tests."""
    check(library_for(level), level)


@pytest.mark.full
@pytest.mark.parametrize("level", ELSEWHERE)
def test_nor_does_one_for_processors_that_this_is_not(level: str) -> None:
    check(library_for(level), level)


LISTING = """
0000000000001000 <void forerun::multiply_block<(forerun::Format)1, 3, 1>(forerun::Linear const&) [clone .isra.0]>:
    1000:\tpush   %rbp
    1001:\tSET_UP
    1004:\tvmovdqa %ymm1,-0x40(%rsp)
    1010:\tvbroadcastss (%rax,%rcx,1),%ymm4
    1018:\tWORK
    1020:\tvfmadd231ps %ymm0,%ymm4,%ymm10
    1026:\tjne    1010 <void forerun::multiply_block<(forerun::Format)1, 3, 1>(forerun::Linear const&)+0x10>
    1028:\tmov    -0x40(%rsp),%rax
    1030:\tjne    1000 <void forerun::multiply_block<(forerun::Format)1, 3, 1>(forerun::Linear const&)>
0000000000002000 <forerun::norm_row(float const*)>:
    2000:\tvfmadd231ps (%rsp),%ymm4,%ymm10
    2008:\tjne    2000 <forerun::norm_row(float const*)>
"""


@pytest.mark.parametrize(
    ("set_up", "work", "found"),
    [
        ("nop", "vmovups (%rdx),%ymm0", False),
        ("nop", "vmovaps 0x8(%rsp),%ymm0", True),
        ("nop", "vpaddd -0x20(%rsp,%rax,8),%ymm1,%ymm3", True),
        ("nop", "vmovups (%rbp),%ymm0", False),  # a register like any other
        ("mov    %rsp,%rbp", "vmovups -0x20(%rbp),%ymm0", True),
        ("nop", "ldr\tq6, [sp, #144]", True),
        ("nop", "ldr\tq6, [x29, #144]", False),
        ("mov\tx29, sp", "ldr\tq6, [x29, #144]", True),
    ],
)
def test_a_stack_access_is_seen_in_the_loop_and_nowhere_else(set_up: str, work: str, found: bool) -> None:
    (function,) = disassembled(LISTING.replace("SET_UP", set_up).replace("WORK", work))
    assert [len(loop) for loop in function.multiplying_loops()] == [4]
    assert bool([*function.stack_accesses()]) == found
