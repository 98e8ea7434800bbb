"""Each page as Markdown beside its HTML, and `llms.txt`, a list of them with what each promises (llmstxt.org): for
programs that read a site for somebody. Code stands as in the notebook; pictures and players are left out."""
import json
import re
from pathlib import Path
from literate import by_reader, directives, grouped, opening, plain, relink, shown, slug


def as_markdown(nb):
    "The cells of a notebook, one under the other; links lead to the Markdown of other pages."
    out = []
    for c in nb['cells']:
        src = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            text = re.sub(r'\s*<!--.*?-->', '', src, flags=re.S).strip()
            out.append(relink(text, lambda path: f'{slug(path)}.md'))
        elif c['cell_type'] == 'code':
            d,code = directives(src)
            if code.strip() and shown(d): out.append(f'```python\n{code.strip()}\n```')
    return '\n\n'.join(out) + '\n'

def listed(name, promise, groups, titles):
    "The list: `groups` are the notebooks of each group of the menu."
    out = [f'# {name}', '', f'> {promise}', '']
    for group,pages in groups.items():
        out += [f'## {titles.get(group, group)}' if group else '## First', '']
        for p in pages:
            title,said = opening(''.join(json.loads(p.read_text('utf-8'))['cells'][0]['source']))
            out.append(f'- [{plain(title)}]({slug(p)}.md): {plain(said)}')
        out.append('')
    return '\n'.join(out)

def write(app, error):
    if error or app.builder.name != 'html': return
    cfg,to = app.config,Path(app.outdir)
    groups = by_reader(grouped(Path(app.confdir)/cfg.literate_nbs, cfg.literate_folders), cfg.literate_places)
    pages = [p for group in groups.values() for p in group]
    for p in pages: (to/f'{slug(p)}.md').write_text(as_markdown(json.loads(p.read_text('utf-8'))), 'utf-8')
    _,promise = opening(''.join(json.loads(pages[0].read_text('utf-8'))['cells'][0]['source']))
    (to/'llms.txt').write_text(listed(cfg.project, promise, groups, cfg.literate_folders), 'utf-8')

def alternate(app, pagename, templatename, context, doctree):
    if pagename not in app.literate_pages: return
    context['metatags'] += f'<link rel="alternate" type="text/markdown" href="{pagename}.md">'

def setup(app):
    app.connect('build-finished', write)
    app.connect('html-page-context', alternate)
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
