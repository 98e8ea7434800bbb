"What ruff says of every line, pyright of the package, and pyright of somebody who uses it."
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH = re.search(r'(?m)^torch==(\S+)', (ROOT/'constraints.txt').read_text('utf-8'))[1]
this_torch = pytest.mark.skipif(version('torch').partition('+')[0] != TORCH,
    reason=f'types are checked against the annotations of torch {TORCH}')

def run(*args, **env):
    return subprocess.run([sys.executable, '-m', *map(str, args)], cwd=ROOT, env={**os.environ, **env},
        capture_output=True, text=True)

def pyright(folder, **env):
    "What pyright has to say of the project in that folder: a line for each error or warning."
    r = run('pyright', '-p', folder, '--pythonpath', sys.executable, '--outputjson',
        PYRIGHT_PYTHON_IGNORE_WARNINGS='1', **env)                   # it would look for a newer one
    assert r.returncode in (0, 1), r.stdout + r.stderr
    said = json.loads(r.stdout)
    assert said['summary']['filesAnalyzed'], r.stdout
    def line(d): return f"{Path(d['file']).name}:{d['range']['start']['line']+1}: {d['message']} ({d.get('rule')})"
    return [line(d) for d in said['generalDiagnostics'] if d['severity'] != 'information']

def test_ruff():
    r = run('ruff', 'check', '--no-cache', '--output-format', 'concise', '.')
    assert r.returncode == 0, r.stdout + r.stderr

@pytest.mark.slow
@this_torch
def test_package():
    said = pyright(ROOT)
    assert not said, '\n'.join(said)

USER = '''
import torch
import shok_nb as R
from shok_nb.catalog import catalog, row

x = torch.randn(8, requires_grad=True)
y = R.soft_round(x, 5., step=torch.tensor(.5)) + R.round_ste(x, ties='even')
layer = R.nn.SoftRound(3.)
also:R.nn.Rounding = R.nn.RoundSTE(step=.25, learnable=True)
loss = (layer(y) + also(y) + R.straight_through(y.round(), y)).square().sum()
loss.backward()

def rise(q, a): return q**a
def slope(q, a): return a*q**(a-1)

power = R.staircase('power_round', rise, slope, a=dict(lo=1.))
nearest = R.estimator('nearest', torch.round, pure=True)
z = power(x, 3., hard=True, step=torch.tensor(.5)) + nearest(x, step=.1, offset=torch.tensor(.05))
size:float = z.abs().max().item()
names = [r.name for r in catalog if r.smooth]
knobs = [k.default for k in row(R.soft_round).knobs]
'''

@this_torch
def test_user(tmp_path):
    "An installed package, and two files that use it: nothing is wrong with the first, one word with the second."
    (tmp_path/'pyrightconfig.json').write_text('{}')
    (tmp_path/'right.py').write_text(USER)
    (tmp_path/'wrong.py').write_text(USER.replace("ties='even'", "ties='odd'"))
    said, = pyright(tmp_path, PYTHONPATH=str(ROOT))
    assert said.startswith('wrong.py:7: ') and '''"Literal['odd']" cannot be assigned to parameter "ties"''' in said
