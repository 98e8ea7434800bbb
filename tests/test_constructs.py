"""What people's forwards do beside arithmetic (`constructs`), through every function that changes a model: it computes
what it did under every mode, flag, size and method, or there is an error that says why not."""
import pytest
from constructs import JUDGES, STAGES, drawn
from estimators import slow_after

pytestmark = pytest.mark.filterwarnings('ignore')           # of torch, about reading and exporting
GOOD = {'right', 'refused', 'at the call'}

def verdicts(fn, networks):
    "The verdicts over some networks; none is a fault."
    found = [(names, JUDGES[fn](names)) for names in networks]
    faults = [f'{" ".join(names)}: {v.kind}; {v.told}' for names,v in found if v.kind not in GOOD]
    assert not faults, faults
    return [v.kind for _,v in found]

@pytest.mark.slow
@pytest.mark.parametrize('fn', JUDGES)
def test_each_construct_alone(fn):
    "A function that refuses all is never wrong: most must be changed. A file takes seconds, so every fifth has one."
    names = [*STAGES][::5 if fn == 'to_onnx' else 1]
    assert verdicts(fn, [[name] for name in names]).count('right') >= .8*len(names)

# The first seeds of all, none was left out; others are run by hand: `JUDGES[fn](drawn(seed))`. A gap that is legal is
# a tenth of the bound of its judge, one that is a fault several times that.
@pytest.mark.parametrize('fn', slow_after(JUDGES, len(JUDGES)-1))    # a file takes seconds
@pytest.mark.slow
def test_together(fn): verdicts(fn, map(drawn, range(2)))
