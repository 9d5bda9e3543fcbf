"""Every benchmark, one after the other, and one table of what they found beside the goals.

python benchmarks                  10 minutes or more; the table also goes into docs/benchmarks.md
python benchmarks --quick          two minutes, less exact; the table is only printed
python benchmarks --cifar10 DIR    the audit also on CIFAR-10, prepared in DIR
python benchmarks --only exchange sweep
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from figures import KEPT

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- made by `python benchmarks` -->\n", "<!-- end -->\n"
NAMES = (
    *("store_accuracy", "store_step", "exchange", "imagenet_store", "loader", "train_step"),
    *("telemetry", "sweep", "audit"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller; nothing is written")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="; ".join(NAMES))
    parser.add_argument("--cifar10", type=Path, metavar="DIR", help="for the audit")
    asked = parser.parse_args()
    began, measured_on = time.monotonic(), machine()
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "figures"
        for name in asked.only or NAMES:
            options = ["--quick"] if asked.quick else []
            if name == "audit" and asked.cifar10:
                options += ["--cifar10", str(asked.cifar10)]
            run(name, options, kept)
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
    minutes = (time.monotonic() - began) / 60
    table = f"{measured_on}; {minutes:.0f} minutes in all.\n\n{markdown(rows)}"
    print(f"\n{table}")
    if not asked.quick and not asked.only:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2])
        print(f"written to {PAGE.relative_to(HERE.parent)}")


def run(name: str, options: list[str], kept: Path) -> None:
    print(f"\n── {name}", flush=True)
    start = time.monotonic()
    environment = os.environ | {KEPT: str(kept)}
    done = subprocess.run([sys.executable, HERE / f"{name}.py", *options], env=environment)
    if done.returncode:
        sys.exit(f"benchmarks/{name}.py ended with {done.returncode}: what it said stands above")
    print(f"── {name} took {time.monotonic() - start:.0f} s", flush=True)


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "ffcv"))
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of an {cpu}, {memory:.0f} GB of "
        f"memory, {platform.system()}, Python {platform.python_version()}, {packages}{code()}"
    )


def code() -> str:
    """What was measured, by the name that git has for the package's files: commits that change
    others, or that are squashed, leave it.
    """
    package, git = "dps_dist", ["git", "-C", str(HERE.parent)]
    try:
        name, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True).stdout.strip()
            for words in (
                ["rev-parse", "--verify", "--quiet", f"HEAD:{package}"],
                ["status", "--porcelain", package],
            )
        )
    except OSError:  # there is no git
        return ""
    if not name:
        return ""
    changes = " with changes" if changed else ""
    return f", code {name[:12]}{changes} (`git rev-parse COMMIT:{package}`)"


def markdown(rows: list[dict[str, str]]) -> str:
    lines = ["| what | measured | goal | `python benchmarks/…` |", "|---|---|---|---|"]
    for row in rows:
        goal = row["goal"] + ("" if row["met"] else ", **missed**")
        lines.append(f"| {row['what']} | {row['measured']} | {goal} | `{row['script']}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
