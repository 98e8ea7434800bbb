"Ends with one line if this Python is older than settings.ini allows; runs on any Python 3."
import re
import sys
from os.path import dirname, join

settings = join(dirname(dirname(__file__)), 'settings.ini')
with open(settings) as f: floor = re.search(r'(?m)^min_python *= *([0-9.]+)', f.read()).group(1)
if sys.version_info < tuple(map(int, floor.split('.'))):
    this = '%d.%d' % sys.version_info[:2]
    sys.exit('shok_nb needs Python %s or newer, and this is %s: make PYTHON=python%s' % (floor, this, floor))
