"Every public name explains itself: one line, its source, and a comment on each parameter and on the result."
import inspect
import re
from importlib import import_module
from pathlib import Path
import pytest
from fastcore.docments import docments
from shok_nb.arguments import COMMON
from shok_nb.catalog import catalog

ROOT = Path(__file__).parent.parent
MODULES = [p.stem for p in (ROOT/'shok_nb').glob('*.py') if not p.stem.startswith('_')]
def public(m):
    module = import_module(f'shok_nb.{m}')
    return [(m, n) for n in module.__all__ if callable(getattr(module, n))]
PUBLIC = [p for m in MODULES for p in public(m)]

def first_line(f): return (f.__doc__ or '').partition('\n')[0]

@pytest.mark.parametrize('module, name', PUBLIC, ids=lambda s: s)
def test_docments(module, name):
    f = getattr(import_module(f'shok_nb.{module}'), name)
    doc = first_line(f)
    assert doc and len(doc) <= 115 and not doc.startswith(('This ', 'A function')), doc
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
    assert re.search(r'\d{4}\.\d{4,5}|20\d\d|19\d\d|shok|SO \d+', first_line(r.f)), 'name the paper'
    assert 'raises' in first_line(r.f)

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
    import json
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
    """Every arXiv id that a page cites, and every "Name 1999", has its entry in references.bib. No entry is there for
    nothing, and a BibTeX entry has one field a line, with authors as "Last, First"."""
    import json
    arxiv = re.compile(r'\b[012]\d(?:0[1-9]|1[0-2])\.\d{4,5}\b')
    def text(p): return '\n'.join(''.join(c['source']) for c in json.loads(p.read_text('utf-8'))['cells'])
    pages = '\n'.join(text(p) for p in sorted((ROOT/'nbs').glob('*.ipynb')) if p.stem != '66_references')
    bib = (ROOT/'docs'/'references.bib').read_text('utf-8')
    entries = [dict(re.findall(r'(?m)^  (\w+) = \{(.*)\},$', e)) for e in re.findall(r'(?ms)^@\w+\{.*?^\}$', bib)]
    assert len(entries) == bib.count('\n@') > 45
    assert {e['eprint'] for e in entries if 'eprint' in e and 'keywords' not in e} == set(arxiv.findall(pages))
    for e in entries:
        words = [w for w in e.get('keywords', '').split(', ') if w]
        assert not words or any(w in pages for w in words), e['title']
        assert all(', ' in a or a.startswith('{') for a in e['author'].split(' and ')), e['author']
        assert not e.get('doi', '').startswith('http') and re.fullmatch(r'\d{4}', e['year'])
    names = r'([A-ZÉ][a-zéü]+)(?: (?:&|and) [A-Z][a-z]+| et al\.)?,? \(?(1[89]\d\d|20[0-2]\d)\b(?!\]\(https://arxiv)'
    years = lambda e: {e['year'], '20' + e.get('eprint', '')[:2]}
    for name,year in set(re.findall(names, pages)):
        assert any(name in e['author'] and year in years(e) for e in entries), f'{name} {year}: not in references.bib'

@pytest.mark.parametrize('nb', sorted((ROOT/'nbs').glob('[1-3][0-9]_*.ipynb')), ids=lambda p: p.stem)
def test_every_knob_has_a_slider(nb):
    """On the page of an estimator with knobs, the stored player of `tune` shows a slider for each, a menu for each
    choice, and the toggle of a smooth one."""
    import json
    from shok_nb.catalog import catalog
    rows,seen = {r.name: r for r in catalog},0
    for c in json.loads(nb.read_text('utf-8'))['cells']:
        if c['cell_type'] != 'code' or not (m := re.match(r'tune\((\w+)', ''.join(c['source']))): continue
        r,pages = rows[m[1]],[o['data']['text/html'] for o in c['outputs'] if 'text/html' in o.get('data', {})]
        page = ''.join(''.join(p) for p in pages)
        assert page.count('type="range"') >= len(r.knobs), r.name
        assert page.count('<select') == len(r.choices) and page.count('type="checkbox"') == r.smooth, r.name
        seen += 1
    assert seen, 'a page without a slider'
