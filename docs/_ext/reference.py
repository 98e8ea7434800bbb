"""Sphinx extension: writes the page of the API, everything public by folder, with its methods and an example each.

A notebook has the same entries, each beside its source: the index of names leads there, and here for methods. A site of
a few notebooks has what these make. The order is that of the menu."""
import ast
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

def entries(module, path):
    "What autodoc is to show of a module: a function or a class without an entry in the index, a method with one."
    tree,out = ast.parse(path.read_text('utf-8')),[]
    found = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for name in _exported(tree):
        n,full = found.get(name),f'{module}.{name}'
        if n is None: continue                                                  # a value
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

def chapter(package, root, notebooks):
    "What the modules of these notebooks export, in Markdown: a section each."
    out = []
    for nb in notebooks:
        module,title = taught(nb)
        shown = module and entries(f'{package}.{module}', root/f"{module.replace('.', '/')}.py")
        if not shown: continue
        out += [f'### {title}', f'`{package}.{module}`, made and tested on [its page]({slug(nb)}.ipynb).',
            f'```{{eval-rst}}\n{shown}```']
    return out

def reference(package, root, notebooks, folders):
    "The page, in Markdown; `folders` has their titles, in order."
    promise = 'Everything public, by topic: what goes in, what comes out, what raises, and an example that runs.'
    out = ['# API', meta('API', promise, ['reference']), f'> {promise}',
        'A `step` and an `offset` are in the units of `x`; other knobs have no unit where they name none. '
        'All names are in the [index](genindex).',
        '```{toctree}\n:hidden:\n\nIndex of names <genindex>\n```']
    for folder,nbs in grouped(notebooks, folders).items():
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
