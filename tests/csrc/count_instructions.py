"""Guards the kernels' speed without a clock, by counting instructions.

    python count_instructions.py COUNTS --compiler PROGRAM --run avx2=PROGRAM --read avx512=OBJECT
    python count_instructions.py COUNTS ... --record

--run: the fixed calls of PROGRAM (fixed_calls.cpp) under valgrind's callgrind: instructions that
    each executes.
--read: for an instruction set that valgrind does not run: the innermost loops of an object file
    that multiply and add, as objdump shows them: instructions for each multiply-add, and spills
    (vectors stored to or loaded from the stack).

COUNTS holds what was recorded for each compiler's major version. A count may differ by 5 %; what
got better has to be recorded too. Exit status 77, skipped: a tool or the recorded values are
missing. --record writes the values of this compiler into COUNTS in place of the old ones; every
other line stays.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

TOLERANCE = 0.05
SKIPPED = 77
FEWEST_MULTIPLY_ADDS = 16  # of a loop that counts: four accumulators, unrolled four times
HEADER = """\
# Instructions: <compiler> <machine> <set> <fixed call> <executed>, or, read from the object file,
# <compiler> <machine> <set> <function> <instructions> <multiply-adds> <spills> of its inner loops.
# Written by: cmake --build build/cmake --target record_instruction_counts
"""

Key = tuple[str, str]  # instruction set, call or function
Counts = dict[Key, tuple[int, ...]]


class Skip(Exception):
    """Why nothing can be compared here."""


def need(tool: str) -> str:
    """The path of a tool."""
    path = shutil.which(tool)
    if path is None:
        raise Skip(f"{tool} is not installed")
    return path


def count_executed(isa: str, program: str) -> Counts:
    """Fixed call -> (instructions executed,)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts"
        callgrind = [need("valgrind"), "--tool=callgrind", f"--callgrind-out-file={file}"]
        callgrind += ["--collect-atstart=no", "--toggle-collect=fixed_call"]
        callgrind += ["--dump-after=fixed_call", program]
        done = subprocess.run(callgrind, capture_output=True, text=True)
        if done.returncode == SKIPPED:
            raise Skip(f"this machine lacks {isa}")
        if done.returncode:
            raise SystemExit(f"{program} failed under valgrind:\n{done.stderr}")
        counts: Counts = {}
        for number, name in enumerate(done.stdout.split(), 1):
            dump = file.with_name(f"{file.name}.{number}").read_text()
            totals = re.search(r"^totals: (\d+)", dump, re.MULTILINE)
            assert totals, f"callgrind's output for {name} has no totals"
            counts[isa, name] = (int(totals[1]),)
        return counts


def read_loops(isa: str, path: str) -> Counts:
    """Function -> (instructions, multiply-adds, spills) of its innermost float32 loops."""
    command = [need("objdump"), "--disassemble", "--demangle", "--no-show-raw-insn", path]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sums: dict[Key, list[int]] = {}
    for function, body in split_functions(listing.splitlines()):
        for loop in innermost_loops(body):
            values = [len(loop), sum(map(is_multiply_add, loop)), sum(map(is_spill, loop))]
            if values[1] >= FEWEST_MULTIPLY_ADDS:
                total = sums.setdefault((isa, short_name(function)), [0, 0, 0])
                total[:] = [a + b for a, b in zip(total, values, strict=True)]
    return {key: tuple(values) for key, values in sums.items()}


def split_functions(lines: Iterable[str]) -> Iterator[tuple[str, dict[int, str]]]:
    """Each function's name and its instructions by address."""
    name: str = ""
    body: dict[int, str] = {}
    for line in lines:
        if title := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            yield name, body
            name, body = title[1], {}
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(.*)$", line):
            body[int(instruction[1], 16)] = instruction[2].strip()
    yield name, body


def innermost_loops(body: dict[int, str]) -> Iterator[list[str]]:
    """The stretches from the target of a backward jump to the jump that hold no other such.

    >>> list(innermost_loops({0: "nop", 2: "add", 4: "jne 2 <f+0x2>", 6: "jne 0 <f>", 8: "jmp 9"}))
    [['add', 'jne 2 <f+0x2>']]
    """
    jumps = []
    for address, text in body.items():
        jump = re.match(r"j\w+\s+([0-9a-f]+)\b", text)
        if jump and int(jump[1], 16) in body and int(jump[1], 16) <= address:
            jumps.append((int(jump[1], 16), address))
    for first, last in jumps:
        inner = [(a, b) for a, b in jumps if first <= a and b <= last and (a, b) != (first, last)]
        if not inner:
            yield [text for address, text in body.items() if first <= address <= last]


def is_multiply_add(text: str) -> bool:
    """Of float32 numbers, a whole vector of them."""
    return re.match(r"vfn?m(add|sub)\d+ps\s.*%[yz]mm", text) is not None


def is_spill(text: str) -> bool:
    """A vector register and the stack."""
    return re.search(r"%[yz]mm", text) is not None and re.search(r"\(%r[sb]p", text) is not None


def short_name(function: str) -> str:
    """The function that a loop belongs to, without namespaces, numbers, arguments and lambdas.

    >>> space = "attention_ext::avx512::(anonymous namespace)::"
    >>> short_name(f"auto {space}F<float>::f<4, true>(long)::{{lambda(long)#1}}::x<int>() const")
    'F<float>::f'
    >>> short_name(f"void {space}add<float, 6>(float const*, long)")
    'add<float>'
    """
    name = re.sub(r"attention_ext::(\w+::)?|\(anonymous namespace\)::", "", function)
    name = re.sub(r"<(\d+|true|false)>", "", re.sub(r", (\d+|true|false)\b", "", name))
    return name.partition("(")[0].replace(", ", ",").split()[-1]


def read_counts(path: Path, compiler: str) -> Counts:
    """What is recorded for a compiler."""
    counts: Counts = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith(f"{compiler} "):
            isa, name, *numbers = line.removeprefix(compiler).split()
            counts[isa, name] = tuple(map(int, numbers))
    return counts


def write_counts(path: Path, compiler: str, counts: Counts) -> None:
    """Replaces the lines of a compiler."""
    lines = path.read_text().splitlines() if path.is_file() else []
    others = [x for x in lines if x and not x.startswith(("#", f"{compiler} "))]
    own = [f"{compiler} {isa} {name} {' '.join(map(str, n))}" for (isa, name), n in counts.items()]
    path.write_text(HEADER + "\n".join(sorted(others + own)) + "\n")


def compare(counts: Counts, recorded: Counts) -> list[str]:
    """One sentence for every count that is not as it was recorded.

    >>> compare({("avx2", "f"): (104,)}, {("avx2", "f"): (100,)})
    []
    >>> compare({("avx2", "f"): (94,)}, {("avx2", "f"): (100,)})
    ['avx2 f: instructions were 100, now 94 (-6.0 %)']
    >>> compare({("avx512", "f"): (150, 96, 9)}, {("avx512", "f"): (150, 96, 0)})
    ['avx512 f: spills were 0, now 9']
    >>> compare({}, {("avx2", "f"): (100,)})
    ['avx2 f: is recorded, but gone']
    """
    faults = []
    for isa, name in sorted(counts | recorded):
        now, then = counts.get((isa, name)), recorded.get((isa, name))
        if now is None or then is None:
            faults.append(f"{isa} {name}: {'is recorded, but gone' if then else 'is not recorded'}")
        elif len(now) == 1:
            faults += differ(f"{isa} {name}: instructions", now[0], then[0])
        else:
            each, before = now[0] / now[1], then[0] / then[1]
            faults += differ(f"{isa} {name}: instructions for each multiply-add", each, before)
            faults += differ(f"{isa} {name}: spills", now[2], then[2], slack=2)
    return faults


def differ(what: str, now: float, then: float, slack: float = 0) -> list[str]:
    """A sentence, if the numbers are further apart than they may be."""
    if abs(now - then) <= max(TOLERANCE * then, slack):
        return []
    change = f" ({100 * (now / then - 1):+.1f} %)" if then else ""
    return [f"{what} were {then:.4g}, now {now:.4g}{change}"]


def main() -> int:
    """Compares or records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("counts", type=Path)
    parser.add_argument("--compiler", required=True, help="a program that knows its compiler")
    parser.add_argument("--run", action="append", default=[], metavar="SET=PROGRAM")
    parser.add_argument("--read", action="append", default=[], metavar="SET=OBJECT")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()

    name = subprocess.run(
        [arguments.compiler, "--compiler"], check=True, capture_output=True, text=True
    ).stdout.strip()
    compiler = f"{name} {platform.machine()}"
    sets = [pair.partition("=")[0] for pair in arguments.run + arguments.read]
    recorded = read_counts(arguments.counts, compiler)
    recorded = {key: numbers for key, numbers in recorded.items() if key[0] in sets}
    try:
        if not recorded and not arguments.record:
            raise Skip(
                f"no counts are recorded for {compiler}; the target record_instruction_counts does"
            )
        counts: Counts = {}
        for pair in arguments.run:
            counts |= count_executed(*pair.split("=", 1))
        for pair in arguments.read:
            counts |= read_loops(*pair.split("=", 1))
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    if arguments.record:
        write_counts(arguments.counts, compiler, counts)
        print(f"recorded {len(counts)} counts for {compiler}")
        return 0
    faults = compare(counts, recorded)
    print("\n".join(faults))
    print(f"{len(counts)} counts for {compiler}, {len(faults)} not as recorded")
    if faults:
        print(
            "meant? then record them: cmake --build build/cmake --target record_instruction_counts"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
