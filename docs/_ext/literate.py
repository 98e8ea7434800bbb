"""Sphinx extension: turns the notebooks of ../nbs into pages, without showing readers the `#|` directives.

Each notebook becomes a page of the source folder (which git ignores). A cell that exports public names becomes their
API entries (autodoc, parameters from the docments comments) and its source, folded. Of any other cell one sees the
example: what it checks is folded after it as "Check", and what must fail is shown with its error (examples.py).
`#| code-fold: true` folds a cell whole, which is then named by what it holds, or as its `#| code-summary: Errors` says.
What a cell that stands open needs stands open too: a reader may copy what he sees. So of the imports one sees those,
each in the first cell that needs it, and again in what is copied alone: "Use it", and each of a page of recipes.

A folder of notebooks is a group of the menu, with a page of its own that this writes: `literate_folders` has the titles
in their order, `literate_guidance` what stands at its head. Within a folder the order is that of the numbers in the
file names. `literate_places` takes pages of other folders into a group, or orders its own. The site itself has no
folders, so a page keeps its address when its notebook moves. Below the title of each page are links to its notebook."""
import ast
import functools
import hashlib
import html
import importlib
import itertools
import json
import re
import sys
import sysconfig
import textwrap
from importlib import metadata
from inspect import getsource
from pathlib import Path
from urllib.parse import quote
from examples import is_check, parts, symbols

HIDDEN = {'hide', 'default_exp'}
LONG = 20      # lines; a longer cell is folded
WIDE = 88      # characters of a line of imports
FOLDS_NEED = 'Imports of the folded code'
SOURCE = 'Show the source'
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
    "Rewrite links to other notebooks: `to(path)` is the new target of what was `path`.ipynb."
    return re.sub(r'\]\(([\w./-]+)\.ipynb(#[^)]*)?\)', lambda m: f"]({to(m[1])}{m[2] or ''})", text)

def to_page(path):
    "A link to a notebook, from wherever, leads to its page: by its name alone."
    return f'{slug(path)}.ipynb'

def to_neighbour(path):
    "A link to a notebook that lies in the same folder."
    return f'{Path(path).name}.ipynb'

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

def by_reader(folders, places):
    "The groups of the menu: pages stand where `places` names them; `...` there is the rest of the folder."
    where = {slug(p): p for pages in folders.values() for p in pages}
    taken = {n for names in places.values() for n in names if n is not ...}
    def rest(f): return [p for p in folders.get(f, []) if slug(p) not in taken]
    def group(f):
        for n in places.get(f, [...]):
            if n is ...: yield from rest(f)
            elif n in where: yield where[n]
    return {f: pages for f in folders if (pages := [*group(f)])}

NOTEBOOKS = '_notebooks'      # the folder of the site that they are downloaded from

def page_links(git_url, branch, nb, title):
    "Links from a page to its notebook `nb`: to download, and in a repository to run, change and speak about."
    links = [(f'{NOTEBOOKS}/{Path(nb).name}', 'Download notebook', ' download')]
    if git_url: links += [(f'{git_url}/blob/{branch}/nbs/{nb}', 'Notebook source', '')]
    if m := re.fullmatch(r'https://github\.com/(.+)', git_url):
        colab = f'https://colab.research.google.com/github/{m[1]}/blob/{branch}/nbs/{nb}'
        links += [(colab, 'Open in Colab', ''), (f'{git_url}/edit/{branch}/nbs/{nb}', 'Edit', '')]
        links += [(f'{git_url}/issues/new?title={quote(title)}', 'Feedback', '')]
    return ' · '.join(f'<a href="{html.escape(to)}"{more}>{text}</a>' for to,text,more in links)

def said(code):
    "The names in a cell: modules with those above them, what is called, and what is taken from `R`."
    for n in ast.walk(ast.parse(code)):
        paths = []
        if isinstance(n, ast.Import): paths = [a.name for a in n.names]
        elif isinstance(n, ast.ImportFrom): paths = [f'{n.module}.{a.name}' for a in n.names]
        elif isinstance(n, ast.Name): yield n.id
        elif isinstance(n, ast.Attribute) and getattr(n.value, 'id', '') == 'R': yield n.attr
        for p in paths: yield from (p[:i] for i in range(len(p)+1) if p[i:i+1] in ('', '.'))

def needs(nb, extras):
    "The extras of the package that the code of a page needs; `extras` has the names that each of them brings."
    found = set()
    for c in nb['cells']:
        d,code = directives(''.join(c['source']))
        given = not shown(d) or {'export', 'exports', 'exporti'} & d.keys() or d.get('echo') == 'false'
        if c['cell_type'] == 'code' and not given: found |= {*said(code)}
    wanted = [e for e,names in extras.items() if found & {*names.split()}]
    return wanted[-1:] if 'lessons' in wanted else wanted

def install_line(wanted):
    "What a page says of the extras that it needs."
    if not wanted: return ''
    line = f"pip install '.[{','.join(wanted)}]'"
    return f' · Needs <a href="index.html#install"><code>{html.escape(line, quote=False)}</code></a>'

def with_install(nb, git_url):
    "The notebook with a cell that installs the package where it is missing, as in Colab; none without a repository."
    cells = [c for c in nb['cells'] if c.get('id') != 'install']
    if git_url:
        extra = f'shok_nb[lessons] @ git+{git_url}'
        code = f"#| hide\n#| eval: false\ntry: import shok_nb\nexcept ImportError: %pip install -q '{extra}'"
        cells.insert(1, _cell('code', 'install', code.splitlines(True), execution_count=None, outputs=[]))
    return nb | dict(cells=cells)

def toctree(names, titles=None):
    "Entries of the menu, by their `titles` where they have another there; those of the index begin with itself."
    titles = dict(index='Overview <self>') | {n: f'{t} <{n}>' for n,t in (titles or {}).items()}
    lines = [titles.get(n, n) for n in names]
    return '```{toctree}\n:hidden:\n\n' + '\n'.join(lines) + '\n```'

def words(text):
    "What readers search for where a page says it otherwise, as its comments `<!-- search: this, that -->` have it."
    return [w.strip() for said in re.findall(r'<!-- search: (.*?) -->', text) for w in said.split(',')]

def other_senses(text):
    "Terms that a page uses in another sense than the glossary, as `<!-- other sense: step -->` has it: no links."
    return {w.strip() for said in re.findall(r'<!-- other sense: (.*?) -->', text) for w in said.split(',')}

def plain(text):
    "Markdown as one line of text: no links, no ticks."
    return ' '.join(re.sub(r'\[([^\]]*)\]\([^)]*\)|[`*]', lambda m: m[1] or '', text).split())

def meta(title, promise, said):
    "What a page tells other programs of itself: a description, and the words of `said`."
    fields = {'keywords': ', '.join(said), 'description': plain(promise), 'property=og:title': plain(title),
        'property=og:description': plain(promise)}
    lines = [f'   :{k}: {v}' for k,v in fields.items() if v]
    return '```{eval-rst}\n.. meta::\n' + '\n'.join(lines) + '\n```'

def opening(text):
    "The title and the promise of a page, which its first cell begins with."
    promise = re.search(r'(?m)^> (.*(?:\n> .*)*)', text)
    title = re.search(r'(?m)^# (.*)', text)
    return title[1] if title else 'Untitled',promise[1].replace('\n> ', ' ') if promise else ''

def folder_page(title, openings, syms, titles=None, guidance=''):
    "The page of a folder, in Markdown: `openings` are the titles and promises of its pages, by name."
    def line(name, head, promise): return f'- **[{head}]({name})**: {relink(prose(promise, syms), to_page)}'
    lines = [line(name, *said) for name,said in openings.items()]
    heads = ', '.join(head for head,_ in openings.values())
    head = relink(prose(guidance, syms), to_page)
    return '\n\n'.join([f'# {title}', meta(title, f'{title}: {heads}.', ()), *[head]*bool(head), '\n'.join(lines),
        toctree((Path(n).stem for n in openings), titles)]) + '\n'

# <span title="alpha=20">20</span> sets, as do several with &; "now=alpha", "now=largest_slope" follow. In Jupyter they
# are text.
SETS = r'<span title="([\w.-]+=[^"]*)">(.*?)</span>'

NAMED = r'\[[^\]]*\]\(|(?<![`}])`([\w.]+)`(?!`)'         # a name, and the links that it may be part of

def set_player(m):
    "A button that sets the player before it, or the next one; of `now=alpha`, a number that follows that player."
    said = re.sub('`([^`]*)`', r'<code>\1</code>', m[2])
    if m[1].startswith('now='):
        what = html.escape(m[1][4:].replace('_', ' '))
        return f'<span class="shok-now" data-follows="{what}">{said}</span>'
    return f'<button type="button" class="shok-set" data-set="{html.escape(m[1])}">{said}</button>'

def foreign(inventories):
    "Names of other projects, as their inventories (version 1) have them: each leads to itself, `nn.X` and `F.x` too."
    lines = [l for f in sorted(inventories) for l in f.read_text('utf-8').splitlines() if l[:1] != '#']
    names = [l.split()[0] for l in lines if '.' in l.split()[0]]
    short = {n.removeprefix('torch.'): n for n in names if n.startswith('torch.nn.')}
    return {n: n for n in names} | short | {re.sub('^nn.functional.', 'F.', n): to for n,to in short.items()}

TERM = re.compile(r'(?m)^- \*\*(.+?)\*\*: (.*)$')      # a line of the glossary
ORDINARY = set("""adaptive rounding|bits|block|calibration|catalog|cell|code|deploy|estimator|fold|hard|knob|
    per channel|quantizer|row|scale|seed|soft rounding|stochastic rounding|bias|alpha|law|level"""
    .replace('\n    ', '').split('|'))
_APART = '|'.join((r'```.*?```', '<!--.*?-->', '`[^`]*`', r'!?\[[^\]]*\]\([^)]*\)', r'\{[^}]*\}', r'\$[^$]*\$',
    '<span title.*?</span>', '<[^>]*>', r'\*\*.*?\*\*', r'^(?:#|\||>|    ).*?$', r'\b(?:time|training) steps?\b'))

def glossary(text):
    "The terms of the glossary, each with its line: `- **one; another**: what it is`."
    return {t: m[2] for m in TERM.finditer(text) for t in m[1].split('; ')}

def explained(terms):
    "For each page that the glossary links to: the terms that it explains."
    found = {}
    for t,said in terms.items():
        for path in re.findall(r'\]\(([\w./-]+)\.ipynb', said): found.setdefault(slug(path), []).append(t)
    return found

def as_glossary(text):
    "Its lines as MyST has them."
    def entry(m): return ':::{glossary}\n' + m[1].replace('; ', '\n') + '\n  ' + m[2] + '\n:::\n'
    return TERM.sub(entry, text)

def link_terms(text, terms, seen):
    "The first time that a page says a term, it links to the glossary; what is an ordinary word too does not."
    names = {t.lower(): t for t in terms if t not in ORDINARY}
    if not names: return text
    either = '|'.join(map(re.escape, sorted(names, key=len, reverse=True)))
    def link(m):
        term = names.get((m[1] or '').lower())
        if term is None or term in seen or term.isupper() and m[1] != term: return m[0]
        seen.add(term)
        return f'{{term}}`{m[0]} <{term}>`'
    return re.sub(rf'(?ms){_APART}|(?<![\w-])({either})(?:s|es)?(?![\w-])', link, text, flags=re.I)

def prose(text, syms):
    """Markdown for MyST: `name` links to the API entry of that name, ours or torch's, where it is not part of another
    link; `$$` lines stand apart from their paragraph."""
    def link(m): return f'{{py:obj}}`{m[1]} <{syms[m[1]]}>`' if m[1] in syms else m[0]
    text = re.sub(SETS, set_player, text, flags=re.S)
    out,fence = [],False
    for l in re.sub(r'^\$\$[^$]+\$\$$', r'\n\g<0>\n', text, flags=re.M).split('\n'):
        if l.lstrip().startswith('```'): fence = not fence
        elif not fence and not l.startswith(('    ', '#')): l = re.sub(NAMED, link, l)
        out.append(l)
    return '\n'.join(out)

def _cell(kind, id, src, **kw): return dict(cell_type=kind, id=id, metadata={}, source=src, **kw)

def _hidden(id, src):
    "A code cell that runs and is not seen."
    return _cell('code', id, src, execution_count=None, outputs=[]) | dict(metadata=dict(tags=['remove-cell']))

def _api(mod, node):
    kind = 'class' if isinstance(node, ast.ClassDef) else 'function'
    return _cell('markdown', f'api-{node.name}', f'```{{eval-rst}}\n.. auto{kind}:: {mod}.{node.name}\n```')

def _label(d, code, public, kinds=frozenset()):
    "What stands on the fold of a cell: its `code-summary`, or what it holds or, of these `kinds`, shows."
    if 'code-summary' in d: return d['code-summary']
    if 0 < len(public) < 3: return 'Show the source of ' + ' and '.join(n.name for n in public)
    if not {'export', 'exports', 'exporti'} & d.keys():
        if 'fig-alt' in d or kinds & {'image/png', 'text/html'}: return 'Show the code of this picture'
        if 'text/markdown' in kinds: return 'Show the code of this table'
        if any(map(is_check, ast.parse(code).body)): return 'Check'
    return SOURCE

def _fold(c, label):
    "The cell, folded under a label."
    meta = c['metadata']
    prompts = dict(code_prompt_show=label, code_prompt_hide=label.replace('Show', 'Hide'))
    tags = sorted({*meta['tags'], 'hide-input', *['hide-cell']*(label == 'Check')})     # with what a check ends in
    return c | dict(metadata=meta | dict(tags=tags, mystnb=meta.get('mystnb', {}) | prompts))

def _only_imports(body): return all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)

def _code(c, mod):
    "The cells of the page that code cell `c` becomes."
    d,code = directives(''.join(c['source']))
    tags,api,public = set(c['metadata'].get('tags', [])),[],[]
    meta = {k: v for k,v in c['metadata'].items() if k == 'says'}
    if d.get('output') == 'false': tags.add('remove-output')
    if d.get('eval') == 'false': tags.add('skip-execution')
    before = []
    if 'fig-alt' in d:                                    # for a PNG, and for inline SVG
        meta['mystnb'] = dict(image=dict(alt=d['fig-alt']))
        before = [_hidden(f"alt-{c['id']}", f"figures.alt({d['fig-alt']!r})")]
    show = shown(d) and bool(code)
    fold = d.get('code-fold', str(len(code.splitlines()) > LONG).lower()) == 'true' or d.get('echo') == 'false'
    if {'export', 'exports', 'exporti'} & d.keys():
        body = ast.parse(code).body
        public = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
        if 'exporti' not in d and show: api = [_api(mod, n) for n in public]
        fold = True
        show = show and not _only_imports(body)
        tags.add('remove-output')
        meta['exported'] = True
    if not show: tags.add('remove-cell')                  # still runs, never seen
    made = c | dict(source=code, metadata=meta | dict(tags=sorted(tags)))
    kinds = {k for o in c.get('outputs', ()) for k in o.get('data', ())}
    return [*api, *before, _fold(made, _label(d, code, public, kinds)) if fold else made]

def in_parts(c):
    "A code cell as those that the page has for it: examples, checks, and what must fail after the check that it does."
    d,code = directives(''.join(c['source']))
    whole = {'export', 'exports', 'exporti'} & d.keys() or not shown(d) or d.get('code-fold') == 'true'
    if whole or 'false' in (d.get('echo'), d.get('eval')) or not code: return [c]
    found,made = parts(code),[]
    def add(src, kind='', id='', outputs=(), **meta):
        id = id or f"{c['id']}-{len(made)}{kind}"
        made.append(c | dict(id=id, source=src, outputs=[*outputs]) | (dict(metadata=meta) if meta else {}))
    last = max((i for i,p in enumerate(found) if p.kind == 'example'), default=None)
    for i,p in enumerate(found):
        if p.kind == 'check': add(f'#| code-fold: true\n#| code-summary: Check\n{p.code}', 'check')
        elif p.kind == 'error':
            add(f'#| hide\n{p.test}\nfigures.error()', 'test')
            add(p.code, tags=['raises-exception'], says=p.says)
        else:
            said = [f'#| {k}: {v}' for k,v in d.items() if i == last or k != 'fig-alt']
            src = '\n'.join([*said, p.code])
            add(src, **dict(id=c['id'], outputs=c.get('outputs', ())) if i == last else {})
    return made

def _pages_cells(nb, syms, pkg, base, terms):
    "The cells of the page of a notebook. A name that two modules have is, on the page of one, its own."
    out,mod,seen = [],pkg,set()
    made = (directives(''.join(c['source']))[0].get('default_exp') for c in nb['cells'] if c['cell_type'] == 'code')
    page = f'{pkg}.{next(filter(None, made), "")}.'
    syms = syms | {k.removeprefix(page): k for k in syms if k.startswith(page)}
    for c in nb['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            seen |= other_senses(src)
            src = as_glossary(src) if TERM.search(src) and '# Glossary' in src else link_terms(src, terms, seen)
            out.append(c | dict(source=outside(relink(prose(src, syms), to_page), base)))
        elif c['cell_type'] == 'code':
            if exp := directives(src)[0].get('default_exp'): mod = f'{pkg}.{exp}'
            for p in in_parts(c): out += _code(p, mod)
    return out

def convert(nb, syms, pkg, base='', terms=()):
    "An nbdev notebook as a MyST-NB one; `base` is where the repository shows its files, `terms` are those to link."
    cells = _pages_cells(nb, syms, pkg, base, terms)
    if ids := needed(cells):
        again = nb | dict(cells=[_opened(c, ids) for c in nb['cells']])
        cells = _pages_cells(again, syms, pkg, base, terms)
    cells = near_imports(late_imports(part_imports(cells)), pkg)
    return nb | dict(cells=joined_folds(use_first(imports_again(cells, pkg))))

@functools.cache
def names(code):
    "What the code of a cell binds, and what it reads that was bound before it."
    bound,read = set(),set()
    for n in ast.parse(code).body:
        wanted,made = symbols(n)
        read |= wanted - bound - (made if hasattr(n, 'body') else set())        # a loop reads what it binds itself
        bound |= made
    return bound,read

def _is_seen(c): return c['cell_type'] == 'code' and 'remove-cell' not in c['metadata']['tags']

def is_folded(c):
    "Is the code of a page's cell seen only when a reader asks?"
    return 'hide-input' in c['metadata']['tags']

def _is_checked(c): return c['metadata'].get('mystnb', {}).get('code_prompt_show') == 'Check'

def _unfolded(c):
    "The cell, standing open."
    meta = c['metadata']
    tags,myst = [t for t in meta['tags'] if t not in ('hide-input', 'hide-cell')],dict(meta.get('mystnb', {}))
    for k in ('code_prompt_show', 'code_prompt_hide'): myst.pop(k, None)
    return c | dict(metadata=meta | dict(tags=tags) | (dict(mystnb=myst) if 'mystnb' in meta else {}))

def needed(cells):
    """The folded cells that stand open, so that none which does reads what a folded one binds: of the examples above it
    that bind the name, the last."""
    examples = [i for i,c in enumerate(cells) if is_example(c) and not _is_checked(c)]
    uses = {i: names(cells[i]['source']) for i in examples}
    folded,found = {i for i in examples if is_folded(cells[i])},set()
    todo = [i for i in examples if i not in folded]
    for i in todo:                                        # it grows
        for name in uses[i][1]:
            above = [j for j in examples if j < i and name in uses[j][0]]
            if above and folded.issuperset(above):
                folded.remove(above[-1])
                found.add(cells[above[-1]]['id'])
                todo.append(above[-1])
    return found

def _opened(c, ids):
    "The notebook's cell, to stand open if the page has one of these of it."
    mine = {i for i in ids if c['id'] in (i, i.rpartition('-')[0])}
    if not mine: return c
    src = re.sub(r'(?m)^#\| code-fold:.*\n', '', ''.join(c['source']))
    return c | dict(source=f'#| code-fold: false\n{src}')

def _import_of(n, aliases):
    "An import statement of some of its names, in lines that fit a page."
    line = ast.unparse(ast.Import(aliases) if isinstance(n, ast.Import) else ast.ImportFrom(n.module, aliases, n.level))
    if len(line) <= WIDE or ' import ' not in line: return line
    head,_,tail = line.partition(' import ')
    indent = dict(initial_indent='    ', subsequent_indent='    ', break_long_words=False)
    return f'{head} import (\n{textwrap.fill(tail, WIDE, **indent)})'

def part_imports(cells):
    "Of the cells that import alone one sees what the cells below need that stand open. The rest follows, folded."
    read = set().union(*[names(c['source'])[1] for c in cells if _is_seen(c) and not is_folded(c)])
    def is_read(alias): return _bound(alias) in read
    out = []
    for c in cells:
        body = ast.parse(c['source']).body if _is_seen(c) else []
        if not body or not _only_imports(body):
            out.append(c)
            continue
        each = [(n, [a for a in n.names if is_read(a)], [a for a in n.names if not is_read(a)]) for n in body]
        shown = '\n'.join(_import_of(n, some) for n,some,_ in each if some)
        rest = '\n'.join(_import_of(n, some) for n,_,some in each if some)
        if shown: out.append(_unfolded(c) | dict(source=shown))
        if rest:
            id = f"{c['id']}-rest" if shown else c['id']
            out.append(_fold(c | dict(id=id, source=rest), FOLDS_NEED))
    return out

def _bound(alias): return alias.asname or alias.name.partition('.')[0]

def _move(out, i, places):
    "Put each import of cell `i` into the cells that `places(statement, name)` names; without any left it is None."
    placed = {}
    for n in ast.parse(out[i]['source']).body:
        for a in n.names:
            for to in places(n, _bound(a)): placed.setdefault(to, {}).setdefault(n, []).append(a)
    for to,found in placed.items():
        lines = '\n'.join(_import_of(n, some) for n,some in found.items())
        out[to] = out[to] | dict(source=lines if to == i else f"{lines}\n{out[to]['source']}")
    if i not in placed: out[i] = None

def late_imports(cells):
    "What only folds import stands in the first of them that reads it. What unseen code reads is imported unseen."
    out = [*cells]
    for i,c in enumerate(cells):
        label = c['metadata'].get('mystnb', {}).get('code_prompt_show')
        if label != FOLDS_NEED or '*' in c['source']: continue
        _move(out, i, lambda n, name, i=i: _fold_of(cells, i, name))
        if out[i]: out[i] = _unseen(out[i])
    return [c for c in out if c]

def _fold_of(cells, i, name):
    "The first fold below cell `i` that reads a name, and `i` itself if other cells read it before, or no fold does."
    reads = [j for j,c in enumerate(cells[i+1:], i+1) if c['cell_type'] == 'code' and name in names(c['source'])[1]]
    folds = [j for j in reads if is_example(cells[j]) and is_folded(cells[j])][:1]
    return folds if reads[:1] == folds != [] else [i, *folds]

def near_imports(cells, pkg):
    """What an open cell imports stands in the first one that needs it, and in the first fold that does before. It is
    before an error that is shown, and stays if none needs it, or if an example of the page makes what has that name on
    the way. What the library's own code makes is the same if it comes from a module of the package `pkg` of which no
    private name is seen; anything else is imported before that code runs, as in the notebook."""
    out = [*cells]
    def is_open(c): return is_example(c) and not is_folded(c) and 'raises-exception' not in c['metadata']['tags']
    def places(i, n, name):
        last,fold = i,[]
        module = n.module if isinstance(n, ast.ImportFrom) else ''
        same = f'{module}.'.startswith(f'{pkg}.') and module not in inside
        for j,c in enumerate(cells[i+1:], i+1):
            if c['cell_type'] != 'code': continue
            _,read = names(c['source'])
            body = [n for n in ast.parse(c['source']).body if not _only_imports([n])]
            makes = any(name in symbols(n)[1] for n in body)
            if 'exported' in c['metadata']:
                if makes and not same: return [*fold, last]
                continue
            opened = is_open(c) and body
            if name in read and opened: return [*fold, j]
            if name in read and _is_seen(c) and not is_folded(c): return [*fold, last] if last > i else [i]
            if name in read: fold = fold or [j]
            if makes: return [i]
            if opened: last = j
        return [i]
    bodies = {i: ast.parse(c['source']).body for i,c in enumerate(cells) if c['cell_type'] == 'code' and is_open(c)}
    imports = {i: body for i,body in bodies.items() if body and _only_imports(body) and '*' not in cells[i]['source']}
    inside = {getattr(n, 'module', '') for body in imports.values() for n in body for a in n.names if a.name[0] == '_'}
    for i in imports: _move(out, i, functools.partial(places, i))
    return [c for c in out if c]

def headed(cells):
    "The cells from one heading below the title to the next."
    found = [[]]
    for c in cells:
        if c['cell_type'] == 'markdown' and re.search('^##', c['source'], re.M): found.append([])
        found[-1].append(c)
    return found

def _with_imports(lines, src, pkg):
    "The code of a cell that begins with these imports and its own, a line for each module, ours behind others'."
    own = [*itertools.takewhile(lambda n: _only_imports([n]), ast.parse(src).body)]
    rest = src.splitlines()[own[-1].end_lineno if own else 0:]
    of = {}
    for n in [*ast.parse('\n'.join(lines)).body, *own]:
        for a in n.names:
            module = getattr(n, 'module', a.name)
            of.setdefault((type(n), module), (module, n, {}))[2][a.name, a.asname] = a
    made = sorted(of.values(), key=lambda found: f'{found[0]}.'.startswith(f'{pkg}.'))
    return '\n'.join([*(_import_of(n, [*aliases.values()]) for _,n,aliases in made), *rest])

def imports_again(cells, pkg):
    """What a reader copies alone, a section "Use it" or a recipe, imports anew what it needs, unless it reads a
    variable of those above."""
    title = next((c['source'] for c in cells if c['cell_type'] == 'markdown'), '')
    alone = '^##' if re.search('^# Recipes', title, re.M) else '^## Use it$'
    out,imports,variables = [],{},set()
    for section in headed(cells):
        opened = [c for c in section if is_example(c) and not is_folded(c)]
        code = '\n'.join(c['source'] for c in opened)
        own = {_bound(a): _import_of(n, [a]) for n in ast.walk(ast.parse(code))
            if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
        bound,read = names(code)
        lines = [line for name,line in imports.items() if name in read]
        if lines and not read & variables and re.search(alone, section[0]['source'], re.M):
            first = opened[0] | dict(source=_with_imports(lines, opened[0]['source'], pkg))
            section = [first if c is opened[0] else c for c in section]
        imports |= own
        variables |= bound - own.keys()
        out += section
    return out

def is_entry(c): return str(c['id']).startswith('api-')

def is_source(c): return 'exported' in c['metadata'] and _is_seen(c)

def is_example(c): return _is_seen(c) and 'exported' not in c['metadata']

def _again(c):
    "A copy of a cell that is seen and does not run."
    tags = [*c['metadata']['tags'], 'skip-execution']
    return c | dict(id=f"{c['id']}-shown", metadata=c['metadata'] | dict(tags=tags), outputs=[])

def _unseen(c): return c | dict(metadata=c['metadata'] | dict(tags=[*c['metadata']['tags'], 'remove-cell']))

def blocks(cells):
    """The cells of a page in blocks: a heading begins one, and so does what stands before an entry of the API or a
    source, with the prose that leads to it."""
    found = [[]]
    for i,c in enumerate(cells):
        heads = c['cell_type'] == 'markdown' and ''.join(c['source']).startswith('#')
        prose = c['cell_type'] == 'markdown' and not is_entry(c)
        later = next((n for n in cells[i+1:] if 'remove-cell' not in n['metadata'].get('tags', ())), None)
        leads = prose and later and (is_entry(later) or is_source(later))
        if found[-1] and (heads or leads): found.append([])
        found[-1].append(c)
    return found

def use_first(cells):
    "In each block the entries of the API and their sources stand behind the examples; they run where they stood."
    out = []
    for block in blocks(cells):
        uses = any(map(is_example, block)) and any(map(is_entry, block))
        moves = [c for c in block if uses and (is_entry(c) or is_source(c))]
        stay = [_unseen(c) if c in moves else c for c in block if not (c in moves and is_entry(c))]
        out += stay + [c if is_entry(c) else _again(c) for c in moves]
    return out

def _joins(c):
    "What stands on a fold that has no name of its own, and so may be one with its like."
    label = c['metadata'].get('mystnb', {}).get('code_prompt_show')
    return label if label == 'Check' or label == SOURCE and not c['outputs'] else None

def joined_folds(cells):
    "Checks that follow each other are one fold, and so are sources without a name."
    out = []
    for c in cells:
        last = out[-1] if out else None
        if last and _joins(c) and _joins(c) == _joins(last) and c['metadata']['tags'] == last['metadata']['tags']:
            source,outputs = f"{last['source']}\n\n{c['source']}",[*last['outputs'], *c['outputs']]
            out[-1] = last | dict(source=source, outputs=outputs)
        else: out.append(c)
    return out

def installed():
    "The packages that a page may meet, with Python's version. Setuptools adds its own to `sys.path`: not those."
    where = {*map(sysconfig.get_path, ('purelib', 'platlib'))}
    found = {(d.name, d.version) for d in metadata.distributions(path=sorted(where))}
    return repr((sys.version, sorted(found, key=str))).encode()

def known(lib, text, root, nbs):
    "Stands for all that a page reads beside its cells: the library, files that its `text` names, results of studies."
    data = [f for f in (*root.glob('bench/*.*'), *root.glob('docs/*.bib')) if f.name in text]
    if 'shok_nb.studies' in text: data += root.glob('shok_nb/studies/*.json')
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
    syms |= {full: full for mod,d in idx.items() for full in d if re.fullmatch('[a-zA-Z]\\w*', full[len(mod)+1:])}
    made_of = sorted(f for kind in ('*.py', '*.js', '*.css') for f in Path(pkg.__file__).parent.rglob(kind))
    syms |= foreign((Path(app.confdir)/'inv').glob('*.inv'))
    made_of += [Path(app.confdir)/'_ext'/'figures.py']
    lib = b''.join(f.read_bytes() for f in made_of) + installed() + getsource(relink).encode()
    base = f'{cfg.literate_git_url}/blob/{cfg.literate_branch}/' if cfg.literate_git_url else ''
    root = Path(app.confdir)/cfg.literate_nbs
    folders = by_reader(grouped(root, cfg.literate_folders), cfg.literate_places)
    nbs = [p for pages in folders.values() for p in pages]
    made = {f: [n for n in names if (dst/f'{n}.md').exists()] for f,names in cfg.literate_more.items()}
    menu = [slug(p) for p in folders.get('', [])] + [f for f in folders if f]
    menu += [n for f,names in made.items() if f not in folders for n in names]
    openings,terms = {},{}
    for p in nbs:
        if slug(p) == 'glossary': terms = glossary(''.join(json.loads(p.read_text('utf-8'))['cells'][0]['source']))
    for p in nbs:
        text = p.read_text('utf-8')
        code = known(lib, text, Path(app.confdir).parent, nbs)
        start = f'import figures; figures.install()    # {code}: what the page reads; if that changes, it runs again'
        cells = json.loads(text)['cells']
        first = next((''.join(c['source']) for c in cells if c['cell_type'] == 'markdown'), '')
        openings[p] = opening(first)
        nb = convert(json.loads(text), syms, pkg.__name__, base, terms)
        nb['cells'].insert(1, _hidden('start', start))    # after the title, which MyST-NB wants first
        said = [*words(first), cfg.literate_titles.get(slug(p), ''), *explained(terms).get(slug(p), [])]
        nb['cells'].insert(1, _cell('markdown', 'words', meta(*openings[p], filter(None, said))))
        if p.stem == 'index': nb['cells'].append(_cell('markdown', 'toc', toctree(menu)))
        write(dst/f'{slug(p)}.ipynb', json.dumps(nb, indent=1, ensure_ascii=False))
    for folder,pages in folders.items():
        if not folder: continue
        heads = {f'{n}.md': opening((dst/f'{n}.md').read_text('utf-8')) for n in made.get(folder, [])}
        heads |= {f'{slug(p)}.ipynb': openings[p] for p in pages}
        if folder not in cfg.literate_folders: _warn(f'{folder}: no title in literate_folders of docs/conf.py')
        title = cfg.literate_folders.get(folder, folder)
        head = cfg.literate_guidance.get(folder, '')
        write(dst/f'{folder}.md', folder_page(title, heads, syms, cfg.literate_titles, head))
    ours = {dst/f'{slug(p)}.ipynb' for p in nbs} | {dst/f'{f}.md' for f in folders}
    ours |= {dst/f'{n}.md' for names in made.values() for n in names}
    for f in {*dst.glob('*.ipynb'), *dst.glob('*.md')} - ours: f.unlink()
    app.literate_terms,app.literate_syms = terms,syms
    app.literate_pages = {slug(p): (p, openings[p][0]) for p in nbs}

def _rst(s, syms):
    """A line of markdown for docutils: ticks make literals, whatever stands after them, and links of names that are
    known; nothing else is markup."""
    def mark(m):
        if not m[1]: return '\\' + m[2]
        made = f':py:obj:`{m[1]} <{syms[m[1]]}>`' if m[1] in syms else f'``{m[1]}``'
        return made + ('\\ ' if s[m.end():m.end()+1].strip() else '')
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
    syms = app.literate_syms
    link = r'`\g<0> <https://arxiv.org/abs/\1>`__'
    out = [re.sub(r'(?:arXiv:)?\b(\d{4}\.\d{4,5})\b', link, _rst(l, syms)) for l in head]
    for p in params:
        param,text = re.match(r'(\*{0,2}\w+)(?: \(.*?\))?: (.*)', p).groups()
        out.append(f':param {_rst(param, {})}: {_rst(text, syms)}')
    out += [f":returns: {_rst(r.partition(': ')[2], syms)}" for r in returns]
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
    "Links of a Markdown output to a notebook, which MyST-NB leaves alone, lead to its page; terms say what they are."
    from docutils import nodes
    for n in doctree.findall(nodes.reference):
        if n.children and 'std-term' in getattr(n[0], 'attributes', {}).get('classes', []):
            term = n.get('refuri', '').partition('#term-')[2].replace('-', ' ')
            said = next((d for t,d in app.literate_terms.items() if t.replace('-', ' ') == term), '')
            n['reftitle'] = plain(said)
        if not (m := re.fullmatch(r'([\w./-]+)\.ipynb(#.*)?', n.get('refuri', ''))): continue
        page = slug(m[1])
        if page in app.env.titles: n['refuri'] = app.builder.get_relative_uri(docname, page) + (m[2] or '')
        else: _warn(f'{docname}: no page {m[0]}', type='myst', subtype='xref_missing')

def keep_whole(app, doctree, docname):
    "A number stays in one line with its ± or ×; a cell of a table that is one says so: it needs no width for words."
    from docutils import nodes
    as_it_is = nodes.literal,nodes.FixedTextElement,nodes.raw,nodes.math
    for text in [*doctree.findall(nodes.Text)]:
        if isinstance(text.parent, as_it_is): continue
        whole = re.sub(r' (?=[±×] ?\d)|(?<=[±×]) (?=\d)', '\N{NO-BREAK SPACE}', text)
        if whole != text: text.parent.replace(text, nodes.Text(whole))
    for cell in doctree.findall(nodes.entry):
        if re.fullmatch(r'[-+−±×%\d.,e\s]*', cell.astext()): cell['classes'].append('number')

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

def link_page(app, pagename, templatename, context, doctree):
    "Under the title of a page, what can be done with its notebook."
    if pagename not in app.literate_pages: return
    nb,title = app.literate_pages[pagename]
    where = nb.relative_to(Path(app.confdir)/app.config.literate_nbs).as_posix()
    links = page_links(app.config.literate_git_url, app.config.literate_branch, where, title)
    links += install_line(needs(json.loads(nb.read_text('utf-8')), app.config.literate_extras))
    head,end,rest = context['body'].partition('</h1>')
    context['body'] = f'{head}{end}\n<p class="page-links">{links}</p>{rest}'

def write_notebooks(app, error):
    "The notebooks of the pages, for download; links among them lead to each other in one folder."
    if error or app.builder.name != 'html': return
    to = Path(app.outdir)/NOTEBOOKS
    to.mkdir(exist_ok=True)
    for nb,_ in app.literate_pages.values():
        made = with_install(json.loads(nb.read_text('utf-8')), app.config.literate_git_url)
        for c in made['cells']:
            if c['cell_type'] == 'markdown': c['source'] = relink(''.join(c['source']), to_neighbour)
        write(to/nb.name, json.dumps(made, indent=1, ensure_ascii=False) + '\n')

def setup(app):
    for k,v in dict(nbs='../nbs', package='', git_url='', branch='main').items():
        app.add_config_value(f'literate_{k}', v, 'env')
    for k in ('folders', 'guidance', 'places', 'more', 'titles', 'extras'):
        app.add_config_value(f'literate_{k}', {}, 'env')
    app.connect('builder-inited', write_pages, priority=100)
    app.connect('autodoc-process-docstring', docments_fields)
    app.connect('object-description-transform', fold_fields, priority=900)   # after autodoc has put the types in
    app.connect('doctree-resolved', lead_to_pages)
    app.connect('doctree-resolved', keep_whole)
    app.connect('html-page-context', neighbours)
    app.connect('html-page-context', link_page)
    app.connect('build-finished', write_notebooks)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
