"SECURITY.md and the workflows: what they say is so."
import re
import pytest
from pages import ROOT

yaml = pytest.importorskip('yaml')
FLOWS = sorted((ROOT/'.github'/'workflows').glob('*.yml'))
flows = pytest.mark.parametrize('path', FLOWS, ids=lambda p: p.stem)

@flows
def test_actions_by_hash(path):
    "A tag can be moved to other code, a commit cannot. Its version stands beside it."
    uses = re.findall(r'(?m)^\s*-?\s*uses:\s*(.*)$', path.read_text('utf-8'))
    assert uses
    for line in uses: assert re.fullmatch(r'[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+', line), line

def test_one_hash_a_version():
    found = {re.split('[@#]', u)[0]: u for p in FLOWS for u in re.findall(r'uses: (.*)', p.read_text('utf-8'))}
    everywhere = {u for p in FLOWS for u in re.findall(r'uses: (.*)', p.read_text('utf-8'))}
    assert everywhere == {*found.values()}

@flows
def test_permissions(path):
    "Reading alone, but in a job that publishes: it runs no code of a package or of a test."
    flow = yaml.safe_load(path.read_text('utf-8'))
    assert flow['permissions'] == {'contents': 'read'}
    for name,job in flow['jobs'].items():
        given = job.get('permissions', {})
        assert name == 'publish' or not given, name
        runs = [s for s in job['steps'] if 'run' in s or 'checkout' in s['uses']]
        assert not ('write' in given.values() and runs), name
