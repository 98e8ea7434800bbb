"""Sphinx extension: turns the notebooks of ../nbs into pages, without showing readers the `#|` directives.

Each notebook becomes a page of the source folder (which git ignores). A cell that exports public names becomes their
API entries (autodoc, parameters from the docments comments) and its source, folded. `#| code-fold: true` folds any
other cell, which is then named "Check" if it holds tests, or as its `#| code-summary: Errors` says.

A folder of notebooks is a group of the menu, with a page of its own that this writes: `literate_folders` has the titles
in their order. Within a folder the order is that of the numbers in the file names. The site itself has no folders, so
a page keeps its address when its notebook moves."""
import ast
import hashlib
import importlib
import json
import re
from pathlib import Path

HIDDEN = {'hide', 'default_exp'}
LONG = 20      # lines; a longer cell is folded
_directive = re.compile(r'\s*#\|\s*([\w-]+)\s*:?\s*(.*?)\s*$')

_checks = re.compile(r'(?m)^\s*(assert |test_\w+\(|with expect_fail\()')

def directives(src):
    "Split the leading `#|` lines from `src`: (dict, rest)."
    found,lines = {},src.splitlines()
    while lines and (not lines[0].strip() or _directive.match(lines[0])):
        if m := _directive.match(lines.pop(0)): found[m[1]] = m[2]
    return found,'\n'.join(lines).rstrip()

def shown(d): return not HIDDEN & d.keys() and d.get('include') != 'false'

def slug(name): return re.sub(r'^\d+[a-z]?_', '', Path(name).stem)

def relink(text, to):
    "Rewrite links to other notebooks: `to(path)` is the new target of what was `path`.ipynb."
    return re.sub(r'\]\(([\w./-]+)\.ipynb(#[^)]*)?\)', lambda m: f"]({to(m[1])}{m[2] or ''})", text)

def to_page(path):
    "A link to a notebook, from wherever, leads to its page: by its name alone."
    return f'{slug(path)}.ipynb'

def outside(text, base):
    "Links to files of the repository that are no pages, `../X`: under `base`, or plain text where that is empty."
    return re.sub(r'\[([^\]]+)\]\((?:\.\./)+([^)]+)\)', rf'[\1]({base}\2)' if base else r'\1', text)

def grouped(nbs, folders=()):
    """The notebooks of each folder in the reader's order: `folders` first, as they stand there, and before them, under
    '', what lies in none; it begins with the index."""
    found = {f: [] for f in ('', *folders)}
    for p in sorted(Path(nbs).rglob('[!_.]*.ipynb'), key=lambda p: (p.stem != 'index', p)):
        where = p.relative_to(nbs).parent.parts
        if not any(w.startswith(('.', '_')) for w in where): found.setdefault('/'.join(where), []).append(p)
    return {f: pages for f,pages in found.items() if pages}

def repo_links(git_url, branch, nb):
    "One line of links from a page to its notebook, empty without a repository."
    if not git_url: return ''
    links = [f'[Notebook source]({git_url}/blob/{branch}/nbs/{nb})']
    if m := re.fullmatch(r'https://github\.com/(.+)', git_url):
        links.insert(0, f'[Open in Colab](https://colab.research.google.com/github/{m[1]}/blob/{branch}/nbs/{nb})')
    return '{.repo-links}\n' + ' · '.join(links)

def toctree(names):
    "Entries of the menu; those of the index begin with itself."
    lines = ['Overview <self>' if n == 'index' else n for n in names]
    return '```{toctree}\n:hidden:\n\n' + '\n'.join(lines) + '\n```'

def words(text):
    "What readers search for where a page says it otherwise, as its comment `<!-- search: ... -->` has it."
    return ' '.join(re.findall(r'<!-- search: (.*?) -->', text)).split()

def opening(text):
    "The title and the promise of a page, which its first cell begins with."
    promise = re.search(r'(?m)^> (.*(?:\n> .*)*)', text)
    title = re.search(r'(?m)^# (.*)', text)
    return title[1] if title else 'Untitled',promise[1].replace('\n> ', ' ') if promise else ''

def folder_page(title, openings, syms):
    "The page of a folder, in Markdown: `openings` are the titles and promises of its pages, by name."
    def line(name, head, promise): return f'- **[{head}]({name})** {relink(prose(promise, syms), to_page)}'
    lines = [line(name, *said) for name,said in openings.items()]
    return '\n\n'.join([f'# {title}', '\n'.join(lines), toctree(Path(n).stem for n in openings)]) + '\n'

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

def _label(d, code, public):
    "What stands on the fold of a cell: its `code-summary`, or what it holds."
    if 'code-summary' in d: return d['code-summary']
    if all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(code).body): return 'Show the imports'
    if 0 < len(public) < 3: return 'Show the source of ' + ' and '.join(n.name for n in public)
    checks = not {'fig-alt', 'export', 'exports', 'exporti'} & d.keys() and _checks.search(code)
    return 'Check' if checks else 'Show the source'

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
        label = _label(d, code, public if api else [])
        prompts = dict(code_prompt_show=label, code_prompt_hide=label.replace('Show', 'Hide'))
        meta['mystnb'] = meta.get('mystnb', {}) | prompts
    if not show: tags.add('remove-cell')                  # still runs, never seen
    return [*api, *before, c | dict(source=code, metadata=meta | dict(tags=sorted(tags)))]

def convert(nb, syms, pkg, links='', base=''):
    "An nbdev notebook as a MyST-NB one; `base` is where the repository shows its files."
    out,mod = [],pkg
    for c in nb['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            src = outside(relink(prose(src, syms), to_page), base)
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

def _warn(text, **kw):
    from sphinx.util.logging import getLogger
    getLogger(__name__).warning(text, **kw)

def write(f, text):
    "Unless it is there: an unchanged file keeps its time stamp."
    if not f.exists() or f.read_text('utf-8') != text: f.write_text(text, 'utf-8')

def write_pages(app):
    "Write the pages into the source folder; unchanged ones keep their time stamp."
    cfg,dst = app.config,Path(app.srcdir)
    pkg = importlib.import_module(cfg.literate_package)
    idx = importlib.import_module(f'{pkg.__name__}._modidx').d['syms']
    syms = {name: full for mod,d in idx.items() for full in d if '._' not in (name := full.removeprefix(mod + '.'))
            and not name.startswith('_') and '.' not in name}
    lib = b''.join(f.read_bytes() for f in sorted(Path(pkg.__file__).parent.rglob('*.py')))
    base = f'{cfg.literate_git_url}/blob/{cfg.literate_branch}/' if cfg.literate_git_url else ''
    root = Path(app.confdir)/cfg.literate_nbs
    folders = grouped(root, cfg.literate_folders)
    nbs = [p for pages in folders.values() for p in pages]
    made = {f: [n for n in names if (dst/f'{n}.md').exists()] for f,names in cfg.literate_more.items()}
    menu = [slug(p) for p in folders.get('', [])] + [f for f in folders if f]
    menu += [n for f,names in made.items() if f not in folders for n in names]
    openings = {}
    for p in nbs:
        links = repo_links(cfg.literate_git_url, cfg.literate_branch, p.relative_to(root).as_posix())
        text = p.read_text('utf-8')
        code = known(lib, text, Path(app.confdir).parent, nbs)
        start = f'import figures; figures.install()    # {code}: what the page reads; if that changes, it runs again'
        cells = json.loads(text)['cells']
        first = next((''.join(c['source']) for c in cells if c['cell_type'] == 'markdown'), '')
        openings[p] = opening(first)
        nb = convert(json.loads(text), syms, pkg.__name__, links, base)
        nb['cells'].insert(1, _hidden('start', start))    # after the title, which MyST-NB wants first
        if said := words(first):
            meta = f'```{{eval-rst}}\n.. meta::\n   :keywords: {", ".join(said)}\n```'
            nb['cells'].insert(1, _cell('markdown', 'words', meta))
        if p.stem == 'index': nb['cells'].append(_cell('markdown', 'toc', toctree(menu)))
        write(dst/f'{slug(p)}.ipynb', json.dumps(nb, indent=1, ensure_ascii=False))
    for folder,pages in folders.items():
        if not folder: continue
        heads = {f'{n}.md': opening((dst/f'{n}.md').read_text('utf-8')) for n in made.get(folder, [])}
        heads |= {f'{slug(p)}.ipynb': openings[p] for p in pages}
        if folder not in cfg.literate_folders: _warn(f'{folder}: no title in literate_folders of docs/conf.py')
        write(dst/f'{folder}.md', folder_page(cfg.literate_folders.get(folder, folder), heads, syms))
    ours = {dst/f'{slug(p)}.ipynb' for p in nbs} | {dst/f'{f}.md' for f in folders}
    ours |= {dst/f'{n}.md' for names in made.values() for n in names}
    for f in {*dst.glob('*.ipynb'), *dst.glob('*.md')} - ours: f.unlink()

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

def lead_to_pages(app, doctree, docname):
    "Links of a Markdown output to a notebook, which MyST-NB leaves as they are, lead to its page."
    from docutils import nodes
    for n in doctree.findall(nodes.reference):
        if not (m := re.fullmatch(r'([\w./-]+)\.ipynb(#.*)?', n.get('refuri', ''))): continue
        page = slug(m[1])
        if page in app.env.titles: n['refuri'] = app.builder.get_relative_uri(docname, page) + (m[2] or '')
        else: _warn(f'{docname}: no page {m[0]}', type='myst', subtype='xref_missing')

def in_order(env, page):
    "A page and those below it in the menu, as a reader goes on: without the index of names, which is no page of ours."
    found = [page]
    for n in env.toctree_includes.get(page, []):
        if n in env.titles and n != page: found += in_order(env, n)
    return found

def neighbours(app, pagename, templatename, context, doctree):
    "Previous and next are those of the menu."
    pages = in_order(app.env, app.config.root_doc)
    if pagename not in pages: return
    i = pages.index(pagename)
    def link(n):
        title = app.builder.render_partial(app.env.titles[n])['title']
        return dict(link=app.builder.get_relative_uri(pagename, n), title=title)
    context['prev'] = link(pages[i-1]) if i else None
    context['next'] = link(pages[i+1]) if i+1 < len(pages) else None

def setup(app):
    for k,v in dict(nbs='../nbs', package='', git_url='', branch='main', folders={}, more={}).items():
        app.add_config_value(f'literate_{k}', v, 'env')
    app.connect('builder-inited', write_pages, priority=100)
    app.connect('autodoc-process-docstring', docments_fields)
    app.connect('object-description-transform', fold_fields, priority=900)   # after autodoc has put the types in
    app.connect('doctree-resolved', lead_to_pages)
    app.connect('html-page-context', neighbours)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
