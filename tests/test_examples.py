"What a reader sees of a cell: an example with its value, checks folded after it, and errors as errors."
import ast
import json
import re
import literate
import pytest
from examples import is_check, parts, symbols
from literate import is_folded
from pages import DOCS, NBS, notebook, played, slug
from test_copy import GIVEN, seen


@pytest.mark.parametrize('code,want', {
    'the checks are last': ('x = 1\nassert x\nx', [('example', 'x = 1\nx'), ('check', 'assert x')]),
    'in their order': ('x = 1\ntest_eq(x, 1)\ny = 2\nassert y\nx+y',
        [('example', 'x = 1\ny = 2\nx+y'), ('check', 'test_eq(x, 1)\nassert y')]),
    'before what they read changes': ('x = 1\nassert x == 1\nx = 2\nx',
        [('example', 'x = 1'), ('check', 'assert x == 1'), ('example', 'x = 2\nx')]),
    'before an item changes': ('assert x[0]\nx[0] = 0\nx', [('check', 'assert x[0]'), ('example', 'x[0] = 0\nx')]),
    'before something acts': ('assert x\nadam.step()\nx', [('check', 'assert x'), ('example', 'adam.step()\nx')]),
    'before a function changes what it reads': ('assert f(m)\ndeploy_(m, x)',
        [('check', 'assert f(m)'), ('example', 'deploy_(m, x)')]),
    'after one that changes something else': ('assert f(m)\ndeploy_(n, m)',
        [('example', 'deploy_(n, m)'), ('check', 'assert f(m)')]),
    'before a method changes it': ('assert x\ny = x.add_(1)', [('check', 'assert x'), ('example', 'y = x.add_(1)')]),
    'before a loop': ('assert x\nfor i in x: i.pop()', [('check', 'assert x'), ('example', 'for i in x: i.pop()')]),
    'a name of its own does not hold it': ('for i in x: assert i\n[i for i in x]',
        [('example', '[i for i in x]'), ('check', 'for i in x: assert i')]),
    'what is printed changes nothing': ('assert x\nprint(x)\nx', [('example', 'print(x)\nx'), ('check', 'assert x')]),
    'what a check binds is there': ('for i in x: assert i\ni', [('check', 'for i in x: assert i'), ('example', 'i')]),
    'a value in between is not shown': ('f()\nassert x\nx = 2',
        [('example', 'f();'), ('check', 'assert x'), ('example', 'x = 2')]),
    'a function may hold a check': ('def f(x):\n    assert x\n    return x\nf(1)',
        [('example', 'def f(x):\n    assert x\n    return x\nf(1)')]),
    'comments stay with what they are about': ('x = 1  # one\n# small\nassert x < 2\n# last\nx\n# end',
        [('example', 'x = 1  # one\n# last\nx\n# end'), ('check', '# small\nassert x < 2')]),
    'two statements in a line': ('x = 1; y = 2\nassert x; assert y\nx', [('example', 'x = 1; y = 2\nx'),
        ('check', 'assert x; assert y')]),
    'blocks that end in a check': ('with torch.no_grad():\n    y = f(x)\n    assert y\nif gpu: assert x\nx',
        [('example', 'x'), ('check', 'with torch.no_grad():\n    y = f(x)\n    assert y\nif gpu: assert x')]),
    'what fails': ("# too few\nwith expect_fail(ValueError, contains='no'):\n    f(x,\n        bits=1)\nx",
        [('error', '# too few\nf(x,\n    bits=1)'), ('example', 'x')]),
    'in one line': ('with expect_fail(ValueError): f(x,\n    1)', [('error', 'f(x,\n    1)')]),
    'failures in a loop': ('for f in fs:\n    with expect_fail(): f()',
        [('check', 'for f in fs:\n    with expect_fail(): f()')]),
}.values())
def test_parts(code, want): assert [(p.kind, p.code) for p in parts(code)] == want

def test_what_a_function_reads_is_not_its_own():
    "Whatever its name: Python's symtable takes a function named top for a module."
    for name in ('f', 'top'):
        reads,binds = symbols(ast.parse(f'def {name}(x):\n    y = x+z\n    return [v for v in y]').body[0])
        assert (reads, binds) == ({'z'}, {name})

def test_an_error_is_checked_before_it_is_shown():
    "Unseen, by the statement of the notebook; the cell that the reader sees may fail, and says with what."
    src = "#| fig-alt: no\nwith expect_fail(ValueError, contains='too large'): f(9)\nf(1)\nassert f(1)"
    nb = notebook(src)
    nb.cells[0].outputs = said = [dict(output_type='stream', text='1')]
    page = literate.convert(nb, {}, 'shok_nb')
    test,error,alt,shown,check = page['cells']
    assert 'remove-cell' in test['metadata']['tags']
    assert test['source'] == "with expect_fail(ValueError, contains='too large'): f(9)\nfigures.error()"
    assert (error['source'], error['metadata']) == ('f(9)', dict(tags=['raises-exception'], says='too large'))
    assert (alt['source'], shown['source'], shown['outputs']) == ("figures.alt('no')", 'f(1)', said)
    assert check['metadata']['mystnb']['code_prompt_show'] == 'Check' and check['source'] == 'assert f(1)'
    ids = [c['id'] for c in page['cells']]
    assert len({*ids}) == 5 and shown['id'] == 'c0'

@pytest.mark.parametrize('nb', NBS, ids=slug)
def test_no_check_among_examples(nb):
    "Nothing of a cell is lost, no cell that one sees unfolded holds a check, and no value needs what a check does."
    page = json.loads(nb.read_text('utf-8'))
    def statements(*codes): return sorted(ast.unparse(n) for c in codes for n in ast.parse(c).body)
    for c in page['cells']:
        d,code = literate.directives(''.join(c['source']))
        if c['cell_type'] != 'code' or GIVEN & d.keys(): continue
        made = parts(code)
        assert statements(code) == statements(*(p.test or p.code for p in made))
        examples,checks = ('\n'.join(p.code for p in made if (p.kind == 'check') == of) for of in (False, True))
        def modes(text): return {*re.findall(r'\b(\w+)\.(?:eval|train)\(\)', text)}
        unseen = modes(checks) - modes(examples)            # networks whose mode a reader would not have set
        assert 'code-fold' in d or not unseen & {*re.findall(r'\w+', examples.rpartition('\n')[2])}
    for c in seen(page):
        assert is_folded(c) or not [n for n in ast.parse(c['source']).body if is_check(n)], c['source']

@pytest.mark.slow
def test_an_error_takes_a_line(tmp_path):
    "Where it must be; any other keeps its traceback."
    start = f"import sys\nsys.path.insert(0, {str(DOCS/'_ext')!r})\nimport figures; figures.install()"
    cells = played(start, 'figures.error()', '1/0', '1/0', cwd=tmp_path)
    short,long = (c['outputs'][0] for c in cells[2:])
    assert short['traceback'] == ['ZeroDivisionError: division by zero'] and len(long['traceback']) > 1
    assert (short['ename'], short['evalue']) == (long['ename'], long['evalue'])
