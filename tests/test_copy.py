"""What a reader copies from a page runs: the code that stands open, in order, in a Python that has the package alone.
`make test` looks at every page for whether each name is there, without running it again; the runs of the lessons and
of the first page of each folder, which show what no look sees, are slow. A page that trains runs once, as a whole."""
import ast
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from unittest import mock
import literate
import pytest
from literate import is_folded
from nbformat.v4 import new_markdown_cell
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import FOLDERS, NBS, ROOT, TRAINS, conf, notebook, played, slug

GIVEN = {'export', 'exports', 'exporti'}              # such cells are in the package, which the reader has installed
UNSEEN = {'remove-cell', 'remove-input', 'skip-execution'}

def seen(nb):
    "The code cells that the site shows of a notebook, folded or not, but for those that the package holds."
    def given(c): return c['cell_type'] == 'code' and GIVEN & literate.directives(''.join(c['source']))[0].keys()
    cells = literate.convert(nb | dict(cells=[c for c in nb['cells'] if not given(c)]), {}, 'shok_nb')['cells']
    return [c for c in cells if c['cell_type'] == 'code' and not UNSEEN & {*c['metadata']['tags']}]

def seen_in_order(nb):
    "The cells of its page, but for code that nobody sees."
    return [c for c in literate.convert(nb, {}, 'shok_nb')['cells']
        if c['cell_type'] != 'code' or not UNSEEN & {*c['metadata']['tags']}]

def raised(cell):
    "What the cell raised as it ran, or None."
    for o in cell['outputs']:
        if o['output_type'] == 'error': return f"{o['ename']}: {o['evalue']}"

def as_shown(cell, error):
    "Does the cell of a page end so: in an error with its message where it must fail, and else in none?"
    if 'raises-exception' not in cell['metadata']['tags']: return error is None
    return bool(error) and cell['metadata']['says'] in error and not error.startswith('NameError')

def wrong(nb, cwd, missing=()):
    "The open cells that do not end as the page shows, `[(first line, what it raised)]`, where packages are missing."
    block = f'import sys\nsys.modules.update(dict.fromkeys({missing}))'
    cells = [dict(source=block, metadata=dict(tags=[])), *(c for c in seen(nb) if not is_folded(c))]
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'):
        made = played(*(c['source'] for c in cells), cwd=cwd)
    ends = zip(cells, map(raised, made), strict=True)
    return [(c['source'].partition('\n')[0], e) for c,e in ends if not as_shown(c, e)]

FIRST = [*FOLDERS['start'], *(pages[0] for f,pages in FOLDERS.items() if f != 'start')]
COPIED = [nb for nb in FIRST if slug(nb) not in TRAINS]

@pytest.mark.slow
@pytest.mark.parametrize('nb', COPIED, ids=slug)
def test_what_is_seen_runs(nb, tmp_path):
    "With the extras that the page says it needs, and with no other."
    page,extras = json.loads(nb.read_text('utf-8')),conf()['literate_extras']
    named = literate.needs(page, extras)
    others = {*extras} - ({*extras} if 'lessons' in named else {*named})
    failed = wrong(page, tmp_path, [n for e in others for n in extras[e].split() if '.' not in n])
    assert not failed, '\n'.join(f'{line}\n    {e}' for line,e in failed)

def rebound(cells):
    "Names that an open cell reads and a folded one was the last to bind, each with both cells."
    last,found = {},[]
    for c in cells:
        bound,read = literate.names(c['source'])
        if not is_folded(c): found += [(n, c['id'], last[n]['id']) for n in read if is_folded(last.get(n, c))]
        last |= dict.fromkeys(bound, c)
    return found

def test_a_name_bound_anew_is_found():
    def cell(id, source, *tags): return dict(id=id, source=source, metadata=dict(tags=tags))
    cells = [cell('a', 'x = 1'), cell('b', 'x = 2\ny = 3', 'hide-input'), cell('c', 'def f(): return x'),
        cell('d', 'for y in x: y')]
    assert rebound(cells) == [('x', 'c', 'b'), ('x', 'd', 'b')]

def test_what_is_seen_has_its_names(tmp_path):
    """A name of a cell that nobody sees, or of one below, is undefined to ruff. What stands open needs nothing
    folded, and no name that it reads is bound anew there, or its value would be another."""
    (tmp_path/'found.py').write_text('a = b\nb = 1\ndef f(): return c\n')
    for nb in NBS:
        cells = seen(json.loads(nb.read_text('utf-8')))
        assert not rebound(cells), f'{nb.name}: {rebound(cells)}'
        for of,some in dict(all=cells, open=[c for c in cells if not is_folded(c)]).items():
            (tmp_path/f'{slug(nb)}_{of}.py').write_text('\n\n'.join(c['source'] for c in some), 'utf-8')
    command = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select', 'F821', '--output-format', 'concise']
    said = subprocess.run([*command, '.'], cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert {l.partition(':')[0] for l in said} == {'found.py', 'Found 2 errors.'}, said

# What goes on from the section above it: recipes by their heading, "Use it" by its page
GO_ON = {'Save and load a quantized model', 'Save and export 4-bit codes', 'A few integers: a local search',
    'best', 'blocks', 'design', 'replace'}

def open_code(nb):
    "The open code of each section of a page, by its heading."
    found = {}
    for section in literate.headed(seen_in_order(json.loads(nb.read_text('utf-8')))):
        code = [c['source'] for c in section if c['cell_type'] == 'code' and not is_folded(c)]
        if head := re.findall('^##+ (.*)', section[0]['source'], re.M): found[head[-1]] = '\n\n'.join(code)
    return found

def test_what_is_copied_alone(tmp_path):
    """The open code of a recipe, and of "Use it", has all names that it needs, the imports among them, unless it goes
    on from another section. So has a section to which a search leads past the start of its page."""
    pages = {slug(nb): open_code(nb) for nb in NBS}
    alone = {p: sections['Use it'] for p,sections in pages.items() if 'Use it' in sections}
    assert len(alone) > 60
    for p in ('recipes', 'quantization_recipes'): alone |= pages[p]
    alone = [pages['decimals']['Round to cents'], *(code for name,code in alone.items() if name not in GO_ON)]
    for i,code in enumerate(alone): (tmp_path/f'{i}.py').write_text(code, 'utf-8')
    command = [sys.executable, '-m', 'ruff', 'check', '--isolated', '--select', 'F821', '--output-format', 'concise']
    r = subprocess.run([*command, '.'], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout

def test_imports_are_repeated_in_what_is_copied_alone():
    """A recipe, or "Use it", gets those that its open code reads and does not have. One that reads a variable from
    above gets none, nor does another section. There is one line for each module, ours last."""
    said = ['import math\nimport json', '## One', 'a = math.pi', '## Two', 'b = math.e\njson.dumps(b)', '## Three',
        'a+math.tau']
    def made(title):
        nb = notebook(*(new_markdown_cell(c) if c[0] == '#' else c for c in (f'# {title}', *said)))
        return [c['source'] for c in literate.convert(nb, {}, 'shok_nb')['cells'] if c['cell_type'] == 'code']
    first,two,three = made('Recipes for cooks')
    assert (first, three) == ('import math\na = math.pi', 'a+math.tau')
    assert two == 'import math\nimport json\nb = math.e\njson.dumps(b)'
    assert made('Cooking')[1] == 'import json\nb = math.e\njson.dumps(b)'
    own = 'from shok_nb import fsq', 'fsq', '## Use it', 'import torch\nfrom shok_nb import lfq\nfsq, lfq, torch'
    nb = notebook(*(new_markdown_cell(c) if c[0] == '#' else c for c in ('# Tokens', *own)))
    last = literate.convert(nb, {}, 'shok_nb')['cells'][-1]
    assert last['source'] == 'import torch\nfrom shok_nb import fsq, lfq\nfsq, lfq, torch'

@pytest.mark.slow
def test_what_does_not_run_is_found(tmp_path):
    "A name from a hidden cell, or from one without its code; a shown error must be the one that is raised."
    def fails(src, says): return f'with expect_fail(Exception, contains={says!r}): {src}'
    nb = notebook('#| hide\nimport math', 'math.pi', '#| echo: false\na = 1', 'a', '#| code-fold: true\nb = 2', 'b',
        '#| code-fold: true\nnobody(asks)', fails("raise ValueError('no')", 'no'), fails('b', ''),
        fails('int("no")', 'yes'), fails('c', 'c'), '#| export\nb = c', 'from shok_nb import round_ste',
        'import onnx\nonnx.checker')
    said = wrong(nb, tmp_path, ['onnx'])
    assert said == [('math.pi', "NameError: name 'math' is not defined"), ('a', "NameError: name 'a' is not defined"),
        ('b', None), ('int("no")', "ValueError: invalid literal for int() with base 10: 'no'"),
        ('c', "NameError: name 'c' is not defined"),
        ('import onnx', 'ModuleNotFoundError: import of onnx halted; None in sys.modules')]

def test_a_page_names_the_extras_of_its_code():
    "By what it imports and calls; what readers do not see, and the package's own code, needs none."
    extras = dict(widgets='matplotlib shok_nb.show plots', onnx='onnx to_onnx', lessons='sklearn')
    def wanted(*sources): return literate.needs(notebook(*sources), extras)
    assert wanted('import torch', '#| hide\nimport onnx', '#| export\nimport onnx', "to = 'onnx'") == []
    assert wanted('import matplotlib.pyplot as plt') == wanted('from shok_nb.show.plots import figure') == ['widgets']
    assert wanted('R.plots.figure()', 'R.to_onnx(m, x)') == ['widgets', 'onnx']
    assert wanted('import onnx', 'from sklearn.datasets import load_digits') == ['lessons']
    assert "pip install '.[widgets,onnx]'" in literate.install_line(['widgets', 'onnx'])
    assert not literate.install_line([])

def imported(source):
    "The packages that a cell imports."
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.Import): yield from (a.name.partition('.')[0] for a in n.names)
        elif isinstance(n, ast.ImportFrom): yield n.module.partition('.')[0]

def brought(reqs):
    "The distributions that these requirements install, with what those need."
    found,todo = set(),[*reqs]
    for r in map(Requirement, todo):                      # it grows
        name = canonicalize_name(r.name)
        if name in found or r.marker and not r.marker.evaluate(dict(extra='')): continue
        found.add(name)
        with suppress(metadata.PackageNotFoundError): todo += metadata.requires(name) or []
    return found

@pytest.mark.slow
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
