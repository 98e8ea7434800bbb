"tests/test_schedules.py skips the trainers that are missing: here none may be."
from importlib import import_module
import pytest


@pytest.mark.parametrize('name', ['lightning.pytorch', 'transformers', 'accelerate', 'fastai.learner'])
def test_trainer_is_here(name): import_module(name)
