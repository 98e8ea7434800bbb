"""Sphinx extension: turns the notebooks of ../nbs into pages, without showing readers the `#|` directives.

Each notebook becomes a page of the source folder (which git ignores). A cell that exports public names becomes their
API entries (autodoc, parameters from the docments comments) and its source, folded. The table of contents comes from
the numbers in the file names."""
import ast
import hashlib
import importlib
import json
import re
from pathlib import Path

HIDDEN = {'hide', 'default_exp'}
_directive = re.compile(r'\s*#\|\s*([\w-]+)\s*:?\s*(.*?)\s*$')

def directives(src):
    "Split the leading `#|` lines from `src`: (dict, rest)."
    found,lines = {},src.splitlines()
    while lines and (not lines[0].strip() or _directive.match(lines[0])):
        if m := _directive.match(lines.pop(0)): found[m[1]] = m[2]
    return found,'\n'.join(lines).rstrip()

def shown(d): return not HIDDEN & d.keys() and d.get('include') != 'false'

def slug(name): return re.sub(r'^\d+[a-z]?_', '', Path(name).stem)

def relink(text, to):
    "Rewrite links to other notebooks: `to(stem)` is the new target."
    return re.sub(r'\]\(([\w-]+)\.ipynb(#[^)]*)?\)', lambda m: f"]({to(m[1])}{m[2] or ''})", text)

def repo_links(git_url, branch, nb):
    "One line of links from a page to its notebook, empty without a repository."
    if not git_url: return ''
    links = [f'[Notebook source]({git_url}/blob/{branch}/nbs/{nb})']
    if m := re.fullmatch(r'https://github\.com/(.+)', git_url):
        links.insert(0, f'[Open in Colab](https://colab.research.google.com/github/{m[1]}/blob/{branch}/nbs/{nb})')
    return '{.repo-links}\n' + ' · '.join(links)

def toctree(names, floors):
    "Table of contents: one group per first digit, pages in the order of their numbers, the floor last."
    groups = {'Start': ['Overview <self>']}
    for n in sorted(names, key=lambda n: (n[0] == '0', n)):           # the floor is for those who look under it
        if n != 'index': groups.setdefault(floors.get(n[0], 'More'), []).append(slug(n))
    return '\n'.join(f'```{{toctree}}\n:hidden:\n:caption: {k}\n\n' + '\n'.join(v) + '\n```' for k,v in groups.items())

def prose(text, syms):
    "Markdown for MyST: `name` links to the API entry of that name, and `$$` lines stand apart from their paragraph."
    def link(m): return f'{{py:obj}}`{m[1]} <{syms[m[1]]}>`' if m[1] in syms else m[0]
    out,fence = [],False
    for l in re.sub(r'^\$\$[^$]+\$\$$', r'\n\g<0>\n', text, flags=re.M).split('\n'):
        if l.lstrip().startswith('```'): fence = not fence
        elif not fence and not l.startswith(('    ', '#')): l = re.sub(r'(?<![`}])`(\w+)`(?!`)', link, l)
        out.append(l)
    return '\n'.join(out)

def _cell(kind, id, src, **kw): return dict(cell_type=kind, id=id, metadata={}, source=src, **kw)

def _api(mod, node):
    kind = 'class' if isinstance(node, ast.ClassDef) else 'function'
    return _cell('markdown', f'api-{node.name}', f'```{{eval-rst}}\n.. auto{kind}:: {mod}.{node.name}\n```')

def _code(c, mod):
    "The cells of the page that code cell `c` becomes."
    d,code = directives(''.join(c['source']))
    tags,meta,api = set(c['metadata'].get('tags', [])),{},[]
    if d.get('echo') == 'false': tags.add('remove-input')
    if d.get('output') == 'false': tags.add('remove-output')
    if d.get('eval') == 'false': tags.add('skip-execution')
    if 'fig-alt' in d: meta['mystnb'] = dict(image=dict(alt=d['fig-alt']))
    fold,show = d.get('code-fold') == 'true',shown(d) and bool(code)
    if {'export', 'exports', 'exporti'} & d.keys():
        body = ast.parse(code).body
        public = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
        if 'exporti' not in d and show: api = [_api(mod, n) for n in public]
        fold = fold or bool(api)
        show = show and not all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)
        tags.add('remove-output')
    if fold:
        tags.add('hide-input')
        prompts = dict(code_prompt_show='Show the source', code_prompt_hide='Hide the source')
        meta['mystnb'] = meta.get('mystnb', {}) | prompts
    if not show: tags.add('remove-cell')                  # still runs, never seen
    return [*api, c | dict(source=code, metadata=meta | dict(tags=sorted(tags)))]

def convert(nb, syms, pkg, links=''):
    "An nbdev notebook as a MyST-NB one."
    out,mod = [],pkg
    for c in nb['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            src = relink(prose(src, syms), lambda stem: slug(stem) + '.ipynb')
            if links and src.startswith('# '):
                title,_,rest = src.partition('\n')
                src,links = f'{title}\n\n{links}\n{rest}',''
            out.append(c | dict(source=src))
        elif c['cell_type'] == 'code':
            if exp := directives(src)[0].get('default_exp'): mod = f'{pkg}.{exp}'
            out += _code(c, mod)
    return nb | dict(cells=out)

def write_pages(app):
    "Write the pages into the source folder; unchanged ones keep their time stamp."
    cfg,dst = app.config,Path(app.srcdir)
    pkg = importlib.import_module(cfg.literate_package)
    idx = importlib.import_module(f'{pkg.__name__}._modidx').d['syms']
    syms = {name: full for mod,d in idx.items() for full in d if '._' not in (name := full.removeprefix(mod + '.'))
            and not name.startswith('_') and '.' not in name}
    lib = b''.join(f.read_bytes() for f in sorted(Path(pkg.__file__).parent.rglob('*.py')))
    start = f'import figures; figures.install()    # {hashlib.sha1(lib).hexdigest()[:12]}: a changed library runs again'
    nbs = sorted((Path(app.confdir)/cfg.literate_nbs).glob('[!_.]*.ipynb'))
    for p in nbs:
        links = repo_links(cfg.literate_git_url, cfg.literate_branch, p.name)
        nb = convert(json.loads(p.read_text('utf-8')), syms, pkg.__name__, links)
        hidden = _cell('code', 'start', start, execution_count=None, outputs=[])
        hidden['metadata'] = dict(tags=['remove-cell'])
        nb['cells'].insert(1, hidden)                     # after the title, which MyST-NB wants first
        if p.stem == 'index':
            pages = toctree([o.stem for o in nbs], cfg.literate_floors)
            nb['cells'].append(_cell('markdown', 'toc', pages))
        f,text = dst/f'{slug(p)}.ipynb',json.dumps(nb, indent=1, ensure_ascii=False)
        if not f.exists() or f.read_text('utf-8') != text: f.write_text(text, 'utf-8')
    for f in {*dst.glob('*.ipynb')} - {dst/f'{slug(p)}.ipynb' for p in nbs}: f.unlink()

def _rst(s):
    "A line of markdown for docutils: ticks make literals, and nothing else is markup."
    return re.sub(r'`([^`]+)`|([*|_\\])', lambda m: f'``{m[1]}``' if m[1] else '\\' + m[2], s)

def sections(lines):
    "The parts of a docstring as docs/docstrings.py writes them: what is before, parameters, result, example."
    text = '\n'.join(lines).strip()
    parts = re.split(r'(?m)^(Parameters|Returns|Example):\n', text)
    found = dict(zip(parts[1::2], parts[2::2]))
    def entries(part):
        each = re.split(r'(?m)^    (?=\S)', found.get(part, ''))
        return [' '.join(e.split()) for e in each if e.strip()]
    return parts[0].splitlines(),entries('Parameters'),entries('Returns'),found.get('Example', '').rstrip().splitlines()

def docments_fields(app, what, name, obj, options, lines):
    "`x (Tensor): the thing` becomes `:param x: the thing`, an arXiv id a link, an example code."
    head,params,returns,example = sections(lines)
    link = r'`\g<0> <https://arxiv.org/abs/\1>`__'
    out = [re.sub(r'(?:arXiv:)?\b(\d{4}\.\d{4,5})\b', link, _rst(l)) for l in head]
    for p in params:
        param,text = re.match(r'(\*{0,2}\w+)(?: \(.*?\))?: (.*)', p).groups()
        out.append(f':param {_rst(param)}: {_rst(text)}')
    out += [f":returns: {_rst(r.partition(': ')[2])}" for r in returns]
    lines[:] = [*out, '', '.. code-block:: pycon', '', *example] if example else out

def setup(app):
    for k,v in dict(nbs='../nbs', package='', git_url='', branch='main', floors={}).items():
        app.add_config_value(f'literate_{k}', v, 'env')
    app.connect('builder-inited', write_pages, priority=100)
    app.connect('autodoc-process-docstring', docments_fields)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
