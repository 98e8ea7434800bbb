"""Makes what notebooks store small: `python docs/pictures.py` after `nbdev-test --save`.

Readers of the site see vector figures and players. What a notebook stores is for those who read it in Jupyter or in a
repository: 64 colours do, a picture that is still large is halved, and a player, which no repository runs, becomes
the picture that it starts with, with a PNG beside it: Jupyter shows no SVG of a notebook that is not trusted yet.
Code that the site folds is folded in JupyterLab too, and with a repository each notebook begins with a cell that
installs the package where it is missing. Run twice, nothing changes."""
import base64
import io
import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/'docs'/'_ext'))
from literate import directives, with_install  # noqa: E402 (found by the line above)

LIMIT = 60_000                                # characters of one picture
MANY = 64                                     # colours

def pictures(nb):
    "For each stored picture of the notebook `nb`: its cell, the data it lies in, and its kind."
    for c in nb['cells']:
        for o in c.get('outputs', []):
            for kind in o.get('data', {}):
                if kind.startswith('image/'): yield c,o['data'],kind

def drawings(page):
    "The drawings of a player, each a whole `<svg>`."
    found,at,page = [],0,page.partition('<script>')[0]
    while (at := page.find('<svg', at)) >= 0:
        depth,end = 0,at
        for m in re.finditer('<svg|</svg>', page[at:]):
            depth += 1 if m[0] == '<svg' else -1
            end = at+m.end()
            if not depth: break
        found,at = [*found, page[at:end]],end
    return found

def still(page):
    "The drawings of a player as one picture on white paper: two in a row, or six small ones."
    drawn = drawings(page)
    boxes = [[*map(float, re.match('<svg viewBox="(.*?)"', d)[1].split())] for d in drawn]
    names = [n.replace('<wbr>', '') for n in re.findall(r'</svg>([\w<>]+)<small', page)]      # of small ones
    row = 6 if names else 2
    wide = 920//row
    tall = max(wide*h/w for _,_,w,h in boxes) + (30 if names else 10)
    placed = [f'<text x="{i%row*wide}" y="{(i//row+1)*tall-14:.0f}">{n}</text>' for i,n in enumerate(names)]
    for i,(d,(_,_,w,h)) in enumerate(zip(drawn, boxes)):
        inner = re.sub(r' (width="100%"|style=".*?"|role=".*?"|data-[\w-]+=".*?")(?=[ />])', '', d, flags=re.S)
        at = f'x="{i%row*wide:g}" y="{i//row*tall:g}" width="{wide-8:g}" height="{(wide-8)*h/w:.0f}"'
        placed.append(inner.replace('<svg', f'<svg {at}', 1))
    size = f'{row*wide} {tall*(-(-len(drawn)//row)):.0f}'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{row*wide}" color="#222" '
        f'font-family="system-ui,sans-serif" font-size="10">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(placed)}</svg>')

def without_players(nb):
    "Each player of the notebook `nb` becomes a still picture. Were there any?"
    found = False
    for c in nb['cells']:
        for o in c.get('outputs', []):
            page = ''.join(o.get('data', {}).get('text/html', ''))
            if '<div data-shok' not in page[:40]: continue
            del o['data']['text/html']
            o['data'],found = {'image/svg+xml': still(page).splitlines(True), **o['data']},True
    return found

def raster(svg):
    "An SVG as a base64 PNG in few colours, with the letters that matplotlib brings."
    import matplotlib
    import resvg_py
    fonts = Path(matplotlib.get_data_path())/'fonts'/'ttf'
    made = resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True, font_dirs=[str(fonts)], zoom=1.5,
        sans_serif_family='DejaVu Sans', font_family='DejaVu Sans')
    return small(base64.b64encode(bytes(made)).decode())

def with_rasters(nb):
    "Each stored SVG gets a PNG beside it. Were there any without?"
    bare = [data for _,data,kind in pictures(nb) if kind == 'image/svg+xml' and 'image/png' not in data]
    for data in bare: data['image/png'] = raster(''.join(data['image/svg+xml']))
    return bool(bare)

def folded(nb):
    "Code that the site folds or hides is folded in JupyterLab, by its metadata. Does that change any?"
    before = [dict(c['metadata']) for c in nb['cells']]
    for c in nb['cells']:
        if c['cell_type'] != 'code': continue
        d,_ = directives(''.join(c['source']))
        private = {'exporti', 'export', 'exports', 'hide', 'default_exp'} & d.keys() or d.get('code-fold') == 'true'
        jupyter = {k: v for k,v in c['metadata'].get('jupyter', {}).items() if k != 'source_hidden'}
        if private: jupyter['source_hidden'] = True
        c['metadata'] = {k: v for k,v in c['metadata'].items() if k != 'jupyter'}
        if jupyter: c['metadata']['jupyter'] = jupyter
    return before != [c['metadata'] for c in nb['cells']]

def installs(nb):
    "The notebook with the cell that installs the package, if there is a repository. Does that change it?"
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    before = nb['cells']
    nb['cells'] = with_install(nb, ini['DEFAULT']['git_url'])['cells']
    return nb['cells'] != before

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
        changed = any([without_players(nb), with_rasters(nb), installs(nb), folded(nb)])
        for _,data,kind in pictures(nb):
            if kind != 'image/png': continue
            old = ''.join(data[kind])
            new = small(old)
            changed |= new != old
            data[kind] = new if isinstance(data[kind], str) else new.splitlines(True)
        if changed: path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n', 'utf-8')

if __name__ == '__main__': main(sys.argv[1:])
