"""Builds vpool with a sanitizer in a temporary folder and runs the stress, or tests, under it.

    python tests/sanitize/run.py thread --seconds 60
    python tests/sanitize/run.py address,undefined --seconds 60
    python tests/sanitize/run.py address,undefined --tests tests/test_model.py tests/test_stress.py

With both `--seconds` and `--tests` the stress comes first, and one build does for both.

Only vpool's modules are instrumented; Python and NumPy run as they are, with the sanitizer's library loaded
before them.  The GIL and Python's locks are seen, since they are made of calls that the library intercepts.
The exit status is 1 for a report that names vpool, or where the program itself fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARIES = {"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}
LEFT_OUT = shutil.ignore_patterns("*.so", "__pycache__", ".*_cache", ".hypothesis", "lib*", "temp*", "bdist*")
REPORT = re.compile(r"^(?:=+\d*=* *)?(?:WARNING|ERROR): \w+Sanitizer|: runtime error: ", re.MULTILINE)


def compiler():
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc").split()[0]


def library(name):
    """Path of a sanitizer's library, which comes with the compiler."""
    found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"{compiler()} has no {name}: install the sanitizer libraries that belong to it")
    return path.resolve()


def build(folder, kinds):
    """A copy of the source, built with the sanitizers."""
    for name in ("pyx", "vpool", "tests", "build/cython"):
        if (ROOT / name).exists():
            # Times are kept, so that what Cython generated before is taken as it is.
            shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, "VPOOL_SANITIZE": kinds, "CFLAGS": "-g1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout}")


def environment(folder, kinds):
    first = [str(library(LIBRARIES[kind])) for kind in kinds.split(",")]
    options = f"log_path={folder}/report exitcode=0"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(first),
        "PYTHONPATH": str(folder),
        "PYTHONMALLOC": "malloc" if "address" in kinds else "default",
        "TSAN_OPTIONS": f"{options} history_size=4 report_signal_unsafe=0",
        "ASAN_OPTIONS": f"{options} detect_leaks=0 allocator_may_return_null=1 halt_on_error=1",
        "UBSAN_OPTIONS": f"{options} print_stacktrace=1",
    }


def reports(folder):
    """The reports that name vpool, and how many do not."""
    ours, others = [], 0
    for path in folder.glob("report.*"):
        text = path.read_text(errors="replace")
        begins = [found.start() for found in REPORT.finditer(text)]
        # A runtime error's line begins before what was found.
        begins = [text.rfind("\n", 0, begin) + 1 for begin in begins]
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            if "vpool" in text[begin:end] or "pyx/" in text[begin:end]:
                ours.append(text[begin:end])
            else:
                others += 1
    return ours, others


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", help="thread, address, undefined, or address,undefined")
    parser.add_argument("--seconds", type=float, help="of the stress; 20 without tests")
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help="run these under pytest")
    options = parser.parse_args()
    if not set(options.kinds.split(",")) <= LIBRARIES.keys():
        parser.error(f"kinds are {', '.join(LIBRARIES)}")
    seconds = options.seconds or (0 if options.tests else 20)
    commands = []
    if seconds:
        commands.append([sys.executable, "-m", "tests.sanitize.stress", "--seconds", str(seconds)])
    if options.tests:
        commands.append([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.tests])
    if "thread" in options.kinds and shutil.which("setarch"):
        # The thread sanitizer's library wants its own places in the address space.
        commands = [["setarch", "-R", *command] for command in commands]
    with tempfile.TemporaryDirectory(prefix="vpool-sanitize-") as name:
        folder = Path(name)
        settings = environment(folder, options.kinds)
        started = time.monotonic()
        build(folder, options.kinds)
        built = time.monotonic()
        statuses = [subprocess.run(command, cwd=folder, env=settings).returncode for command in commands]
        status = next(filter(None, statuses), 0)
        ours, others = reports(folder)
    for report in ours[:20]:
        print(report)
    print(
        f"{options.kinds}: built in {built - started:.0f} s, ran {time.monotonic() - built:.0f} s, status {status}; "
        f"{len(ours)} reports name vpool, {others} others"
    )
    return 1 if ours or status else 0


if __name__ == "__main__":
    sys.exit(main())
