"A pytest plugin that writes each outcome down as it comes, so that a run that is cut off can be counted."
import os


def pytest_configure(config): config.pluginmanager.register(Outcomes(config), 'outcomes of every test')

class Outcomes:
    "A line for each test in the file that SHOK_FOUND names; of processes side by side, the first one writes."
    def __init__(self, config): self.writes = 'SHOK_FOUND' in os.environ and not hasattr(config, 'workerinput')

    def pytest_runtest_logreport(self, report):
        if self.writes and (report.when == 'call' or not report.passed): self._write(report.outcome, report.nodeid)

    def pytest_collectreport(self, report):
        if self.writes and report.failed: self._write('failed', report.nodeid)

    def _write(self, outcome, name):
        with open(os.environ['SHOK_FOUND'], 'a', encoding='utf-8') as f: f.write(f'{outcome} {name}\n')
