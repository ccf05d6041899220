"""Build the CPU passes from the C sources beside this file: by the package's installation, or again by hand.

    python -m lrmoe.ops.cpu [compiler with arguments]

Needs GCC, and nothing of Python but its standard library: an installation runs this file alone.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "_lrmoe_cpu.so"
X86 = platform.machine().lower() in ("x86_64", "amd64")
_COMMON = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra")
# Infinities and NaN keep their meaning, and no sum is reordered; what C says of errno and traps is of no use here.
_NUMBERS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_WIDE = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx2",
    "-mfma",
    "-mprefer-vector-width=512",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    **({"avx2": ("-mavx2", "-mfma"), "avx512": _WIDE} if X86 else {}),
}


class BuildError(RuntimeError):
    """There is no compiler here that builds the passes; the message says what was tried."""


def checksum() -> str:
    """Of the C sources, 16 hexadecimal digits: a library says which ones it was built from."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def build(target: Path, compiler: str | None = None) -> str:
    """Compile the sources into the library `target`.

    Args:
        compiler: command to call, with arguments where it has some ("ccache gcc"); by default, and where it is empty,
            the first of gcc and cc that is there.

    Returns:
        the command with its program's path.

    Raises:
        BuildError: there is none, it is not GCC, or it failed.
    """
    command = _compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        objects = list(_objects(command, work))
        made = work / LIBRARY
        _run([*command, "-shared", "-fopenmp", *map(str, objects), "-o", str(made)])
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")
        shutil.copyfile(made, fresh)
        fresh.replace(target)  # a process that has the old library mapped keeps it
    return " ".join(command)


def _compiler(wanted: str | None) -> list[str]:
    names = [[wanted], wanted.split()] if wanted and wanted.strip() else [["gcc"], ["cc"]]
    found = next(([path, *rest] for name, *rest in names if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise BuildError(f"no C compiler ({wanted or 'gcc or cc'})")
    macros = _run([*found, "-dM", "-E", "-x", "c", "/dev/null"])
    if "__clang__" in macros or "__GNUC__" not in macros:
        # Another compiler's OpenMP brings a second pool of threads beside the one torch computes with.
        raise BuildError(f"{' '.join(found)} is not GCC, whose OpenMP library torch uses too")
    return found


def _objects(command: list[str], work: Path) -> Iterator[Path]:
    macros = [f"-DLRMOE_SOURCES={checksum()}", *(["-DLRMOE_X86"] if X86 else [])]
    parts: dict[str, tuple[str, list[str]]] = {"sums": ("sums.c", []), "lrmoe_cpu": ("lrmoe_cpu.c", macros)}
    for name, wide in VARIANTS.items():
        parts[f"variant_{name}"] = ("kernels.c", [f"-DVARIANT=variant_{name}", *wide])
        parts[f"choices_{name}"] = ("choose.c", [f"-DCHOICES=choices_{name}", *wide])
    for name, (source, flags) in parts.items():
        made = work / f"{name}.o"
        _run([*command, *_COMMON, *_NUMBERS, *flags, "-c", str(SOURCES / source), "-o", str(made)])
        yield made


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def main(compiler: str | None = None) -> int:
    """Build into the installed package; see `build` for the compiler."""
    target = SOURCES / LIBRARY
    try:
        print(f"built {target} with {build(target, compiler)}")
    except BuildError as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    return 0
