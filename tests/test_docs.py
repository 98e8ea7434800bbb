"Every public name explains itself: one line, its source, and a comment on each parameter and on the result."
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
import pytest
from fastcore.docments import docments
from shok_nb.arguments import COMMON
from shok_nb.catalog import catalog

ROOT = Path(__file__).parent.parent
MODULES = [p.stem for p in (ROOT/'shok_nb').glob('*.py') if not p.stem.startswith('_')]
PAGES = sorted((ROOT/'nbs').glob('[1-4][0-9]_*.ipynb'))
def public(m):
    module = import_module(f'shok_nb.{m}')
    return [(m, n) for n in module.__all__ if callable(getattr(module, n))]
PUBLIC = [p for m in MODULES for p in public(m)]

@pytest.mark.parametrize('module, name', PUBLIC, ids=lambda s: s)
def test_docments(module, name):
    f = getattr(import_module(f'shok_nb.{module}'), name)
    doc = (f.__doc__ or '').strip()
    assert doc and '\n' not in doc and len(doc) <= 115 and not doc.startswith(('This ', 'A function')), doc
    if inspect.isclass(f) and '__init__' not in vars(f): return
    target = f.__init__ if inspect.isclass(f) else f
    rest = inspect.Parameter.VAR_KEYWORD,inspect.Parameter.VAR_POSITIONAL
    params = inspect.signature(target).parameters.items()
    wanted = [n for n,p in params if n not in ('self', 'cls') and p.kind not in rest]
    assert all(dict(params)[n].annotation is not inspect.Parameter.empty for n in wanted), 'a parameter without a type'
    got = docments(f, returns=True)
    again = [p for p,text in got.items() if p in COMMON and ' '.join((text or '').split()) == COMMON[p]]
    assert not again, 'COMMON says so already'
    got = {p: text or COMMON.get(p) for p,text in got.items()}
    assert all(got.get(p) for p in wanted), [p for p in wanted if not got.get(p)]
    if not inspect.isclass(f) and inspect.signature(f).return_annotation is not None:
        assert got.get('return'), 'what does it return?'

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_estimators_name_their_source(r):
    assert re.search(r'\d{4}\.\d{4,5}|20\d\d|19\d\d|shok|SO \d+', r.f.__doc__), 'name the paper'
    assert 'raises' in r.f.__doc__

def test_everything_public_is_in_the_catalog():
    "An estimator is a public function of the floors 1 to 3 whose first argument is the tensor to round."
    rows = {r.f for r in catalog}
    for nb in sorted((ROOT/'nbs').glob('[1-3][0-9]_*.ipynb')):
        module = import_module('shok_nb.' + re.sub(r'^\d+_', '', nb.stem))
        for n in module.__all__:
            f = getattr(module, n)
            if inspect.isfunction(f) and next(iter(inspect.signature(f).parameters)) in 'xyz':
                assert f in rows, f'{nb.stem}: {n} has no row'

def test_arrows_go_down():
    """A page imports only from lower floors. The tens digit is the floor. From 50 on the whole number
    counts: a model is made of quantizers, and plots read the catalog. On the ground floor no page
    imports itself by way of others; the order there is the reader's."""
    from graphlib import TopologicalSorter
    floor = {}
    for nb in (ROOT/'nbs').glob('[0-9]*.ipynb'):
        cells = [''.join(c['source']) for c in json.loads(nb.read_text('utf-8'))['cells'] if c['cell_type'] == 'code']
        name = next((m[1] for c in cells if (m := re.match(r'#\| default_exp (\w+)', c))), nb.stem)
        exported = '\n'.join(c for c in cells if c.startswith(('#| export', '#| exporti')))
        absolute = re.findall(r'from shok_nb\.(\w+) import', exported)
        relative = re.findall(r'^from \.(\w+) import', exported, re.M)
        floor[name] = nb.stem[:2], {*absolute, *relative}
    for name,(number,imports) in floor.items():
        whole = 2 if number[0] in '5678' else 1
        for i in imports:
            if number[0] != '0' or floor[i][0][0] != '0':
                assert floor[i][0][:whole] < number[:whole], f'{name} ({number}) imports {i} ({floor[i][0]})'
    ground = TopologicalSorter({n: imports for n,(_,imports) in floor.items()})
    list(ground.static_order())                                                 # a CycleError names them
    below = [n for n,(k,_) in floor.items() if k[0] < '6']
    for n in below:
        src = (ROOT/'shok_nb'/f'{n}.py')
        if src.exists():
            roots = set(re.findall(r'^(?:from|import) (\w+)', src.read_text('utf-8'), re.M))
            known = {'torch', 'math', 'numbers', 'os', 'shok_nb', 'functools', 'collections', 'dataclasses',
                'contextlib', 'threading', 'warnings', 'copy', 'types', 'typing', 'inspect'}
            assert roots <= known, (n, roots)

def test_references():
    "Every arXiv id that a page cites has its title on the page of references, and every one there is cited."
    arxiv = re.compile(r'\b[012]\d(?:0[1-9]|1[0-2])\.\d{4,5}\b')
    def text(p): return ''.join(s for c in json.loads(p.read_text('utf-8'))['cells'] for s in c['source'])
    ids = {p.stem: set(arxiv.findall(text(p))) for p in (ROOT/'nbs').glob('*.ipynb')}
    assert ids.pop('66_references') == set().union(*ids.values())

def players(nb):
    "The row of each player that a page calls for, and what is stored of it."
    rows = {r.name: r for r in catalog}
    for c in json.loads(nb.read_text('utf-8'))['cells']:
        if c['cell_type'] != 'code' or not (m := re.search(r'(?m)^tune\((\w+)', ''.join(c['source']))): continue
        pages = [o['data']['text/html'] for o in c['outputs'] if 'text/html' in o.get('data', {})]
        yield rows[m[1]],''.join(''.join(p) for p in pages)

@pytest.mark.parametrize('nb', PAGES, ids=lambda p: p.stem)
def test_every_knob_has_a_slider(nb):
    """The stored player of `tune` shows a slider for each knob, a menu for each choice, and the toggle of a
    smooth estimator."""
    for r,page in players(nb):
        assert page.count('type="range"') >= len(r.knobs), r.name
        assert page.count('<select') == len(r.choices) and page.count('type="checkbox"') == r.smooth, r.name

@pytest.mark.parametrize('r', [r for r in catalog if r.knobs], ids=lambda r: r.name)
def test_every_estimator_with_a_knob_has_a_player(r):
    assert r.name in {played.name for nb in PAGES for played,_ in players(nb)}, f'no page has tune({r.name})'
