"What `help(f)` says of everything public: what goes in, what comes out, and an example that runs."
import ast
import builtins
import doctest
import inspect
import pydoc
import re
import types
from importlib import import_module
from importlib.util import find_spec
import nbformat
import pytest
import torch
from estimators import lumped
from pages import ROOT, notebook
import shok_nb as R
from docs.docstrings import Notes, described, everything, examples, exported, notebooks, of_nothing
from shok_nb.engine import core
from shok_nb.engine.arguments import check_knob

MODULES = {p.stem: '.'.join(p.relative_to(ROOT).with_suffix('').parts) for p in (ROOT/'shok_nb').rglob('[!_]*.py')}

METHOD = types.FunctionType, staticmethod, classmethod, property

def public():
    "`(name, object)` of every public function, class and method that people call; a field of a dataclass is none."
    for m,path in sorted(MODULES.items()):
        module = import_module(path)
        for n in module.__all__:
            o = getattr(module, n)
            if not callable(o): continue
            yield f'{m}.{n}',o
            if not inspect.isclass(o): continue
            fields = getattr(o, '__dataclass_fields__', {})
            for k,f in vars(o).items():
                called = isinstance(f, METHOD) and k not in fields
                if called and (k == '__call__' or k[0] != '_'): yield f'{m}.{n}.{k}',f
PUBLIC = dict(public())
named = pytest.mark.parametrize('name', PUBLIC)

def signature(o):
    o = o.fget if isinstance(o, property) else getattr(o, '__func__', o)
    if inspect.isclass(o) and vars(o).get('__init__', object.__init__) is object.__init__: return None
    return inspect.signature(o)

@lumped([pytest.param(n, id=n) for n in PUBLIC], lambda name: name.partition('.')[0])
def test_parameters(name):
    "Each is there, with what it means; so is what is returned."
    o = PUBLIC[name]
    doc,sig = inspect.getdoc(o) or '',signature(o)
    line,*rest = doc.split('\n')
    assert line and len(line) <= 115 and (not rest or not rest[0]), doc
    assert all(len(l) <= 95 for l in rest), doc
    if not sig or inspect.isclass(o) and issubclass(o, tuple): return
    said = doc.partition('Parameters:\n')[2].partition('\n\n')[0]
    given = [p for p in sig.parameters.values() if p.name not in ('self', 'cls')]
    method,rest = name.count('.') > 1,(inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    untyped = [p.name for p in given if p.annotation is p.empty and p.kind not in rest]
    assert method or not untyped, f'{untyped} without a type'
    missing = [p.name for p in given if not re.search(rf'(?m)^    \*{{0,2}}{p.name}( \(.*|: )', said)]
    assert not missing, f'{missing} in {doc}'
    back = sig.return_annotation
    quiet = inspect.isclass(o) or back is None or method and back is inspect.Signature.empty
    if not quiet: assert 'Returns:\n    ' in doc, doc

@pytest.mark.parametrize('nb', notebooks(ROOT/'nbs'), ids=lambda p: p.stem)
def test_notebooks_hold_one_line(nb):
    "The comments stand beside the parameters there; the export does the rest."
    for src in exported(nb)[1]:
        if src.startswith('#| exporti'): continue
        for n in ast.walk(ast.parse(src)):
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_'):
                assert '\n' not in (ast.get_docstring(n) or ''), n.name

def bare(src):
    "The code of a cell: no docstrings, no lines."
    tree = ast.parse(src)
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(n) is not None:
            n.body = n.body[1:] or [ast.Pass()]
    return ast.dump(tree)

def test_nothing_but_docstrings_is_written():
    "The code of every cell is that of its notebook; a cell that is no Python is left as it is."
    notes,given = Notes(ROOT/'nbs'),examples()
    for nb in notebooks(ROOT/'nbs'):
        module,cells = exported(nb)
        for src in cells: assert bare(described(src, module, notes, given)) == bare(src), nb.stem
    broken = 'def f(:\n    "One line."'
    assert described(broken, 'soft', notes, given) == broken
    assert described('def f(x): return x', 'soft', notes, given) == 'def f(x): return x'

NEEDS = {f'schedules.{n}_callback': n for n in ('lightning', 'transformers', 'fastai')}

@named
def test_example(name, monkeypatch, tmp_path):
    "It needs nothing but itself, and prints what it says it prints."
    import matplotlib
    matplotlib.use('agg')
    import matplotlib.pyplot as plt
    monkeypatch.chdir(tmp_path)
    text = (inspect.getdoc(PUBLIC[name]) or '').partition('\nExample:\n')[2]
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples, 'an example for docs/examples.txt'
    if name in NEEDS and not find_spec(NEEDS[name]):
        said = f'{name.partition(".")[2]} needs the package {NEEDS[name]}: pip install {NEEDS[name]}'
        test.examples[-1] = doctest.Example(test.examples[-1].source, '', exc_msg=f'ImportError: {said}\n')
    said = []
    try: doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    finally: plt.close('all')
    assert not said, ''.join(said)

GIVEN = dict(x='torch.ones(2, 4)', tensors='[torch.ones(2)]', dim='0', dims='(0, 1)', block='2', alpha='5.', beta='3.',
    loss='torch.square', r='R.catalog.row(R.soft_round)')

def spans(text):
    "The calls among the words of a docstring: the code in its text, without what calls an argument of the function."
    for code in re.findall(r'`([^`]+)`', re.sub(r'\s*\n\s+', ' ', text)):
        try: tree = ast.parse(code, mode='eval')
        except SyntaxError: continue                                      # a formula, or a part of a call
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if any(isinstance(n, ast.Call) for n in ast.walk(tree)): yield code,called

def ran(code, called, arguments):
    "Whether it runs: what it calls is of the package or of Python, not an argument."
    import functools
    import shok_nb as R
    names = {n: getattr(m, n) for m in (R, R.nn) for n in getattr(m, '__all__', ())}
    names |= dict(R=R, torch=torch, nn=torch.nn, partial=functools.partial)
    if called & arguments or not called <= names.keys() | vars(builtins).keys(): return False
    eval(code, names | {k: eval(v, names) for k,v in GIVEN.items()})
    return True

def test_code_in_the_text_runs():
    "Not the examples alone: what the words of a docstring say to call is called. One that raises is found."
    done = []
    for name,o in PUBLIC.items():
        sig = signature(o)
        for code,called in spans((inspect.getdoc(o) or '').partition('\nExample:\n')[0]):
            if ran(code, called, set(sig.parameters if sig else ())): done.append(code)
    assert 'Rounding(dorefa_weight, deployed=dorefa_weight, bits=2)' in done and len(done) >= 10, done
    (code,called), = spans('such as `Rounding(dorefa_weight,\n    bits=2)`, of `x`')
    with pytest.raises(ValueError, match='pass deployed='): ran(code, called, set())

def test_no_example_of_nothing(tmp_path):
    """Each in the file is of something public, and the export names one of a function that is gone; while a cell is not
    Python it says nothing."""
    assert examples().keys() == PUBLIC.keys() and not of_nothing(str(ROOT/'nbs'))
    (tmp_path/'examples.txt').write_text('Head.\n\nsoft.f\n>>> 1\n1\n\nsoft.C.g\n>>> 2\n2\n')
    for src,lost in {'def f(): pass\nclass C:\n    def g(self): pass': [], 'def f(:': [],
            'def f2(): pass\nclass C: pass': ['soft.C.g', 'soft.f']}.items():
        nbformat.write(notebook('#| default_exp folder.soft', f'#| export\n{src}'), tmp_path/'10_soft.ipynb')
        of_nothing.cache_clear()
        assert of_nothing(str(tmp_path), tmp_path/'examples.txt') == lost
    of_nothing.cache_clear()

def test_help():
    "As Python shows it, of a function, of a layer made by `_twin`, and of a method."
    import shok_nb as R
    for f,words in ((R.soft_round, ['alpha (float|Tensor = 5.)', 'Sharpness', '>>> y = R.soft_round(x, 5.)']),
            (R.nn.SoftRound, ['alpha (float|Tensor = 5.)', 'learnable (bool = False)']),
            (R.KnobScheduler.step, ['at (int|None = None)', 'scheduler.step(5)'])):
        text = pydoc.render_doc(f, renderer=pydoc.plaintext)
        assert [w for w in words if w not in text] == [], text
    assert 'internal Module state' not in inspect.getdoc(R.nn.SoftRound.__init__)

def test_types_are_written_out():
    "The words that one chooses from, not what the package calls them."
    assert "gradient ('saturated'|'clipped'|'ste' = 'saturated')" in R.fake_quantize.__doc__
    ours = {n for n,(node,_) in everything(str(ROOT/'nbs')).items() if isinstance(node, ast.Assign)}
    line = re.compile(r'(?m)^    \w+ \((\w+)(?: = .*)?\): ')
    kinds = {k for o in PUBLIC.values() for k in line.findall(inspect.getdoc(o) or '')}
    assert not kinds & ours, kinds & ours

def test_every_word_of_a_range_is_explained():
    "What `estimator` and `staircase` take of a knob, and what they say it means; and that it means so."
    for f in (R.estimator, R.staircase):
        for word in core._RANGE: assert re.search(rf'\b{word}\b', f.__doc__ + check_knob.__doc__), (f, word)
        for word in ('size=True', 'held=(.001, .9)'): assert word in f.__doc__, (f, word)
    def made(**kw): return R.estimator('mine', lambda v, k: 0*v + k, None, lambda v, k: 0*v + k, k=dict(hi=1., **kw))
    ways = dict(held=(dict(held=(.001, .9)), (.001, .9)), size=(dict(size=True), (2., 1.)), end=({}, (0., 1.)))
    for kw,want in ways.values():
        for k,y in zip((-2., 3.), want):
            knob = torch.tensor(k, requires_grad=True)
            got = made(**kw)(torch.zeros(1), knob)
            assert got.item() == pytest.approx(min(y, 1.))
            assert torch.autograd.grad(got.sum(), knob)[0] != 0
