"""A pytest plugin that moves the tests to a GPU: PYTHONPATH=bench python -m pytest -p on_cuda tests/test_contract.py

Whatever a test makes without naming a device is made there. SHOK_DEVICE=cpu tries the plugin without a GPU."""
import os
import sys
from pathlib import Path
import torch

DEVICE = os.environ.get('SHOK_DEVICE', 'cuda')
torch.set_default_device(DEVICE)                          # before the tests are imported: some make tensors as they are
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'tests'))
import estimators  # noqa: E402 (found by the line above)


def generator(seed=0): return torch.Generator(DEVICE).manual_seed(seed)
estimators.generator = generator

def pytest_report_header(): return f'tensors are made on {DEVICE}'

def pytest_collection_modifyitems(config, items):
    "ONNX Runtime takes arrays of the CPU."
    gone = [i for i in items if i.originalname == 'test_onnx']
    items[:] = [i for i in items if i not in gone]
    config.hook.pytest_deselected(items=gone)
