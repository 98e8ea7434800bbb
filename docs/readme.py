"""Write README.md from nbs/index.ipynb and its stored outputs: python docs/readme.py [--check]

A stored picture becomes docs/_static/index-N.png (or .svg), so what README shows is what the notebook showed. Links are
relative, for those who have the files; setup.py makes them absolute for those who read it elsewhere."""
import base64
import json
import re
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here/'_ext'))
from literate import SETS, directives, relink, shown  # noqa: E402 (found by the line above)

NOTE = '<!-- Written by docs/readme.py from nbs/index.ipynb: edit the notebook, not this file. -->'

def show(output, alt, pictures):
    "Markdown for one stored output; a picture is added to `pictures`, and what needs a script is left out."
    data = {k: ''.join(v) if isinstance(v, list) else v for k,v in output.get('data', {}).items()}
    text = ''.join(output.get('text', data.get('text/plain', ''))).rstrip()
    for mime,ext in {'image/svg+xml': 'svg', 'image/png': 'png'}.items():
        if mime in data:
            name = f'index-{len(pictures)+1}.{ext}'
            pictures[name] = data[mime].encode() if ext == 'svg' else base64.b64decode(data[mime])
            return f'![{alt}](docs/_static/{name})'
    if 'text/markdown' in data: return relink(data['text/markdown'].strip(), lambda path: f'nbs/{path}.ipynb')
    if 'text/html' in data: return data['text/html'].strip() if '<table' in data['text/html'] else ''
    return f'```\n{text}\n```' if text else ''

def readme(nb):
    "`(text, pictures)`: README.md and the files it shows, by name."
    out,pictures = [NOTE],{}
    for c in nb['cells']:
        src = ''.join(c['source']).strip()
        if c['cell_type'] == 'markdown':
            src = re.sub(SETS, r'\2', re.sub(' <!-- search: .*? -->', '', src))     # which the site alone has
            src = re.sub(r'(\]\([\w./-]+\.ipynb)#[^)]*', r'\1', src)     # a repository opens a notebook at its top
            out.append(relink(src, lambda path: f'nbs/{path}.ipynb').replace('](../', ']('))
        if c['cell_type'] != 'code': continue
        d,code = directives(src)
        if not shown(d): continue
        if code and d.get('echo') != 'false': out.append(f'```python\n{code}\n```')
        if d.get('output') != 'false': out += [show(o, d.get('fig-alt', 'Figure'), pictures) for o in c['outputs']]
    return '\n\n'.join(o for o in out if o) + '\n', pictures

if __name__ == '__main__':
    text,pictures = readme(json.loads((here.parent/'nbs'/'index.ipynb').read_text('utf-8')))
    files = {here.parent/'README.md': text.encode()} | {here/'_static'/k: v for k,v in pictures.items()}
    extra = sorted({*(here/'_static').glob('index-*.*')} - files.keys())
    changed = sorted(f for f,v in files.items() if not f.exists() or f.read_bytes() != v)
    stale = [f.name for f in changed + extra]
    if '--check' in sys.argv: sys.exit(f"stale: {', '.join(stale)}; run python docs/readme.py" if stale else 0)
    for f,v in files.items(): f.write_bytes(v)
    for f in extra: f.unlink()
