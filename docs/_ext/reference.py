"""Sphinx extension: writes the page of the API, everything public by folder, with its methods and an example each.
A table at its head has every name with its signature.

A notebook has the same entries, each beside its source: the index of names leads there, and here for methods. A site of
a few notebooks has what these make. The order is that of the menu."""
import ast
import html
import importlib
import inspect
import json
import re
from pathlib import Path
from literate import grouped, meta, slug, write


def _exported(tree):
    "The names in `__all__`."
    for n in tree.body:
        if isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == '__all__': return ast.literal_eval(n.value)
    return []

def _method(m):
    "The directive of a method, None for what is no method of a reader's."
    if not isinstance(m, ast.FunctionDef) or m.name.startswith('_') and m.name != '__call__': return None
    marks = [ast.unparse(d) for d in m.decorator_list]
    return 'autoproperty' if 'property' in marks else 'automethod'

def public(path):
    "What a module exports: each name with the function or class that it is, None for a value."
    tree = ast.parse(path.read_text('utf-8'))
    found = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return {name: found.get(name) for name in _exported(tree)}

def entries(module, path):
    "What autodoc is to show of a module: a function or a class without an entry in the index, a method with one."
    out = []
    for name,n in public(path).items():
        if n is None: continue                                                  # a value
        full = f'{module}.{name}'
        kind = 'autoclass' if isinstance(n, ast.ClassDef) else 'autofunction'
        out += [f'.. {kind}:: {full}', '   :no-index:', '']
        if kind == 'autoclass':
            for m in n.body:
                if directive := _method(m): out += [f'   .. {directive}:: {full}.{m.name}', '']
    return '\n'.join(out)

def taught(nb):
    "The module that a notebook makes, and its title."
    cells = [''.join(c['source']) for c in json.loads(nb.read_text('utf-8'))['cells']]
    made = next((m[1] for c in cells if (m := re.match(r'#\| default_exp ([\w.]+)', c))), None)
    title = next((m[1] for c in cells if (m := re.match(r'# (.+)', c))), nb.stem)
    return made,title

def file_of(root, module): return root/f"{module.replace('.', '/')}.py"

def chapter(package, root, notebooks):
    "What the modules of these notebooks export, in Markdown: a section each."
    out = []
    for nb in notebooks:
        module,title = taught(nb)
        shown = module and entries(f'{package}.{module}', file_of(root, module))
        if not shown: continue
        out += [f'### {title}', f'`{package}.{module}`, made and tested on [its page]({slug(nb)}.ipynb).',
            f'```{{eval-rst}}\n{shown}```']
    return out

def _written(n):
    "The defaults of a function or class as its source has them, by the names of the parameters."
    if isinstance(n, ast.ClassDef):
        n = next((m for m in n.body if isinstance(m, ast.FunctionDef) and m.name == '__init__'), n)
    if isinstance(n, ast.ClassDef):                                             # its fields
        return {m.target.id: ast.unparse(m.value) for m in n.body if isinstance(m, ast.AnnAssign) and m.value}
    a = n.args
    some = [*a.posonlyargs, *a.args][-len(a.defaults):] if a.defaults else []
    pairs = *zip(some, a.defaults),*zip(a.kwonlyargs, a.kw_defaults)
    return {p.arg: ast.unparse(v) for p,v in pairs if v is not None}

def arguments(f, n):
    """The parameters of a function or class, each with its default, and `*` before those that are given by name. What a
    decorator adds has its default as Python prints it."""
    written,out = _written(n),[]
    for p in inspect.signature(f).parameters.values():
        if p.kind == p.KEYWORD_ONLY and '*' not in out: out.append('*')
        stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        default = '' if p.default is p.empty else f'={written.get(p.name, repr(p.default))}'
        out.append(f'{stars}{p.name}{default}')
    return out

def _code(words): return f'<code class="docutils literal">{html.escape(words)}</code>'

def _kind(t):
    "What a class is for those who know Python and torch: the first of its bases that is theirs."
    name = next(b.__name__ for b in t.__mro__ if b.__module__.partition('.')[0] in ('torch', 'builtins'))
    return 'an object' if name == 'object' else f'an object, {_code(name)}'

def _returned(n):
    "What a function returns, without the modules where that is defined."
    return re.sub(r'(\w+\.)+(?=\w)', '', ast.unparse(n.returns)) if n.returns else 'None'

def _row(cells, tag='td'): return '<tr>' + ''.join(f'<{tag}>{c}</{tag}>' for c in cells) + '</tr>'

def line(module, name, n, page):
    "The row of a public name in the table: `n` defines it; a value has a place on its page alone."
    v,to,takes = getattr(importlib.import_module(module), name),f'#{module}.{name}',''
    if n is None: to,gives = f'{page}.html',f'a value, {_code(type(v).__name__)}'
    else:
        takes = ', '.join(map(_code, arguments(v, n)))
        gives = _kind(v) if isinstance(n, ast.ClassDef) else _code(_returned(n))
    changes = _code(next(iter(inspect.signature(v).parameters))) if name.endswith('_') else ''
    return _row([f'<a class="reference internal" href="{to}">{_code(name)}</a>', takes, gives, changes])

def glance(package, root, notebooks):
    "A table of what these notebooks export, in HTML, which the search leaves out: what each takes, gives and changes."
    rows = []
    for nb in notebooks:
        module,_ = taught(nb)
        if not module: continue
        names = public(file_of(root, module))
        rows += [line(f'{package}.{module}', name, n, slug(nb)) for name,n in names.items()]
    head = _row(('Name', 'Arguments', 'Returns', 'Changes'), 'th')
    return '\n'.join(['<div class="table-wrapper docutils container">', '<table class="docutils align-default glance">',
        f'<thead>{head}</thead>', '<tbody>', *rows, '</tbody>', '</table>', '</div>']) if rows else ''

def reference(package, root, notebooks, folders):
    "The page, in Markdown; `folders` has their titles, in order."
    promise = 'Everything public, by topic: what goes in, what comes out, what raises, and an example that runs.'
    out = ['# API', meta('API', promise, ()), f'> {promise}',
        'A `step` and an `offset` are in the units of `x`; other knobs have no unit where they name none. '
        'All names are in the [index](genindex).',
        '```{toctree}\n:hidden:\n\nIndex of names <genindex>\n```']
    groups = grouped(notebooks, folders)
    out += ['## All public names at a glance',
        'Arguments after `*` are given by name. What ends in `_` changes its first argument in place.']
    for folder,nbs in groups.items():
        if made := glance(package, root, nbs): out += [f'**{folders.get(folder, "Pages")}**', made]
    for folder,nbs in groups.items():
        if made := chapter(package, root, nbs): out += [f'## {folders.get(folder, "Pages")}', *made]
    return '\n\n'.join(out) + '\n'

def write_reference(app):
    "Write the page into the source folder, before the notebooks are, whose table of contents has it."
    cfg,here = app.config,Path(app.confdir)
    root,nbs = here.parent/cfg.literate_package,here/cfg.literate_nbs
    write(Path(app.srcdir)/'api.md', reference(cfg.literate_package, root, nbs, cfg.literate_folders))

def anchor(app, doctree):
    "Each entry of the page has an anchor of its own, its full name, and a link to it."
    if app.env.docname != 'api': return
    from sphinx.addnodes import desc_signature
    for n in doctree.findall(desc_signature):
        if not n['ids']: n['ids'].append(f"{n['module']}.{n['fullname']}")

HOMES = 'torch', 'torch.nn', 'torch.optim', 'torch.optim.lr_scheduler', 'torch.utils.data'

def public_name(app, env, node, contnode):
    "What torch defines deeper inside, such as torch.nn.modules.module.Module, is looked for where its users find it."
    target = node.get('reftarget', '')
    if not target.startswith('torch.'): return
    known = {n for names in getattr(env, 'intersphinx_named_inventory', {}).get('torch', {}).values() for n in names}
    places = [target, *(f"{home}.{target.rpartition('.')[2]}" for home in HOMES)]
    node['reftarget'] = next((n for n in places if n in known), target)

def setup(app):
    app.connect('missing-reference', public_name, priority=400)         # before intersphinx looks
    app.connect('builder-inited', write_reference, priority=50)
    app.connect('doctree-read', anchor)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
