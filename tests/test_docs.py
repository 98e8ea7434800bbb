"Every public name explains itself: one line, its source, and a comment on each parameter and on the result."
import ast
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
import literate
import nbformat
import offline_math
import pytest
import reference
import torch
from measure import imported, modules, named
from nbformat.v4 import new_markdown_cell
from pages import FOLDERS, NBS, ROOT, cells, notebook, slug
import shok_nb
from docs.docstrings import exported
from shok_nb.catalog import catalog


@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_estimators_name_their_source(r):
    line = (r.f.__doc__ or '').partition('\n')[0]
    assert re.search(r'\d{4}\.\d{4,5}|20\d\d|19\d\d|shok|SO \d+', line), 'name the paper'

def test_everything_public_is_in_the_catalog():
    "An estimator is a public function of that folder whose first argument is the tensor to round."
    rows = {r.f for r in catalog}
    for name in map(slug, FOLDERS['estimators']):
        if name in ('gradient', 'bounds', 'checks'): continue                                   # they round nothing
        module = import_module(f'shok_nb.estimators.{name}')
        for n in module.__all__:
            f = getattr(module, n)
            if inspect.isfunction(f) and next(iter(inspect.signature(f).parameters)) in 'xyz':
                assert f in rows, f'{name}: {n} has no row'

# Each may use what stands above it. The modules without a folder have their place among the folders.
FLOORS = ('engine', 'estimators', 'grids', 'training', 'nn functions', 'quantization', 'networks', 'low_precision',
    'deployment', 'chips', 'post_training', 'catalog checks', 'show', 'studies', 'demo')

def test_folder_may_use_folder():
    "A folder uses those before it; inside a folder no page imports itself by way of others."
    from graphlib import TopologicalSorter
    floor = {name: i for i,names in enumerate(FLOORS) for name in names.split()}
    arrows = imported()
    for name,uses in arrows.items():
        for u in uses:
            here,there = (n.partition('.')[0] for n in (name, u))
            assert floor[there] <= floor[here], f'{name} imports {u}, and {there} stands above {here}'
    list(TopologicalSorter(arrows).static_order())                              # a CycleError names them
    assert 'engine.replay' in arrows['engine.pieces'] and 'estimators.ste' in arrows['studies.jpeg']

CONTRIBUTING = (ROOT/'CONTRIBUTING.md').read_text('utf-8')

def test_contributing_has_the_same_floors():
    "A row of its table for each, in this order."
    table = CONTRIBUTING.partition('**What may use what.**')[2].partition('\n**')[0]
    rows = [re.findall(r'`([\w.]+)/?`', row.split('|')[1]) for row in re.findall(r'(?m)^\| `.*', table)]
    assert [' '.join(names).replace('.py', '') for names in rows] == [*FLOORS]

def test_contributing_says_where_a_step_is():
    "In the way of a model, a name is defined in the file that is named next, and each file and folder is there."
    way,names = CONTRIBUTING.partition('**The way of a model**')[2].partition('\n**')[0],set()
    for word in re.findall('`([^`]+)`', way):
        if not re.search(r'/|\.py$', word): names.add(word)
        elif word.endswith('/'): assert (ROOT/'shok_nb'/word).is_dir()
        else:
            assert names <= {*named(ast.parse((ROOT/'shok_nb'/word).read_text('utf-8')))}, word
            names = set()
    assert not names

def crossings(source, module, known):
    "The private names of other modules that a module imports, or reads from one that it has imported."
    package,held = ['shok_nb', *module.split('.')[:-1]],{}
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.Import): held |= {a.asname: a.name for a in n.names if a.asname}
        if not isinstance(n, ast.ImportFrom): continue
        above = package[:len(package)+1-n.level] if n.level else []
        base = '.'.join([*above, *filter(None, [n.module])])
        for a in n.names:
            name = f'{base}.{a.name}'
            if name in known: held[a.asname or a.name] = name
            elif base in known and a.name.startswith('_'): yield name
    for n in ast.walk(ast.parse(source)):
        if not isinstance(n, ast.Attribute) or not n.attr.startswith('_') or n.attr.endswith('__'): continue
        whole = ast.unparse(n.value)
        of = held.get(whole, whole)
        if of in known: yield f'{of}.{n.attr}'

def owned(source):
    "The private names of each class: what it defines, and what its methods write on it."
    for c in ast.walk(ast.parse(source)):
        if not isinstance(c, ast.ClassDef): continue
        names = {n.name for n in c.body if isinstance(n, ast.FunctionDef)}
        names |= {n.id for s in c.body for n in ast.walk(s) if isinstance(n, ast.Name)
            and isinstance(n.ctx, ast.Store) and not isinstance(s, ast.FunctionDef)}
        names |= {n.attr for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            and ast.unparse(n.value) == 'self'}
        yield {n for n in names if re.match('_[^_]', n)}

def reached(source, others):
    "The attributes in it that are private to a class of another module, and that none of its own has."
    here = set().union(*owned(source))
    for n in ast.walk(ast.parse(source)):
        if isinstance(n, ast.Attribute) and n.attr in others-here: yield ast.unparse(n)

def test_an_underscore_means_this_module_only():
    """What another module needs has a name without one, and so has what is read of a class that stands there. No
    exception is left; one would need its reason here."""
    texts = {m: f.read_text('utf-8') for m,f in modules().items()}
    known = {'shok_nb', *(f'shok_nb.{m}' for m in texts)}
    assert [c for m,text in texts.items() for c in crossings(text, m, known)] == []
    of_torch = {*vars(torch.nn.Conv2d(1, 1, 1)), *dir(torch.nn.Module)}
    private = set().union(*(names for text in texts.values() for names in owned(text))) - of_torch
    assert len(private) > 40
    assert [f'{m}: {a}' for m,text in texts.items() for a in reached(text, private)] == []
    shows = 'class A:\n    _b = 1\n    def _c(self): self._d = 0\n    def _e(self, q): return q._b'
    assert [*owned(shows)] == [{'_b', '_c', '_d', '_e'}]
    assert [*reached('q._b, q.b, q._f(), made.layer._c(1)', {'_b', '_c'})] == ['q._b', 'made.layer._c']
    assert [*reached(shows, {'_b', '_c', '_d'})] == []
    for source in ('from .widgets import tune, _frame', 'from . import widgets as w\nw._frame(f)',
            'from shok_nb.show.widgets import _frame as f', 'import shok_nb.show.widgets as w\nw._frame',
            'import shok_nb.show.widgets\nshok_nb.show.widgets._frame(f)',
            'def late(): from ..show.widgets import _frame'):
        assert [*crossings(source, 'show.try_it', known)] == ['shok_nb.show.widgets._frame'], source
    for source in ('from . import widgets as _w\n_w.tune, _w.__name__', 'self._frame', 'from torch import _C\n_C._jit'):
        assert [*crossings(source, 'show.try_it', known)] == [], source

def test_a_page_is_called_what_its_module_is():
    "And lies in the folder that it lies in. A module of no folder has its page in any; no two pages have one name."
    slugs,made = [*map(slug, NBS)],set()
    assert len({*slugs}) == len(slugs)
    for nb,name in zip(NBS, slugs):
        module,_ = exported(nb)
        if module: assert module in (name, f'{nb.parent.name}.{name}'), nb.stem
        made.add(module)
    assert imported().keys() <= made

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_formulas_are_written_for_tex(nb):
    "One backslash before a command; two are a new line and a word. Nor has a string of Python eaten one."
    for c in cells(nb):
        if c['cell_type'] != 'markdown': continue
        assert not re.search(r'\\\\[a-zA-Z]|[\t\f\v\a\b]', c['source']), c['id']

def test_formulas_are_drawn():
    "KaTeX takes every formula of every page, in HTML and MathML, and says what is wrong with one that it cannot draw."
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin
    read,found = MarkdownIt().use(dollarmath_plugin),set()
    for nb in NBS:
        tokens = [t for c in cells(nb, 'markdown')
            for b in read.parse(literate.prose(c['source'], {})) for t in (b, *(b.children or ()))]
        found |= {(t.content, t.type == 'math_block') for t in tokens if t.type.startswith('math')}
    assert len(found) > 300
    for tex,display in found:
        made = offline_math.drawn(tex, display)
        assert '<math' in made and 'katex-html' in made and '<annotation' not in made
        assert ('display="block"' in made) == display
    for wrong in (r'\frac{1}{', r'\nonsense', 'x^', 'é'):
        with pytest.raises(Exception, match='KaTeX|strict|LaTeX'): offline_math.drawn(wrong)

def test_the_table_of_names_is_whole():
    "At the head of the API: every exported name once, and so every one of `shok_nb`, with what Python says it takes."
    shown = '\n'.join(reference.glance('shok_nb', ROOT/'shok_nb', pages) for pages in FOLDERS.values())
    rows = [re.findall('<td>(.*?)</td>', r) for r in shown.split('\n') if '<td>' in r]
    cells = {re.search('href="([^"]+)', r[0])[1]: [re.sub('<.*?>', '', c) for c in r[1:]] for r in rows}
    known = {m: getattr(import_module(f'shok_nb.{m}'), '__all__', ()) for m in modules() if m}
    assert sorted(re.findall('>([^<>]+)</code></a>', shown)) == sorted(n for names in known.values() for n in names)
    top = {n for n,v in vars(shok_nb).items() if not n.startswith('_') and not inspect.ismodule(v)}
    assert top <= {n for names in known.values() for n in names}
    for to,(takes,_,changes) in cells.items():
        if not to.startswith('#'): continue
        module,_,name = to[1:].rpartition('.')
        parameters = inspect.signature(getattr(import_module(module), name)).parameters
        assert [n for n in re.findall(r'\w+', takes) if n in parameters][:len(parameters)] == [*parameters], to
        assert changes == (next(iter(parameters)) if name.endswith('_') else '')
    soft = 'x, alpha=5.0, *, hard=False, step=1.0, offset=0.0'
    assert cells['#shok_nb.estimators.soft.soft_round'] == [soft, 'Tensor', '']
    assert cells['#shok_nb.deployment.deploy.deploy_'] == ['model, example, *, pack=True', 'LayerReport', 'model']

def test_references():
    """Every arXiv id that a page cites, and every "Name 1999", has its entry in references.bib. No entry is there for
    nothing, and a BibTeX entry has one field a line, with authors as "Last, First"."""
    arxiv = re.compile(r'\b[012]\d(?:0[1-9]|1[0-2])\.\d{4,5}\b')
    pages = '\n'.join(c['source'] for p in NBS if p.stem != '40_references' for c in cells(p))
    bib = (ROOT/'docs'/'references.bib').read_text('utf-8')
    entries = [dict(re.findall(r'(?m)^  (\w+) = \{(.*)\},$', e)) for e in re.findall(r'(?ms)^@\w+\{.*?^\}$', bib)]
    assert len(entries) == bib.count('\n@') > 0
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

def test_code_that_is_not_run():
    "What a fence of the recipes shows exists, and the tests that the text names run it in its own trainer."
    text = '\n'.join(c['source'] for c in cells(ROOT/'nbs'/'start'/'40_recipes.ipynb', 'markdown'))
    fence, = re.findall(r'```python\n(.*?)```', text, re.S)
    named = {*re.findall(r'\bR\.(\w+)', fence)}
    assert named == {n for n in shok_nb.__all__ if n.endswith('_callback')}
    tests = (ROOT/'tests'/'test_schedules.py').read_text('utf-8')
    assert '../tests/test_schedules.py' in text and all(f'{n}(' in tests for n in named)

# --- numbers in prose
NOT_PROSE = re.compile(r'''
    ```.*?```                                  # code
    | `[^`]*`
    | \$\$.*?\$\$ | \$[^$]*\$                  # formulas
    | <span\ title=.*?</span>                   # what the tests of a player set and read
    | !?\[[^\]]*\]\([^)]*\) | <[^>]+>          # links, whose text names a page or a paper
    | (?m:^\#+\ .*$) | (?m:^\s*\d+\.\s)        # headings, the numbers of a list
    | \d{4}\.\d{4,5} | \b(?:1[89]|20)\d\d\b    # arXiv ids, years
    | (?:§|\beqs?\.|\bsection|\btable|\bfig\.|\bPart|\bAlgorithm|\b[Rr]ule|\bpage)\s*\d[\d.]*(?:\ and\ \d+)?
    | \b(?:torch|Python|QKeras|opset|CUDA|libjpeg|Inductor|TensorFlow|WCAG|seed|Seed|quality|level)\s+\d[\d.]*   # names
    | \b\d+(?:\.\d+){2,}                       # versions
    | \b\d+[- ]bits?\b | \bone-bit\b
''', re.S | re.X)
NUMBER = re.compile(r'(?<![\w.:/×^-])(\d{1,3}(?:[ ,]\d{3})+|\d*\.?\d+)(?:\s?(%|per cent|percent))?(?![\w:/×]|\.\d)')
WORDS_OF = {w: n for n,w in enumerate('three four five six seven eight nine ten eleven twelve'.split(), 3)}
MEASURED = re.compile(rf"\b({'|'.join(WORDS_OF)}) (decibels?|dB|per ?cent|times)\b", re.I)
ALLOWED = {0, 1, 2, .5}                        # what any reader takes for granted, with 100 %
LITERAL = re.compile(r'(?<![\w.])(\d[\d_]*\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)(?:(\*\*|/|<<)(\d+))?(?![\w.])')

def numbers(prose):
    "What a text says in numbers: as written, value, decimals, is it a share? A number in words is not rounded."
    text = NOT_PROSE.sub(' ', prose)
    for m in NUMBER.finditer(text):
        digits = re.sub('[ ,]', '', m[1])
        value,share = float(digits),bool(m[2])
        if value in ALLOWED and not share or share and value in (0, 100): continue
        yield m[0],value,len(digits.partition('.')[2]),share
    for m in MEASURED.finditer(text): yield m[0],float(WORDS_OF[m[1].lower()]),9,m[2].startswith('per')

def literals(c):
    "The numbers in the source of a code cell and in what it shows."
    texts = [c['source']]
    for o in c['outputs']:
        shown = [v for k,v in o.get('data', {}).items() if k in ('text/plain', 'text/html', 'text/markdown')]
        texts += [''.join(t) for t in [*shown, o.get('text', '')] if len(''.join(t)) < 20_000]
    for m in (m for t in texts for m in LITERAL.finditer(t)):
        v = float(m[1].replace('_', ''))
        yield v
        if m[2] and float(m[3]):
            e = int(m[3])
            yield v/e if m[2] == '/' else v*2.**min(e, 99) if m[2] == '<<' else v**min(e, 99)

def loose(path):
    "The numbers in the prose of a page that no code cell beside them has: neither in its source nor in its output."
    page = cells(path)
    kinds = ''.join(c['cell_type'][0] for c in page)
    found = []
    for i,c in enumerate(page):
        if kinds[i] != 'm': continue
        after = re.match('m*(c*)', kinds[i:]).span(1)
        before = re.search('(c*)m*$', kinds[:i]).span(1)
        beside = [*page[slice(*before)], *page[i+after[0]:i+after[1]]]
        near = {v for b in beside for v in literals(b)}
        def said(value, places, share):
            "Is it one of them, rounded as it is written?"
            def same(v): return value in (v, round(v, places), round(v + 1e-12, places))
            return any(same(v) or share and same(100*v) for v in near)
        found += [(c['id'], s) for s,*number in numbers(c['source']) if not said(*number)]
    return found

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_numbers_stand_beside_their_cell(nb):
    "A number in prose is in the code cells before or after it: in an assert, or in what they show."
    assert not loose(nb)

# more digits than a float32 has; a field of a tuple has those of its class
ENDLESS = re.compile(r'(?<![\d.=])\d*\.\d*[1-9]\d{7,}|np\.float\d+')
# the last digits are what these show, or a report, an optimizer or a tuple has them
LAST_DIGITS = set('5b14c003 d60e4a75 e5b2584d c6800034 40f00006 10570007'.split())

def test_values_have_few_digits():
    "What a page shows is rounded to what can be read, and is a number of Python, not of NumPy."
    found,allowed = [],set()
    for nb in NBS:
        for c in cells(nb, 'code'):
            for o in c['outputs']:
                text = ''.join(o.get('text') or o.get('data', {}).get('text/plain', ''))
                if m := ENDLESS.search(text):
                    if c['id'] in LAST_DIGITS: allowed.add(c['id'])
                    else: found.append((nb.stem, c['id'], m[0]))
    assert not found and allowed == LAST_DIGITS

def test_a_loose_number_is_found(tmp_path):
    "Refuted, and next to the wrong cell; not what is rounded, a share, a formula, a name, a year or a heading."
    def page(*cells):
        made = [new_markdown_cell(s) if kind == 't' else s for kind,s in cells]
        nbformat.write(notebook(*made), tmp_path/'page.ipynb')
        return [s for _,s in loose(tmp_path/'page.ipynb')]
    code = 'c', 'assert share < .137 and n == 2**20 and loss > 1_500 and dB > 3.72'
    right = ('13.7 % of 1,048,576', '14 % of 1 048 576', '1500 of them', '3.7 dB', 'two of 1, 2 and 0',
        'since 2013, torch 2.6', '## 77', '$x^{77}$', '`77`', '[77 pages](77.html)', '1308.3432 §4.1', '4 bits',
        'float32, 8x8', '1. first')
    for text in right: assert not page(('t', text), code) + page(code, ('t', text)), text
    for text in ('half at 63 %', 'some 77', 'off by 0.4', 'four decibels and more', '3.8 dB'):
        assert len(page(code, ('t', text))) == 1, text
    assert page(code, ('t', 'Next.'), ('c', 'pass'), ('t', '13.7 % here')) == ['13.7 %']

def test_a_name_is_defined_once():
    "In a module or class: a second cell that defines it would replace the first, and ruff reads cell by cell."
    for module in modules().values():
        tree = ast.parse(module.read_text('utf-8'))
        for n in (tree, *[n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]):
            counts = Counter(named(n))
            assert not [k for k,many in counts.items() if many > 1], module
    assert [*named(ast.parse('def f(): pass\na,b = 1,2\na = 3'))] == ['f', 'a', 'b', 'a']

# --- plain English
def prose(nb):
    "The Markdown cells of a notebook, each paragraph as one line, so that a phrase is found where it wraps."
    return '\n\n'.join(re.sub(r'(?<=\S)\n(?=[\w`*(\[])', ' ', c['source']) for c in cells(nb, 'markdown')) + '\n'

def docstrings(module):
    "What the docstrings of a file say, in paragraphs: each line, and of each parameter and result what it means."
    for n in ast.walk(ast.parse(module.read_text('utf-8'))):
        if not isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Module)): continue
        line,params,returned,_ = literate.sections((ast.get_docstring(n) or '').splitlines())
        yield ' '.join(line)
        yield from (re.sub(r'^(\*{0,2}\w+( \(.*\))?|[\w.|\[\], ]+): ', '', p) for p in params+returned)

def test_plain_english(tmp_path):
    "Codespell finds neither a misspelled word nor a phrase of docs/words.txt in prose, docstrings and comments."
    files = [ROOT/f'{n}.md' for n in ('README', 'CHANGELOG', 'CONTRIBUTING')]
    files += [p for p in sorted((ROOT/'shok_nb').rglob('*.py')) if p.stem != '_modidx']
    for nb in NBS:
        files.append(tmp_path/f'{nb.stem}.md')
        files[-1].write_text(prose(nb), 'utf-8')
    words = (ROOT/'docs'/'words.txt').read_text('utf-8').splitlines()
    phrases = [re.escape(p) for p,_,_ in (l.partition('->') for l in words) if ' ' in p]
    command = [sys.executable, '-m', 'codespell_lib', '--regex', fr"(?i:\b(?:{'|'.join(phrases)})\b)|[\w\-'’]+"]
    for bad,said in (('fine', ''), ('Somebody else', 'Someone else'), ('teh', 'the')):
        r = subprocess.run([*command, '-'], cwd=ROOT, input=bad, capture_output=True, text=True)
        assert bool(r.returncode) == bool(said) and said in r.stdout, r
    r = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert not r.returncode, r.stdout + r.stderr

NAMED = re.compile(r'\b([Aa]n?) ([\w.]*(?:\d|\.\w)[\w.]*)')           # an x86, a uint8, an nn.ReLU

@pytest.mark.slow
def test_grammar(tmp_path):
    "Harper finds nothing by the rules of docs/grammar.txt: a wrong word, a word twice, a sentence that is too long."
    texts = {n: (ROOT/f'{n}.md').read_text('utf-8') for n in ('README', 'CHANGELOG', 'CONTRIBUTING')}
    texts |= {nb.stem: '\n\n'.join(c['source'] for c in cells(nb, 'markdown')) for nb in NBS}
    for p in sorted((ROOT/'shok_nb').rglob('*.py')):
        name = '.'.join(p.relative_to(ROOT).with_suffix('').parts)
        if p.stem != '_modidx': texts[name] = '\n\n'.join(docstrings(p))
    planted = ('It rounds the the value.', 'It allows to round.', 'A step with an scale.', 'More then a step.',
        'Despite of this it learns.', 'It gets .98 of them.', f'It learns{" and it rounds what it gets" * 8}.')
    texts |= {f'planted-{i}': bad for i,bad in enumerate(planted)} | dict(fine='A uint8 scale, an x86 processor.')
    for name,text in texts.items(): (tmp_path/f'{name}.md').write_text(NAMED.sub(r'\1 `\2`', text) + '\n', 'utf-8')
    lines = (ROOT/'docs'/'grammar.txt').read_text('utf-8').splitlines()
    rules = [l for l in lines if l and l[0] != '#']
    command = [sys.executable, '-m', 'harper', 'lint', '--quiet', '--no-color', '--format', 'json',
        '--user-dict-path', tmp_path/'no.txt', '--only', ','.join(rules), *(f'{n}.md' for n in texts)]
    r = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {f['file'].removesuffix('.md'): f['lints'] for f in json.loads(r.stdout)}
    assert [i for i in range(len(planted)) if len(found.pop(f'planted-{i}', [])) != 1] == []
    wrong = [f"{n}: {l['rule']}: {l['matched_text']}: {l['message']}" for n,said in found.items() for l in said]
    assert not wrong, '\n'.join(wrong)
