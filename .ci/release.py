"""Builds the source archive and the wheel, checks both as an index would, says what would be uploaded, and stops.

    make release                     into dist/
    python .ci/release.py FOLDER     somewhere else"""
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

def run(*args):
    r = subprocess.run([sys.executable, '-m', *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    if r.returncode: sys.exit(f"{r.stdout}{r.stderr}\nmake release: {' '.join(map(str, args))} failed")
    return r.stdout

def missing(cfg):
    "What a release should not be without, a line each."
    news = (ROOT/'CHANGELOG.md').read_text('utf-8')
    head = re.search(rf"(?m)^## {re.escape(cfg['version'])}\b.*$", news)
    if not head: yield f"CHANGELOG.md has nothing on {cfg['version']}"
    elif 'unreleased' in head[0]: yield f"CHANGELOG.md says: {head[0].strip('# ')}"
    if not cfg['git_url']: yield 'git_url in settings.ini is empty: the package will have no links'

def main(to):
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    cfg = ini['DEFAULT']
    for f in (*to.glob(f"{cfg['lib_name']}-*"), ROOT/'build', ROOT/f"{cfg['lib_name']}.egg-info"):
        if f.is_dir(): shutil.rmtree(f)
        elif f.exists(): f.unlink()
    run('build', '--no-isolation', '--outdir', to, ROOT)             # the wheel from the archive
    made = sorted(to.glob(f"{cfg['lib_name']}-*"))
    run('twine', 'check', '--strict', *made)
    run('check_wheel_contents', *to.glob('*.whl'))
    shutil.rmtree(ROOT/f"{cfg['lib_name']}.egg-info", ignore_errors=True)
    print(f"{cfg['lib_name']} {cfg['version']} is built and checked. Would be uploaded:")
    for f in made: print(f'  {f}  {f.stat().st_size/1000:.0f} kB')
    for line in missing(cfg): print(f'But {line}')
    print(f'Nothing was uploaded. To do it: {sys.executable} -m twine upload', *made)

if __name__ == '__main__': main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT/'dist').resolve())
