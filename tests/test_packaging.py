"""The package as it is built, installed and documented."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

import attention_ext

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "attention_ext" / "_C.so"
in_a_checkout = pytest.mark.skipif(
    not (ROOT / "setup.py").is_file(), reason="needs the source tree around the tests"
)
pytestmark = in_a_checkout


def read_table(name: str) -> list[list[str]]:
    lines = (ROOT / "csrc" / name).read_text().splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def run(*command: str | Path, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=900, **options
    )


def nm(*options: str) -> list[str]:
    try:
        return run("nm", *options, LIBRARY, check=True).stdout.splitlines()
    except FileNotFoundError:
        pytest.skip("nm is not installed")


@pytest.fixture
def python_without_torch(tmp_path: Path) -> Path:
    """A Python that has setuptools and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", check=True)
    python = tmp_path / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", where, check=True).stdout.strip())
    there = Path(setuptools.__file__).parent.parent
    for part in (*there.glob("setuptools*"), there / "_distutils_hack"):
        (site_packages / part.name).symlink_to(part)
    return python


def test_every_source_file_is_listed_once_and_exists() -> None:
    listed = [path for _, _, path in read_table("sources.txt")]
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")]
    assert sorted(listed) == sorted(found)


def test_every_way_to_compile_has_its_flags() -> None:
    groups = {line[0] for line in read_table("flags.txt")}
    ways = {how for _, how, _ in read_table("sources.txt")}
    assert ways | {"all", "kernel", "link"} == groups


def test_kernels_and_what_they_include_see_no_torch_header() -> None:
    glue = {path for _, how, path in read_table("sources.txt") if how == "cxx"}
    kernels = [ROOT / path for _, how, path in read_table("sources.txt") if how != "cxx"]
    seen: set[Path] = set()
    while kernels:
        file = kernels.pop()
        if file in seen:
            continue
        seen.add(file)
        assert str(file.relative_to(ROOT)) not in glue
        for name in re.findall(r'^\s*#\s*include\s+[<"](.*)[>"]', file.read_text(), re.MULTILINE):
            assert not re.match(r"torch/|ATen/|c10/|Python\.h", name), f"{file} includes {name}"
            kernels += [p for p in (file.parent / name, ROOT / "csrc" / name) if p.is_file()]
    assert len(seen) > 3


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == attention_ext.__version__


def test_the_tested_torch_is_pinned_in_one_file() -> None:
    files = [*ROOT.glob("requirements-*.txt"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    pins = [file.name for file in files if re.search(r"\btorch==", file.read_text())]
    assert pins == ["requirements-torch.txt"]


def test_the_library_holds_no_python_and_little_torch() -> None:
    needed = {line.split()[-1].partition("@")[0] for line in nm("-D", "--undefined-only")}
    assert not [name for name in needed if re.match("_?Py[A-Z_]", name)]
    torch_names = {name for name in needed if re.search("torch|c10|at::|2at", name)}
    assert torch_names
    assert all(name.startswith(("aoti_torch_", "torch_")) for name in torch_names), torch_names


def test_the_library_exports_nothing() -> None:
    exported = [line.split()[-1] for line in nm("-D", "--defined-only", "-C")]
    assert not [name for name in exported if "attention_ext" in name]


def test_importing_the_package_needs_nothing_but_torch() -> None:
    extras = ["matplotlib", "numpy", "safetensors", "tokenizers", "tomli_w", "tqdm", "tyro"]
    script = (
        "import sys;"
        f"sys.modules.update(dict.fromkeys({extras}));"  # None: importing it raises
        "import attention_ext, attention_ext.nn"
    )
    done = run(sys.executable, "-W", "ignore", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_the_build_stops_with_one_sentence(python_without_torch: Path) -> None:
    done = run(python_without_torch, "setup.py", "-q", "dist_info", cwd=ROOT)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("attention_ext: building needs torch >= 2.11")


def test_with_an_old_torch_the_build_stops_with_one_sentence(python_without_torch: Path) -> None:
    (site_packages,) = python_without_torch.parent.parent.glob("lib/python*/site-packages")
    (site_packages / "torch").mkdir()
    (site_packages / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
    done = run(python_without_torch, "setup.py", "-q", "dist_info", cwd=ROOT)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "torch >= 2.11, but 2.9.1+cu128 is installed" in done.stderr


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path),
        cwd=ROOT,
        env=os.environ | {"CXX": "no-such-compiler"},
    )
    assert done.returncode == 1
    assert "there is no no-such-compiler" in done.stderr


def test_the_readme_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.slow
def test_a_wheel_holds_the_library_and_fits_every_python_3(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", tmp_path, ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"attention_ext-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "attention_ext/_C.so",
        "attention_ext/py.typed",
        "attention_ext/nn/__init__.py",
    } <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "attention_ext"
    }


@pytest.mark.slow
def test_a_source_archive_holds_what_building_and_testing_need(
    tmp_path: Path, python_without_torch: Path
) -> None:
    sdist = ("egg_info", "--egg-base", tmp_path, "sdist", "-d", tmp_path)
    run(python_without_torch, "setup.py", "-q", *sdist, cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    sources |= {"CMakeLists.txt", "LICENSE", "Makefile", "requirements-torch.txt", "setup.py"}
    assert sources | {"tests/test_packaging.py", "tests/csrc/check.h"} <= names
