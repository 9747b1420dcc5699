"""Runs pyverbs' own test suite in this process, and prints one line for each test: its outcome, its name, and the reason.

    pyverbs_suite.py DIRECTORY --dev DEVICE     DIRECTORY takes a copy of the suite

Debian's rdma-core package carries the suite among its documentation, partly compressed.
"""

import gzip
import os
import shutil
import subprocess
import sys
import unittest

SUITE = "/usr/share/doc/rdma-core/tests"
# Tests of functions of one vendor's adapters, each of which looks for such a device.
VENDORS = ("test_mlx5", "test_efa", "test_cuda")


def unpack(directory):
    """Copies the suite, without the compression of Debian's packages."""
    tests = os.path.join(directory, "tests")
    os.makedirs(tests)
    for name in os.listdir(SUITE):
        if name.startswith(VENDORS):
            continue
        source = os.path.join(SUITE, name)
        if name.endswith(".gz"):
            with gzip.open(source) as packed, open(os.path.join(tests, name[:-3]), "wb") as plain:
                shutil.copyfileobj(packed, plain)
        else:
            shutil.copy(source, tests)
    return tests


def answer_for_rdma(directory):
    """Puts an `rdma` on the PATH that lists no device, unless there is one that succeeds.

    Newer suites ask it for the interface of a device before they look into /sys/class/infiniband. It asks the kernel, which knows no
    device of xwarp: a kernel with RDMA answers with an empty list, one without RDMA with an error.
    """
    try:
        subprocess.run(["rdma", "link", "show", "-j"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        place = os.path.join(directory, "bin")
        os.makedirs(place)
        with open(os.path.join(place, "rdma"), "w", encoding="ascii") as script:
            script.write("#!/bin/sh\necho '[]'\n")
            os.fchmod(script.fileno(), 0o755)
        os.environ["PATH"] = place + os.pathsep + os.environ["PATH"]


def in_one_line(error):
    """The text of an exception, without numbers of processes and addresses of objects."""
    kind, value, _ = error
    text = " ".join(str(value).split())
    return f"{kind.__name__}: {text}"[:160]


class Outcomes(unittest.TestResult):
    """Prints each outcome as soon as it is known, so that a test that hangs is the one after the last line."""

    def startTest(self, test):
        super().startTest(test)
        self.outcome = ("ok", "")

    def addSkip(self, test, reason):
        # A test class that is skipped as a whole has no start and no stop.
        self.outcome = ("skip", " ".join(str(reason).split())[:160])

    def addError(self, test, error):
        self.outcome = ("error", in_one_line(error))

    def addFailure(self, test, error):
        self.outcome = ("fail", in_one_line(error))

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.outcome = ("fail", in_one_line(error))

    def stopTest(self, test):
        outcome, reason = self.outcome
        name = test.id().removeprefix("tests.")
        print(f"outcome {outcome} {name} {reason}".rstrip(), flush=True)


def main():
    directory = sys.argv.pop(1)
    tests = unpack(directory)
    answer_for_rdma(directory)
    # The suite imports its modules both by their own name and as members of the package.
    sys.path[:0] = [os.path.dirname(tests), tests]
    from args_parser import parser

    parser.parse_args()
    import tests as suite

    loader = unittest.TestLoader()
    result = Outcomes()
    for module in suite.__test_modules__:
        loader.loadTestsFromModule(module).run(result)
    print(f"ran {result.testsRun} tests", flush=True)


if __name__ == "__main__":
    main()
