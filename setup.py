"""Builds the package. Everything it knows is in settings.ini: edit there, not here."""
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='], interpolation=None)
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

def reqs(name): return cfg[f'{name}requirements'].split()

widgets,onnx = reqs('widgets_'),reqs('onnx_')
lessons = sorted({*widgets, *onnx, *reqs('lessons_')})
docs,test = (sorted({*lessons, *reqs(name)}) for name in ('docs_', 'test_'))
extras = dict(widgets=widgets, onnx=onnx, lessons=lessons, docs=docs, test=test, dev=sorted({*docs, *test}))
urls = dict(Repository=cfg['git_url'], Documentation=cfg['doc_url'])
if cfg['git_url']:
    urls |= dict(Changelog=f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md", Issues=f"{cfg['git_url']}/issues")
topics = [line.strip() for line in cfg['topics'].splitlines()]

def elsewhere(text):
    "README for a package index, which has none of our files: links lead to the repository, or are words without one."
    def there(m):
        picture,words,path = m.groups()
        if not cfg['git_url']: return f'*{words}*' if picture else words
        return f"{picture}[{words}]({cfg['git_url']}/{'raw' if picture else 'blob'}/{cfg['branch']}/{path})"
    parts = re.split(r'(?ms)(^```.*?^```$)', text)             # code stays as it is
    parts[::2] = [re.sub(r'(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)', there, p) for p in parts[::2]]
    return ''.join(parts)

setup(
    version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(), author=cfg['author'],
    long_description=elsewhere((here/'README.md').read_text(encoding='utf-8')),
    long_description_content_type='text/markdown',
    license_expression=cfg['license'], python_requires=f">={cfg['min_python']}",
    project_urls={k: v for k, v in urls.items() if v},
    classifiers=[f"Development Status :: {cfg['status']}", f"Intended Audience :: {cfg['audience']}",
        'Operating System :: OS Independent', 'Programming Language :: Python :: 3 :: Only',
        *[f'Programming Language :: Python :: {v}' for v in cfg['pythons'].split()],
        *[f'Topic :: {t}' for t in topics], 'Typing :: Typed'],
    package_dir={'': '.'},                      # so that a checkout is importable as a folder: nbdev-export finds docs/
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path'] + '.*']),
    package_data={cfg['lib_path']: ['py.typed', 'show/js/*.js', 'show/js/*.css', 'studies/*.json']},
    include_package_data=False,
    install_requires=reqs(''), extras_require=extras,
    # nbdev links to other people's sites by this; without a site of ours the links would be dead.
    entry_points=dict(nbdev=[f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]) if cfg['doc_url'] else {},
)
