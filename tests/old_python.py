"Ends with one line if this Python is older than settings.ini allows or makes no venv; runs on any Python 3."
import re
import sys
from os.path import dirname, join

settings = join(dirname(dirname(__file__)), 'settings.ini')
with open(settings) as f: floor = re.search(r'(?m)^min_python *= *([0-9.]+)', f.read()).group(1)
this = '%d.%d' % sys.version_info[:2]
if sys.version_info < tuple(map(int, floor.split('.'))):
    sys.exit('shok_nb needs Python %s or newer, and this is %s: make PYTHON=python%s' % (floor, this, floor))
try:
    import ensurepip  # noqa: F401, which Debian has in a package apart
    import venv  # noqa: F401
except ImportError:
    sys.exit('this Python makes no venv: apt-get install python%s-venv, or make PYTHON=another' % this)
