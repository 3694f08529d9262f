"""Prints the CPU seconds of a session by folder of tests, and of its most expensive files.

While no test ends for a while, it prints those that run. Loaded by tests/conftest.py. The time of a test includes the
processes that it has started and waited for.
"""

import os
from collections import Counter
from threading import Event, Thread
from time import monotonic

import pytest

#: Files that the table names one by one.
MOST = 12
#: Seconds without the end of a test after which those that run are printed.
SILENCE = 15.0


def used():
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Parts:
    """Attaches the CPU seconds of each phase of a test to its report, and adds them up where reports arrive."""

    def __init__(self):
        self.before = used()
        self.by_folder, self.by_file, self.counts = Counter(), Counter(), Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = used()
        report.cpu_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        seconds = getattr(report, "cpu_seconds", 0.0)
        self.by_folder[folder] += seconds
        self.by_file[file] += seconds
        self.counts[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter):
        if len(self.by_file) < 2:
            return
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds by part")
        for folder, seconds in self.by_folder.most_common():
            write(f"{seconds:8.1f}  {self.counts[folder]:6} tests  {folder}")
        write("the most expensive files:")
        for file, seconds in self.by_file.most_common(MOST):
            write(f"{seconds:8.1f}  {file}")


class Running:
    """Prints the tests that run while none ends; for the process that only distributes tests to others."""

    def __init__(self, config):
        self.plugins = config.pluginmanager
        self.running, self.last, self.due, self.ended = {}, monotonic(), SILENCE, Event()

    def pytest_sessionstart(self):
        Thread(target=self._watch, daemon=True).start()

    def pytest_sessionfinish(self):
        self.ended.set()

    def pytest_runtest_logstart(self, nodeid):
        self.running[nodeid] = monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.running.pop(nodeid, None)
        self.last, self.due = monotonic(), SILENCE

    def _watch(self):
        while not self.ended.wait(1.0):
            if (silence := monotonic() - self.last) > self.due:
                self.due += SILENCE
                tests = sorted(self.running, key=self.running.get)[:4]
                what = ", ".join(tests) or "the tests are collected"
                reporter = self.plugins.getplugin("terminalreporter")
                reporter.write_line(f"\n{silence:5.0f} s without the end of a test: {what}")
