"""Runs the tests of this folder in order, one line each, and ends with their counts. Exit 0, 1, or 77: all skipped."""

import pathlib
import signal
import sys
import time
import unittest


class Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.n_passed = 0

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()

    def say(self, word, test, text=""):
        took = f" ({time.monotonic() - self.started:.0f} s)" if hasattr(self, "started") else ""
        # What is no test is the preparation of a class: "setUpClass (module.Class)".
        name = test.id() if isinstance(test, unittest.TestCase) else str(test).replace("setUpClass (", "").rstrip(")")
        print(f"{word:5} {name}{took if word != 'skip' else ''}{text}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.n_passed += 1
        self.say("ok", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say("skip", test, f": {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.say("FAIL", test, "\n" + self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self.say("FAIL", test, "\n" + self.errors[-1][1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.say("FAIL", subtest, "\n" + "".join(map(str, error[1:2])))


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is registered for the exit is done
    folder = pathlib.Path(__file__).parent
    result = Result()
    tests = sys.argv[1:]
    loader = unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(tests) if tests else loader.discover(str(folder), "test_*.py")
    suite.run(result)
    n_failed = len(result.failures) + len(result.errors)
    print(f"{result.n_passed} passed, {n_failed} failed, {len(result.skipped)} skipped")
    if n_failed:
        return 1
    return 0 if result.n_passed else 77


if __name__ == "__main__":
    sys.exit(main())
