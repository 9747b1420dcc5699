"""Runs a seeded sample of mutants; see ci/mutants."""

import argparse
import collections
import json
import pathlib
import random
import re
import subprocess
import sys

OUTPUT = pathlib.Path("target/mutants")
ARGUED = pathlib.Path("ci/mutants.txt")

# Package: further options of cargo, the files to change, and files among them that are part of tests.
PACKAGES = {
    "xwarp-tcp": ([], ["tcp-offload/src/**"], ["tcp-offload/src/sim/**", "**/tests/**", "**/testing*", "**/twins.rs"]),
    "xwarp-rnic": ([], ["rnic/src/**"], ["rnic/src/sim.rs", "**/tests/**"]),
    "xwarp-control": ([], ["control/src/**"], ["**/tests.rs"]),
    "xwarp-verbs": (
        ["--no-default-features"],
        ["verbs/src/ticks.rs"]
        + [f"verbs/src/api/{name}.rs" for name in ("async_event", "counters", "failure", "gather", "window")],
        [],
    ),
    "xwarp-sdp": (
        [],
        ["sdp/src/machine/**", "sdp/src/wire.rs", "sdp/src/rules.rs", "sdp/src/buffers.rs", "sdp/src/mapper/packet.rs"],
        ["**/*_tests.rs"],
    ),
    "xwarp-daemon": (
        ["--cargo-test-arg=--lib"],
        [f"daemon/src/{name}.rs" for name in ("closing", "limits", "options", "pairs", "pending", "ports", "slots")],
        [],
    ),
}

# Of a file with this many mutants or more, this share must be caught.
JUDGED = 10
SHARE = 0.95


def mutants(package, *arguments, **options):
    extra, _, _ = PACKAGES[package]
    command = ["cargo", "mutants", "--package", package, *extra, *arguments]
    return subprocess.run(command, check=False, text=True, **options)


def list_mutants(package):
    """All mutants of a package, as (package, name)."""
    _, files, excluded = PACKAGES[package]
    options = [f"--file={glob}" for glob in files] + [f"--exclude={glob}" for glob in excluded]
    listed = mutants(package, "--list", "--json", *options, stdout=subprocess.PIPE)
    listed.check_returncode()
    return [(package, mutant["name"]) for mutant in json.loads(listed.stdout)]


def without_place(name):
    """The file and the change of a mutant: "FILE:LINE:COLUMN: CHANGE" without line and column, which move."""
    return re.sub(r"^([^:]+):\d+:\d+: ", r"\1: ", name)


def argued():
    """The survivors that need no test. Each must have a reason."""
    lines = [line for line in ARGUED.read_text().splitlines() if line and not line.startswith("#")]
    names = set()
    for line, reason in zip(lines, lines[1:] + [""]):
        if not line.startswith(" "):
            if not reason.startswith(" "):
                sys.exit(f"{ARGUED}: no reason for {line}")
            names.add(line)
    return names


def run(package, names):
    """Runs these mutants. Returns the outcome of each."""
    output = OUTPUT / package
    output.mkdir(parents=True, exist_ok=True)
    chosen = [f"--re=^{re.escape(name)}$" for name in names]
    ran = mutants(package, "--no-times", f"--output={output}", *chosen)
    report = output / "mutants.out" / "outcomes.json"
    # 0: all caught, 2: some missed, 3: some timed out.
    if ran.returncode not in (0, 2, 3):
        sys.exit(f"cargo mutants failed for {package} ({ran.returncode})")
    outcomes = {}
    for outcome in json.loads(report.read_text())["outcomes"]:
        if outcome["scenario"] != "Baseline":
            outcomes[outcome["scenario"]["Mutant"]["name"]] = outcome["summary"]
    if set(outcomes) != set(names):
        sys.exit(f"{package}: {len(outcomes)} of {len(names)} mutants were run")
    return outcomes


def judge(outcomes):
    """Prints the result by file. Returns whether it is good enough."""
    excused, files, missed = argued(), collections.defaultdict(collections.Counter), []
    for name, summary in outcomes.items():
        if summary == "Unviable":
            continue
        plain = without_place(name)
        # A mutant that hangs is noticed.
        caught = summary in ("CaughtMutant", "Timeout")
        if caught and plain in excused:
            print(f"{ARGUED}: is caught now: {plain}")
        if not caught and plain not in excused:
            missed.append(name)
        files[plain.split(":")[0]]["caught" if caught or plain in excused else "missed"] += 1
    for name in sorted(missed):
        print(f"missed: {name}")
    print(f"{'caught':>8}{'missed':>8}  file")
    good = True
    for path, count in sorted(files.items()):
        all_of_it = count["caught"] + count["missed"]
        bad = all_of_it >= JUDGED and count["caught"] < SHARE * all_of_it
        good &= not bad
        print(f"{count['caught']:8}{count['missed']:8}  {path}{'  too few' if bad else ''}")
    all_caught, all_missed = (sum(count[kind] for count in files.values()) for kind in ("caught", "missed"))
    print(f"{all_caught:8}{all_missed:8}  in all")
    return good


def main():
    parser = argparse.ArgumentParser(prog="ci/mutants")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    known = [mutant for package in PACKAGES for mutant in list_mutants(package)]
    if options.file:
        known = [mutant for mutant in known if mutant[1].split(":")[0] in options.file]
    if not known:
        sys.exit("no mutants")
    sample = random.Random(options.seed).sample(known, min(options.number, len(known)))
    print(f"{len(sample)} of {len(known)} mutants, seed {options.seed}", flush=True)
    if options.list:
        print("\n".join(sorted(name for _, name in sample)))
        return
    outcomes = {}
    for package in PACKAGES:
        names = [name for of, name in sample if of == package]
        if names:
            outcomes.update(run(package, names))
    sys.exit(0 if judge(outcomes) else 1)


main()
