"""Sphinx extension: turns the notebooks of ../nbs into pages, without showing readers the `#|` directives.

Each notebook becomes a page of the source folder (which git ignores). A cell that exports public names becomes their
API entries (autodoc, parameters from the docments comments) and its source, folded. The table of contents follows
`literate_order`, the reader's order, and not the numbers in the file names, which say what imports what."""
import ast
import hashlib
import importlib
import json
import re
from pathlib import Path

HIDDEN = {'hide', 'default_exp'}
LONG = 20      # lines; a longer cell is folded
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

def outside(text, base):
    "Links to files of the repository that are no pages, `../X`: under `base`, or plain text where that is empty."
    return re.sub(r'\[([^\]]+)\]\(\.\./([^)]+)\)', rf'[\1]({base}\2)' if base else r'\1', text)

def repo_links(git_url, branch, nb):
    "One line of links from a page to its notebook, empty without a repository."
    if not git_url: return ''
    links = [f'[Notebook source]({git_url}/blob/{branch}/nbs/{nb})']
    if m := re.fullmatch(r'https://github\.com/(.+)', git_url):
        links.insert(0, f'[Open in Colab](https://colab.research.google.com/github/{m[1]}/blob/{branch}/nbs/{nb})')
    return '{.repo-links}\n' + ' · '.join(links)

def toctree(pages, order):
    "Table of contents in groups. A name without its page is skipped; a page without a place is warned of."
    groups = {k: [n for n in names if n in pages] for k,names in order.items()}
    if loose := sorted(pages - {n for names in order.values() for n in names}):
        from sphinx.util.logging import getLogger
        getLogger(__name__).warning(f"{', '.join(loose)}: no place in literate_order of docs/conf.py")
        groups['More'] = loose
    lines = {k: ['Overview <self>' if n == 'index' else n for n in names] for k,names in groups.items() if names}
    return '\n'.join(f'```{{toctree}}\n:hidden:\n:caption: {k}\n\n' + '\n'.join(v) + '\n```' for k,v in lines.items())

def prose(text, syms):
    "Markdown for MyST: `name` links to the API entry of that name, and `$$` lines stand apart from their paragraph."
    def link(m): return f'{{py:obj}}`{m[1]} <{syms[m[1]]}>`' if m[1] in syms else m[0]
    out,fence = [],False
    for l in re.sub(r'^\$\$[^$]+\$\$$', r'\n\g<0>\n', text, flags=re.M).split('\n'):
        if l.lstrip().startswith('```'): fence = not fence
        elif not fence and not l.startswith(('    ', '#')): l = re.sub(r'(?<![`}])`(\w+)`(?!`|\]\()', link, l)
        out.append(l)
    return '\n'.join(out)

def _cell(kind, id, src, **kw): return dict(cell_type=kind, id=id, metadata={}, source=src, **kw)

def _hidden(id, src):
    "A code cell that runs and is not seen."
    return _cell('code', id, src, execution_count=None, outputs=[]) | dict(metadata=dict(tags=['remove-cell']))

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
    before = []
    if 'fig-alt' in d:                                    # for a PNG, and for inline SVG
        meta['mystnb'] = dict(image=dict(alt=d['fig-alt']))
        before = [_hidden(f"alt-{c['id']}", f"figures.alt({d['fig-alt']!r})")]
    show = shown(d) and bool(code)
    fold = d.get('code-fold', str(len(code.splitlines()) > LONG).lower()) == 'true'
    if {'export', 'exports', 'exporti'} & d.keys():
        body = ast.parse(code).body
        public = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
        if 'exporti' not in d and show: api = [_api(mod, n) for n in public]
        fold = True
        show = show and not all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)
        tags.add('remove-output')
    if fold:
        tags.add('hide-input')
        prompts = dict(code_prompt_show='Show the source', code_prompt_hide='Hide the source')
        meta['mystnb'] = meta.get('mystnb', {}) | prompts
    if not show: tags.add('remove-cell')                  # still runs, never seen
    return [*api, *before, c | dict(source=code, metadata=meta | dict(tags=sorted(tags)))]

def convert(nb, syms, pkg, links='', base=''):
    "An nbdev notebook as a MyST-NB one; `base` is where the repository shows its files."
    out,mod = [],pkg
    for c in nb['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            src = outside(relink(prose(src, syms), lambda stem: slug(stem) + '.ipynb'), base)
            if links and src.startswith('# '):
                title,_,rest = src.partition('\n')
                src,links = f'{title}\n\n{links}\n{rest}',''
            out.append(c | dict(source=src))
        elif c['cell_type'] == 'code':
            if exp := directives(src)[0].get('default_exp'): mod = f'{pkg}.{exp}'
            out += _code(c, mod)
    return nb | dict(cells=out)

def known(lib, text, root, nbs):
    "Stands for all that a page reads besides its own cells: the library, and the files that its `text` names."
    data = [f for f in (*root.glob('bench/*.*'), *root.glob('docs/*.bib')) if f.name in text]
    files = sorted(data) + (nbs if "*.ipynb')" in text else [])
    return hashlib.sha1(b''.join([lib, *(f.read_bytes() for f in files)])).hexdigest()[:12]

def write_pages(app):
    "Write the pages into the source folder; unchanged ones keep their time stamp."
    cfg,dst = app.config,Path(app.srcdir)
    pkg = importlib.import_module(cfg.literate_package)
    idx = importlib.import_module(f'{pkg.__name__}._modidx').d['syms']
    syms = {name: full for mod,d in idx.items() for full in d if '._' not in (name := full.removeprefix(mod + '.'))
            and not name.startswith('_') and '.' not in name}
    lib = b''.join(f.read_bytes() for f in sorted(Path(pkg.__file__).parent.rglob('*.py')))
    base = f'{cfg.literate_git_url}/blob/{cfg.literate_branch}/' if cfg.literate_git_url else ''
    nbs = sorted((Path(app.confdir)/cfg.literate_nbs).glob('[!_.]*.ipynb'))
    for p in nbs:
        links = repo_links(cfg.literate_git_url, cfg.literate_branch, p.name)
        text = p.read_text('utf-8')
        code = known(lib, text, Path(app.confdir).parent, nbs)
        start = f'import figures; figures.install()    # {code}: what the page reads; if that changes, it runs again'
        nb = convert(json.loads(text), syms, pkg.__name__, links, base)
        nb['cells'].insert(1, _hidden('start', start))    # after the title, which MyST-NB wants first
        if words := cfg.literate_words.get(slug(p)):
            meta = f'```{{eval-rst}}\n.. meta::\n   :keywords: {", ".join(words.split())}\n```'
            nb['cells'].insert(1, _cell('markdown', 'words', meta))
        if p.stem == 'index':
            made = {f.stem for f in dst.glob('*.md')}     # by other extensions
            nb['cells'].append(_cell('markdown', 'toc', toctree({*map(slug, nbs)} | made, cfg.literate_order)))
        f,text = dst/f'{slug(p)}.ipynb',json.dumps(nb, indent=1, ensure_ascii=False)
        if not f.exists() or f.read_text('utf-8') != text: f.write_text(text, 'utf-8')
    for f in {*dst.glob('*.ipynb')} - {dst/f'{slug(p)}.ipynb' for p in nbs}: f.unlink()

def _rst(s):
    "A line of markdown for docutils: ticks make literals, whatever stands after them, and nothing else is markup."
    def mark(m):
        if not m[1]: return '\\' + m[2]
        return f'``{m[1]}``' + ('\\ ' if s[m.end():m.end()+1].strip() else '')
    return re.sub(r'`([^`]+)`|([*|_\\])', mark, s)

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

def fold_fields(app, domain, objtype, content):
    """Beside its source an entry shows its signature and its line; parameters, result and example open on demand, and
    are open on the page of the API."""
    from docutils import nodes
    fields = next((n for n in content.children if isinstance(n, nodes.field_list)), None)
    if fields is None or app.env.docname == 'api': return
    i = content.index(fields)
    content.insert(i, nodes.raw('', '<details class="fields"><summary>Parameters</summary>', format='html'))
    content.append(nodes.raw('', '</details>', format='html'))

def neighbours(app, pagename, templatename, context, doctree):
    "Previous and next are those of the reader's order, whatever else the table of contents holds."
    pages = [n for names in app.config.literate_order.values() for n in names if n in app.env.titles]
    if pagename not in pages: return
    i = pages.index(pagename)
    def link(n):
        title = app.builder.render_partial(app.env.titles[n])['title']
        return dict(link=app.builder.get_relative_uri(pagename, n), title=title)
    context['prev'] = link(pages[i-1]) if i else None
    context['next'] = link(pages[i+1]) if i+1 < len(pages) else None

def setup(app):
    for k,v in dict(nbs='../nbs', package='', git_url='', branch='main', order={}, words={}).items():
        app.add_config_value(f'literate_{k}', v, 'env')
    app.connect('builder-inited', write_pages, priority=100)
    app.connect('autodoc-process-docstring', docments_fields)
    app.connect('object-description-transform', fold_fields, priority=900)   # after autodoc has put the types in
    app.connect('html-page-context', neighbours)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
