"""Builds attention_ext/_C.so.  Metadata: pyproject.toml.  Files and compiler flags: csrc/*.txt.

Needs a C++17 compiler and an installed torch, of which only the headers and libtorch_cpu.so are
used: torch is not imported.  Environment: CXX (the compiler), MAX_JOBS (files at a time).

Each step leaves in build/objects what it made, the command that made it (.cmd) and, for a compile,
the files it read (.d).  While command and files stand, so does the result, whichever of
`pip install .`, `pip install -e .` and `python setup.py build_ext --inplace` asks for it.
"""

import concurrent.futures
import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.dist_info import dist_info as _dist_info

ROOT = Path(__file__).resolve().parent
MIN_TORCH = "2.11"
MIN_SETUPTOOLS = "77"  # the first that reads this pyproject.toml
IS_X86 = platform.machine() in ("x86_64", "AMD64")


def stop(sentence: str) -> NoReturn:
    sys.exit(f"attention_ext: {sentence}")


def is_older(version: str, minimum: str) -> bool:
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (version, minimum)]
    return numbers[0] < numbers[1]


if is_older(setuptools.__version__, MIN_SETUPTOOLS):
    stop(
        f"building needs setuptools >= {MIN_SETUPTOOLS}, but {setuptools.__version__} is installed:"
        " upgrade it, or leave out --no-build-isolation."
    )
from setuptools.command.bdist_wheel import bdist_wheel as _bdist_wheel  # noqa: E402


def read_table(name: str) -> list[list[str]]:
    """The words of each line of csrc/NAME, without comments."""
    lines = (ROOT / "csrc" / name).read_text().splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def read_flags(groups: list[str]) -> list[str]:
    """The flags of these groups, in the order of the groups."""
    table = read_table("flags.txt")
    return [flag for group in groups for name, *flags in table for flag in flags if name == group]


def list_torch_places() -> Iterator[Path]:
    """Where torch may be installed, as this process and as its environment see it."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        yield from map(Path, spec.submodule_search_locations)
    # pip's build isolation only edits sys.path: the environment's site-packages is still known.
    for key in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(key)) / "torch"
    if sys.prefix == sys.base_prefix:  # outside a virtual environment
        yield Path(site.getusersitepackages()) / "torch"


def find_torch() -> Path:
    """The folder of the installed torch; stops with one sentence if there is none or an old one."""
    for place in list_torch_places():
        if not (place / "version.py").is_file():
            continue
        version = re.search(r"__version__ = '(.*?)'", (place / "version.py").read_text())
        if version and is_older(version[1], MIN_TORCH):
            stop(
                f"building needs torch >= {MIN_TORCH}, but {version[1]} is installed in"
                f" {place.parent}: upgrade torch, then install attention_ext again."
            )
        return place
    stop(
        f"building needs torch >= {MIN_TORCH}, and {sys.prefix} has none: install torch first, as"
        " its site says for your machine, then run `pip install .` again (tools other than pip need"
        " their option against build isolation: `uv pip install --no-build-isolation .`)."
    )


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX, or the first usual name that exists."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        command = shlex.split(name)
        if shutil.which(command[0]):
            return command
    stop(
        f"building needs a C++17 compiler, and there is no {' or '.join(names)}: install one"
        " (Debian, Ubuntu: `apt install g++`), or name it in the environment variable CXX."
    )


class Job(NamedTuple):
    """One command, what it makes, and what it reads."""

    title: str
    command: list[str]
    output: Path
    inputs: list[Path]

    @property
    def stamp(self) -> Path:
        return self.output.with_suffix(self.output.suffix + ".cmd")

    def is_done(self) -> bool:
        """True if this very command made the output and no input has changed since."""
        if not (self.inputs and self.output.is_file() and self.stamp.is_file()):
            return False
        made = self.output.stat().st_mtime_ns
        return self.stamp.read_text() == shlex.join(self.command) and all(
            path.is_file() and path.stat().st_mtime_ns <= made for path in self.inputs
        )

    def run(self) -> "subprocess.CompletedProcess[str]":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.unlink(missing_ok=True)
        start = time.time_ns()
        done = subprocess.run(
            self.command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode == 0:
            os.utime(self.output, ns=(start, start))  # a file edited meanwhile counts as newer
            self.stamp.write_text(shlex.join(self.command))
        return done


def run_jobs(jobs: list[Job]) -> None:
    """Runs the jobs, MAX_JOBS at a time, and prints a line as each is done."""
    workers = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(job.run): job for job in jobs}
        for count, future in enumerate(concurrent.futures.as_completed(running), 1):
            job, done = running[future], future.result()
            print(f"[{count}/{len(jobs)}] {job.title}\n{done.stdout}".rstrip(), flush=True)
            if done.returncode:
                pool.shutdown(cancel_futures=True)
                print(shlex.join(job.command), flush=True)
                stop(f"could not {job.title}: the compiler's message stands above.")


def replace_file(target: Path, source: Path) -> None:
    """Makes `target` a copy of `source` in one step; a process that has it loaded keeps the old."""
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_suffix(f".{os.getpid()}")
    shutil.copyfile(source, beside)
    beside.replace(target)


class build_ext(_build_ext):
    """Compiles each file with the flags of its groups and links the library."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: there is no Python in the library."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        if not sys.platform.startswith("linux"):
            stop(f"expected Linux, got {sys.platform}, for which there is no build yet.")
        torch, cxx, library = find_torch(), find_compiler(), ext.name.rpartition(".")[2]
        folder = Path("build", "objects", sysconfig.get_platform(), library)
        compiles = [
            self.plan_compile(how, path, folder, cxx, torch)
            for name, how, path in read_table("sources.txt")
            if name == library and (IS_X86 or how not in ("avx2", "avx512"))
        ]
        run_jobs([job for job in compiles if self.force or not job.is_done()])

        objects, output = [job.output for job in compiles], folder / f"{library}.so"
        command = [*cxx, *read_flags(["link"]), *map(str, objects), f"-L{torch / 'lib'}"]
        command += ["-ltorch_cpu", "-o", str(output)]
        link = Job(f"link {library}.so", command, ROOT / output, [ROOT / path for path in objects])
        run_jobs([link] if self.force or not link.is_done() else [])

        # Beside the sources too, whatever the command: Python started in this folder finds those.
        for target in (
            Path(self.get_ext_fullpath(ext.name)),
            ROOT / self.get_ext_filename(ext.name),
        ):
            replace_file(target, ROOT / output)

    def copy_extensions_to_source(self) -> None:
        """Done already."""

    def plan_compile(self, how: str, path: str, folder: Path, cxx: list[str], torch: Path) -> Job:
        """Only glue is told where torch's headers are: a kernel that includes one fails here."""
        obj = folder / Path(path).with_suffix(".o")
        dependencies = obj.with_suffix(".d")
        command = [*cxx, *read_flags(["all", "cxx"] if how == "cxx" else ["all", "kernel", how])]
        if how == "cxx":
            command += ["-isystem", str(torch / "include")]
        command += ["-MD", "-MF", str(dependencies), "-c", path, "-o", str(obj)]
        inputs = []
        if (ROOT / dependencies).is_file():  # a make rule, `object: file file ...`
            rule = (ROOT / dependencies).read_text().replace("\\\n", " ")
            inputs = [ROOT / name for name in rule.partition(":")[2].split()]
        return Job(f"compile {path}", command, ROOT / obj, inputs)


class dist_info(_dist_info):
    """pip asks for the metadata before it downloads what is missing: the last moment to stop it."""

    def run(self) -> None:
        find_torch()
        super().run()


class bdist_wheel(_bdist_wheel):
    """A wheel for any Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def list_extensions() -> Iterator[Extension]:
    files: dict[str, list[str]] = {}
    for library, _, path in read_table("sources.txt"):
        files.setdefault(library, []).append(path)
    for library, paths in files.items():
        yield Extension(f"attention_ext.{library}", paths)


setup(
    ext_modules=list(list_extensions()),
    cmdclass={"build_ext": build_ext, "dist_info": dist_info, "bdist_wheel": bdist_wheel},
)
