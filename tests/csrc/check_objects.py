"""Checks what the linker may do with the kernels' object files.

The linker keeps one copy of a weak symbol (an inline function, a template's instance), that of
whichever file comes first. One that a kernel file compiled for AVX-512 shares with any other file
could put AVX-512 instructions into code that runs on every machine. So a kernel file may share
none, may export nothing outside its instruction set's namespace, and may run nothing at load time.

    python check_objects.py NM --baseline kernels_baseline.o --avx2 ... --cxx library.o checks.o ...
"""

import subprocess
import sys

WEAK = "VWuvw"  # nm's letters for a definition that the linker may take from another file
EXPORTED = "TDBRGS" + WEAK
NAMESPACE = "attention_ext::{}::"


def read_symbols(nm: str, path: str) -> dict[str, str]:
    """Name -> nm's letter, of what the object file defines."""
    output = subprocess.run(
        [nm, "-C", "--defined-only", path], check=True, capture_output=True, text=True
    ).stdout
    lines = (line.split(maxsplit=2) for line in output.splitlines())
    return {name: letter for _, letter, name in lines}


def find_faults(objects: list[tuple[str, str, dict[str, str]]]) -> list[str]:
    """One sentence for every symbol that a kernel file should not have."""
    faults = []
    for isa, path, symbols in objects:
        if isa == "cxx":
            continue
        for name, letter in symbols.items():
            if "_GLOBAL__sub_I" in name:
                faults.append(f"{path}: {name} runs when the library loads")
            if letter not in EXPORTED:
                continue
            if NAMESPACE.format(isa) not in name:
                faults.append(f"{path}: {name} is not in the namespace {NAMESPACE.format(isa)}")
            if letter in WEAK:
                others = [p for _, p, there in objects if p != path and name in there]
                faults += [f"{path}: {name} is weak, and also in {other}" for other in others]
    return faults


def read_objects(nm: str, arguments: list[str]) -> list[tuple[str, str, dict[str, str]]]:
    """(instruction set or "cxx", path, symbols) for each object file named on the command line."""
    objects, how = [], ""
    for argument in arguments:
        if argument.startswith("--"):
            how = argument[2:]
        else:
            objects.append((how, argument, read_symbols(nm, argument)))
    return objects


def main() -> int:
    nm, *arguments = sys.argv[1:]
    objects = read_objects(nm, arguments)
    faults = find_faults(objects)
    print("\n".join(faults))
    print(f"{len(objects)} object files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
