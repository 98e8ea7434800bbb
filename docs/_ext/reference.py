"""Sphinx extension: writes the page of the API, everything public by topic, with its methods and an example each.

A notebook has the same entries, each beside its source: the index of names leads there, and here for methods. A site of
a few notebooks has what these make."""
import ast
import json
import re
from pathlib import Path
from literate import slug
from sphinx.util.logging import getLogger

TOPICS = {                                              # the modules of the package, each once
    'Hard estimators': ('Forward is on the grid; backward is a slope of their own.', 'ste ratio ewgs surrogates signs'),
    'Smooth estimators': ('One curve for both ways, between the identity and `torch.round`.',
        'soft sigmoid sine fourier cubic ramp decimals'),
    'Random estimators': ('They take a `generator` or a `seed`.', 'stochastic dither neighbours'),
    'Estimators of your own': ('Two functions make one, right under every transform.',
        'staircases core parts arguments'),
    'Gradients': ('The value stays, the gradient changes.', 'gradient'),
    'Schedules': ('A knob as a function of the step.', 'schedules'),
    'Modules': ('A layer in training, the hard operation after it.', 'nn functions'),
    'Grids': ('Where the points of a grid should lie.', 'calibrate'),
    'Quantizers': ('Integers times a step.', 'quantize quantizer scalar_quantize'),
    'Learned rounding': ('Up or down is what is trained.', 'learned'),
    'Models and deployment': ('From a float model to integer codes.', 'models deploy'),
    'Pictures and sliders': ('They need matplotlib and ipywidgets.', 'plots widgets learn lab'),
    'Catalog and checks': ('What each estimator claims, and the laws that hold it to that.', 'catalog checks'),
    'Randomness and replay': ('Noise by position, and formulas that run in pieces.', 'random replay'),
    'Studies': ('A JPEG that is differentiable, and the demo.', 'jpeg demo'),
}

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

def pages(folder, notebooks):
    "The page of each module: its notebook without the number, and the title."
    out = {}
    for nb in sorted(Path(notebooks).glob('[0-9]*.ipynb')):
        cells = [''.join(c['source']) for c in json.loads(nb.read_text('utf-8'))['cells']]
        made = next((m[1] for c in cells if (m := re.match(r'#\| default_exp (\w+)', c))), None)
        title = next((m[1] for c in cells if (m := re.match(r'# (.+)', c))), nb.stem)
        if made: out[made] = slug(nb),title
    return out

def reference(package, folder, notebooks):
    "The page, in Markdown."
    taught,out = pages(folder, notebooks),['# API']
    out += ['> Everything public, by topic: what goes in, what comes out, what raises, and an example that runs.',
        'A `step` and an `offset` are in the units of `x`; other knobs have no unit where they name none. '
        'All names are in the [index](genindex).',
        '```{toctree}\n:hidden:\n\nIndex of names <genindex>\n```']
    for topic,(line,modules) in TOPICS.items():
        if any(m in taught for m in modules.split()): out += [f'## {topic}', line]
        for m in modules.split():
            if m not in taught: continue
            page,title = taught[m]
            out += [f'### {title}', f'`{package}.{m}`, made and tested on [its page]({page}.ipynb).',
                f"```{{eval-rst}}\n{entries(f'{package}.{m}', folder/f'{m}.py')}```"]
    return '\n\n'.join(out) + '\n'

def write_reference(app):
    "Write the page into the source folder, before the notebooks are, whose table of contents has it."
    folder = Path(app.confdir).parent/app.config.literate_package
    told = {m for _,modules in TOPICS.values() for m in modules.split()}
    there = {p.stem for p in folder.glob('[!_]*.py') if _exported(ast.parse(p.read_text('utf-8')))}
    if lost := sorted(there ^ told): getLogger(__name__).warning(f"{', '.join(lost)}: TOPICS of docs/_ext/reference.py")
    text = reference(app.config.literate_package, folder, Path(app.confdir)/app.config.literate_nbs)
    f = Path(app.srcdir)/'api.md'
    if not f.exists() or f.read_text('utf-8') != text: f.write_text(text, 'utf-8')

def setup(app):
    app.connect('builder-inited', write_reference, priority=50)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
