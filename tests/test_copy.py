"What a reader copies from a page runs: its visible code, in order, in a Python that has the package and nothing else."
import ast
import functools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import NBS, ROOT

GIVEN = {'export', 'exports', 'exporti'}              # such cells are in the package, which the reader has installed
UNSEEN = {'remove-cell', 'remove-input', 'skip-execution'}
# In `make test`; the rest is slow. They are those that people copy from first, and one of each folder.
FIRST = 'index', 'recipes', 'first_network', 'ste', 'soft', 'core', 'quantizer', 'schedules', 'plots', 'functions'

def seen(nb):
    "The code cells that the site shows of a notebook, folded or not, but for those that the package holds."
    from literate import convert, directives
    def given(c): return c['cell_type'] == 'code' and GIVEN & directives(''.join(c['source']))[0].keys()
    cells = convert(nb | dict(cells=[c for c in nb['cells'] if not given(c)]), {}, 'shok_nb')['cells']
    return [c for c in cells if c['cell_type'] == 'code' and not UNSEEN & {*c['metadata']['tags']}]

def shown_error(cell):
    "What the page shows that the cell raises, or None."
    for o in cell['outputs']:
        if o['output_type'] == 'error': return f"{o['ename']}: {o['evalue']}"

@functools.cache
def warm():
    "The process whose forks run pages."
    env = {**os.environ, 'MPLBACKEND': 'Agg', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    program = [sys.executable, Path(__file__).with_name('copied.py')]
    return subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def wrong(nb, cwd):
    "The cells of a notebook that do not end as the page shows: `[(first line, what it raised)]`."
    cells = seen(nb)
    print(json.dumps(dict(cells=[c['source'] for c in cells], cwd=str(cwd))), file=warm().stdin, flush=True)
    raised = json.loads(warm().stdout.readline())
    assert isinstance(raised, list), raised
    pairs = zip(cells, raised, strict=True)
    return [(c['source'].partition('\n')[0], e) for c,e in pairs if e != shown_error(c)]

def page(nb):
    name = nb.stem.lstrip('0123456789_')
    return pytest.param(nb, id=name, marks=[] if name in FIRST else pytest.mark.slow)

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='each page runs in a fork')
@pytest.mark.parametrize('nb', [page(nb) for nb in NBS])
def test_what_is_seen_runs(nb, tmp_path):
    failed = wrong(json.loads(nb.read_text('utf-8')), tmp_path)
    assert not failed, '\n'.join(f'{line}\n    {e}' for line,e in failed)

def test_first():
    assert {*FIRST} <= {nb.stem.lstrip('0123456789_') for nb in NBS}

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='each page runs in a fork')
def test_what_does_not_run_is_found(tmp_path):
    "A name from a hidden cell, or from one without its code; a shown error must be the one that is raised."
    def code(src, *outputs): return dict(cell_type='code', id='c', metadata={}, source=src, outputs=[*outputs])
    error = dict(output_type='error', ename='ValueError', evalue='no', traceback=[])
    cells = [code('#| hide\nimport math'), code('math.pi'), code('#| echo: false\na = 1'), code('a'),
        code('#| code-fold: true\nb = 2'), code('b'), code("raise ValueError('no')", error), code('b', error),
        code('#| export\nb = c'), code('from shok_nb import round_ste')]
    said = wrong(dict(cells=cells), tmp_path)
    assert said == [('math.pi', "NameError: name 'math' is not defined"), ('a', "NameError: name 'a' is not defined"),
        ('b', None)]

def imported(source):
    "The packages that a cell imports."
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.Import): yield from (a.name.partition('.')[0] for a in n.names)
        elif isinstance(n, ast.ImportFrom): yield n.module.partition('.')[0]

def brought(reqs):
    "The distributions that these requirements install, with what those need."
    found,todo = set(),[Requirement(r) for r in reqs]
    while todo:
        r = todo.pop()
        name = canonicalize_name(r.name)
        if name in found or r.marker and not r.marker.evaluate(dict(extra='')): continue
        found.add(name)
        try: todo += map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError: continue
    return found

def test_lessons_bring_what_the_pages_import():
    "`pip install 'shok_nb[lessons]'` is enough for every cell that the site shows."
    from test_house import settings
    cfg = settings()
    reqs = [r for k in ('', 'widgets_', 'onnx_', 'lessons_') for r in cfg[f'{k}requirements'].split()]
    there,of = brought(reqs),metadata.packages_distributions()
    for nb in NBS:
        for c in seen(json.loads(nb.read_text('utf-8'))):
            for name in {*imported(c['source'])} - {*sys.stdlib_module_names, 'shok_nb'}:
                assert {canonicalize_name(d) for d in of[name]} & there, f'{nb.stem}: {name}'
