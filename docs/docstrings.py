"""What `help(f)` shows: the export writes the comments on parameters, and an example, into the docstrings.

`nbdev-export` calls `Docstrings` for each notebook (export_procs in pyproject.toml). In a notebook a docstring is
one line and a parameter has a comment beside it; in shok_nb/ the docstring holds both, and an example of examples.txt,
so that a reader of `help(f)` needs no notebook. The package is not imported: what is broken can be exported too."""
import ast
import functools
import io
import json
import re
import tokenize
from itertools import chain
from pathlib import Path
from textwrap import TextWrapper, indent
from nbdev.maker import NbCell, relative_import

HERE = Path(__file__).resolve().parent
WIDTH = 95
IMPORTS = {'io': 'io', 'torch': 'torch', 'R': 'shok_nb as R'}      # for an example that says `torch.`

def _parsed(src):
    "Its statements; none of a cell that is not Python, which whoever imports it will hear of."
    try: return ast.parse(src).body
    except SyntaxError: return []

def exported(path):
    "The name of a notebook's module, and its exported cells."
    name,cells = '',[]
    for c in json.loads(path.read_text('utf-8'))['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] != 'code': continue
        if m := re.match(r'#\| default_exp (\S+)', src): name = m[1]
        if re.match(r'#\| export', src): cells.append(src)
    return name,cells

def notebooks(folder):
    "Those of a folder and of the folders in it, but for what Jupyter keeps."
    return [p for p in sorted(Path(folder).rglob('[0-9]*.ipynb')) if '.ipynb_checkpoints' not in p.parts]

@functools.cache
def everything(folder):
    "All top-level functions and values of the package, `(node, its cell)` by name; the first of a name counts."
    found = {}
    for p in notebooks(folder):
        for src in exported(p)[1]:
            for n in _parsed(src):
                names = [n.name] if isinstance(n, (ast.FunctionDef, ast.ClassDef)) else []
                if isinstance(n, ast.Assign): names = [t.id for t in n.targets if isinstance(t, ast.Name)]
                for name in names: found.setdefault(name, (n, src))
    return found

def examples(path=HERE/'examples.txt'):
    """The example of each public name, `module.name` or `module.Class.method`, with its imports. A module is called by
    its own name, without the folder it lies in."""
    blocks = re.split(r'(?m)^([a-z]\w*\.[\w.]+)\n(?=>>> )', path.read_text('utf-8'))[1:]
    return {name: _imported(block.strip()) for name,block in zip(blocks[::2], blocks[1::2])}

def _named(node):
    "A function, or a class and what it may have an example of."
    if isinstance(node, ast.FunctionDef): return [node.name]
    if not isinstance(node, ast.ClassDef): return []
    methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
    return [node.name, *(f'{node.name}.{m}' for m in methods)]

@functools.cache
def of_nothing(folder, path=HERE/'examples.txt'):
    "The examples of names that no notebook of the folder exports; none while a cell is not Python."
    names = set()
    for nb in notebooks(folder):
        name,cells = exported(nb)
        for src in cells:
            body = _parsed(src)
            if not body and src.strip(): return []
            names |= {f"{name.rpartition('.')[2]}.{n}" for node in body for n in _named(node)}
    return sorted(examples(path).keys() - names)

def _imported(example):
    needed = [text for name,text in IMPORTS.items() if re.search(rf'(?<![\w.]){name}\.', example)]
    lines = [f'>>> import {", ".join(needed)}'] if needed else []
    if re.search(r'(?<![\w.])nn\.', example): lines.append('>>> from torch import nn')
    return '\n'.join([*lines, example])

def comments(src, places):
    "The comment on each of `places`, `(name, line)`: at the end of its line, or alone on the lines before."
    at,alone = {},set()
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type == tokenize.COMMENT:
            at[t.start[0]] = t.string.lstrip('#').strip()
            if not t.line[:t.start[1]].strip(): alone.add(t.start[0])
    out = {}
    for name,line in places:
        above,i = [],line-1
        while i in alone: above.insert(0, at[i]); i -= 1
        if text := at.get(line) or ' '.join(above): out[name] = text
    return out

class Parameter:
    "A name, its type and default as they are written, and what it is."
    def __init__(self, name, kind='', default='', text=''):
        self.name,self.kind,self.default,self.text = name,kind,default,text
    def __str__(self):
        about = ' = '.join(filter(None, [self.kind, self.default]))
        return f'{self.name} ({about}): {self.text}' if about else f'{self.name}: {self.text}'

class Notes:
    "What the notebooks of a folder say of a function or a class."
    def __init__(self, folder): self.known = everything(str(folder))

    def common(self):
        "What is described once for all."
        node = self.known['COMMON'][0].value
        return {k.arg: ast.literal_eval(k.value) for k in node.keywords}

    def kind(self, node, src):
        "A type as it is written; a name that the package gives to one is its value, and a choice is its words."
        if node is None: return ''
        text = ast.get_source_segment(src, node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str): text = node.value
        alias,where = self.known.get(text, (None, ''))
        if isinstance(alias, ast.Assign): return self.kind(alias.value, where)
        def words(m): return '|'.join(w.strip() for w in m[1].split(','))
        return re.sub(r'Literal\[([^]]*)\]', words, ' '.join(text.split()))

    def fields(self, node, src):
        "The fields of a class as parameters."
        found = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        texts = comments(src, [(n.target.id, n.lineno) for n in found])
        def field(n):
            default = ast.get_source_segment(src, n.value) if n.value else ''
            return Parameter(n.target.id, self.kind(n.annotation, src), default, texts.get(n.target.id, ''))
        return [field(n) for n in found]

    def parameters(self, node, src):
        "Of a function."
        a,common = node.args,self.common()
        plain = [*a.posonlyargs, *a.args]
        defaults = dict(zip(reversed(plain), reversed(a.defaults))) | dict(zip(a.kwonlyargs, a.kw_defaults))
        stars = {p: star for p,star in ((a.vararg, '*'), (a.kwarg, '**')) if p}
        args = [p for p in (*plain, a.vararg, *a.kwonlyargs, a.kwarg) if p and p.arg not in ('self', 'cls')]
        lines = [p.lineno for p in args]
        alone = [(p.arg, p.lineno) for p in args if lines.count(p.lineno) == 1 and p.lineno != node.lineno]
        texts,out = comments(src, alone),[]      # a comment beside several is about none of them
        for p in args:
            value = ast.get_source_segment(src, defaults[p]) if defaults.get(p) else ''
            text = texts.get(p.arg) or common.get(p.arg, '')
            out.append(Parameter(stars.get(p, '') + p.arg, self.kind(p.annotation, src), value, text))
        return out

    def returned(self, node, src):
        "Type and comment of what a function returns."
        text = node.returns and comments(src, [('return', node.returns.lineno)]).get('return')
        return f'{self.kind(node.returns, src)}: {text}' if text else ''

    def made_of(self, node, src):
        "What a class is made with, in a call of it."
        for d in node.decorator_list:
            if isinstance(d, ast.Call) and getattr(d.func, 'id', '') == '_twin':    # it takes what its function takes
                takes = self.parameters(*self.known[d.args[0].id])
                knobs = [p for p in takes if p.name not in ('x', 'generator')]
                learns = [Parameter('learnable', 'bool', 'False', self.common()['learnable'])]
                return knobs + learns if knobs else []
        init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == '__init__']
        data = any('dataclass' in ast.unparse(d) for d in node.decorator_list)
        tuple_ = any('NamedTuple' in ast.unparse(b) for b in node.bases)
        if init: return self.parameters(init[0], src)
        return self.fields(node, src) if data or tuple_ else []

def sections(line, params, returns, example, width):
    "A docstring: the line of the notebook, what goes in, what comes out, an example."
    wrap = TextWrapper(width, initial_indent='    ', subsequent_indent=' '*8, break_long_words=False,
        break_on_hyphens=False)
    def listed(head, texts): return '\n'.join([head, *(wrap.fill(t) for t in texts)])
    out = [line]
    params = [p for p in params if p.text]
    if params: out.append(listed('Parameters:', map(str, params)))
    if returns: out.append(listed('Returns:', [returns]))
    if example: out.append('Example:\n' + indent(example, '    '))
    return '\n\n'.join(out)

def _quoted(text, margin):
    "Text as a docstring."
    if '\n' not in text and '"' not in text and '\\' not in text: return f'{margin}"{text}"'
    quotes = "'''" if text.endswith('"') or '"""' in text else '"""'
    raw = 'r' if '\\' in text else ''
    body = indent(text, margin).strip() + ('\n' + margin if '\n' in text else '')
    return f'{margin}{raw}{quotes}{body}{quotes}'

def _put(lines, node, text):
    "Make `text` the docstring of `node`, in the lines of its cell."
    first,margin = node.body[0],' '*(node.col_offset + 4)
    new = _quoted(text, margin)
    if ast.get_docstring(node) is not None:
        row,rest = first.end_lineno-1,lines[first.end_lineno-1].encode()[first.end_col_offset:].decode()
        head = lines[first.lineno-1].encode()[:first.col_offset].decode()
        put = ([head.rstrip()] if head.strip() else []) + (new + rest).split('\n')
        lines[first.lineno-1:row+1] = put
    elif first.lineno == node.lineno or not lines[first.lineno-1][:first.col_offset].isspace():  # def f(x): return x
        line = lines[first.lineno-1].encode()
        head,rest = line[:first.col_offset].decode().rstrip(),line[first.col_offset:].decode()
        lines[first.lineno-1:first.lineno] = [head, *new.split('\n'), margin + rest]
    else:
        at = min([first.lineno, *(d.lineno for d in getattr(first, 'decorator_list', []))]) - 1
        lines[at:at] = new.split('\n')

HOOKS = dict(                                              # what torch calls, described once for all
    extra_repr=('What `print` shows of it.', [], 'str: Between the brackets'),
    right_inverse=('What torch keeps when a weight that goes through this layer is set.',
        [Parameter('w', 'Tensor', '', 'The weight to be')], 'Tensor: `w` itself'))

def described(src, module, notes, given):
    "An exported cell with the docstrings of its public functions, classes and methods written out."
    todo,last = [],module.rpartition('.')[2]
    def note(node, name, params, returns, line=None):
        line = line or ast.get_docstring(node) or ''
        example,width = given.get(f'{last}.{name}', ''),WIDTH - node.col_offset - 4
        if line: todo.append((node, sections(line, params, returns, example, width)))
    def function(n, name):
        note(n, name, notes.parameters(n, src), notes.returned(n, src))
    for n in _parsed(src):
        if not isinstance(n, (ast.FunctionDef, ast.ClassDef)) or n.name.startswith('_'): continue
        if isinstance(n, ast.FunctionDef): function(n, n.name); continue
        note(n, n.name, notes.made_of(n, src), '')
        for m in n.body:
            if not isinstance(m, ast.FunctionDef): continue
            if m.name == '__init__': note(m, '', [], '', f'See `{n.name}`.')
            elif m.name in HOOKS: note(m, f'{n.name}.{m.name}', *HOOKS[m.name][1:], HOOKS[m.name][0])
            elif not m.name.startswith('_') or m.name == '__call__': function(m, f'{n.name}.{m.name}')
    lines = src.split('\n')
    for node,text in sorted(todo, key=lambda t: -t[0].lineno): _put(lines, node, text)
    return '\n'.join(lines)

def relative(cell, package):
    "Imports from the package become relative, those of several lines too, which nbdev leaves (3.3)."
    lines = cell.source.splitlines(keepends=True)
    for n in chain.from_iterable(map(ast.walk, _parsed(cell.source))):
        if not isinstance(n, ast.ImportFrom) or f'{n.module}.'.partition('.')[0] != 'shok_nb': continue
        named = f'from {relative_import(n.module, package, n.level)} import'
        lines[n.lineno-1] = lines[n.lineno-1].replace(f'from {n.module} import', named, 1)
    cell.set_source(''.join(lines))

NbCell.import2relative = relative

class Docstrings:
    "A processor of nbdev's export."
    def __init__(self, nb):
        self.module = next((c.directives_['default_exp'] for c in nb.cells if 'default_exp' in c.directives_), '')
        self.notes,self.given = Notes(HERE.parent/'nbs'),examples()
        if lost := of_nothing(str(HERE.parent/'nbs')):
            raise ValueError(f"docs/examples.txt: {', '.join(lost)}: nothing of that name is exported")

    def __call__(self, cell):
        if cell.cell_type != 'code' or not {'export', 'exports'} & cell.directives_.keys(): return
        cell.set_source(described(cell.source, self.module, self.notes, self.given))
