"The first network and the recipes: what they ask is answered, and the code that is shown without being run exists."
import ast
import json
import re
from pathlib import Path
import shok_nb

ROOT = Path(__file__).resolve().parents[1]

def cells(name): return json.loads((ROOT/'nbs'/f'{name}.ipynb').read_text('utf-8'))['cells']
def source(c): return ''.join(c['source'])

def test_questions_are_answered():
    "What the reader is asked has a cell below it that says."
    page = cells('start/10_first_network')
    asked = [i for i,c in enumerate(page) if re.search(r'\*\*(Guess|Will)', source(c))]
    assert asked and all(any('assert' in source(c) for c in page[i+1:i+5] if c['cell_type'] == 'code') for i in asked)

def test_code_that_is_not_run():
    "What a fence shows exists, and the tests that the text names run it in its own trainer."
    text = '\n'.join(source(c) for c in cells('start/40_recipes') if c['cell_type'] == 'markdown')
    fence, = re.findall(r'```python\n(.*?)```', text, re.S)
    names = {n.attr for n in ast.walk(ast.parse(fence)) if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name) and n.value.id == 'R'}
    assert names == {n for n in shok_nb.__all__ if n.endswith('_callback')}
    tests = (ROOT/'tests'/'test_schedules.py').read_text('utf-8')
    assert '../tests/test_schedules.py' in text and all(f'{n}(' in tests for n in names)
