import sys
from pathlib import Path
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)                  # the tests run side by side; those about threads set their own

@pytest.fixture(autouse=True)
def fresh_compiler():
    "A test that compiles starts from nothing."
    yield
    if 'torch._dynamo' in sys.modules: torch._dynamo.reset()              # importing it takes longer than most files

def pytest_collection_modifyitems(items):
    "`-k soft` finds the groups in which there is a soft one."
    for i in items:
        group = getattr(i, 'callspec', None) and i.callspec.params.get('group')
        i.extra_keyword_matches.update(getattr(group, 'ids', ()))        # a group of rows, found by the name of each
