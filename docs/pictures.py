"""Makes what notebooks store small: `python docs/pictures.py` after `nbdev-test --save`.

Readers of the site see vector figures and players. What a notebook stores is for those who read it in Jupyter or in a
repository: 64 colours do, a picture that is still large is halved, and a player, which no repository runs, is left
out. Run twice, nothing changes."""
import base64
import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60_000                                # characters of one picture
MANY = 64                                     # colours

def pictures(nb):
    "For each stored picture of the notebook `nb`: its cell, the data it lies in, and its kind."
    for c in nb['cells']:
        for o in c.get('outputs', []):
            for kind in o.get('data', {}):
                if kind.startswith('image/'): yield c,o['data'],kind

def without_players(nb):
    "Remove the players of the notebook `nb`. Were there any?"
    def played(o): return '<div data-shok' in ''.join(o.get('data', {}).get('text/html', ''))[:40]
    found = False
    for c in nb['cells']:
        kept = [o for o in c.get('outputs', []) if not played(o)]
        if kept != c.get('outputs', []): c['outputs'],found = kept,True
    return found

def _encoded(im):
    file = io.BytesIO()
    im.quantize(MANY, dither=0).save(file, 'PNG', optimize=True)
    return base64.b64encode(file.getvalue()).decode()      # nbdev-clean wants no newline at its end

def small(png):
    "A base64 PNG in few colours and, if need be, fewer pixels. One that is small stays as it is."
    from PIL import Image
    im = Image.open(io.BytesIO(base64.b64decode(png)))
    if im.mode == 'P' and len(png) < LIMIT: return png
    im = im.convert('RGB')
    new = _encoded(im)
    while len(new) >= LIMIT:
        im = im.resize((im.width//2, im.height//2), Image.Resampling.LANCZOS)
        new = _encoded(im)
    return min(png, new, key=len)

def main(paths):
    for path in map(Path, paths or sorted((ROOT/'nbs').glob('**/[!_.]*.ipynb'))):
        nb = json.loads(path.read_text('utf-8'))
        changed = without_players(nb)
        for _,data,kind in pictures(nb):
            if kind != 'image/png': continue
            old = ''.join(data[kind])
            new = small(old)
            changed |= new != old
            data[kind] = new if isinstance(data[kind], str) else new.splitlines(True)
        if changed: path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n', 'utf-8')

if __name__ == '__main__': main(sys.argv[1:])
