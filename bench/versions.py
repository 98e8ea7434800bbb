"""One row of the table of versions, from the tests that just ran: `make test-all
TORCH=2.15.0 PYTHON=python3.12` calls it.

The row of this torch and this Python, 3.12 say, takes the place of the one before it in bench/versions.json."""
import datetime
import json
import platform
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree
import torch

TABLE = Path(__file__).with_name('versions.json')

def why(skipped):
    "The reason of a skip, without the file it stands in."
    return skipped.get('message', '').removeprefix('Skipped: ')

def row(xml):
    "What the tests written to this file say."
    suites = ElementTree.parse(xml).getroot().iter('testsuite')
    total,reasons,failures = Counter(),Counter(),[]
    for suite in suites:
        total.update({k: int(suite.get(k)) for k in ('tests', 'failures', 'errors', 'skipped')})
        total['seconds'] += round(float(suite.get('time')))
        for case in suite.iter('testcase'):
            for s in case.iter('skipped'): reasons[why(s)] += 1
            if case.find('failure') is not None or case.find('error') is not None: failures.append(case.get('name'))
    failed,skipped = total['failures'] + total['errors'],total['skipped']
    return dict(torch=torch.__version__.partition('+')[0], python=platform.python_version(),
        date=str(datetime.date.today()), machine=f'{platform.system()} {platform.machine()}',
        passed=total['tests'] - failed - skipped, skipped=skipped, failed=failed, minutes=round(total['seconds']/60),
        reasons=dict(sorted(reasons.items())), failures=sorted(failures))

def put(rows, new):
    "`rows` with `new` in its place, oldest torch first."
    def key(r): return [int(p) for p in r['torch'].split('.')],[int(p) for p in r['python'].split('.')[:2]]
    return sorted([r for r in rows if key(r) != key(new)] + [new], key=key)

if __name__ == '__main__':
    rows = json.loads(TABLE.read_text('utf-8')) if TABLE.exists() else []
    new = row(sys.argv[1])
    TABLE.write_text(json.dumps(put(rows, new), indent=1, ensure_ascii=False) + '\n', 'utf-8')
    counts = '{passed} passed, {skipped} skipped, {failed} failed'.format(**new)
    print(f"torch {new['torch']}, Python {new['python']}: {counts}; written to bench/versions.json")
