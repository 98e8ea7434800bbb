"""One row of the table of versions, from the tests that just ran: `make test-all
TORCH=2.15.0 PYTHON=python3.12` calls it with the file that pytest's --junitxml wrote. After a fault is mended, the
tests that failed run alone, and both files make the row.

The row of this torch and this Python, 3.12 say, takes the place of the one before it in bench/versions.json."""
import datetime
import json
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree
import torch

TABLE = Path(__file__).with_name('versions.json')

def why(skipped):
    "The reason of a skip, without the file it stands in."
    return skipped.get('message', '').removeprefix('Skipped: ')

def name(case):
    "Of a test, without the group that pytest-xdist ran it in."
    return re.sub(r'@\w+$', '', case.get('name'))

def row(*files):
    "What the tests written to these files say; one that ran again counts as it did the last time."
    last,seconds = {},0.
    for xml in files:
        for suite in ElementTree.parse(xml).getroot().iter('testsuite'):
            seconds += float(suite.get('time'))
            last.update({(case.get('classname'), name(case)): case for case in suite.iter('testcase')})
    def has(case, *kinds): return any(case.find(k) is not None for k in kinds)
    failed = [case for case in last.values() if has(case, 'failure', 'error')]
    skipped = [case for case in last.values() if has(case, 'skipped') and case not in failed]
    reasons = Counter(why(case.find('skipped')) for case in skipped)
    return dict(torch=torch.__version__.partition('+')[0], python=platform.python_version(),
        date=str(datetime.date.today()), machine=f'{platform.system()} {platform.machine()}',
        passed=len(last) - len(failed) - len(skipped), skipped=len(skipped), failed=len(failed),
        minutes=round(seconds/60), reasons=dict(sorted(reasons.items())),
        failures=sorted(name(case) for case in failed))

def put(rows, new):
    "`rows` with `new` in its place, oldest torch first."
    def key(r): return [int(p) for p in r['torch'].split('.')],[int(p) for p in r['python'].split('.')[:2]]
    return sorted([r for r in rows if key(r) != key(new)] + [new], key=key)

if __name__ == '__main__':
    rows = json.loads(TABLE.read_text('utf-8')) if TABLE.exists() else []
    new = row(*sys.argv[1:])
    TABLE.write_text(json.dumps(put(rows, new), indent=1, ensure_ascii=False) + '\n', 'utf-8')
    counts = '{passed} passed, {skipped} skipped, {failed} failed'.format(**new)
    print(f"torch {new['torch']}, Python {new['python']}: {counts}; written to bench/versions.json")
